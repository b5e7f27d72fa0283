"""Micro-batches of a rank, read directly from the shards.

    data = open_run_data(config)                               # once, in the launcher
    source = BatchSource(data, Share.of(config, topology, rank))
    for batch in source.micro_batches(step): ...               # Batch of numpy arrays; torch.from_numpy shares them
    held = source.eval_batches()

What a step's samples are is decided by `plan/order.py` alone; this file only fetches them. `runtime/rank.py` puts the
shared-memory ring in front (`Share.samples` says what to look for); the bytes are the same either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mula_ray.config.run import RunConfig
from mula_ray.data.shards import TokenSet
from mula_ray.data.source import RunData
from mula_ray.plan.order import SampleOrder, assign, micro_batch_count, share
from mula_ray.plan.topology import Topology

_PLANNED_STEPS = 32


@dataclass(frozen=True)
class Batch:
    """A micro-batch; the fields are those of the engine's `MicroBatch`."""

    tokens: NDArray[np.int64]
    """(B, S + 1)"""
    weight: NDArray[np.float32]
    """(B,) 1.0 for a real sample, 0.0 for an empty one"""
    doc_starts: NDArray[np.int32] | None = None
    """(B, S) position in the window at which each token's document starts; only with a document mask"""


@dataclass(frozen=True)
class Share:
    """Which part of every step belongs to a ddp index."""

    global_batch: int
    micro_batch: int
    ddp: int
    ddp_index: int
    ep: int = 1
    document_mask: bool = False
    eval_samples: int = 0

    @classmethod
    def of(cls, config: RunConfig, topology: Topology, rank: int) -> Share:
        """The share of `rank`; ranks of one pipeline or TP group have the same."""
        return cls(
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            ddp=topology.ddp,
            ddp_index=topology.ddp_index(rank),
            ep=topology.ep,
            document_mask=config.data.document_mask,
            eval_samples=config.train.eval_samples,
        )

    def samples(self, step: int) -> NDArray[np.int64]:
        """(micro-batches, micro_batch) global sample numbers of a step, -1 for empty ones."""
        numbers = assign(step, self.global_batch, self.ddp, self.ddp_index, self.micro_batch, self.ep)
        return np.array(numbers, dtype=np.int64)

    def eval_samples_of(self, held_out_count: int) -> NDArray[np.int64]:
        """(micro-batches, micro_batch) held-out windows of this share, of the first `eval_samples`."""
        total = min(self.eval_samples, held_out_count)
        if total == 0:
            return np.empty((0, self.micro_batch), dtype=np.int64)
        first, stop = share(total, self.ddp, self.ddp_index)
        slots = micro_batch_count(total, self.ddp, self.micro_batch) * self.micro_batch
        mine = np.full(slots, -1, dtype=np.int64)
        mine[: stop - first] = np.arange(first, stop)
        return mine.reshape(-1, self.micro_batch)


class BatchSource:
    """Direct reads: a rank's samples from the memory-mapped shards."""

    def __init__(self, data: RunData, part: Share) -> None:
        self.data = data
        self.part = part
        self._train = data.open("train")
        self._held: TokenSet | None = None
        self._order: SampleOrder = data.order
        self._planned: tuple[int, NDArray[np.int64]] = (0, np.empty((0, 0, 0), dtype=np.int64))

    def micro_batches(self, step: int) -> list[Batch]:
        """The micro-batches of a step, equally many on every rank."""
        return read_batches(self._train, self._windows(step), self.data.context, self.part.document_mask)

    def _windows(self, step: int) -> NDArray[np.int64]:
        """(micro-batches, micro_batch) windows of a step, planned for many steps at once: one costs as much."""
        first, planned = self._planned
        if not first <= step < first + len(planned):
            numbers = np.stack([self.part.samples(at) for at in range(step, step + _PLANNED_STEPS)])
            planned = np.where(numbers >= 0, self._order.windows(np.maximum(numbers, 0)), -1)
            first, self._planned = step, (step, planned)
        found: NDArray[np.int64] = planned[step - first]
        return found

    def eval_batches(self) -> list[Batch]:
        """The held-out micro-batches, the same at every evaluation, equally many on every rank."""
        if self._held is None:
            self._held = self.data.open("held_out")
        windows = self.part.eval_samples_of(self.data.held_out_count)
        return read_batches(self._held, windows, self.data.context, self.part.document_mask)


def read_batches(tokens: TokenSet, windows: NDArray[np.int64], context: int, document_mask: bool) -> list[Batch]:
    """Read windows (micro-batches, B), -1 being an empty sample, into batches."""
    flat = windows.reshape(-1)
    real = flat >= 0
    ids = np.zeros((flat.size, context + 1), dtype=np.int64)
    starts = np.zeros((flat.size, context), dtype=np.int32) if document_mask else None
    if real.any():
        ids[real] = tokens.windows(flat[real], context)
        if starts is not None:
            starts[real] = tokens.doc_starts(flat[real], context)
    return as_batches(ids, real, starts, windows.shape[1])


def as_batches(
    ids: NDArray[np.int64], real: NDArray[np.bool_], starts: NDArray[np.int32] | None, micro_batch: int
) -> list[Batch]:
    """Cut the samples of a rank, (n, S + 1), into micro-batches of `micro_batch` (a divisor of n)."""
    weight = real.astype(np.float32)
    cuts = [slice(at, at + micro_batch) for at in range(0, ids.shape[0], micro_batch)]
    return [Batch(ids[cut], weight[cut], None if starts is None else starts[cut]) for cut in cuts]
