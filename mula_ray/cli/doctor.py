"""`mula-ray doctor`: checks this machine or a cluster; every finding with its fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mula_ray.cli.options import Json
from mula_ray.config.errors import UserError
from mula_ray.config.site import load_site


def doctor(
    site: Annotated[str, typer.Option(help="what is expected: aurora, local, … or a path")] = "local",
    address: Annotated[str | None, typer.Option(help="every node of this running Ray cluster")] = None,
    run_dir: Annotated[Path, typer.Option(help="folder whose file system is tried")] = Path("."),
    job: Annotated[int | None, typer.Option(help="also whether the fixed ports of this job number are free")] = None,
    bound: Annotated[float, typer.Option(help="longest wait for a node, seconds")] = 120.0,
    as_json: Json = False,
) -> int:
    """Check this machine, or with --address every node of a cluster. Exit 20 when something must be mended."""
    from mula_ray.launch.doctor.run import examine_cluster, examine_here

    machine = load_site(site)
    report = examine_cluster(machine, address, bound) if address else examine_here(machine, run_dir, job)
    typer.echo(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()))
    return UserError.exit_code if report.errors else 0
