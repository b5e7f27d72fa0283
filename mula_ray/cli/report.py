"""`mula-ray report RUN_DIR [RUN_DIR ...]`: one self-contained HTML page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mula_ray.config.errors import UserError


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="run folders; several side by side")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the page; default RUN_DIR/report.html")] = None,
) -> int:
    """Write one self-contained HTML page about a run, or several side by side."""
    from mula_ray.train.report.page import build

    page = build(run_dirs)
    path = out or (run_dirs[0] / "report.html" if len(run_dirs) == 1 else Path("report.html"))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; give another place with --out") from error
    typer.echo(f"{path} ({len(page.encode()) / 1e6:.2f} MB)")
    return 0
