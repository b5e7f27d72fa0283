"""Documents out of input files, one after another, in bounded memory, with everything odd counted.

A document's `position` in its file (a byte offset, row or token number) does not depend on how the file was cut into
items: the shuffle is keyed by it, so any number of workers gives the same bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mula_ray.data.inputs import PART_BYTES, PART_TOKENS, BrokenInput, Span, open_npy

MAX_LINE_BYTES = 256 << 20
_BUFFER = 1 << 20
_SMALL = 1 << 16
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    """A document, or a part of a long one."""

    position: int
    text: str | None
    ids: NDArray[Any] | None
    ends: bool
    """Whether the document ends here (the last part of it)."""

    @property
    def size(self) -> int:
        """Rough bytes, to bound what is held at a time."""
        return len(self.text) if self.text is not None else 4 * len(cast("NDArray[Any]", self.ids))


@dataclass
class ReadReport:
    """What happened while reading an span."""

    counts: Counter[str]
    examples: list[str]
    """A few places, for the person."""

    @classmethod
    def unheard(cls) -> ReadReport:
        """One that nobody reads."""
        return cls(Counter(), [])

    def odd(self, kind: str, where: str, most: int = 3) -> None:
        """Count something; remember where for the first few of its kind."""
        self.counts[kind] += 1
        if self.counts[kind] <= most:
            self.examples.append(f"{kind}: {where}")


@dataclass(frozen=True)
class ReadRules:
    """How files are read."""

    text_field: str = "text"
    tokens_field: str = "tokens"
    txt_documents: str = "file"
    """`file`: a text file is a document; `line`: each line is one."""
    eos_id: int | None = None
    """Cuts token streams into documents."""


def read_documents(span: Span, rules: ReadRules, report: ReadReport) -> Iterator[Document]:
    """The documents of an span.

    Raises:
        BrokenInput: the file cannot be read, or not to its end; what came before is good.
    """
    kind = span.file.kind
    try:
        if kind == "txt" and rules.txt_documents == "file":
            yield from _text_parts(span, report)
        elif kind in ("txt", "jsonl"):
            yield from _line_documents(span, rules, report)
        elif kind in ("parquet_text", "parquet_tokens"):
            yield from _parquet(span, rules, report)
        elif kind == "npy":
            yield from _npy(span, rules)
        else:
            yield from _shard(span)
    except (EOFError, zlib.error, pa.ArrowInvalid, OSError) as error:
        raise BrokenInput(f"cannot be read to its end: {error}") from error


class _Unpacked(io.RawIOBase):
    """A packed file that ends where it breaks: what comes before is handed out first, then the error raised."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        super().__init__()
        self._read = read
        self.failure: Exception | None = None

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Some bytes; none at the end or at a break."""
        try:
            found = self._read(min(len(buffer), _SMALL))
        except (EOFError, OSError, zlib.error, pa.ArrowInvalid) as error:
            self.failure = error
            return 0
        buffer[: len(found)] = found
        return len(found)


@contextlib.contextmanager
def _open(span: Span) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked. A break in it raises when the reader has come to its end."""
    if not span.file.packing:
        with open(span.file.path, "rb", buffering=_BUFFER) as file:
            yield file
        return
    with contextlib.ExitStack() as stack:
        if span.file.packing == "gz":
            raw = _Unpacked(stack.enter_context(gzip.open(span.file.path)).read1)
        else:
            raw = _Unpacked(stack.enter_context(pa.CompressedInputStream(pa.OSFile(span.file.path), "zstd")).read)
        yield cast("BinaryIO", io.BufferedReader(raw, _BUFFER))
        if raw.failure is not None:
            raise raw.failure


def _decode(raw: bytes, where: str, report: ReadReport) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        report.odd("broken_utf8", where)
        return raw.decode("utf-8", errors="replace")


def _text_parts(span: Span, report: ReadReport) -> Iterator[Document]:
    """A text file as one document, in parts that begin at the first line after each multiple of PART_BYTES."""
    half, stop = PART_BYTES // 2, span.stop if not span.file.packing else None
    with _open(span) as file:
        if span.begin:
            file.seek(span.begin)
        base, window = span.begin, file.read(PART_BYTES + half + 1)
        while window and (stop is None or base < stop):
            begin = _boundary(window, 0, half) if base else 0
            more = len(window) > PART_BYTES
            end = _boundary(window, PART_BYTES, half) if more else len(window)
            ends = end == len(window)
            raw = window[begin:end]
            if base == 0:
                raw = raw.removeprefix(_BOM)
            text = _decode(raw, f"{span.file.name} near byte {base + begin}", report) if raw else ""
            if text.strip():
                yield Document(base + begin, text, None, ends)
                if base and begin < end:
                    report.counts["parts_of_long_documents"] += 1
            elif base or not ends:
                report.counts["blank_parts"] += begin < end
            else:
                report.odd("empty_documents", span.file.name)
            if ends:
                break
            window = window[PART_BYTES:] + file.read(PART_BYTES)
            base += PART_BYTES


def _boundary(window: bytes, at: int, reach: int) -> int:
    """The first line start after `at`, or, without one within `reach`, the next start of a UTF-8 character."""
    found = window.find(b"\n", at, at + reach)
    if found >= 0:
        return found + 1
    while at < len(window) and window[at] & 0xC0 == 0x80:
        at += 1
    return at


def _line_documents(span: Span, rules: ReadRules, report: ReadReport) -> Iterator[Document]:
    for offset, raw in _lines(span, report):
        where = f"{span.file.name} at byte {offset}"
        text = _json_text(raw, rules, where, report) if span.file.kind == "jsonl" else _decode(raw, where, report)
        if text is None:
            continue
        if not text.strip():
            report.odd("empty_documents", where)
            continue
        yield from _parts(offset, text, report)


