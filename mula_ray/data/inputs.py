"""What there is to prepare: sources, their files, what is in them, and how they are cut into work.

A source is a folder, a file, a glob, or a prepared data folder. Files are taken in the order of their relative paths;
their position in that order, never the path itself, goes into the shuffle. How a file is cut into items changes nothing
in the result; it only bounds what a worker does at a time.
"""

from __future__ import annotations

import glob
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mula_ray.config.errors import UserError
from mula_ray.data.manifest import MANIFEST, SPLITS, Split, read_manifest
from mula_ray.plan.order import fold_seed

Kind = Literal["txt", "jsonl", "parquet_text", "parquet_tokens", "npy", "shard"]
Packing = Literal["", "gz", "zst"]
TOKEN_KINDS = frozenset({"parquet_tokens", "npy", "shard"})
PART_BYTES = 4 << 20
"""A longer text is cut into parts of about this size, at line ends where possible. The result depends on it."""
PART_TOKENS = 1 << 20
"""The same for input that is tokens already."""
TOKENIZER_KEY = b"tokenizer_sha256"
"""Key of a Parquet file's schema metadata that names its tokenizer."""
_FEW_FILES = 20


class BrokenInput(Exception):
    """A file that cannot be read (to its end). Whether that stops the preparation is the caller's choice."""


@dataclass(frozen=True)
class Source:
    """Where text or tokens come from, and its share of the training tokens (None: everything, once)."""

    pattern: str
    weight: float | None = None
    files: tuple[tuple[str, str], ...] = ()
    """(path, name) of the files where they are known; `pattern` is then only a name."""


@dataclass(frozen=True)
class InputFile:
    """One file of a source."""

    source: int
    ordinal: int
    """Position among the files of its source."""
    path: str
    name: str
    """Relative to its source: for reports."""
    kind: Kind
    packing: Packing
    bytes: int
    mtime_ns: int
    split: Split | None
    """None: decided document by document."""
    units: int
    """What items are cut by: bytes, row groups, tokens or rows."""
    tokenizer: str | None = None
    """sha256 of the tokenizer that made its tokens, where the file says so."""


@dataclass(frozen=True)
class Span:
    """Units [begin, stop) of a file."""

    file: InputFile
    begin: int
    stop: int

    @property
    def bytes(self) -> int:
        """Its part of the file's bytes."""
        return round(self.file.bytes * (self.stop - self.begin) / max(1, self.file.units))


@dataclass(frozen=True)
class Item:
    """A piece of work: spans of one source, a part of a large file or many small ones."""

    number: int
    source: int
    spans: tuple[Span, ...]

    @property
    def bytes(self) -> int:
        """Bytes of input, for progress."""
        return sum(span.bytes for span in self.spans)


@dataclass(frozen=True)
class FoundInput:
    """All files, and what was left out and why."""

    files: tuple[InputFile, ...]
    counts: dict[str, int]
    notes: tuple[str, ...]
    broken: tuple[str, ...]


@dataclass(frozen=True)
class InputRules:
    """How files are looked at."""

    text_field: str = "text"
    tokens_field: str = "tokens"
    treat_as: Literal["", "txt", "jsonl"] = ""
    duplicates: Literal["skip", "keep"] = "skip"
    held_out: float = 0.01
    held_out_by: Literal["auto", "file", "document"] = "auto"
    seed: int = 0


