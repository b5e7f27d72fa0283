"""`mula-ray bench NAME`: side-by-side benchmarks, always a ratio against something.

Each lives in `mula_ray/bench/<name>.py` with `run(args: Sequence[str]) -> dict`, whose `rows` have the keys
case, metric, value, unit, against, speedup.
"""

from __future__ import annotations

import importlib
import json
from typing import Annotated, Any

import typer

from mula_ray.cli.options import Json
from mula_ray.config.errors import UserError

NAMES = ("moe", "step", "optimizer", "comm", "checkpoint", "recovery", "pipeline", "quality")


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=", ".join(NAMES))],
    case: Annotated[list[str] | None, typer.Option(help="only this case; repeatable")] = None,
    repeats: Annotated[int | None, typer.Option(help="recovery only: failures a case")] = None,
    as_json: Json = False,
) -> int:
    """Run one benchmark side by side with what it is measured against."""
    if name not in NAMES:
        raise UserError(f"bench {name!r} does not exist; choose one of {', '.join(NAMES)}")
    if repeats is not None and (name != "recovery" or repeats < 1):
        raise UserError(f"--repeats {repeats} is for bench recovery, and at least 1; leave it out for bench {name}")
    module = importlib.import_module(f"mula_ray.bench.{name}")
    result: dict[str, Any] = module.run(
        cases=tuple(case) if case else None, **({} if repeats is None else {"repeats": repeats})
    )
    typer.echo(json.dumps(result) if as_json else _table(result))
    return 0


def _table(result: dict[str, Any]) -> str:
    head = f"{result['bench']} on {result['device']} ({result['processor']}), {result['threads']} threads"
    lines = [head, f"{'case':34} {'metric':22} {'value':>12} {'unit':6} {'against':26} {'speedup':>8}"]
    for row in result["rows"]:
        speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        figures = f"{row['metric']:22} {row['value']:>12.4g} {row['unit']:6} {row['against']!s:26} {speedup:>8}"
        lines.append(f"{row['case']:34} {figures}")
    return "\n".join(lines)