def _parts(position: int, text: str, report: ReadReport) -> Iterator[Document]:
    """A text, in parts if it is long."""
    begin = 0
    while len(text) - begin > PART_BYTES:
        end = text.rfind("\n", begin + PART_BYTES // 2, begin + PART_BYTES) + 1
        if not end:
            end = text.rfind(" ", begin + PART_BYTES // 2, begin + PART_BYTES)
        end = end if end > 0 else begin + PART_BYTES
        yield Document(position + begin, text[begin:end], None, False)
        report.counts["parts_of_long_documents"] += 1
        begin = end
    yield Document(position + begin, text[begin:] if begin else text, None, True)


def _lines(span: Span, report: ReadReport) -> Iterator[tuple[int, bytes]]:
    """(offset, line without its end) of the lines that start in the span; blank lines are counted and left out."""
    stop = None if span.file.packing else span.stop
    with _open(span) as file:
        offset = span.begin
        if offset:
            file.seek(offset - 1)
            offset += _skip_line(file) - 1
        while stop is None or offset < stop:
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                break
            here, offset = offset, offset + len(line)
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                offset += _skip_line(file)
                report.odd("too_long_lines", f"{span.file.name} at byte {here}")
                continue
            line = line.rstrip(b"\r\n")
            if here == 0:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield here, line
            else:
                report.counts["blank_lines"] += 1


def _skip_line(file: BinaryIO) -> int:
    """Read to behind the next line end; how many bytes that was."""
    skipped = 0
    while chunk := file.readline(_BUFFER):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


def _json_text(raw: bytes, rules: ReadRules, where: str, report: ReadReport) -> str | None:
    try:
        row = json.loads(raw)
    except UnicodeDecodeError:
        report.odd("broken_utf8", where)
        try:
            row = json.loads(raw.decode("utf-8", errors="replace"))
        except ValueError:
            report.odd("broken_json", where)
            return None
    except (ValueError, RecursionError):
        report.odd("broken_json", where)
        return None
    text = row.get(rules.text_field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        report.odd("rows_without_text", where)
        return None
    if b"\\u" in raw and not _encodable(text):
        report.odd("broken_utf8", where)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _encodable(text: str) -> bool:
    """Whether there is no lone surrogate in it, which JSON can escape but UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _parquet(span: Span, rules: ReadRules, report: ReadReport) -> Iterator[Document]:
    tokens = span.file.kind == "parquet_tokens"
    column = rules.tokens_field if tokens else rules.text_field
    with pq.ParquetFile(span.file.path) as file:
        counts = [file.metadata.row_group(group).num_rows for group in range(span.stop)]
        row = sum(counts[: span.begin])
        groups = list(range(span.begin, span.stop))
        for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=[column], use_threads=False):
            values = batch.column(0)
            for value in values:
                where, position = f"{span.file.name} row {row}", row << 32
                row += 1
                if not value.is_valid:
                    report.odd("null_rows", where)
                elif tokens:
                    yield from _token_parts(position, _ids(value.values, where), where, report)
                elif not (text := value.as_py()).strip():
                    report.odd("empty_documents", where)
                else:
                    yield from _parts(position, text, report)


def _ids(values: pa.Array, where: str) -> NDArray[Any]:
    if values.null_count:
        raise BrokenInput(f"{where} has null among its token ids")
    return cast("NDArray[Any]", values.to_numpy(zero_copy_only=False))


def _token_parts(position: int, ids: NDArray[Any], where: str, report: ReadReport) -> Iterator[Document]:
    if not len(ids):
        report.odd("empty_documents", where)
        return
    for begin in range(0, len(ids), PART_TOKENS):
        part = ids[begin : begin + PART_TOKENS]
        ends = begin + PART_TOKENS >= len(ids)
        report.counts["parts_of_long_documents"] += not ends
        yield Document(position + begin, None, part, ends)


def _npy(span: Span, rules: ReadRules) -> Iterator[Document]:
    """Rows of a 2-D array; of a 1-D one, the documents (up to an end-of-text id each) that start in the span."""
    array = open_npy(span.file.path)
    unused = ReadReport.unheard()
    if array.ndim == 2:
        for row in range(span.begin, span.stop):
            yield from _token_parts(row << 32, array[row], f"{span.file.name} row {row}", unused)
        return
    if rules.eos_id is None:
        for begin in range(span.begin, span.stop, PART_TOKENS):
            end = min(begin + PART_TOKENS, len(array))
            yield Document(begin, None, array[begin:end], end == len(array))
        return
    begin = span.begin if span.begin == 0 else _after_eos(array, span.begin - 1, rules.eos_id)
    while begin < span.stop:
        end = _after_eos(array, begin, rules.eos_id)
        for part in range(begin, end, PART_TOKENS):
            yield Document(part, None, array[part : min(part + PART_TOKENS, end)], part + PART_TOKENS >= end)
        begin = end


def _after_eos(array: NDArray[Any], at: int, eos: int) -> int:
    """Position behind the first `eos` at or after `at`; the end of the array without one."""
    for begin in range(at, len(array), PART_TOKENS):
        found = np.flatnonzero(array[begin : begin + PART_TOKENS] == eos)
        if found.size:
            return begin + int(found[0]) + 1
    return len(array)


def _shard(span: Span) -> Iterator[Document]:
    """The documents of a prepared shard, as they are."""
    column = pa.ipc.open_file(pa.memory_map(span.file.path)).get_batch(0).column("tokens")
    values, offsets = column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy(zero_copy_only=True)
    for number, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        yield Document(number, None, values[begin:end], False)
