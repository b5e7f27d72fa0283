"""`mula-ray eval CKPT --data …`: perplexity, and multiple-choice accuracy, of a checkpoint on local data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from mula_ray.cli.options import Json
from mula_ray.config.errors import NoCheckpoint, UserError

if TYPE_CHECKING:
    from mula_ray.checkpoint.reader import CheckpointReader


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="CKPT", help="a run folder (its newest) or one checkpoint")],
    data: Annotated[str, typer.Option(help="a prepared data folder, stdlib, or a .jsonl file of texts or questions")],
    split: Annotated[str, typer.Option(help="of a data folder: held_out, train")] = "held_out",
    samples: Annotated[int, typer.Option(min=0, help="of a data folder: windows to score; 0 all")] = 0,
    context: Annotated[int, typer.Option(min=0, help="tokens of a window; 0: as trained")] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json; default: of the training data")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="processes, each with the whole model")] = 1,
    dtype: Annotated[str, typer.Option(help="fp32, bf16")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, cuda, xpu")] = "cpu",
    as_json: Json = False,
) -> None:
    """Perplexity (and bits a byte) of text, accuracy of multiple choice; the same result for any number of ranks."""
    from mula_ray.checkpoint.failures import DamagedCheckpoint
    from mula_ray.checkpoint.reader import CheckpointReader

    if split not in ("held_out", "train") or dtype not in ("fp32", "bf16"):
        raise UserError(f"--split is {split!r} (held_out, train) and --dtype {dtype!r} (fp32, bf16); use one of these")
    folder = _checkpoint(target)
    try:
        with CheckpointReader(folder) as reader:
            width = context or int(reader.manifest.facts.config.get("data", {}).get("context", 2048))
            step = reader.manifest.facts.step
            result = _score(reader, data, split, samples, width, tokenizer, ranks, dtype, device)
    except DamagedCheckpoint as error:
        raise NoCheckpoint(str(error)) from error
    result = {"checkpoint": str(folder), "step": step, "data": data, "context": width} | result
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' ')}: {shown}")


def _score(
    reader: CheckpointReader,
    data: str,
    split: str,
    samples: int,
    context: int,
    tokenizer: Path | None,
    ranks: int,
    dtype: str,
    device: str,
) -> dict[str, Any]:
    from mula_ray.data.corpus import STDLIB
    from mula_ray.data.shards import TokenSet
    from mula_ray.data.source import resolve_path
    from mula_ray.data.tokenizer import load_tokenizer
    from mula_ray.train.evaluate import accuracy, load_examples, perplexity, score_checkpoint, windows_of

    kind = cast(Literal["fp32", "bf16"], dtype)
    if data == STDLIB or Path(data).is_dir():
        tokens = TokenSet.open(resolve_path(data), cast(Literal["held_out", "train"], split))
        tokens.check()
        windows = windows_of(tokens, context, samples)
        nlls = score_checkpoint(reader.path, windows, ranks=ranks, dtype=kind, device=device)
        return perplexity(nlls, windows)
    if not Path(data).is_file():
        raise UserError(f"--data {data} does not exist; give a prepared data folder, stdlib, or a .jsonl file")
    examples = load_examples(Path(data), load_tokenizer(tokenizer or _tokenizer(reader)), context)
    nlls = score_checkpoint(reader.path, examples.sequences, ranks=ranks, dtype=kind, device=device)
    result: dict[str, Any] = {}
    if examples.text:
        texts = [examples.sequences[at] for at in examples.text]
        result |= perplexity(nlls[examples.text], texts, examples.text_bytes)
    if examples.choices:
        result |= accuracy(nlls, examples.choices)
    if examples.cut:
        result["questions_cut"] = examples.cut
    return result


def _checkpoint(target: Path) -> Path:
    """The checkpoint folder that is meant: itself, or the newest valid one of a run.

    Raises:
        UserError: no such folder. NoCheckpoint: nothing valid in it.
    """
    from mula_ray.checkpoint.scan import find_latest
    from mula_ray.plan.format import MANIFEST

    if not target.is_dir():
        raise UserError(f"{target} is not a folder; give a run folder or one checkpoint")
    if (target / MANIFEST).is_file():
        return target
    root = target / "checkpoints" if (target / "checkpoints").is_dir() else target
    found = find_latest(root, deep=False) or find_latest(root, deep=False, kind="model")
    if found is None:
        raise NoCheckpoint(f"{root} holds no valid checkpoint; see mula-ray ckpt ls {target}")
    return found.path


def _tokenizer(reader: CheckpointReader) -> Path:
    """The tokenizer.json beside the data that the checkpoint was trained on."""
    from mula_ray.data.manifest import TOKENIZER
    from mula_ray.data.source import resolve_path

    name = str(reader.manifest.facts.config.get("data", {}).get("path", ""))
    path = resolve_path(name) / TOKENIZER if name else None
    if path is None or not path.is_file():
        raise UserError(f"{reader.path}: the tokenizer of its data ({name or 'unknown'}) is gone; give --tokenizer")
    return path
