"""Token shards: Arrow IPC files, memory-mapped, one row a document.

A shard has one column, `tokens: large_list<uint16 | uint32>` (64-bit offsets). Its flat values are the tokens of the
shard one after another, its offsets are the document boundaries. A split is the concatenation of its shards; sample
`i` for a context of S is the window [i*S, i*S + S] of that stream, S + 1 tokens, so consecutive windows share one token
(the target of one is the first input of the next). Windows cross document boundaries; every document ends with the
end-of-text token, and `doc_starts` serves models that mask across documents. The last, incomplete window is unused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from mula_ray.config.errors import UserError
from mula_ray.data.manifest import DataManifest, ShardEntry, Split, read_manifest

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Smallest stored type that holds every id of the vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def shard_digest(values: NDArray[Any], lengths: I64) -> str:
    """sha256 of the content of a shard: ids as little-endian, then document lengths as little-endian int64."""
    digest = hashlib.sha256(np.ascontiguousarray(values).data)
    digest.update(np.ascontiguousarray(lengths, dtype="<i8").data)
    return digest.hexdigest()


def write_shard(path: Path, values: NDArray[Any], lengths: I64) -> ShardEntry:
    """Write one shard: temporary name, fsync, rename.

    Args:
        path: final name
        values: (tokens,) uint16 or uint32
        lengths: (documents,) tokens of each document, summing to `tokens`
    """
    assert int(lengths.sum()) == values.size, "document lengths do not sum to the tokens"
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
    batch = pa.record_batch([column], names=["tokens"])
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        with pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    temporary.replace(path)
    return ShardEntry(
        file=path.name,
        tokens=int(values.size),
        documents=int(lengths.size),
        bytes=size,
        max_id=int(values.max()) if values.size else -1,
        sha256=shard_digest(values, lengths),
    )


@dataclass(frozen=True)
class Shard:
    """An open shard: views into the memory map."""

    values: NDArray[Any]
    """(tokens,) uint16 or uint32"""
    offsets: I64
    """(documents + 1,) boundaries; document d is values[offsets[d]:offsets[d + 1]]"""

    @property
    def lengths(self) -> I64:
        """(documents,) tokens of each document."""
        return np.diff(self.offsets)


def open_shard(folder: Path, entry: ShardEntry) -> Shard:
    """Map one shard and hold it against its manifest entry.

    Raises:
        UserError: missing, truncated, or not the shard that the manifest describes.
    """
    path = folder / entry.file
    fix = "prepare the data again, or copy the file again from its origin"
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"shard {path} cannot be read: {error.strerror}; {fix}") from error
    if size != entry.bytes:
        raise UserError(
            f"shard {path} has {size} bytes, the manifest says {entry.bytes}: it is truncated or was changed; {fix}"
        )
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if reader.num_record_batches != 1:
            raise ValueError(f"{reader.num_record_batches} record batches instead of 1")
        column = reader.get_batch(0).column("tokens")
        shard = Shard(column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy(zero_copy_only=True))
    except (pa.ArrowInvalid, OSError, KeyError, ValueError) as error:
        raise UserError(f"shard {path} is damaged: {error}; {fix}") from error
    found, told = (shard.values.size, shard.offsets.size - 1), (entry.tokens, entry.documents)
    if found != told:
        raise UserError(f"shard {path} holds {found} tokens and documents, the manifest says {told}; {fix}")
    return shard


class TokenSet:
    """One split of a prepared data folder. Shards are mapped when first touched."""

    def __init__(self, folder: Path, manifest: DataManifest, split: Split) -> None:
        self.folder = folder
        self.manifest = manifest
        self.split = split
        self._entries = manifest.splits[split]
        self._starts = np.cumsum([0, *(entry.tokens for entry in self._entries)], dtype=np.int64)
        self._shards: dict[int, Shard] = {}
        self._views: dict[tuple[int, int], NDArray[Any]] = {}

    @classmethod
    def open(cls, path: Path | str, split: Split = "train") -> TokenSet:
        """Read the manifest; nothing else is touched yet (`check` does that).

        Raises:
            UserError: no prepared data there.
        """
        folder = Path(path)
        return cls(folder, read_manifest(folder), split)

    @property
    def tokens(self) -> int:
        """Tokens of the split."""
        return int(self._starts[-1])

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""
        return self.manifest.vocab_size

    @property
    def content_hash(self) -> str:
        """Hash of the content; see `DataManifest.content_hash`."""
        return self.manifest.content_hash(self.split)

    def count(self, context: int) -> int:
        """Samples of `context` tokens (plus one target)."""
        return max(0, (self.tokens - 1) // context)

    def check(self) -> None:
        """Open every shard once: existence, size, framing, counts, largest id on record.

        Raises:
            UserError: for the first shard that fails.
        """
        for number, entry in enumerate(self._entries):
            self._shard(number)
            if entry.max_id >= self.vocab_size:
                raise UserError(
                    f"shard {self.folder / entry.file} has token id {entry.max_id}, but the vocabulary has "
                    f"{self.vocab_size} ids; prepare the data again with the right tokenizer"
                )

    def shards(self) -> Iterator[tuple[ShardEntry, Shard]]:
        """Every shard, in order."""
        for number, entry in enumerate(self._entries):
            yield entry, self._shard(number)

    def windows(self, indices: I64, context: int) -> I32:
        """Tokens of the samples `indices`.

        Args:
            indices: (n,) each in [0, count(context))
            context: S

        Returns:
            (n, S + 1) int32

        Raises:
            UserError: a shard is damaged, or an id is outside the vocabulary.
        """
        out = np.empty((len(indices), context + 1), dtype=np.int32)
        begins = np.asarray(indices, dtype=np.int64) * context
        numbers = np.searchsorted(self._starts, begins, side="right") - 1
        whole = begins + context < self._starts[np.minimum(numbers + 1, len(self._entries))]
        highest = 0
        for number in set(numbers[whole].tolist()):
            rows = np.flatnonzero(whole & (numbers == number))
            found = self._rolling(number, context)[begins[rows] - self._starts[number]]
            highest = max(highest, int(found.max()))
            out[rows] = found
        for row in np.flatnonzero(~whole).tolist():
            self._copy(out[row], int(begins[row]), int(numbers[row]))
            highest = max(highest, int(out[row].max()))
        if highest >= self.vocab_size:
            self._name_bad_id(out, numbers)
        return out

    def _rolling(self, number: int, context: int) -> NDArray[Any]:
        """(positions, S + 1) view of a shard: row p is the window that starts at token p."""
        key = (number, context)
        if key not in self._views:
            self._views[key] = sliding_window_view(self._shard(number).values, context + 1)
        return self._views[key]

    def _copy(self, out: I32, begin: int, number: int) -> None:
        """Fill `out` from stream position `begin`, which lies in shard `number`, over as many shards as it takes."""
        done = 0
        while done < out.size:
            if begin >= self.tokens:
                raise ValueError(f"window ends at token {begin + out.size - done}, the split has {self.tokens}")
            at = begin - int(self._starts[number])
            part = self._shard(number).values[at : at + out.size - done]
            out[done : done + part.size] = part
            done, begin, number = done + part.size, begin + part.size, number + 1

    def doc_starts(self, indices: I64, context: int) -> I32:
        """Where the document of each token begins, for masks and positions that restart at document boundaries.

        Args:
            indices: (n,) samples
            context: S

        Returns:
            (n, S) int32: position in the window, 0 for a document that began before it.
        """
        out = np.empty((len(indices), context), dtype=np.int32)
        for row, index in enumerate(np.asarray(indices, dtype=np.int64).tolist()):
            begin = index * context
            out[row] = np.maximum(self._boundaries(begin, begin + context) - begin, 0)
        return out

    def _boundaries(self, begin: int, stop: int) -> I64:
        """(stop - begin,) stream position at which the document of each token in [begin, stop) starts."""
        number = int(np.searchsorted(self._starts, begin, side="right")) - 1
        parts: list[I64] = []
        while begin < stop:
            first = int(self._starts[number])
            offsets = self._shard(number).offsets
            until = min(stop, int(self._starts[number + 1]))
            low = int(np.searchsorted(offsets, begin - first, side="right")) - 1
            high = int(np.searchsorted(offsets, until - first, side="left"))
            starts = offsets[low:high]
            lengths = np.diff(np.append(np.maximum(starts, begin - first), until - first))
            parts.append(np.repeat(starts + first, lengths))
            begin, number = until, number + 1
        return np.concatenate(parts)

    def _shard(self, number: int) -> Shard:
        shard = self._shards.get(number)
        if shard is None:
            shard = self._shards[number] = open_shard(self.folder, self._entries[number])
        return shard

    def _name_bad_id(self, out: I32, numbers: I64) -> None:
        row = int(np.argmax(out.max(axis=1)))
        file = self.folder / self._entries[int(numbers[row])].file
        raise UserError(
            f"token id {int(out[row].max())} in or after shard {file} is outside the "
            f"vocabulary of {self.vocab_size}; run `mula-ray data verify {self.folder}`, then prepare the data again"
        )
