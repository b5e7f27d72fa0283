"""The data stream of a node: one Ray Data stream a node agent, over the addresses that `plan/order.py` gives.

For `runtime/node.py`:

    stream = NodeStream(data, config)           # once, when the agent learns the run's data
    spec = stream.begin(generation, start_step, stop_step, shares)   # each generation; returns at once; one Share
                                                # (data/batches.py) a tile of this node, in tile order
    stream.stats()                              # StreamStats, for reports
    stream.close()                              # before the agent leaves; bounded

and in the rank of tile i, with no Ray in it (spec is picklable; it may be None):

    source = RingSource(data, shares[i], spec, cell=i, generation=generation)       # data/ring.py

What flows: a thread of the agent keeps the ring filled some steps ahead of the slowest rank, from chunks of many
steps that one long-lived Ray Data reading task on this node yields, in order, when asked. A generation that starts
again a few steps back finds them still in the ring; one that starts elsewhere only moves the next request. Only when
this node's part of a step changes (another world size, other tiles) are ring and stream replaced. Until the first
chunk is there (a new stream needs 0.7 s warm, 2.4 s cold), and whenever the stream is behind or broken, ranks read the
same addresses themselves: the stream can cost time, never correctness.

Why the reading task waits in itself and is not held back by Ray Data's back-pressure: with no task running, Ray Data's
executor does not sleep between its rounds and keeps nearly a whole core busy for nothing (0.85 cores measured with Ray
2.60). With one, it makes a round every 0.1 s, which in two agents cost 2.4 % of a core; it wakes up for a chunk anyhow,
so it is told to wait longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mula_ray.config.run import RunConfig
from mula_ray.data.batches import Share
from mula_ray.data.ring import RingSpec, RingWriter, StepSamples
from mula_ray.data.shards import token_dtype
from mula_ray.data.source import RunData
from mula_ray.plan.order import share
from mula_ray.runtime.chunks import Chunk, StreamPlan

_CHUNK_BYTES = 16 << 20
_MAX_CHUNK_STEPS = 2048
_KEPT_STEPS = 8
_WORTH_STEPS = 32
_FIRST_PAUSE_S = 5.0
_POLL_S = (0.002, 0.2)
_EXECUTOR_WAIT_S = 1.0
_STOP_S = 3.0
_RETRIES = 3

Opener = Callable[[StreamPlan, RingSpec], Iterator[Chunk]]


@dataclass
class StreamStats:
    """What a node's stream did, over all generations."""

    rings: int = 0
    streams: int = 0
    """Ray Data streams opened; more than `rings` when one broke."""
    chunks: int = 0
    steps: int = 0
    """Steps put into rings."""
    late_steps: int = 0
    """Steps that arrived after the ranks had read them directly."""
    error: str = ""
    """Why the stream was given up; empty while it works."""


@dataclass(frozen=True)
class _Begun:
    """One generation's wish."""

    generation: int
    start: int
    stop: int


class NodeStream:
    """Owner of this node's ring, filling thread and Ray Data stream."""

    def __init__(self, data: RunData, config: RunConfig, *, opener: Opener | None = None) -> None:
        self._data = data
        self._prefetch = config.data.prefetch_steps
        self._open: Opener = opener or open_ray_stream
        self._stats = StreamStats()
        self._plan: StreamPlan | None = None
        self._ring: RingWriter | None = None
        self._filler: _Filler | None = None

    def begin(self, generation: int, start_step: int, stop_step: int, shares: Sequence[Share]) -> RingSpec | None:
        """Serve `generation` from `start_step` on. Returns at once; None if this node has no samples at all.

        Args:
            generation: of the ranks that will read; others are ignored from now on
            start_step: their first step
            stop_step: one past the last step of the run
            shares: of each tile of this node, in tile order; the position is the rank's `cell`
        """
        plan = make_plan(self._data, shares, self._prefetch, stop_step)
        if plan != self._plan or self._ring is None or self._ring.spec.cells != len(shares):
            self._drop()
            if plan is None:
                return None
            self._plan = plan
            self._ring = RingWriter.create(
                samples=len(plan.offsets),
                context=self._data.context,
                depth=self._prefetch + _KEPT_STEPS,
                cells=len(shares),
                dtype=token_dtype(self._data.vocab_size),
                starts=plan.document_mask,
            )
            self._stats.rings += 1
            self._filler = _Filler(plan, self._ring, self._prefetch, self._open, self._stats)
        assert self._filler is not None
        self._filler.begin(_Begun(generation, start_step, stop_step))
        return self._ring.spec

    def stats(self) -> StreamStats:
        """A copy of the counters."""
        return replace(self._stats)

    def close(self) -> None:
        """End the stream and let the ring go; returns within seconds whatever the stream does."""
        self._drop(_STOP_S)

    def _drop(self, wait_s: float = 0.0) -> None:
        """Tell the filler to end; a new generation does not wait for it."""
        if self._filler is not None:
            self._filler.close(wait_s)
        self._plan = self._ring = self._filler = None


