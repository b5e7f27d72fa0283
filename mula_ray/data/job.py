"""The plan of a preparation: settings, input, tokenizer, and the working folder in which it can be resumed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from mula_ray.config.errors import UserError
from mula_ray.data.inputs import (
    TOKEN_KINDS,
    FoundInput,
    InputFile,
    InputRules,
    Item,
    Source,
    cut_into_items,
    find_input,
)
from mula_ray.data.manifest import MANIFEST, TOKENIZER, read_manifest, write_atomic
from mula_ray.data.readers import ReadReport, ReadRules, read_documents
from mula_ray.data.shards import token_dtype
from mula_ray.data.tokenizer import eos_of, load_tokenizer, tokenizer_digest, tokenizer_text, train_bpe, vocab_size_of
from mula_ray.plan.order import fold_seed

WORK = ".prepare"
DONE = "prepared.json"
_MOST_ITEMS = 4096


@dataclass(frozen=True)
class PrepareSettings:
    """What the person asks for. All of it but the last group fixes the result."""

    sources: tuple[Source, ...]
    tokenizer: str | None = None
    """A tokenizer.json; without it, one is trained on a sample of the text, or none is needed (tokens only)."""
    train_vocab: int = 32768
    """Vocabulary of a trained tokenizer."""
    tokens_tokenizer: str | None = None
    """The tokenizer.json that made the token input."""
    vocab_size: int | None = None
    """Of token input whose tokenizer is not known."""
    eos_id: int | None = None
    """End-of-text id; found in the tokenizer where there is one."""
    rules: InputRules = field(default_factory=InputRules)
    txt_documents: Literal["file", "line"] = "file"
    shard_tokens: int = 1 << 26
    max_repeat: float = 1.0
    on_broken: Literal["stop", "skip"] = "stop"
    item_bytes: int = 0
    """Input of a piece of work; 0 derives it from the size of the input."""
    sample_bytes: int = 64 << 20
    """Text that a tokenizer is trained on."""

    @property
    def seed(self) -> int:
        """Of shuffle and held-out choice."""
        return self.rules.seed

    @property
    def held_out(self) -> float:
        """Part of the files or documents that is held out."""
        return self.rules.held_out


@dataclass(frozen=True)
class Job:
    """A planned preparation; picklable, so that workers can do parts of it."""

    out: Path
    settings: PrepareSettings
    items: tuple[Item, ...]
    vocab_size: int
    eos_id: int | None
    tokenizer_sha256: str | None
    counts: dict[str, int]
    notes: tuple[str, ...]
    broken: tuple[str, ...]
    held_out_by: str
    fingerprint: str
    block_bytes: int
    """Text of a block: bounds a worker's memory."""

    @property
    def work(self) -> Path:
        """The working folder."""
        return self.out / WORK

    @property
    def dtype(self) -> np.dtype[Any]:
        """Stored type of a token."""
        return token_dtype(self.vocab_size)

    @property
    def read_rules(self) -> ReadRules:
        """How files are read."""
        rules = self.settings.rules
        return ReadRules(rules.text_field, rules.tokens_field, self.settings.txt_documents, self.eos_id)

    def block_path(self, item: int, block: int) -> Path:
        """File of a block."""
        return self.work / f"block-{item:06d}-{block:05d}.arrow"

    def result_path(self, item: int) -> Path:
        """Record of a finished item."""
        return self.work / f"item-{item:06d}.json"


def already_done(out: Path, settings: PrepareSettings) -> bool:
    """Whether `out` holds the finished result of these settings on this input.

    Raises:
        UserError: it holds another data set.
    """
    if not (out / MANIFEST).exists():
        return False
    found = find_input(settings.sources, settings.rules)
    fingerprint = _fingerprint(settings, found.files, _given_tokenizer(settings))
    if (out / DONE).exists() and json.loads((out / DONE).read_text())["fingerprint"] == fingerprint:
        return True
    raise UserError(
        f"{out} already holds a prepared data set of other input or settings; choose another --out, or remove it"
    )


