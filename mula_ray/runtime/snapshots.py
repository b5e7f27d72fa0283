"""Between two steps, in a rank: copy the state into the agent's memory, and have saves written from there.

Two rules keep "0 committed steps lost" true with a snapshot every step and two slots beside a pinned one:
a snapshot is complete before the next step begins, and no rank takes part in the agreement of the next step before its
copy on the buddy node is acknowledged. So whoever is past step s + 1 proves that every copy of s exists.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mula_ray.checkpoint.buffers import select
from mula_ray.checkpoint.failures import StoreFailure
from mula_ray.checkpoint.snapshot import SnapshotBuffer
from mula_ray.config.run import RunConfig
from mula_ray.elastic.interval import Cadence
from mula_ray.plan.pieces import Piece
from mula_ray.plan.scatter import scatter
from mula_ray.runtime.board import COPIED, SAVE, SNAPSHOT, STOP, STOP_DISK, Board
from mula_ray.runtime.messages import RankSpec
from mula_ray.train.engine import Engine
from mula_ray.train.metrics import StepRecord

COPY_BOUND_S = 30.0
KEPT_RECORDS = 16
"""Records of the last steps go with rank 0's snapshots: a committed step keeps its line although its agent died."""
_SETTLE = 0.0002

Tell = Callable[[dict[str, Any]], None]


class RankSnapshots:
    """`Checkpoints` of the loop. `exchange(key, mine)`: every rank's value, in rank order (used once a kind)."""

    def __init__(
        self, spec: RankSpec, engine: Engine, board: Board, tell: Tell, exchange: Callable[[str, bytes], list[bytes]]
    ) -> None:
        self._spec, self._engine, self._board, self._tell, self._exchange = spec, engine, board, tell, exchange
        self._config: RunConfig = spec.run.config
        self._own = SnapshotBuffer(spec.memory)
        self._other = SnapshotBuffer(spec.model_memory)
        self._meta = {"rank": spec.rank, "dp": spec.topology.dp, "run": spec.run.run_id}
        self._last = -1
        self._ended = time.perf_counter()
        auto = spec.run.config.elastic.snapshot_every == "auto"
        self._cadence = Cadence(spec.run.config.cluster.nodes) if auto else None
        self.records: deque[str] = deque(maxlen=KEPT_RECORDS)
        self._shares: dict[str, list[Piece]] = {}
        layout = spec.topology
        self._replicated = layout.tp > 1 or (self._config.optim.kind == "zero1" and layout.ep > 1)

    def rebuild(self, step: int) -> None:
        """Copies are not complete: write a snapshot of the restored state before the first step."""
        self._snapshot(step)

    def wait_copied(self) -> None:
        """Before this rank agrees to a step: the last snapshot's copy exists."""
        if self._last < 0 or not self._spec.buddy:
            return
        words, end = self._board.words, time.monotonic() + COPY_BOUND_S
        while words[COPIED] < self._last and time.monotonic() < end:
            time.sleep(_SETTLE)

    def after_step(self, step: int, *, last: bool, stop: bool, record: StepRecord | None = None) -> float:
        """See `Checkpoints`."""
        if record is not None and self._spec.rank == 0:
            self.records.append(pickle.dumps(record).hex())
        began = time.perf_counter()
        words = self._board.words
        save = self._due(step, self._config.checkpoint.every) or last or (stop and words[STOP] == STOP_DISK)
        save = save or (0 < words[SAVE] == step)
        every = self._every
        model = self._due(step, self._config.checkpoint.persist_every)
        step_s = began - self._ended
        if not (save or model or stop or (every and step % every == 0)):
            self._ended = began
            return 0.0
        self._board.enter("snapshot", step)
        if save and not self._replicated:
            self._snapshot(step, pin=True)
            self._tell({"kind": "save", "step": step, "what": "full"})
        elif stop or save or (every and step % every == 0):
            self._snapshot(step)
        if save and self._replicated:
            self._scattered(step, "full")
        if model:
            self._scattered(step, "model")
        self._ended = time.perf_counter()
        if self._cadence is not None and not self._cadence.agreed:
            self._measured(self._ended - began, step_s)
        return self._ended - began

    @property
    def _every(self) -> int:
        """Steps between snapshots."""
        return self._spec.snapshot_every if self._cadence is None else self._cadence.every

    def _measured(self, stall_s: float, step_s: float) -> None:
        """`snapshot_every: auto`: after some steps with snapshots, all ranks agree on what they can afford."""
        assert self._cadence is not None
        self._cadence.took(stall_s, step_s)
        if self._cadence.due:
            told = self._exchange("cadence", pickle.dumps(self._cadence.mine))
            self._cadence.agree([pickle.loads(other) for other in told])
            if self._spec.rank == 0:
                self._tell({"kind": "cadence", "every": self._cadence.every})

    @staticmethod
    def _due(step: int, every: int) -> bool:
        return every > 0 and step % every == 0

    def _snapshot(self, step: int, pin: bool = False) -> None:
        self.wait_copied()
        meta = {**self._meta, "step": step, "records": list(self.records)}
        self._own.write(step, self._spec.generation, self._engine.pieces(), meta, pin=pin, seal=True)
        self._last = step
        self._board.words[SNAPSHOT] = step
        self._tell({"kind": "snapshot", "step": step})

    def _scattered(self, step: int, kind: str) -> None:
        """State that several ranks hold (or weights): every rank writes its share of it, into a slot of its own."""
        items = self._engine.pieces() if kind == "full" else self._engine.weights()
        if kind not in self._shares:
            mine = pickle.dumps([piece for piece, _ in items])
            held = [pickle.loads(other) for other in self._exchange(f"pieces/{kind}", mine)]
            self._shares[kind] = scatter(held, self._node_of())[self._spec.rank]
        try:
            chosen = select(items, self._shares[kind])
            self._other.write(step, self._spec.generation, chosen, {**self._meta, "step": step, "what": kind}, pin=True)
        except StoreFailure:
            return  # the save before it is still being written: this one is left out
        self._tell({"kind": "save", "step": step, "what": kind})

    def _node_of(self) -> list[int]:
        count = self._spec.run.config.cluster.tiles_per_node
        return [rank // count for rank in range(self._spec.topology.world)]
