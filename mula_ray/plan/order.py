"""Which sample stands where: a pure function of (data content hash, seed, epoch, global sample number).

The cursor of a run is one number, the global samples consumed so far: `step * global_batch`. Sample number `n` belongs
to epoch `n // count` at position `n % count`; within an epoch a keyed permutation of `range(count)` says which window
of the token stream it is. Nothing is stored, so nothing can be lost: a changed world size only cuts the same sequence
of samples differently.

The permutation is a balanced Feistel network on the smallest even number of bits that holds `count`, with cycle walking
back into the range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The round function is the
finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix64(values: U64) -> U64:
    """The finaliser of splitmix64, element-wise: a bijection of 64-bit words."""
    mixed = values + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def fold_seed(*facts: int | str) -> int:
    """A 64-bit key of the facts, in order: the same on every machine and Python version."""
    text = "\x1f".join(f"{type(fact).__name__}:{fact}" for fact in facts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def sample_indices(seed: int, epoch: int, positions: I64, count: int) -> I64:
    """Window of each position of one epoch.

    Args:
        seed: any integer, the key of the run's order
        epoch: number of the epoch, from 0
        positions: (n,) int64, each in [0, count)
        count: samples an epoch

    Returns:
        (n,) int64: `positions` through a permutation of range(count).

    Raises:
        ValueError: `count` is not positive, or a position is outside [0, count).
    """
    if count < 1:
        raise ValueError(f"count is {count}; an epoch needs at least 1 sample")
    positions = np.asarray(positions, dtype=np.int64)
    if positions.size and (positions.min() < 0 or positions.max() >= count):
        raise ValueError(f"positions reach from {positions.min()} to {positions.max()}; they must be in [0, {count})")
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = mix64((np.arange(_ROUNDS, dtype=np.uint64) + np.uint64(1)) ^ np.uint64(fold_seed(seed, epoch)))
    out = _feistel(positions.astype(np.uint64), keys, half)
    while (outside := np.flatnonzero(out >= np.uint64(count))).size:
        out[outside] = _feistel(out[outside], keys, half)
    return out.astype(np.int64)


def _feistel(values: U64, keys: U64, half: int) -> U64:
    """One pass of the network over `2 * half` bits."""
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    return (left << shift) | right


def sample_index(seed: int, epoch: int, position: int, count: int) -> int:
    """Window of one position of one epoch; see `sample_indices`."""
    return int(sample_indices(seed, epoch, np.array([position], dtype=np.int64), count)[0])


def global_to_epoch(cursor: int, count: int) -> tuple[int, int]:
    """(epoch, position in it) of a global sample number; an epoch's end continues into the next one."""
    if cursor < 0 or count < 1:
        raise ValueError(f"cursor {cursor} must be >= 0 and count {count} >= 1")
    return divmod(cursor, count)


@dataclass(frozen=True)
class SampleOrder:
    """The order of one data set under one seed."""

    key: int
    """Folded from the content hash and the seed."""
    count: int
    """Samples an epoch."""

    @classmethod
    def of(cls, content_hash: str, seed: int, count: int) -> SampleOrder:
        """The order that (content hash, seed) fix."""
        if count < 1:
            raise ValueError(f"the data set has {count} samples; it needs at least 1")
        return cls(fold_seed("order", content_hash, seed), count)

    def windows(self, samples: I64) -> I64:
        """Windows of the global sample numbers `samples`, any shape, any epochs; same shape back."""
        samples = np.asarray(samples, dtype=np.int64)
        epochs, positions = np.divmod(samples, self.count)
        out = np.empty_like(samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = sample_indices(self.key, int(epoch), positions[here], self.count)
        return out


def share(global_batch: int, ddp: int, ddp_index: int) -> tuple[int, int]:
    """[first, stop) of the samples of a step that belong to `ddp_index`: contiguous, sizes differ by at most one."""
    if not 0 <= ddp_index < ddp:
        raise ValueError(f"ddp_index {ddp_index} is outside [0, {ddp})")
    return ddp_index * global_batch // ddp, (ddp_index + 1) * global_batch // ddp


def micro_batch_count(global_batch: int, ddp: int, micro_batch: int) -> int:
    """Micro-batches a step, the same on every rank, so that the collectives of all ranks match."""
    if min(global_batch, ddp, micro_batch) < 1:
        raise ValueError(f"global_batch {global_batch}, ddp {ddp} and micro_batch {micro_batch} must be at least 1")
    most = -(-global_batch // ddp)
    return -(-most // micro_batch)


def assign(step: int, global_batch: int, ddp: int, ddp_index: int, micro_batch: int, ep: int = 1) -> list[list[int]]:
    """Global sample numbers of each micro-batch of one ddp index in one step; -1 stands for an empty sample.

    Every rank gets equally many micro-batches of equally many samples, whatever `ep` is: ranks of an EP group and of a
    pipeline must run the same collectives. The real samples come first.

    Args:
        step: number of the step, from 0
        global_batch: samples a step over all ranks
        ddp: ranks with samples of their own (dp x ep)
        ddp_index: which of them
        micro_batch: samples of a forward pass
        ep: expert-parallel size; only checked to divide `ddp`
    """
    if ddp % ep:
        raise ValueError(f"ddp {ddp} is not a multiple of ep {ep}")
    first, stop = share(global_batch, ddp, ddp_index)
    mine = [step * global_batch + sample for sample in range(first, stop)]
    slots = micro_batch_count(global_batch, ddp, micro_batch) * micro_batch
    mine += [-1] * (slots - len(mine))
    return [mine[at : at + micro_batch] for at in range(0, slots, micro_batch)]
