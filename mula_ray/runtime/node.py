"""The agent of a node: owns its tiles' workers, the node's in-memory snapshots, and the word to the driver.

One detached Ray actor a node and run. The driver fences, starts, polls (over a line of its own, see `lines`; Ray only
creates the agent and says when it is gone); ranks report to the hub. All that the driver gets to know travels in the
answers to its polls, so that its traffic is O(nodes). When no driver polls, the agent ends its ranks within a bound but
keeps their snapshots for `elastic.orphan_s`, then it ends itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from mula_ray.checkpoint.failures import StoreFailure
from mula_ray.checkpoint.writer import WriterProcess
from mula_ray.config.environment import tile_setup
from mula_ray.data.batches import Share
from mula_ray.data.ring import RingSpec
from mula_ray.elastic.placement import Shape
from mula_ray.runtime import wire
from mula_ray.runtime.board import COPIED, SAVE, STOP
from mula_ray.runtime.forks import Child, Forks, ZygoteProcess
from mula_ray.runtime.hub import Hub
from mula_ray.runtime.inject import KINDS, Fault
from mula_ray.runtime.jobs import StoreJob
from mula_ray.runtime.lines import answer
from mula_ray.runtime.memory import NodeMemory
from mula_ray.runtime.messages import FenceAnswer, News, NodeFacts, RankSpec, Report, RunFacts, SeatSpec
from mula_ray.runtime.osproc import descendants, die_with_parent, stand_back
from mula_ray.runtime.parts import Part, write_part_of
from mula_ray.runtime.peers import PeerLink, PeerServer
from mula_ray.runtime.pulse import PulseTaker
from mula_ray.runtime.stream import NodeStream
from mula_ray.runtime.tiles import Tiles
from mula_ray.runtime.zygote import Job

CALLS = frozenset({"fence", "start", "poll", "ask_stop", "ask_save", "inject", "strike", "write", "unpin", "end"})
_UNATTENDED_S = 1.0


class NodeAgent:
    """See the module. Over Ray only `hello` and `serve` are called, over the line `CALLS`."""

    def __init__(self, run: RunFacts, node: str, host: str, secret: bytes, environment: dict[str, str]) -> None:
        self._run, self._node, self._host, self._secret = run, node, host, secret
        cluster, layout = run.config.cluster, run.config.parallel
        with contextlib.suppress(OSError):
            die_with_parent(os.getppid())
        self._began = time.monotonic()
        self._shape = Shape(ep=layout.ep, tp=layout.tp, pp=layout.pp, tiles_per_node=cluster.tiles_per_node)
        self._environment = {**os.environ, **environment}
        self._zygote = self._start_zygote()
        self._memory = NodeMemory(cluster.tiles_per_node, self._shape)
        self._hub = Hub(self._on_message)
        self._peers = PeerServer(host, secret, self._memory.take, self._memory.give, partial(answer, self, CALLS))
        self._writer = WriterProcess(f"node {node}")
        self._pulses = PulseTaker(node)
        self._news: list[News] = []
        self._cursor, self._urgent, self._stepped = 0, False, -1
        self._condition = threading.Condition()
        self._lock = threading.RLock()
        self._fenced = -1
        self._seat: SeatSpec | None = None
        self._links: dict[int, PeerLink | None] = {}
        self._saved: dict[tuple[int, str], set[int]] = {}
        self._safe: dict[int, int] = {}
        self._forks: Forks | None = None
        self._store: tuple[Child, tuple[str, int]] | None = None
        self._stores: list[Child] = []
        self._polled, self._greeting = time.monotonic(), True
        self._stream: NodeStream | None = None
        self._interface = environment.get("GLOO_SOCKET_IFNAME")
        setups = [tile_setup(cluster, tile) for tile in range(cluster.tiles_per_node)]
        self._cores = [cores for _, cores in setups]
        self._tiles = Tiles(
            [environment | own for own, _ in setups], self._zygote.address, cluster.rank_start, self.rank_exited
        )
        stand_back(os.getpid())  # after the zygote, whose niceness the ranks inherit
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    # ---- start ----------------------------------------------------------------------------------------------------

    def _start_zygote(self) -> ZygoteProcess:
        """On a thread that stays: the kernel's death signal follows the starting thread."""
        done: list[ZygoteProcess] = []
        ready = threading.Event()
        log = str(Path(self._run.run_dir) / "logs" / f"ranks-{self._node}.log")

        def start() -> None:
            done.append(ZygoteProcess.start(self._environment, log))
            ready.set()
            threading.Event().wait()

        threading.Thread(target=start, name="zygote", daemon=True).start()
        ready.wait()
        return done[0]

    def hello(self) -> NodeFacts:
        """Ready to start ranks: workers are there, the zygote has imported."""
        self._greeting = True  # this takes seconds, in which nobody polls yet
        try:
            self._tiles.start()
            with self._lock:
                if self._store is None:
                    self._new_store()
        finally:
            self._polled, self._greeting = time.monotonic(), False
        count = self._run.config.cluster.tiles_per_node
        ready = time.monotonic() - self._began
        return NodeFacts(self._node, self._host, count, self._peers.address, os.getpid(), ready)

    def serve(self) -> None:
        """Keeps Ray's main thread for as long as a driver polls; then another driver's `hello` can come in."""
        while time.monotonic() - self._polled < _UNATTENDED_S:
            time.sleep(_UNATTENDED_S / 4)

    def _new_store(self) -> None:
        if self._forks is None or self._forks.lost:
            self._forks = Forks(self._zygote.address, lambda _: None)
        child = self._forks.fork()
        child.run(Job("mula_ray.runtime.jobs:store", StoreJob(self._host)))
        (_, host, port), _ = wire.receive(child.channel)
        self._store = (child, (host, port))

    # ---- the driver's words ----------------------------------------------------------------------------------------

    def fence(self, generation: int) -> FenceAnswer:
        """End all ranks of generations <= `generation`, verified; what memory holds; a fresh store's address."""
        with self._lock:
            self._fenced = max(self._fenced, generation)
            seat, self._seat = self._seat, None
            self._pulses.end()
            left = self._tiles.fence(generation)
            for child in self._stores:
                child.kill()
            self._stores = []
            for link in self._links.values():
                if link is not None:
                    link.close()
            self._links, self._saved, self._safe = {}, {}, {}
            if seat is not None:
                self._memory.unpin_all()
            if self._store is None or self._store[0].gone.is_set():
                self._new_store()
            assert self._store is not None
            return FenceAnswer(self._node, generation, self._memory.holdings(), self._store[1], left)

    def start(self, seat: SeatSpec) -> float:
        """Start the ranks of a seat; seconds it took. A stale generation is refused with -1."""
        began = time.monotonic()
        with self._lock:
            if seat.generation <= self._fenced:
                return -1.0
            self._seat = seat
            if self._store is not None and seat.store == self._store[1]:
                self._stores.append(self._store[0])
                self._store = None
            sources = self._sources(seat)
            if sources is None:
                return -1.0
            ring = self._begin_stream(seat)
            specs = [self._rank_spec(seat, tile, rank, sources, ring) for tile, rank in enumerate(seat.ranks)]
            pids = self._tiles.run(specs)
            boards = self._tiles.boards
            self._pulses.begin(
                seat.generation, seat.restore.step, {s.rank: (boards[s.tile], pids[s.tile]) for s in specs}
            )
        threading.Thread(target=self._prepare_next, args=(seat.generation,), daemon=True).start()
        return time.monotonic() - began

    def _sources(self, seat: SeatSpec) -> tuple[Any, ...] | None:
        restore = seat.restore
        if not seat.sources_of:
            return ()
        holders = {rank: seat.holders[seat.seats_of_snapshot[rank]][0] for rank in seat.sources_of}
        try:
            return self._memory.sources(seat.sources_of, restore.generation, restore.step, holders, self._secret)
        except StoreFailure as failure:
            self._tell("restore-failed", seat.generation, why=str(failure), peer=failure.who)
            return None

    def _begin_stream(self, seat: SeatSpec) -> RingSpec | None:
        """The node's data stream for this generation's ranks."""
        if self._stream is None:
            self._stream = NodeStream(seat.run.data, seat.run.config)
        shares = [Share.of(seat.run.config, seat.topology, rank) for rank in seat.ranks]
        return self._stream.begin(seat.generation, seat.restore.step, seat.run.config.train.steps, shares)

    def _rank_spec(
        self, seat: SeatSpec, tile: int, rank: int, sources: tuple[Any, ...], ring: RingSpec | None
    ) -> RankSpec:
        same = [source for source in sources if source.rank == rank]
        whole = seat.restore.dp != seat.topology.dp
        return RankSpec(
            run=seat.run,
            generation=seat.generation,
            topology=seat.topology,
            rank=rank,
            tile=tile,
            node=self._node,
            store=seat.store,
            restore=seat.restore,
            sources=tuple(sources) if whole else tuple(same),
            skips=seat.skips,
            rebuild=seat.rebuild,
            board=self._tiles.boards[tile].path,
            memory=tuple(self._memory.own[tile].memory.paths),
            model_memory=tuple(self._memory.models[tile].memory.paths),
            hub=self._hub.address,
            snapshot_every=seat.snapshot_every,
            buddy=seat.buddy is not None,
            interface=self._interface,
            cores=self._cores[tile],
            ring=ring,
            cell=tile,
        )

    def _prepare_next(self, generation: int) -> None:
        """After a start: have the next store and the next children ready, off the critical path."""
        time.sleep(0.5)
        with self._lock:
            if self._fenced >= generation:
                return
            with contextlib.suppress(RuntimeError, EOFError, OSError):
                if self._store is None:
                    self._new_store()
        self._tiles.warm()

    def poll(self, cursor: int, wait_s: float) -> Report:
        """News after `cursor`, as soon as there is one, at the latest after `wait_s`."""
        self._polled = time.monotonic()
        end = self._polled + wait_s
        with self._condition:
            del self._news[: max(0, min(len(self._news), cursor - (self._cursor - len(self._news))))]
            while not self._urgent and time.monotonic() < end:
                self._condition.wait(end - time.monotonic())
            self._urgent = False
            news, at = tuple(self._news), self._cursor
        pulse = self._pulses.take(self._all_safe())
        return Report(self._node, at, news, pulse)

    def _all_safe(self) -> int:
        """Last step whose snapshots of all ranks of this seat are here and with the buddy; -1 none."""
        seat, safe = self._seat, dict(self._safe)
        return min(safe.values()) if seat is not None and len(safe) == len(seat.ranks) else -1

    def ask_stop(self, generation: int, mode: int) -> None:
        """The ranks shall end at the next step boundary."""
        self._flag(generation, STOP, mode)

    def ask_save(self, generation: int, step: int) -> None:
        """The ranks shall save after `step`."""
        self._flag(generation, SAVE, step)

    def inject(self, tile: int, fault: Fault) -> None:
        """Rehearse a fault inside the rank of a tile, at its next step; in a recovery, at the next rank's first."""
        self._tiles.inject(tile, KINDS.index(fault.kind) + 1, lambda: self._fenced)

    def strike(self, what: str, tile: int) -> int:
        """Rehearse a fault from outside: kill-rank, freeze-rank, kill-actor, kill-agent; the pid that was hit."""
        if what == "kill-agent":
            os.kill(os.getpid(), signal.SIGKILL)
        if what in ("kill-node", "cut-node"):
            raylet = os.getppid()
            number = signal.SIGKILL if what == "kill-node" else signal.SIGSTOP
            below = [pid for pid in descendants(raylet) if pid != os.getpid()]
            for pid in (raylet, *below, os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        return self._tiles.strike(what, tile)

    def _flag(self, generation: int, word: int, value: int) -> None:
        seat = self._seat
        if seat is not None and seat.generation == generation:
            for tile in range(len(seat.ranks)):
                self._tiles.boards[tile].words[word] = value

    def write(self, folder: str, step: int, generation: int, kind: str, fault: str = "") -> Part:
        """Write this seat's part of a checkpoint from memory, then re-read it; see `parts.write_part_of`."""
        what = (step, generation, kind)
        return write_part_of(self._seat, self._memory, self._writer, Path(folder), what, fault, self._node)

    def unpin(self, step: int, kind: str) -> None:
        """A save has ended, one way or the other."""
        for tile in range(len(self._memory.own)):
            found = self._memory.saved(tile, step, kind)
            if found is not None:
                found[0].buffer.unpin(found[1])

    def end(self) -> None:
        """End ranks, workers, zygote; the actor itself is then killed by the driver."""
        self.fence(1 << 40)
        self._tiles.end()
        self._writer.close()
        if self._stream is not None:
            self._stream.close()
        self._zygote.stop()
        self._peers.close()

    # ---- the ranks' words ------------------------------------------------------------------------------------------

    def rank_exited(self, tile: int, generation: int, rank: int, code: int, at: float) -> None:
        """A worker: its rank ended without being asked to."""
        self._hub.drain(generation, rank)
        self._tell("exit", generation, tile=tile, rank=rank, code=code, age_s=time.monotonic() - at)

    def worker_lost(self, tile: int) -> None:
        """A tile's actor is gone."""
        seat = self._seat
        if seat is not None:
            self._tell("worker-lost", seat.generation, tile=tile)

    def _on_message(self, generation: int, rank: int, tile: int, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if generation <= self._fenced and kind not in ("step", "eval"):  # what was committed stays a fact
            return
        if kind == "snapshot":
            self._copy_to_buddy(generation, rank, tile, message["step"])
        elif kind == "save":
            self._save_ready(generation, rank, message)
        else:
            self._tell(kind, generation, rank=rank, **message)

    def _save_ready(self, generation: int, rank: int, message: dict[str, Any]) -> None:
        seat, key = self._seat, (message["step"], message["what"])
        if seat is None:
            return
        with self._lock:
            ready = self._saved.setdefault(key, set())
            ready.add(rank)
            complete = ready >= set(seat.ranks)
            if complete:
                del self._saved[key]
        if complete:
            self._tell("save-ready", generation, seat=seat.seat, **message)

    def _copy_to_buddy(self, generation: int, rank: int, tile: int, step: int) -> None:
        """On the rank's own thread: its snapshot to the buddy, then the word that releases the rank's next commit."""
        seat, board = self._seat, self._tiles.boards[tile]
        if seat is None:
            return
        why = ""
        if seat.buddy is not None and self._links.get(rank, seat) is not None:
            shelf = self._memory.own[tile]
            info = shelf.buffer.find(step, generation)
            try:
                if self._links.get(rank) is None:
                    self._links[rank] = PeerLink(seat.buddy, self._secret)
                link = self._links[rank]
                assert link is not None
                why = "it was overwritten" if info is None else link.copy(rank, shelf.buffer, info)
            except (OSError, EOFError) as error:
                why = f"{type(error).__name__}: {error}"
                self._links[rank] = None
        board.words[COPIED] = step
        if why:
            if generation > self._fenced:
                self._tell("copy-failed", generation, rank=rank, step=step, why=why)
            return
        self._safe[rank] = step

    def _tell(self, kind: str, generation: int, **body: Any) -> None:
        with self._condition:
            self._news.append(News(kind, generation, body))
            self._cursor += 1
            if kind not in ("step", "eval") or generation != self._stepped:
                self._stepped = generation if kind == "step" else self._stepped
                self._urgent = True
                self._condition.notify_all()

    # ---- no driver -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """No driver polls: ranks end soon, everything ends after `orphan_s`."""
        orphan_s = self._run.config.elastic.orphan_s
        ranks_s = min(10.0, orphan_s / 2)
        while True:
            time.sleep(0.25)
            silent = time.monotonic() - self._polled if not self._greeting else 0.0
            if silent > ranks_s and self._seat is not None:
                self.fence(self._seat.generation)
            if silent > orphan_s:
                with contextlib.suppress(Exception):
                    self.end()
                os._exit(0)
            lost = self._tiles.lost()
            for tile in lost:
                self.worker_lost(tile)
