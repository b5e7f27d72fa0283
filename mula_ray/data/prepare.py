"""Raw or tokenized input -> token shards. The work itself, without Ray: `runtime/prepare.py` only spreads it.

    job = plan_job(settings)                  # look at the input, choose or train the tokenizer, fix the plan
    manifest = run_job(job, run_here, report) # tokenize items into blocks; merge blocks into shards; commit

Stages, each resumable file by file (every file has its final name only when it is complete and synced):

1. *tokenize*: an item (part of an input file) becomes sorted blocks (`blocks.py`) and a record of what was counted;
2. *shuffle*: a shard is the merge of its key range over all blocks;
3. *commit*: the manifest is written last; then the working folder `.prepare` goes.

The result is a function of the input files, their order, and the settings: not of workers, blocks, or interruptions.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from mula_ray.config.errors import CannotContinue, UserError
from mula_ray.data.blocks import BINS, Block, copy_keys, document_keys, file_key, held_out_mask, read_block, write_block
from mula_ray.data.inputs import BrokenInput, InputFile, Item
from mula_ray.data.job import DONE, Job
from mula_ray.data.manifest import SPLITS, TOKENIZER, DataManifest, ShardEntry, write_atomic, write_manifest
from mula_ray.data.mixture import ShardPlan, SourceTally, SourceUse, plan_mixture, plan_shards, tally_bins
from mula_ray.data.readers import Document, ReadReport, read_documents
from mula_ray.data.shards import write_shard
from mula_ray.data.tokenizer import Encoder, load_tokenizer


@dataclass(frozen=True)
class ItemResult:
    """What became of an item."""

    number: int
    bytes: int
    documents: int
    tokens: int
    blocks: int
    counts: dict[str, int]
    examples: tuple[str, ...]
    broken: tuple[str, ...] = ()
    """Files that could not be read to their end, and why."""


@dataclass(frozen=True)
class ShardTask:
    """A shard to write, with all that a worker needs to know."""

    plan: ShardPlan
    uses: tuple[SourceUse, ...]
    blocks: tuple[tuple[str, int], ...]
    """(file, source) of every block, in order."""


@dataclass(frozen=True)
class Progress:
    """How far it is."""

    stage: str
    done: int
    total: int
    """Bytes of input, or tokens of output."""
    tokens: int


Spread = Callable[[Job, str, Sequence[Any]], Iterator[Any]]
"""Runs `work(job, stage, task)` for all tasks, in any order; yields the results as they come."""


def work(job: Job, stage: str, task: Any) -> Any:
    """One task of a stage; what an executor calls, here or in a worker."""
    try:
        return tokenize_item(job, task) if stage == "tokenize" else merge_shard(job, task)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CannotContinue(
                f"no space left in {job.out} while preparing data ({stage}); make room there and start the same "
                "command again: finished work is kept"
            ) from error
        raise


def run_here(job: Job, stage: str, tasks: Sequence[Any]) -> Iterator[Any]:
    """The executor without Ray: one after another, the tokenizer on all cores."""
    for task in tasks:
        yield work(job, stage, task)


def run_job(job: Job, spread: Spread, report: Callable[[Progress], None] = lambda _: None) -> DataManifest:
    """Do, or finish, a job.

    Raises:
        UserError: broken input files (unless told to go on), no documents at all, a weighted source without tokens.
        CannotContinue: no space left.
    """
    results = _tokenize(job, spread, report)
    broken = list(job.broken) + [message for result in results for message in result.broken]
    if broken and job.settings.on_broken == "stop":
        raise UserError(
            f"{len(broken)} input file(s) cannot be read to their end, the first: {'; '.join(broken[:5])}. Nothing is "
            "committed and finished work is kept: replace the files, or say --on-broken skip to keep what can be read"
        )
    entries, uses = _shuffle(job, results, spread, report)
    manifest = DataManifest(
        vocab_size=job.vocab_size,
        eos_id=job.eos_id,
        dtype=cast(Any, job.dtype.name),
        tokenizer_sha256=job.tokenizer_sha256,
        splits={split: tuple(entry for entry in entries if entry.file.startswith(split)) for split in SPLITS},
        report=_summary(job, results, broken, uses),
    )
    if job.tokenizer_sha256 is not None:
        write_atomic(job.out / TOKENIZER, (job.work / TOKENIZER).read_bytes())
    write_atomic(job.out / DONE, json.dumps({"fingerprint": job.fingerprint}).encode())
    write_manifest(job.out, manifest)
    shutil.rmtree(job.work, ignore_errors=True)
    return manifest


def _tokenize(job: Job, spread: Spread, report: Callable[[Progress], None]) -> list[ItemResult]:
    total = sum(item.bytes for item in job.items)
    results = {found.number: found for item in job.items if (found := _read_result(job, item)) is not None}
    done, tokens = sum(r.bytes for r in results.values()), sum(r.tokens for r in results.values())
    report(Progress("tokenize", done, total, tokens))
    missing = [item for item in job.items if item.number not in results]
    with _watched(job, missing, lambda part: report(Progress("tokenize", min(total, done + part), total, tokens))):
        for result in spread(job, "tokenize", missing):
            results[result.number] = result
            done, tokens = done + result.bytes, tokens + result.tokens
    report(Progress("tokenize", done, total, tokens))
    return [results[item.number] for item in job.items]


@contextlib.contextmanager
def _watched(job: Job, items: Sequence[Item], tell: Callable[[int], None]) -> Iterator[None]:
    """Tell every second about how many bytes of unfinished items are done, by the blocks in the working folder.

    One packed file may be an item of an hour. Where the blocks come from, another process or node, does not matter.
    """
    sizes = {f"{item.number:06d}": item.bytes for item in items}
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(1.0):
            blocks: Counter[str] = Counter()
            ended = set()
            for name in os.listdir(job.work):
                if name.startswith("block-"):
                    blocks[name[6:12]] += 1
                elif name.startswith("item-"):
                    ended.add(name[5:11])
            going = ((key, count) for key, count in blocks.items() if key not in ended)
            tell(sum(min(sizes.get(key, 0), count * job.block_bytes // 2) for key, count in going))

    thread = threading.Thread(target=look, name="prepare-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _read_result(job: Job, item: Item) -> ItemResult | None:
    path = job.result_path(item.number)
    if not path.exists():
        return None
    raw = json.loads(path.read_text())
    return ItemResult(**(raw | {"examples": tuple(raw["examples"]), "broken": tuple(raw["broken"])}))


def tokenize_item(job: Job, item: Item) -> ItemResult:
    """Read and tokenize an item into blocks; those that exist already are kept."""
    report = ReadReport(Counter(), [])
    encoder = None
    if job.tokenizer_sha256 is not None:
        encoder = Encoder(load_tokenizer(job.work / TOKENIZER), job.dtype)
    blocks = documents = tokens = 0
    broken: list[str] = []
    for block, batch in enumerate(_batches(job, item, report, broken)):
        path = job.block_path(item.number, block)
        if not path.exists():
            _write_batch(job, batch, encoder, path)
        made = read_block(path)
        blocks, documents, tokens = block + 1, documents + len(made.keys), tokens + int(made.offsets[-1])
    result = ItemResult(
        item.number, item.bytes, documents, tokens, blocks, dict(report.counts), tuple(report.examples), tuple(broken)
    )
    write_atomic(job.result_path(item.number), json.dumps(asdict(result)).encode())
    return result


Owned = tuple[InputFile, Document]


def _batches(job: Job, item: Item, report: ReadReport, broken: list[str]) -> Iterator[list[Owned]]:
    """The documents of an item in batches of a block each. What comes before a break in a file is kept."""
    batch: list[Owned] = []
    size = 0
    for file, document in _documents(job, item, report, broken):
        batch.append((file, document))
        size += document.size
        if size >= job.block_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _documents(job: Job, item: Item, report: ReadReport, broken: list[str]) -> Iterator[Owned]:
    for span in item.spans:
        foreign = ""
        try:
            for document in read_documents(span, job.read_rules, report):
                if wrong := _foreign(job, document):  # left out by itself, so that nothing depends on its neighbours
                    report.counts["documents_of_foreign_ids"] += 1
                    foreign = foreign or wrong
                else:
                    yield span.file, document
        except BrokenInput as error:
            broken.append(f"{span.file.path}: {error}")
        if foreign:
            broken.append(f"{span.file.path}: {foreign}")


def _write_batch(job: Job, batch: list[Owned], encoder: Encoder | None, path: Path) -> None:
    texts = [document.text for _, document in batch if document.text is not None]
    assert encoder is not None or not texts, "text without a tokenizer was let through"
    encoded = iter(encoder.encode(texts) if encoder is not None and texts else ())
    ids, file_keys = [], []
    for file, document in batch:
        part = next(encoded) if document.ids is None else document.ids.astype(job.dtype)
        if document.ends and job.eos_id is not None and (not len(part) or part[-1] != job.eos_id):
            part = np.append(part, job.dtype.type(job.eos_id))
        ids.append(part)
        file_keys.append(file_key(job.settings.seed, file.source, file.ordinal))
    keys = document_keys(file_keys, [document.position for _, document in batch])
    held = held_out_mask(keys, job.settings.held_out)
    for row, (file, _) in enumerate(batch):
        if file.split is not None:
            held[row] = file.split == "held_out"
    write_block(path, keys, held, ids)


def _foreign(job: Job, document: Document) -> str:
    """What is wrong with the token ids of a document; empty if nothing is."""
    if document.ids is None:
        return ""
    low, high = int(document.ids.min()), int(document.ids.max())
    if low >= 0 and high < job.vocab_size:
        return ""
    return f"has ids from {low} to {high} near position {document.position}, outside the vocabulary of {job.vocab_size}"


def _shuffle(
    job: Job, results: Sequence[ItemResult], spread: Spread, report: Callable[[Progress], None]
) -> tuple[list[ShardEntry], list[SourceUse]]:
    sources = {item.number: item.source for item in job.items}
    blocks = tuple(
        (job.block_path(result.number, block).name, sources[result.number])
        for result in results
        for block in range(result.blocks)
    )
    tallies: dict[int, SourceTally] = {}
    for name, source in blocks:
        tallies.setdefault(source, SourceTally()).add(read_block(job.work / name))
    uses = plan_mixture([source.weight for source in job.settings.sources], tallies, job.settings.max_repeat)
    plans, total = _plan(job, blocks, uses)
    if not any(plan.split == "train" for plan in plans):
        raise UserError(
            "the input has no training documents with text in them; add text, or lower --held-out if all was held out"
        )
    entries: dict[str, ShardEntry] = {}
    for plan in plans:
        record = job.work / f"{plan.file}.json"
        if record.exists() and (job.out / plan.file).exists():
            entries[plan.file] = ShardEntry(**json.loads(record.read_text()))
    done = sum(entry.tokens for entry in entries.values())
    report(Progress("shuffle", done, total, done))
    tasks = [ShardTask(plan, tuple(uses), blocks) for plan in plans if plan.file not in entries]
    for entry in spread(job, "shuffle", tasks):
        entries[entry.file] = entry
        done += entry.tokens
        report(Progress("shuffle", done, total, done))
    return [entries[plan.file] for plan in plans], uses


def _plan(job: Job, blocks: Sequence[tuple[str, int]], uses: Sequence[SourceUse]) -> tuple[list[ShardPlan], int]:
    plans: list[ShardPlan] = []
    total = 0
    by_bin = {split: np.zeros(BINS) for split in SPLITS}
    for name, source in blocks:
        block = read_block(job.work / name)
        for split in SPLITS:
            tally_bins(block, split == "held_out", uses[source], by_bin[split])
    for split in SPLITS:
        plans += plan_shards(split, by_bin[split], job.settings.shard_tokens)
        total += int(by_bin[split].sum())
    return plans, total


def merge_shard(job: Job, task: ShardTask) -> ShardEntry:
    """Write one shard: the merge of its key range over all blocks."""
    plan, held_out = task.plan, task.plan.split == "held_out"
    parts: list[tuple[Block, np.ndarray[Any, Any]]] = []
    keys: list[np.ndarray[Any, Any]] = []
    for name, source in task.blocks:
        block, use = read_block(job.work / name), task.uses[source]
        for copy in range(1 if held_out else use.appearances):
            for run in block.runs(held_out, copy, plan.low, plan.high):
                rows = np.arange(run.start, run.stop)
                if not held_out:
                    rows = rows[use.wanted(block.keys[run], copy)]
                if rows.size:
                    parts.append((block, rows))
                    keys.append(copy_keys(block.keys[rows], copy))
    owners = np.repeat(np.arange(len(parts)), [rows.size for _, rows in parts])
    rows = np.concatenate([rows for _, rows in parts])
    order = np.argsort(np.concatenate(keys), kind="stable")
    lengths = np.concatenate([block.lengths[rows] for block, rows in parts])[order]
    values = np.empty(int(lengths.sum()), dtype=job.dtype)
    at = 0
    for owner, row in zip(owners[order].tolist(), rows[order].tolist(), strict=True):
        block = parts[owner][0]
        begin, end = block.offsets[row], block.offsets[row + 1]
        values[at : at + end - begin] = block.values[begin:end]
        at += end - begin
    entry = write_shard(job.out / plan.file, values, lengths)
    write_atomic(job.work / f"{plan.file}.json", json.dumps(asdict(entry)).encode())
    return entry


def _summary(
    job: Job, results: Sequence[ItemResult], broken: Sequence[str], uses: Sequence[SourceUse]
) -> dict[str, Any]:
    """What was counted; the same for the same input, so no times and no rates."""
    counts = Counter(job.counts)
    per_source = [Counter[str]() for _ in job.settings.sources]
    examples = list(job.notes)
    for result, item in zip(results, job.items, strict=True):
        counts.update(result.counts)
        examples += result.examples
        per_source[item.source].update(documents=result.documents, tokens=result.tokens)
    counts["broken_files"] = len(broken)
    sources = [
        {"pattern": source.pattern, "weight": source.weight}
        | {"copies": use.copies, "part_again": use.extra_below / 2**64}
        | dict(found)
        for source, use, found in zip(job.settings.sources, uses, per_source, strict=True)
    ]
    return {
        "counts": {name: number for name, number in sorted(counts.items()) if number},
        "examples": [*examples, *broken][:200],
        "sources": sources,
        "held_out_by": job.held_out_by,
        "seed": job.settings.seed,
    }