def make_plan(data: RunData, shares: Sequence[Share], prefetch: int, stop: int) -> StreamPlan | None:
    """What the tiles of a node read in every step, each sample once although TP and pipeline ranks share it."""
    if not shares:
        return None
    offsets: set[int] = set()
    for part in shares:
        offsets.update(range(*share(part.global_batch, part.ddp, part.ddp_index)))
    if not offsets:
        return None
    first = shares[0]
    width = (data.context + 1) * token_dtype(data.vocab_size).itemsize
    step_bytes = len(offsets) * (width + (4 * data.context if first.document_mask else 0))
    steps = min(_MAX_CHUNK_STEPS, max(prefetch, _CHUNK_BYTES // step_bytes))
    return StreamPlan(data, first.global_batch, tuple(sorted(offsets)), first.document_mask, steps, stop)


def open_ray_stream(plan: StreamPlan, spec: RingSpec) -> Iterator[Chunk]:
    """The stream as a Ray Data pipeline of one reading task on this node. Runs in the agent, a Ray process."""
    import ray
    from ray.data import DataContext
    from ray.data._internal.execution import streaming_executor_state as executor
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from mula_ray.runtime.plan_source import PlanSource

    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # a row is a chunk; it must go out when it is read, not when a block is full
    context.execution_no_progress_timeout_s = -1  # waiting for slow training is no fault
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    executor.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = _EXECUTOR_WAIT_S
    with DataContext.current(context):
        stream = ray.data.read_datasource(
            PlanSource(plan, spec), override_num_blocks=1, concurrency=1, num_cpus=0, scheduling_strategy=node
        )
        for bundle in stream.iter_internal_ref_bundles():  # looks only when asked; iter_batches does every 10 ms
            for block in bundle.block_refs:
                table = ray.get(block)
                for row in range(table.num_rows):
                    yield Chunk.of_arrow(table, row)


class _Filler:
    """The thread that moves steps from the stream into the ring."""

    def __init__(self, plan: StreamPlan, ring: RingWriter, prefetch: int, opener: Opener, stats: StreamStats) -> None:
        self._plan = plan
        self._ring = ring
        self._prefetch = prefetch
        self._open = opener
        self._stats = stats
        self._wish: _Begun | None = None
        self._stream: Iterator[Chunk] | None = None
        self._chunk: Chunk | None = None
        self._asked = False
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="data-stream", daemon=True)

    def begin(self, wish: _Begun) -> None:
        """Take over a generation; the thread starts with the first one."""
        self._wish = wish
        if self._thread.ident is None:
            self._thread.start()

    def close(self, wait_s: float) -> None:
        """Stop the thread, which closes the ring when it ends. One stuck in Ray dies with the process: a daemon."""
        self._stop.set()
        self._ring.mark_closed()
        if self._thread.ident is None:
            self._ring.close()
        elif wait_s:
            self._thread.join(wait_s)

    def _run(self) -> None:
        try:
            self._follow()
        finally:
            self._forget()
            self._ring.close()

    def _follow(self) -> None:
        last, since, pause = -1, time.monotonic(), _POLL_S[1]
        while not self._stop.wait(pause):
            wish = self._wish
            assert wish is not None
            wanted = self._ring.wanted(wish.generation)
            if wanted is None or wanted >= wish.stop:
                continue
            now = time.monotonic()
            if wanted > last >= 0:  # come back when a quarter of what lies in the ring is used up
                pause = min(_POLL_S[1], max(_POLL_S[0], (now - since) / (wanted - last) * self._prefetch / 4))
            if wanted != last:
                last, since = wanted, now
            if self._worth(wish, wanted):
                self._fill(wanted, wish.stop)

    def _worth(self, wish: _Begun, wanted: int) -> bool:
        """A new stream costs seconds of processor time: not for a run that ends before, nor while ranks start."""
        if self._failures >= _RETRIES:
            return False
        if self._stream is not None or (self._chunk is not None and self._chunk.covers(wanted)):
            return True
        if wanted <= wish.start or wish.stop - wanted < _WORTH_STEPS:
            return False
        return not self._stop.wait(_FIRST_PAUSE_S)

    def _fill(self, wanted: int, stop: int) -> None:
        for step in range(wanted, min(stop, wanted + self._prefetch)):
            if self._ring.holds(step):
                continue
            try:
                content = self._step(step)
            except Exception as error:  # whatever breaks in Ray Data, ranks go on by direct reads
                self._failures += 1
                self._stats.error = f"{type(error).__name__}: {error}"
                self._forget()
                return
            if content is None:
                return
            self._ring.put(step, content)
            self._stats.steps += 1

    def _step(self, step: int) -> StepSamples | None:
        """One step out of the current chunk, or out of the next one; None when the ranks have left it behind."""
        chunk = self._chunk
        if chunk is None or not chunk.covers(step):
            chunk = self._chunk = self._next_chunk(step)
            if chunk is None:
                self._forget()
                return None
            wish = self._wish
            now = self._ring.wanted(wish.generation) if wish is not None else None
            if now is not None and now > step:
                self._stats.late_steps += now - step
                return None
        following = chunk.first + self._plan.chunk_steps
        if not self._asked and following < self._plan.stop and step >= chunk.first + self._plan.chunk_steps // 2:
            self._ask(following)
        return chunk.step(step)

    def _next_chunk(self, step: int) -> Chunk | None:
        """The chunk that holds `step`, waited for; None when the stream has ended."""
        while not self._stop.is_set():
            if self._stream is None:
                self._stats.streams += 1
                self._stream = self._open(self._plan, self._ring.spec)
            if not self._asked:
                self._ask(step)
            chunk = next(self._stream, None)
            self._asked = False
            if chunk is None:
                return None
            self._stats.chunks += 1
            if chunk.first + self._plan.chunk_steps >= self._plan.stop:
                self._finish()
            if chunk.covers(step):  # otherwise it was asked for before the ranks went elsewhere
                return chunk
        return None

    def _ask(self, first: int) -> None:
        self._ring.ask(first)
        self._asked = True

    def _finish(self) -> None:
        """The run's last chunk is here: let Ray Data end, whose executor looks about ten times a second."""
        if self._stream is not None:
            next(self._stream, None)
        self._stream = None

    def _forget(self) -> None:
        self._stream = self._chunk = None
        self._asked = False
