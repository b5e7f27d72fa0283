"""`mula-ray data prepare / inspect / verify`: token shards from raw or tokenized input, and looking at them."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from mula_ray.config.errors import UserError

if TYPE_CHECKING:
    from mula_ray.data.inputs import Source
    from mula_ray.data.inspect import SplitFacts
    from mula_ray.data.job import PrepareSettings
    from mula_ray.data.manifest import DataManifest
    from mula_ray.data.prepare import Progress

app = typer.Typer(help="Prepare, inspect and verify training data.", no_args_is_help=True)

_SMALL_BYTES = 64 << 20
_EVERY_S = 2.0


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE…", help="folder, file, 'glob' or prepared folder; SOURCE@WEIGHT for a mixture"),
    ],
    out: Annotated[Path, typer.Option(help="folder for the shards; resumed if unfinished")],
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json; without it, one is trained")] = None,
    vocab: Annotated[int, typer.Option(min=257, help="vocabulary of a trained tokenizer")] = 32768,
    tokens_tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json that made token input")] = None,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="ids of token input without tokenizer")] = None,
    eos_id: Annotated[int | None, typer.Option(min=0, help="end-of-text id, if the tokenizer does not say")] = None,
    text_field: Annotated[str, typer.Option(help="field or column with text")] = "text",
    tokens_field: Annotated[str, typer.Option(help="Parquet column with token lists")] = "tokens",
    treat_as: Annotated[str, typer.Option("--as", help="read all files as txt or jsonl, whatever their names")] = "",
    txt_documents: Annotated[str, typer.Option(help="a document of .txt is a: file, line")] = "file",
    held_out: Annotated[float, typer.Option(min=0, max=0.5, help="part of the files that is held out")] = 0.01,
    held_out_by: Annotated[str, typer.Option(help="auto (files if there are 20), file, document")] = "auto",
    seed: Annotated[int, typer.Option(help="of the shuffle and the held-out choice")] = 0,
    shard_tokens: Annotated[int, typer.Option(min=1, help="most tokens of a shard")] = 1 << 26,
    max_repeat: Annotated[float, typer.Option(min=0.01, help="how often a weighted source may be repeated")] = 1.0,
    duplicates: Annotated[str, typer.Option(help="files of equal bytes: skip, keep")] = "skip",
    on_broken: Annotated[str, typer.Option(help="files that cannot be read to their end: stop, skip")] = "stop",
    workers: Annotated[int, typer.Option(min=0, help="parallel workers; 0: all cores")] = 0,
    address: Annotated[str | None, typer.Option(help="a running Ray cluster to work on")] = None,
    engine: Annotated[str, typer.Option(help="auto (Ray for large input), ray, local")] = "auto",
) -> None:
    """Turn text or token files into token shards. Stopped at any time, the same command goes on where it stopped."""
    from mula_ray.data.inputs import InputRules
    from mula_ray.data.job import PrepareSettings

    rules = InputRules(
        text_field=text_field,
        tokens_field=tokens_field,
        treat_as=cast(Literal["", "txt", "jsonl"], _choice("--as", treat_as, "", "txt", "jsonl")),
        duplicates=cast(Literal["skip", "keep"], _choice("--duplicates", duplicates, "skip", "keep")),
        held_out=held_out,
        held_out_by=cast(
            Literal["auto", "file", "document"], _choice("--held-out-by", held_out_by, "auto", "file", "document")
        ),
        seed=seed,
    )
    settings = PrepareSettings(
        sources=tuple(_source(text) for text in sources),
        tokenizer=tokenizer,
        train_vocab=vocab,
        tokens_tokenizer=tokens_tokenizer,
        vocab_size=vocab_size,
        eos_id=eos_id,
        rules=rules,
        txt_documents=cast(Literal["file", "line"], _choice("--txt-documents", txt_documents, "file", "line")),
        shard_tokens=shard_tokens,
        max_repeat=max_repeat,
        on_broken=cast(Literal["stop", "skip"], _choice("--on-broken", on_broken, "stop", "skip")),
    )
    _choice("--engine", engine, "auto", "ray", "local")
    _run(out, settings, engine, workers or os.cpu_count() or 1, address)


def _run(out: Path, settings: PrepareSettings, engine: str, workers: int, address: str | None) -> None:
    from mula_ray.data.job import already_done, plan_job
    from mula_ray.data.manifest import read_manifest
    from mula_ray.data.prepare import run_here, run_job

    if already_done(out, settings):
        print(f"{out} is finished already, of the same input and settings")
        _tell(out, read_manifest(out))
        return
    line = ProgressLine()
    with plan_job(out, settings) as job:
        size = sum(item.bytes for item in job.items)
        if engine == "local" or (engine == "auto" and address is None and (size < _SMALL_BYTES or workers == 1)):
            manifest = run_job(job, run_here, line.show)
        else:
            from mula_ray.runtime.prepare import RayWorkers

            where = RayWorkers.of_cluster(address, workers) if address is not None else RayWorkers.local(workers)
            with where as spread:
                manifest = run_job(job, spread, line.show)
    _tell(out, manifest)


def _choice(option: str, value: str, *allowed: str) -> str:
    if value not in allowed:
        raise UserError(f"{option} is {value!r}; it must be one of {', '.join(name for name in allowed if name)}")
    return value


def _source(text: str) -> Source:
    from mula_ray.data.inputs import Source

    pattern, at, weight = text.rpartition("@")
    if not at or not pattern:
        return Source(text)
    try:
        value = float(weight)
    except ValueError:
        return Source(text)
    if not value > 0:
        raise UserError(f"source {text} has weight {weight}; weights must be above 0")
    return Source(pattern, value)


class ProgressLine:
    """Percent, rate and time left, on stderr; every few seconds, and at the end of a stage."""

    def __init__(self) -> None:
        self._stage = ""
        self._begin = self._said = 0.0
        self._kept = 0

    def show(self, progress: Progress) -> None:
        """Say how far it is, if it is time to."""
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._begin, self._kept = progress.stage, now, progress.done
            if progress.done:
                kept = progress.done / max(1, progress.total)
                print(f"{progress.stage}: {kept:.0%} was done before", file=sys.stderr)
        last = progress.done >= progress.total
        if now - self._said < _EVERY_S and not last:
            return
        self._said = now
        rate = (progress.done - self._kept) / max(1e-9, now - self._begin)
        unit = "MB/s" if progress.stage == "tokenize" else "M tokens/s"
        left = (progress.total - progress.done) / rate if rate > 0 else 0.0
        eta = f", {left // 60:.0f} min {left % 60:02.0f} s left" if rate > 0 and not last else ""
        share = progress.done / max(1, progress.total)
        told = f"{progress.stage}: {share:4.0%}, {progress.tokens / 1e6:.1f} M tokens, {rate / 1e6:.2f} {unit}{eta}"
        print(told, file=sys.stderr, flush=True)


def _tell(out: Path, manifest: DataManifest) -> None:
    for split, shards in manifest.splits.items():
        counts = f"{manifest.tokens(split):,} tokens, {manifest.documents(split):,} documents, {len(shards)} shards"
        print(f"{split}: {counts}")
    if manifest.documents("held_out") == 0:
        print("warning: nothing was held out, and training evaluates on held-out data: give a larger --held-out (0.2)")
    print(f"vocabulary {manifest.vocab_size:,}; held out by {manifest.report.get('held_out_by', '?')}")
    for source in manifest.report.get("sources", []):
        used = source["copies"] + source["part_again"]
        print(f"source {source['pattern']}: {source['tokens']:,} tokens, used {used:.3g} times")
    for name, count in manifest.report.get("counts", {}).items():
        print(f"{name.replace('_', ' ')}: {count:,}")
    for example in manifest.report.get("examples", [])[:10]:
        print(f"  {example}")
    print(f"ready: data.path: {out}")


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="a prepared data folder, or stdlib")],
    document: Annotated[int, typer.Option(min=0, help="which document to show")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="how many of its tokens")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Counts, document lengths with a histogram, and a decoded sample."""
    from mula_ray.data.inspect import inspect_folder
    from mula_ray.data.manifest import read_manifest
    from mula_ray.data.source import resolve_path

    folder = resolve_path(str(folder))
    manifest = read_manifest(folder)
    facts = inspect_folder(folder, tokens, document)
    if as_json:
        print(json.dumps({"vocab_size": manifest.vocab_size, "splits": [asdict(split) for split in facts]}))
        return
    _tell(folder, manifest)
    for split in facts:
        _show(split)


