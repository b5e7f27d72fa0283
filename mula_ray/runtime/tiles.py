"""The tiles of a node as its agent sees them: one worker actor each, started again when one dies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from mula_ray.runtime import seam
from mula_ray.runtime.board import Board
from mula_ray.runtime.messages import RankSpec
from mula_ray.runtime.osproc import start_ticks
from mula_ray.runtime.worker import TileWorker


class Tiles:
    """Workers are owned by the agent's process, so Ray ends them with it."""

    def __init__(self, environments: Sequence[dict[str, str]], zygote: str, rank_start: str) -> None:
        """`environments`: of the rank process, one a tile."""
        count = len(environments)
        self._count, self._zygote, self._environments = count, zygote, environments
        self._preloaded = rank_start == "forkserver"
        self._workers: list[Any] = [None] * count
        self._pids: list[tuple[int, int]] = [(0, 0)] * count
        self._told: set[int] = set()
        self._agent: Any = None
        self._lock = threading.Lock()
        self.boards: list[Board] = []

    def start(self, agent: Any) -> None:
        """Create what is missing, wait until all can start a rank."""
        import ray

        with self._lock:
            self._agent = agent
            missing = [tile for tile in range(self._count) if not self._alive(tile)]
            if not missing:
                return
            here = seam.on_node(ray.get_runtime_context().get_node_id())
            for tile in missing:
                # No restarts by Ray: the agent decides. Threads: a call must be answered while another one waits.
                make = seam.actor(TileWorker, num_cpus=0, max_concurrency=4, scheduling_strategy=here, max_restarts=0)
                self._workers[tile] = make.remote(tile, agent, self._zygote, self._environments[tile], self._preloaded)
            hellos = ray.get([self._workers[tile].hello.remote() for tile in missing], timeout=120)
            if not self.boards:
                self.boards = [None] * self._count  # type: ignore[list-item]
            for tile, path, pid in hellos:
                self.boards[tile] = Board(path)
                self._pids[tile] = (pid, start_ticks(pid))
                self._told.discard(tile)
            ray.get([self._workers[tile].warm.remote() for tile in missing], timeout=120)

    def _alive(self, tile: int) -> bool:
        pid, ticks = self._pids[tile]
        return bool(pid) and start_ticks(pid) == ticks

    def lost(self) -> list[int]:
        """Tiles whose worker died since the last call."""
        gone = [t for t in range(self._count) if self._pids[t][0] and t not in self._told and not self._alive(t)]
        self._told.update(gone)
        return gone

    def run(self, specs: Sequence[RankSpec]) -> dict[int, int]:
        """Start one rank a spec; tile -> pid."""
        import ray

        if any(not self._alive(spec.tile) for spec in specs):
            self.start(self._agent)
            specs = [
                spec if spec.board == self.boards[spec.tile].path else _rebased(spec, self.boards) for spec in specs
            ]
        pids = ray.get([self._workers[spec.tile].start.remote(spec) for spec in specs], timeout=60)
        return {spec.tile: pid for spec, pid in zip(specs, pids, strict=True)}

    def fence(self, generation: int) -> tuple[int, ...]:
        """End the ranks of generations <= `generation`; pids that are not verified gone."""
        import ray

        calls = [self._workers[t].fence.remote(generation) for t in range(self._count) if self._alive(t)]
        left = []
        for call in calls:
            with contextlib.suppress(ray.exceptions.RayActorError):
                left.append(ray.get(call, timeout=30))
        return tuple(pid for pid in left if pid)

    def warm(self) -> None:
        """Have the next children ready."""
        for tile in range(self._count):
            if self._alive(tile):
                self._workers[tile].warm.remote()

    def strike(self, what: str, tile: int) -> int:
        """Rehearsals: hit the rank or the worker of a tile."""
        import ray

        if what == "kill-actor":
            os.kill(self._pids[tile][0], signal.SIGKILL)
            return self._pids[tile][0]
        number = signal.SIGKILL if what == "kill-rank" else signal.SIGSTOP
        return int(ray.get(self._workers[tile].signal.remote(int(number)), timeout=10))

    def end(self) -> None:
        """End all workers."""
        for pid, ticks in self._pids:
            if pid and start_ticks(pid) == ticks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 5
        while any(self._alive(t) for t in range(self._count)) and time.monotonic() < end:
            time.sleep(0.005)


def _rebased(spec: RankSpec, boards: Sequence[Board]) -> RankSpec:
    import dataclasses

    return dataclasses.replace(spec, board=boards[spec.tile].path)
