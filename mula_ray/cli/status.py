"""`mula-ray status RUN_DIR`: how a run is doing, from its files alone."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from mula_ray.cli.options import Json


def status(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="the folder that `mula-ray train` printed")],
    watch: Annotated[bool, typer.Option("--watch", help="keep looking until the run ends")] = False,
    interval: Annotated[float, typer.Option(help="seconds between looks", min=0.1)] = 1.0,
    as_json: Json = False,
) -> int:
    """Say how a run is doing; a dead one is called dead."""
    from mula_ray.train.status import describe, read_status

    if not watch:
        found = read_status(run_dir)
        typer.echo(json.dumps(found.to_json()) if as_json else describe(found))
        return 0
    return _watch(run_dir, interval, as_json)


def _watch(run_dir: Path, interval: float, as_json: bool) -> int:
    """Redraws in a terminal; elsewhere a line (or an object) whenever something changed."""
    from rich.live import Live
    from rich.text import Text

    from mula_ray.train.status import ENDED, describe, read_status

    found = read_status(run_dir)
    if as_json or not sys.stdout.isatty():
        shown = None
        while True:
            key = (found.state, found.step, found.generation, found.checkpoint_step)
            if key != shown:
                typer.echo(json.dumps(found.to_json()) if as_json else _line(describe(found)))
                sys.stdout.flush()
            shown = key
            if found.state in ENDED:
                return 0
            time.sleep(interval)
            found = read_status(run_dir)
    with Live(Text(describe(found)), auto_refresh=False) as live:
        while found.state not in ENDED:
            time.sleep(interval)
            found = read_status(run_dir)
            live.update(Text(describe(found)), refresh=True)
    return 0


def _line(text: str) -> str:
    """The description in one line."""
    rows = [" ".join(row.split()) for row in text.splitlines()]
    return " | ".join(rows)