def _show(facts: SplitFacts) -> None:
    print(f"\n{facts.split}: content {facts.content_hash[:16]}, longest document {facts.longest:,} tokens")
    print("length percentiles: " + ", ".join(f"{at} %: {length:,}" for at, length in facts.percentiles.items()))
    most = max((count for _, count in facts.histogram), default=1)
    for length, count in facts.histogram:
        print(f"  <= {length:>10,} {count:>10,} {'#' * max(1 if count else 0, round(40 * count / most))}")
    if facts.sample_ids:
        print(f"sample: {facts.sample_ids[:16]}…")
        if facts.sample_text is not None:
            print(facts.sample_text)


@app.command()
def verify(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="a prepared data folder, or stdlib")]) -> int:
    """Every checksum, every id against the vocabulary, every document boundary; exit 20 if anything is wrong."""
    from mula_ray.data.inspect import verify_folder
    from mula_ray.data.source import resolve_path

    folder = resolve_path(str(folder))
    bad = number = tokens = 0
    for checked in verify_folder(folder):
        number, tokens = number + 1, tokens + checked.tokens
        if checked.problem:
            bad += 1
            print(f"{checked.what}: {checked.problem}")
    print(f"{folder}: {number} files, {tokens:,} tokens checked, {bad} with problems")
    return 20 if bad else 0
