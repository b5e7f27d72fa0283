"""`mula-ray plan`: what a configuration costs, before it costs anything. Needs neither torch nor ray."""

from __future__ import annotations

import json

import typer

from mula_ray.cli.options import Config, Json, Sets
from mula_ray.config.load import load


def plan(config: Config, sets: Sets = None, as_json: Json = False) -> int:
    """Print parameters of CONFIG (exact, from the layout table)."""
    from mula_ray.plan.layout import active_params, total_params

    loaded = load(config, sets or ())
    counts = {"total": total_params(loaded.config.model), "active": active_params(loaded.config.model)}
    if as_json:
        typer.echo(json.dumps({"config": loaded.name, "parameters": counts}))
        return 0
    typer.echo(f"{loaded.name}: {counts['total']:,} parameters, {counts['active']:,} active")
    return 0
