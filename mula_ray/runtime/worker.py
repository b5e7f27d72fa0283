"""The actor of a tile: its identity, and the parent (by way of the node's zygote) of a generation's rank process.

It never computes: it answers at once while its rank is stuck, kills by SIGKILL, verifies, and tells its agent of a
death that nobody asked for. However it dies itself, the zygote then ends its rank. Its agent speaks to it over a line
of its own (`lines`), answered by threads; its main thread spends its life in `serve`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time

from mula_ray.runtime.board import Board
from mula_ray.runtime.forks import Child, Forks, spawn_child
from mula_ray.runtime.lines import Listener
from mula_ray.runtime.messages import RankSpec
from mula_ray.runtime.osproc import stand_back
from mula_ray.runtime.zygote import Job

RANK_ENTRY = "mula_ray.runtime.rank:main"
WARM_UP = "mula_ray.runtime.warmup:warm_up"
CALLS = frozenset({"warm", "start", "fence", "signal", "next_exit"})
Exit = tuple[int, int, int, float]
"""generation, rank, exit code, when (monotonic)"""


class TileWorker:
    """`environment`: of the rank process; `preloaded`: ranks come from the node's zygote, else fresh interpreters."""

    def __init__(self, tile: int, zygote: str, environment: dict[str, str], preloaded: bool) -> None:
        self._tile, self._zygote = tile, zygote
        self._environment, self._preloaded = environment, preloaded
        self._forks: Forks | None = None
        self._lock = threading.RLock()
        self._rank: Child | None = None
        self._spare: Child | None = None
        self._spec: RankSpec | None = None
        self._killing = False
        self._fenced = -1
        self._exits: queue.SimpleQueue[Exit] = queue.SimpleQueue()
        self.board = Board()
        self._calls = Listener(f"tile{tile}", self, CALLS)
        if preloaded:  # else the ranks are our own children and would inherit it
            stand_back(os.getpid())

    def hello(self) -> tuple[int, str, int, str]:
        """(tile, path of the board, pid, address of its line)."""
        return self._tile, self.board.path, os.getpid(), self._calls.address

    def serve(self) -> None:
        """For as long as the process lives."""
        threading.Event().wait()

    def next_exit(self) -> Exit:
        """The next end of a rank that nobody asked for, whenever it comes."""
        return self._exits.get()

    def warm(self) -> bool:
        """Have a child ready; waits for the zygote's imports."""
        with self._lock:
            if self._spare is None or self._spare.gone.is_set():
                self._spare = self._fork()
        return True

    def _fork(self) -> Child:
        if not self._preloaded:
            return self._spawn()
        if self._forks is None or self._forks.lost:
            self._forks = Forks(self._zygote, self._on_exit)
        return self._forks.fork(WARM_UP)

    def _spawn(self) -> Child:
        """On a thread that lives as long as the child: the kernel's death signal follows the starting thread."""
        made: queue.SimpleQueue[Child | Exception] = queue.SimpleQueue()

        def life() -> None:
            try:
                child = spawn_child({**os.environ, **self._environment})
            except Exception as error:
                made.put(error)
                return
            made.put(child)
            child.gone.wait()
            self._on_exit(child)

        threading.Thread(target=life, name="spawned", daemon=True).start()
        child = made.get()
        if isinstance(child, Exception):
            raise child
        return child

    def start(self, spec: RankSpec) -> int:
        """Start the rank of `spec`; its pid. Refuses what the fence has passed (returns 0)."""
        with self._lock:
            if spec.generation <= self._fenced:
                return 0
            assert self._rank is None or self._rank.gone.is_set(), "one rank at a time"
            if self._spare is None or self._spare.gone.is_set():
                self._spare = self._fork()
            child, self._spare = self._spare, None
            self._rank, self._spec, self._killing = child, spec, False
            self.board.clear()
            child.run(Job(RANK_ENTRY, spec, self._environment))
        return child.pid

    def fence(self, generation: int, bound_s: float = 20.0) -> int:
        """End the rank of generations <= `generation`; 0 when it is verified gone, else its pid."""
        with self._lock:
            self._fenced = max(self._fenced, generation)
            child, spec = self._rank, self._spec
            if child is None or spec is None or spec.generation > generation:
                return 0
            self._killing = True
            child.kill()
        if not child.gone.wait(bound_s):
            return child.pid
        child.channel.close()
        with self._lock:
            self._rank = None
        return 0

    def signal(self, number: int) -> int:
        """Send a signal to the rank process (rehearsals); its pid, 0 without one."""
        child = self._rank
        if child is None or child.gone.is_set():
            return 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
        return child.pid

    def _on_exit(self, child: Child) -> None:
        """The operating system says that a child ended."""
        if child is not self._rank:
            return
        spec, asked = self._spec, self._killing
        if spec is not None and not asked:
            code = child.exit if child.exit is not None else 1
            self._exits.put((spec.generation, spec.rank, code, time.monotonic()))
