"""`mula-ray ckpt ls | verify | export-hf | import-hf`: reads files only; a running job is not disturbed."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from mula_ray.cli.options import Json
from mula_ray.config.errors import NoCheckpoint, UserError

app = typer.Typer(help="List, verify, export and import checkpoints.", no_args_is_help=True)

Target = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run folder, its checkpoints/, or one checkpoint")]


class ExportDtype(Enum):
    """Dtype of exported weights."""

    stored = "stored"
    fp32 = "fp32"
    bf16 = "bf16"


@app.command()
def ls(target: Target, as_json: Json = False) -> None:
    """List checkpoints: step, tokens, slot, size, layout, and whether manifest, files and coverage are sound."""
    rows = [_row(folder) for folder in _folders(target)]
    if as_json:
        typer.echo(json.dumps({"checkpoints": rows}))
        return
    typer.echo(f"{'slot':16} {'kind':5} {'step':>9} {'tokens':>16} {'size':>10} {'gen':>4} {'layout':24} valid")
    for row in rows:
        size, valid = _size(row["bytes"]), "yes" if row["valid"] else f"NO: {row['damages'][0]}"
        figures = f"{row['step']!s:>9} {row['tokens']!s:>16} {size:>10} {row['generation']!s:>4}"
        typer.echo(f"{row['slot']:16} {row['kind']:5} {figures} {_layout(row['layout']):24} {valid}")


@app.command()
def verify(target: Target, as_json: Json = False) -> int:
    """Re-read every byte, from the device; exit 20 when anything is not what was written."""
    from mula_ray.checkpoint.filesystem import RealFileSystem
    from mula_ray.checkpoint.scan import verify_folder

    found = []
    for folder in _folders(target):
        damages = verify_folder(folder, RealFileSystem())
        found.append({"path": str(folder), "valid": not damages, "damages": [damage.event() for damage in damages]})
        if not as_json:
            typer.echo(f"{folder}: {'every byte as written' if not damages else f'{len(damages)} damaged'}")
            for damage in damages:
                typer.echo(f"  {damage}")
    if as_json:
        typer.echo(json.dumps({"checkpoints": found}))
    return 0 if all(entry["valid"] for entry in found) else UserError.exit_code


@app.command("export-hf")
def export_hf(
    target: Target,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="new folder for transformers")],
    dtype: Annotated[ExportDtype, typer.Option(help="stored keeps every bit")] = ExportDtype.stored,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json or its folder; default: of the data")] = None,
) -> None:
    """Write safetensors, config.json and tokenizer that `transformers` loads as OLMoE or OLMo."""
    from mula_ray.checkpoint import hf

    folder = _newest(target)
    names = hf.export_hf(folder, out, dtype=dtype.value, tokenizer=tokenizer or _tokenizer_of(folder))
    typer.echo(f"exported {folder} to {out}: {', '.join(names)}")
    if "tokenizer.json" not in names:
        typer.echo("no tokenizer was found beside the data; give one with --tokenizer")


@app.command("import-hf")
def import_hf(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="run folder that gets checkpoints/model-<step>")],
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="config.json and safetensors of OLMoE or OLMo")],
    step: Annotated[int, typer.Option(min=0, help="the step it counts as")] = 0,
) -> None:
    """Make a model-only checkpoint of a Hugging Face folder, bit for bit."""
    from mula_ray.checkpoint import hf
    from mula_ray.checkpoint.failures import StoreFailure

    root = run_dir if run_dir.name == "checkpoints" else run_dir / "checkpoints"
    try:
        path, damages = hf.import_hf(source, root, step=step)
    except StoreFailure as failure:
        raise failure.as_stop(at_start=True) from failure
    if damages:
        raise UserError(f"{path} does not read back as written: {damages[0]}; the disk is at fault")
    typer.echo(f"imported {source} as {path}")


def _folders(target: Path) -> list[Path]:
    """Checkpoint folders under a run folder, a checkpoints folder, or the one itself.

    Raises:
        UserError: no such folder. NoCheckpoint: nothing in it.
    """
    from mula_ray.checkpoint.scan import committed_folders
    from mula_ray.plan.format import MANIFEST

    if not target.is_dir():
        raise UserError(f"{target} is not a folder; give a run folder, its checkpoints/, or one checkpoint")
    if (target / MANIFEST).is_file():
        return [target]
    root = target / "checkpoints" if (target / "checkpoints").is_dir() else target
    folders = committed_folders(root)
    if not folders:
        raise NoCheckpoint(f"{root} holds no checkpoint: no folder in it has a {MANIFEST}")
    return folders


def _newest(target: Path) -> Path:
    """The checkpoint itself, or the newest sound one with full state, else model-only."""
    from mula_ray.checkpoint.scan import find_latest

    folders = _folders(target)
    if folders == [target]:
        return target
    root = folders[0].parent
    found = find_latest(root, deep=False) or find_latest(root, deep=False, kind="model")
    if found is None:
        raise NoCheckpoint(f"no checkpoint in {root} is valid; see mula-ray ckpt verify {target}")
    return found.path


def _row(folder: Path) -> dict[str, Any]:
    from mula_ray.checkpoint.failures import DamagedCheckpoint
    from mula_ray.checkpoint.filesystem import RealFileSystem
    from mula_ray.checkpoint.reader import read_manifest
    from mula_ray.checkpoint.scan import verify_folder

    row: dict[str, Any] = {"slot": folder.name, "path": str(folder), "kind": "?", "step": None, "tokens": None}
    row |= {"generation": None, "bytes": 0, "layout": {}, "created": None}
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpoint as error:
        return {**row, "valid": False, "damages": [str(damage) for damage in error.damages]}
    facts, damages = manifest.facts, verify_folder(folder, RealFileSystem(), deep=False)
    row |= {"kind": manifest.kind, "step": facts.step, "tokens": facts.tokens, "generation": facts.generation}
    row |= {"bytes": manifest.nbytes, "layout": dict(facts.layout), "created": manifest.created}
    return {**row, "valid": not damages, "damages": [str(damage) for damage in damages]}


def _tokenizer_of(checkpoint: Path) -> Path | None:
    """The tokenizer of the data that the run was trained on, when it is where the configuration says."""
    from mula_ray.checkpoint.reader import read_manifest
    from mula_ray.data.corpus import STDLIB, ensure_stdlib
    from mula_ray.data.manifest import TOKENIZER
    from mula_ray.data.manifest import read_manifest as read_data

    facts = read_manifest(checkpoint).facts
    name = str(facts.config.get("data", {}).get("path", ""))
    path = ensure_stdlib() if name == STDLIB else Path(name)
    if not (path / TOKENIZER).is_file() or read_data(path).content_hash("train") != facts.data_hash:
        return None
    return path / TOKENIZER


def _layout(layout: dict[str, Any]) -> str:
    return " ".join(f"{key}{layout[key]}" for key in ("dp", "ep", "tp", "pp") if key in layout) or "-"


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"