def find_input(sources: Sequence[Source], rules: InputRules) -> FoundInput:
    """Every file of every source, described.

    Raises:
        UserError: a source that matches nothing usable.
    """
    counts: Counter[str] = Counter()
    notes: list[str] = []
    broken: list[str] = []
    files: list[InputFile] = []
    for number, source in enumerate(sources):
        mine: list[InputFile] = []
        for path, name, split in _matches(source):
            try:
                found = _describe(path, name, split, number, rules)
            except BrokenInput as error:
                broken.append(f"{path}: {error}")
                continue
            if found is None:
                counts["ignored_files"] += 1
                notes.append(f"{path}: ignored, unknown kind {path.suffix or '(no suffix)'}")
            else:
                mine.append(found)
        if not mine and not broken:
            raise UserError(
                f"source {source.pattern} has no input files; give a folder, a file or a quoted glob of "
                ".txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .npy files (or --as txt for other names)"
            )
        files += mine
    if rules.duplicates == "skip":
        files = _drop_duplicates(files, counts, notes)
    ordered: list[InputFile] = []
    for number in range(len(sources)):
        ordered += _split_files([file for file in files if file.source == number], rules)
    return FoundInput(tuple(ordered), dict(counts), tuple(notes), tuple(broken))


def _matches(source: Source) -> Iterator[tuple[Path, str, Split | None]]:
    """(path, name, split) of the files of a source, in name order."""
    for known, name in source.files:
        yield Path(known), name, None
    if source.files:
        return
    root = Path(source.pattern).expanduser().absolute()  # workers may stand elsewhere
    if (root / MANIFEST).is_file():
        manifest = read_manifest(root)
        for split in SPLITS:
            for entry in manifest.splits[split]:
                yield root / entry.file, entry.file, split
        return
    if root.is_dir():
        paths = (path for path in root.rglob("*") if not any(p.startswith(".") for p in path.relative_to(root).parts))
        named = [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    elif root.is_file():
        named = [(root.name, root)]
    else:
        fixed = next((parent for parent in root.parents if not glob.has_magic(str(parent))), Path("/"))
        found = [Path(name) for name in glob.glob(str(root), recursive=True)]
        named = [(path.relative_to(fixed).as_posix(), path) for path in found if path.is_file()]
    for name, path in sorted(named):
        yield path, name, None


def _describe(path: Path, name: str, split: Split | None, source: int, rules: InputRules) -> InputFile | None:
    stem, packing = path.name.lower(), ""
    for suffix in ("gz", "zst"):
        if stem.endswith("." + suffix):
            stem, packing = stem.removesuffix("." + suffix), suffix
    suffix = Path(stem).suffix
    tokenizer: str | None = None
    try:
        stat = path.stat()
        units = stat.st_size
        kind: Kind
        if rules.treat_as:
            kind = rules.treat_as
        elif suffix in (".txt", ".jsonl"):
            kind = "txt" if suffix == ".txt" else "jsonl"
        elif suffix == ".parquet" and not packing:
            kind, units, tokenizer = _look_into_parquet(path, rules)
        elif suffix == ".npy" and not packing:
            kind, units = "npy", len(open_npy(path))
        elif suffix == ".arrow" and split is not None:
            kind, tokenizer = "shard", read_manifest(path.parent).tokenizer_sha256
        else:
            return None
    except OSError as error:
        raise BrokenInput(f"cannot be read: {error.strerror or error}") from error
    if packing or kind == "shard":
        units = 1  # read in one go
    return InputFile(
        source,
        0,
        str(path),
        name,
        kind,
        cast(Packing, packing),
        stat.st_size,
        stat.st_mtime_ns,
        split,
        units,
        tokenizer,
    )


def _look_into_parquet(path: Path, rules: InputRules) -> tuple[Kind, int, str | None]:
    try:
        file = pq.ParquetFile(path)
        schema, groups = file.schema_arrow, file.metadata.num_row_groups
    except (pa.ArrowInvalid, OSError) as error:
        raise BrokenInput(f"is no readable Parquet file: {error}") from error
    marked = (schema.metadata or {}).get(TOKENIZER_KEY)
    for field, kind in ((rules.text_field, "parquet_text"), (rules.tokens_field, "parquet_tokens")):
        if field not in schema.names:
            continue
        held = schema.field(field).type
        if kind == "parquet_text" and (pa.types.is_string(held) or pa.types.is_large_string(held)):
            return "parquet_text", groups, None
        if kind == "parquet_tokens" and _is_list(held) and pa.types.is_integer(held.value_type):
            return "parquet_tokens", groups, marked.decode() if marked else None
        raise BrokenInput(f"column {field} has type {held}; it must be text ({rules.text_field}) or lists of integers")
    raise BrokenInput(
        f"has the columns {', '.join(schema.names)}, but neither {rules.text_field} (text) "
        f"nor {rules.tokens_field} (tokens); name them with --text-field or --tokens-field"
    )


def _is_list(held: pa.DataType) -> bool:
    return bool(pa.types.is_list(held) or pa.types.is_large_list(held) or pa.types.is_fixed_size_list(held))


def open_npy(path: Path | str) -> NDArray[Any]:
    """A memory-mapped array of token ids, 1-D (a stream) or 2-D (a document a row)."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise BrokenInput(f"is no readable .npy file: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise BrokenInput(f"holds {array.ndim}-dimensional {array.dtype}; it must be 1- or 2-dimensional integers")
    return array


def file_digest(path: Path | str) -> str:
    """sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _drop_duplicates(files: list[InputFile], counts: Counter[str], notes: list[str]) -> list[InputFile]:
    """The first of equal files stays. Only files of equal size are read for it."""
    sizes = Counter(file.bytes for file in files)
    seen: dict[str, str] = {}
    kept: list[InputFile] = []
    for file in files:
        if sizes[file.bytes] > 1 and file.bytes:
            digest = file_digest(file.path)
            if digest in seen:
                counts["duplicate_files"] += 1
                notes.append(f"{file.path}: skipped, the same bytes as {seen[digest]}")
                continue
            seen[digest] = file.path
        kept.append(file)
    return kept


def _split_files(files: list[InputFile], rules: InputRules) -> list[InputFile]:
    """Number the files of a source and choose the held-out ones: a part of the *files*, when there are enough."""
    by_file = rules.held_out_by == "file" or (rules.held_out_by == "auto" and len(files) >= _FEW_FILES)
    free = [number for number, file in enumerate(files) if file.split is None]
    held: set[int] = set()
    if by_file and rules.held_out > 0:
        ranked = sorted(free, key=lambda number: fold_seed("held-out file", rules.seed, number))
        held = set(ranked[: max(1, round(rules.held_out * len(ranked)))])
    out = []
    for number, file in enumerate(files):
        split: Split | None = file.split
        if split is None and (by_file or rules.held_out <= 0):
            split = "held_out" if number in held else "train"
        out.append(_with(file, ordinal=number, split=split))
    return out


def _with(file: InputFile, *, ordinal: int, split: Split | None) -> InputFile:
    values = file.__dict__ | {"ordinal": ordinal, "split": split}
    return InputFile(**values)


def cut_into_items(files: Sequence[InputFile], item_bytes: int) -> list[Item]:
    """Items of about `item_bytes`, in file order. Text is cut at multiples of `PART_BYTES`, tokens of `PART_TOKENS`."""
    items: list[Item] = []
    spans: list[Span] = []
    size = 0
    for file in files:
        step = max(1, file.units if file.packing or file.kind == "shard" else _step(file, item_bytes))
        for begin in range(0, file.units, step):
            span = Span(file, begin, min(file.units, begin + step))
            if spans and (size + span.bytes > item_bytes or spans[0].file.source != file.source):
                items.append(Item(len(items), spans[0].file.source, tuple(spans)))
                spans, size = [], 0
            spans.append(span)
            size += span.bytes
    if spans:
        items.append(Item(len(items), spans[0].file.source, tuple(spans)))
    return items


def _step(file: InputFile, item_bytes: int) -> int:
    rounding: Callable[[int, int], int] = lambda size, unit: max(1, size // unit) * unit  # noqa: E731
    if file.kind in ("txt", "jsonl"):
        return rounding(item_bytes, PART_BYTES)
    per_unit = max(1, file.bytes // max(1, file.units))
    return rounding(max(1, item_bytes // per_unit), PART_TOKENS if file.kind == "npy" else 1)
