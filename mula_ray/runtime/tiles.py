"""The tiles of a node as its agent sees them: one worker actor each, started again when one dies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mula_ray.runtime import seam, wire
from mula_ray.runtime.board import GENERATION, INJECT, Board
from mula_ray.runtime.lines import Line
from mula_ray.runtime.messages import RankSpec
from mula_ray.runtime.osproc import start_ticks
from mula_ray.runtime.worker import TileWorker

_STRIKE_S = 20.0


class Tiles:
    """Workers are owned by the agent's process, so Ray ends them with it. Ray creates them and holds their main
    thread; what is asked of them goes over `lines`."""

    def __init__(
        self,
        environments: Sequence[dict[str, str]],
        zygote: str,
        rank_start: str,
        exited: Callable[[int, int, int, int, float], None],
    ) -> None:
        """`environments`: of the rank process, one a tile; `exited(tile, generation, rank, code, at)`: a rank ended
        without being asked to."""
        count = len(environments)
        self._count, self._zygote, self._environments, self._exited = count, zygote, environments, exited
        self._preloaded = rank_start == "forkserver"
        self._workers: list[Any] = [None] * count
        self._serving: list[Any] = [None] * count
        self._lines: list[Line] = [Line(_nobody)] * count
        self._pids: list[tuple[int, int]] = [(0, 0)] * count
        self._told: set[int] = set()
        self._lock = threading.Lock()
        self.boards: list[Board] = []

    def start(self) -> None:
        """Create what is missing, wait until all can start a rank."""
        import ray

        with self._lock:
            missing = [tile for tile in range(self._count) if not self._alive(tile)]
            if not missing:
                return
            here = seam.on_node(ray.get_runtime_context().get_node_id())
            for tile in missing:  # no restarts by Ray: the agent decides
                make = seam.actor(TileWorker, num_cpus=0, scheduling_strategy=here, max_restarts=0)
                self._workers[tile] = make.remote(tile, self._zygote, self._environments[tile], self._preloaded)
            hellos = ray.get([self._workers[tile].hello.remote() for tile in missing], timeout=120)
            if not self.boards:
                self.boards = [None] * self._count  # type: ignore[list-item]
            for tile, path, pid, address in hellos:
                self.boards[tile] = Board(path)
                self._pids[tile] = (pid, start_ticks(pid))
                self._lines[tile] = Line(partial(wire.connect, address))
                self._serving[tile] = self._workers[tile].serve.remote()
                self._told.discard(tile)
                threading.Thread(target=self._listen, args=(tile, self._lines[tile]), daemon=True).start()
            self._each(missing, lambda tile: self._lines[tile].call("warm", bound_s=120.0))

    def _listen(self, tile: int, line: Line) -> None:
        """Hear of exits for as long as this worker lives."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._exited(tile, *line.call("next_exit", bound_s=None))

    def _each(self, tiles: Sequence[int], call: Callable[[int], Any]) -> list[Any]:
        """`call(tile)` for all of them at once."""
        if not tiles:
            return []
        with ThreadPoolExecutor(len(tiles)) as pool:
            return list(pool.map(call, tiles))

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
        if any(not self._alive(spec.tile) for spec in specs):
            self.start()
            specs = [
                spec if spec.board == self.boards[spec.tile].path else _rebased(spec, self.boards) for spec in specs
            ]
        wanted = {spec.tile: spec for spec in specs}
        pids = self._each(list(wanted), lambda tile: self._lines[tile].call("start", wanted[tile]))
        return dict(zip(wanted, pids, strict=True))

    def fence(self, generation: int) -> tuple[int, ...]:
        """End the ranks of generations <= `generation`; pids that are not verified gone."""

        def end(tile: int) -> int:
            try:
                return int(self._lines[tile].call("fence", generation, bound_s=30.0))
            except (OSError, EOFError):
                if self._alive(tile):
                    raise
                return 0  # its rank ends with it

        left = self._each([tile for tile in range(self._count) if self._alive(tile)], end)
        return tuple(pid for pid in left if pid)

    def warm(self) -> None:
        """Have the next children ready."""
        with contextlib.suppress(OSError, EOFError):
            self._each(
                [tile for tile in range(self._count) if self._alive(tile)], lambda t: self._lines[t].call("warm")
            )

    def strike(self, what: str, tile: int) -> int:
        """Rehearsals: hit the worker of a tile, or its rank; in a recovery, the next one as soon as it is there."""
        if what == "kill-actor":
            os.kill(self._pids[tile][0], signal.SIGKILL)
            return self._pids[tile][0]
        number = signal.SIGKILL if what == "kill-rank" else signal.SIGSTOP
        end = time.monotonic() + _STRIKE_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError, EOFError):  # the worker is just being replaced
                if pid := int(self._lines[tile].call("signal", int(number), bound_s=10.0)):
                    return pid
            time.sleep(0.005)
        return 0

    def inject(self, tile: int, code: int, fenced: Callable[[], int]) -> None:
        """Rehearsals: put a fault on the board of a tile's rank; in a recovery, of the next one. `fenced`: till now."""
        end = time.monotonic() + _STRIKE_S
        while time.monotonic() < end:
            words = self.boards[tile].words
            if words[GENERATION] > fenced():
                words[INJECT] = code
                return
            time.sleep(0.005)

    def end(self) -> None:
        """End all workers."""
        for pid, ticks in self._pids:
            if pid and start_ticks(pid) == ticks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 5
        while any(self._alive(t) for t in range(self._count)) and time.monotonic() < end:
            time.sleep(0.005)


def _nobody() -> socket.socket:
    raise ConnectionError("this tile has no worker")


def _rebased(spec: RankSpec, boards: Sequence[Board]) -> RankSpec:
    import dataclasses

    return dataclasses.replace(spec, board=boards[spec.tile].path)