@contextlib.contextmanager
def plan_job(out: Path, settings: PrepareSettings) -> Iterator[Job]:
    """Look at the input and open the working folder, for as long as the context lasts (one process at a time).

    Raises:
        UserError: no input, tokenizers that would be mixed, a working folder of other input, another process at work.
    """
    found = find_input(settings.sources, settings.rules)
    if not found.files:
        raise UserError(f"no input file can be read: {'; '.join(found.broken[:5])}")
    _refuse_mixing(found.files, settings)
    work = out / WORK
    _make_room(out, work, found)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is preparing data in {out}; wait, or choose another --out") from error
        fingerprint = _fingerprint(settings, found.files, _given_tokenizer(settings))
        _match_work(work, fingerprint)
        item_bytes = settings.item_bytes or max(32 << 20, sum(file.bytes for file in found.files) // _MOST_ITEMS)
        items = tuple(cut_into_items(found.files, item_bytes))
        tokenizer = _settle_tokenizer(work, settings, found.files, items)
        eos = settings.eos_id if settings.eos_id is not None else eos_of(tokenizer) if tokenizer is not None else None
        free = [file.split for file in found.files if file.split != "held_out"]
        yield Job(
            out=out,
            settings=settings,
            items=items,
            vocab_size=_vocab_size(tokenizer, settings, found.files),
            eos_id=eos,
            tokenizer_sha256=tokenizer_digest(tokenizer) if tokenizer is not None else _marked(found.files),
            counts=found.counts,
            notes=found.notes,
            broken=found.broken,
            held_out_by="document" if None in free else "file",
            fingerprint=fingerprint,
            block_bytes=max(1 << 20, item_bytes // 4),
        )


def _make_room(out: Path, work: Path, found: FoundInput) -> None:
    try:
        work.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; choose a folder that can") from error
    packed = {"gz": 4.0, "zst": 4.0}
    need = sum(int(file.bytes * packed.get(file.packing, 1.0)) for file in found.files)
    taken = sum(file.stat().st_size for file in out.rglob("*.arrow"))
    if free + taken < need:
        raise UserError(
            f"--out {out} has {free / 1e9:.1f} GB free; {need / 1e9:.1f} GB of text need about as much for shards and "
            "working files; make room or choose another folder"
        )


def _match_work(work: Path, fingerprint: str) -> None:
    record = work / "job.json"
    if not record.exists():
        write_atomic(record, json.dumps({"fingerprint": fingerprint}).encode())
    elif json.loads(record.read_text())["fingerprint"] != fingerprint:
        raise UserError(
            f"{work.parent} holds the unfinished preparation of other input, of files that changed since, or of other "
            f"settings; repeat the command that began it, or remove {work} to begin again"
        )


def _given_tokenizer(settings: PrepareSettings) -> str:
    """What is known of the tokenizer before work begins: part of the fingerprint."""
    if settings.tokenizer is None:
        return f"trained {settings.train_vocab} {settings.sample_bytes}"
    return tokenizer_digest(load_tokenizer(Path(settings.tokenizer)))


def _fingerprint(settings: PrepareSettings, files: Sequence[InputFile], tokenizer: str) -> str:
    """Everything that the result depends on, and the times of the input files: cheap signs of a change."""
    asked = asdict(settings)
    for name in ("on_broken", "tokenizer", "tokens_tokenizer"):
        del asked[name]
    facts = [tokenizer, json.dumps(asked, sort_keys=True)]
    facts += [f"{file.source} {file.name} {file.bytes} {file.mtime_ns} {file.kind} {file.split}" for file in files]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _marked(files: Sequence[InputFile]) -> str | None:
    """The tokenizer that all token files name, without having it."""
    return next((file.tokenizer for file in files if file.tokenizer is not None), None)


def _refuse_mixing(files: Sequence[InputFile], settings: PrepareSettings) -> None:
    """All tokens of a data set come from one tokenizer."""
    of_tokens = [file for file in files if file.kind in TOKEN_KINDS]
    if not of_tokens:
        return
    has_text = len(of_tokens) < len(files)
    stated = settings.tokens_tokenizer or (None if has_text else settings.tokenizer)
    digest = tokenizer_digest(load_tokenizer(Path(stated))) if stated is not None else None
    target = tokenizer_digest(load_tokenizer(Path(settings.tokenizer))) if settings.tokenizer is not None else None
    known: dict[str, str] = {}
    for file in of_tokens:
        made_by = file.tokenizer or digest
        if made_by is None and has_text:
            raise UserError(
                f"{file.path} holds tokens of an unknown tokenizer and other input is text: tokenizers must not be "
                "mixed; say which tokenizer.json made the tokens: --tokens-tokenizer, and the same one as --tokenizer"
            )
        known.setdefault(made_by or "unknown", file.path)
    if target is not None or has_text:
        known.setdefault(target or "a tokenizer still to be trained", "the text input" if has_text else "--tokenizer")
    if len(known) > 1:
        whose = "; ".join(f"{path}: {name[:12]}" for name, path in known.items())
        raise UserError(f"tokenizers must not be mixed in a data set, but the input comes from several: {whose}")


def _settle_tokenizer(
    work: Path, settings: PrepareSettings, files: Sequence[InputFile], items: Sequence[Item]
) -> Tokenizer | None:
    """The tokenizer of the job, stored in the working folder: given, found beside prepared shards, or trained now."""
    path = work / TOKENIZER
    if path.exists():
        return load_tokenizer(path)
    given = settings.tokenizer or settings.tokens_tokenizer
    if given is not None:
        tokenizer = load_tokenizer(Path(given))
    elif all(file.kind in TOKEN_KINDS for file in files):
        beside = [Path(file.path).parent / TOKENIZER for file in files if file.kind == "shard"]
        if not beside or not beside[0].exists():
            return None
        tokenizer = load_tokenizer(beside[0])
    else:
        tokenizer = train_bpe(_sample(settings, items), settings.train_vocab)
    write_atomic(path, tokenizer_text(tokenizer).encode())
    return tokenizer


def _sample(settings: PrepareSettings, items: Sequence[Item]) -> Iterator[str]:
    """Training text for a tokenizer, from all over the input, held-out files left out."""
    rules = ReadRules(settings.rules.text_field, settings.rules.tokens_field, settings.txt_documents)
    spans = [span for item in items for span in item.spans]
    mine = [span for span in spans if span.file.kind not in TOKEN_KINDS and span.file.split != "held_out"]
    mine.sort(key=lambda span: fold_seed("sample", settings.seed, span.file.source, span.file.ordinal, span.begin))
    left = settings.sample_bytes
    most = max(1 << 20, settings.sample_bytes // max(1, len(mine)))
    for span in mine:
        taken = 0
        with contextlib.suppress(Exception):  # what is broken is reported when it is tokenized
            for document in read_documents(span, rules, ReadReport.unheard()):
                text = (document.text or "")[: most - taken]
                yield text
                taken += len(text)
                left -= len(text)
                if taken >= most or left <= 0:
                    break
        if left <= 0:
            return


def _vocab_size(tokenizer: Tokenizer | None, settings: PrepareSettings, files: Sequence[InputFile]) -> int:
    if tokenizer is not None:
        return vocab_size_of(tokenizer)
    of_shards = {read_manifest(Path(file.path).parent).vocab_size for file in files if file.kind == "shard"}
    stated = {settings.vocab_size} if settings.vocab_size is not None else of_shards
    if len(stated) != 1:
        raise UserError(
            "the input is tokens of an unknown tokenizer; give its tokenizer.json with --tokenizer, "
            "or at least the number of its ids with --vocab-size"
        )
    return next(iter(stated)) or 0
