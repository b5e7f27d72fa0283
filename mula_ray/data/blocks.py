"""The intermediate of a preparation: blocks of tokenized documents, sorted by their shuffle keys.

Global shuffle in bounded memory: every document gets a 64-bit key, a hash of (seed, source, file number, position in
the file). Sorting all documents by key is the shuffle. A block is sorted in itself, so what a shard needs of it, the
keys in a range, is one contiguous run per copy; a shard is the merge of these runs over all blocks. Keys do not depend
on blocks, items or workers, so neither does the result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mula_ray.plan.order import fold_seed, mix64

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

BINS = 1 << 16
"""Keys are counted by their upper 16 bits to find where shards end."""
_BIN_SHIFT = np.uint64(48)
_COPY_STRIDE = 0x9E3779B97F4A7C15
_SELECT = np.uint64(0xD1B54A32D192ED03)
_HELD = np.uint64(0x2545F4914F6CDD1D)


def file_key(seed: int, source: int, file: int) -> int:
    """What the keys of a file's documents are made from."""
    return fold_seed("document", seed, source, file)


def document_keys(file_keys: Sequence[int], positions: Sequence[int]) -> U64:
    """(n,) shuffle keys of documents, from the `file_key` of their file and their position in it."""
    return mix64(mix64(np.array(positions, dtype=np.uint64)) ^ np.array(file_keys, dtype=np.uint64))


def held_out_mask(keys: U64, fraction: float) -> NDArray[np.bool_]:
    """(n,) which documents are held out, where that is decided document by document."""
    return (mix64(keys ^ _HELD) >> np.uint64(11)).astype(np.float64) < fraction * 2.0**53


def select_hash(keys: U64) -> U64:
    """(n,) second hash: decides which documents get one copy more than others in a mixture."""
    return mix64(keys ^ _SELECT)


def copy_keys(keys: U64, copy: int) -> U64:
    """(n,) shuffle keys of the `copy`-th appearance of documents: the ring of keys, turned."""
    return keys + np.uint64(copy * _COPY_STRIDE & 0xFFFFFFFFFFFFFFFF)


def bins_of(keys: U64) -> I64:
    """(n,) bin of each key, in [0, BINS)."""
    return (keys >> _BIN_SHIFT).astype(np.int64)


@dataclass(frozen=True)
class Block:
    """An open block."""

    keys: U64
    """(n,) ascending within [0, held_from) and within [held_from, n)"""
    offsets: I64
    """(n + 1,)"""
    values: NDArray[Any]
    """(tokens,)"""
    held_from: int
    """Documents from here on are held out."""

    @property
    def lengths(self) -> I64:
        """(n,) tokens of each document."""
        return np.diff(self.offsets)

    def part(self, held_out: bool) -> slice:
        """Rows of a split."""
        return slice(self.held_from, len(self.keys)) if held_out else slice(0, self.held_from)

    def runs(self, held_out: bool, copy: int, low: int, high: int) -> list[slice]:
        """Rows of a split whose key, as its `copy`-th appearance, lies in the bins [low, high): at most two runs."""
        rows = self.part(held_out)
        keys = self.keys[rows]
        turn = copy * _COPY_STRIDE
        begin, end = ((low << 48) - turn) & (2**64 - 1), ((high << 48) - turn) & (2**64 - 1)
        if low == 0 and high == BINS:
            return [rows]
        first = rows.start + int(np.searchsorted(keys, np.uint64(begin)))
        stop = rows.start + int(np.searchsorted(keys, np.uint64(end)))
        if begin < end:
            return [slice(first, stop)]
        return [slice(first, rows.stop), slice(rows.start, stop)]


def write_block(path: Path, keys: U64, held: NDArray[np.bool_], ids: Sequence[NDArray[Any]]) -> None:
    """Write a block, sorted: temporary name, fsync, rename."""
    order = np.lexsort((keys, held))
    lengths = np.array([len(ids[row]) for row in order], dtype=np.int64)
    offsets = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    values = np.concatenate([ids[row] for row in order])
    tokens = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
    schema = pa.schema(
        [("key", pa.uint64()), ("tokens", tokens.type)], metadata={"held_from": str(len(ids) - int(held.sum()))}
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        with pa.ipc.new_file(file, schema) as writer:
            writer.write_batch(pa.record_batch([pa.array(keys[order]), tokens], schema=schema))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_block(path: Path) -> Block:
    """Map a block."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    batch = reader.get_batch(0)
    tokens = batch.column("tokens")
    return Block(
        keys=batch.column("key").to_numpy(zero_copy_only=True),
        offsets=tokens.offsets.to_numpy(zero_copy_only=True),
        values=tokens.values.to_numpy(zero_copy_only=True),
        held_from=int(reader.schema.metadata[b"held_from"]),
    )
