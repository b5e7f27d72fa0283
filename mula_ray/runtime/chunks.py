"""Chunks of many steps: what the reading task of a node's stream yields, and how it makes them (no Ray in here)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mula_ray.data.ring import RingReader, RingSpec, StepSamples
from mula_ray.data.shards import TokenSet, token_dtype
from mula_ray.data.source import RunData

_POLL_S = (0.01, 0.2)


@dataclass(frozen=True)
class StreamPlan:
    """Which samples a node reads in every step. Equal plans may share a ring and a stream."""

    data: RunData
    global_batch: int
    offsets: tuple[int, ...]
    """Ascending, each in [0, global_batch): sample `step * global_batch + offset`."""
    document_mask: bool
    chunk_steps: int
    """Steps read at a time."""
    stop: int
    """One past the last step of the run."""


@dataclass(frozen=True)
class Chunk:
    """The samples of the steps [first, first + steps)."""

    first: int
    numbers: NDArray[np.int64]
    """(steps, n) global sample numbers"""
    tokens: NDArray[Any]
    """(steps, n, S + 1)"""
    starts: NDArray[np.int32] | None
    """(steps, n, S)"""

    def covers(self, step: int) -> bool:
        """Whether `step` is in it."""
        return self.first <= step < self.first + len(self.numbers)

    def step(self, step: int) -> StepSamples:
        """One step of it."""
        at = step - self.first
        return StepSamples(self.numbers[at], self.tokens[at], None if self.starts is None else self.starts[at])

    def to_arrow(self) -> pa.Table:
        """One row: the chunk must not be cut on its way."""
        starts = b"" if self.starts is None else self.starts.tobytes()
        shape = [*self.tokens.shape]
        columns = {
            "first": [self.first],
            "shape": [shape],
            "dtype": [self.tokens.dtype.name],
            "numbers": [self.numbers.tobytes()],
            "tokens": [self.tokens.tobytes()],
            "starts": [starts],
        }
        kinds = {"numbers": pa.large_binary(), "tokens": pa.large_binary(), "starts": pa.large_binary()}
        return pa.table({name: pa.array(value, kinds.get(name)) for name, value in columns.items()})

    @classmethod
    def of_arrow(cls, table: pa.Table, row: int = 0) -> Chunk:
        """The chunk in a row that `to_arrow` made; its arrays are views into the table."""
        steps, samples, width = table["shape"][row].as_py()
        raw = {name: table[name][row].as_buffer() for name in ("numbers", "tokens", "starts")}
        starts = None
        if raw["starts"].size:
            starts = np.frombuffer(raw["starts"], np.int32).reshape(steps, samples, width - 1)
        return cls(
            first=table["first"][row].as_py(),
            numbers=np.frombuffer(raw["numbers"], np.int64).reshape(steps, samples),
            tokens=np.frombuffer(raw["tokens"], table["dtype"][row].as_py()).reshape(steps, samples, width),
            starts=starts,
        )


class ChunkReader:
    """Reads chunks from the shards, and serves an agent's requests for them."""

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._tokens: TokenSet = plan.data.open("train")
        self._order = plan.data.order
        self._dtype = token_dtype(plan.data.vocab_size)

    def read(self, first: int) -> Chunk:
        """The chunk that starts at step `first`."""
        plan = self._plan
        steps = np.arange(first, min(first + plan.chunk_steps, plan.stop), dtype=np.int64)
        numbers = steps[:, None] * plan.global_batch + np.array(plan.offsets, dtype=np.int64)
        windows = self._order.windows(numbers).reshape(-1)
        context = plan.data.context
        tokens = self._tokens.windows(windows, context).astype(self._dtype).reshape(*numbers.shape, context + 1)
        starts = None
        if plan.document_mask:
            starts = self._tokens.doc_starts(windows, context).reshape(*numbers.shape, context)
        return Chunk(first, numbers, tokens, starts)

    def serve(self, spec: RingSpec) -> Iterator[Chunk]:
        """A chunk for each request that the agent writes into its ring, until the one with the run's last step, or
        until the ring closes or the agent dies."""
        ring = RingReader.attach(spec)
        served, pause = 0, _POLL_S[0]
        while ring is not None and not ring.closed:
            number, first = ring.asked()
            if number == served:  # what is asked for is needed half a chunk later, except the first
                time.sleep(pause)
                pause = min(_POLL_S[1], pause * 1.1)
                continue
            served, pause = number, _POLL_S[0]
            yield self.read(first)
            if first + self._plan.chunk_steps >= self._plan.stop:
                return
