"""A cluster of fake agents in this process, for the real driver loop (`runtime/conductor.py`): no Ray, no ranks.

One thread with a heap of timed answers plays all agents. Ranks train at a steady pace; a fake tells what a real agent
would.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.config.run import ClusterConfig, ParallelConfig, RunConfig, TrainConfig
from mula_ray.elastic import commands as cmd
from mula_ray.elastic import events as ev
from mula_ray.elastic.hang import Pulse
from mula_ray.elastic.memory import Holding
from mula_ray.elastic.state import State, policy_config
from mula_ray.runtime.conductor import Conductor
from mula_ray.runtime.links import AgentDied
from mula_ray.runtime.messages import FenceAnswer, News, Report, RunFacts

FENCE_S, START_S = 0.02, 0.2


class Timer:
    """Calls things later, on one thread."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._condition = threading.Condition()
        self._count = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        with self._condition:
            self._count += 1
            heapq.heappush(self._heap, (time.monotonic() + seconds, self._count, call))
            if self._heap[0][1] == self._count:
                self._condition.notify()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (not self._heap or self._heap[0][0] > time.monotonic()):
                    self._condition.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
                if self._closed:
                    return
                _, _, call = heapq.heappop(self._heap)
            call()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()


@dataclass
class FakeAgent:
    """One agent: what it holds, what it will say at the next poll. Also the `Link` to itself."""

    fleet: FakeFleet
    node: str
    tiles: int
    domain: str = ""
    peer: str = ""
    spec: Any = None
    began: float = 0.0
    news: list[News] = field(default_factory=list)
    cursor: int = 0
    waiting: Any = None
    dead: bool = False
    silent: bool = False
    holdings: tuple[Holding, ...] = ()
    stop: int = 0

    def call(self, method: str, *args: Any, then: Any = None) -> None:
        """A call of the driver: answered later by the timer's thread."""
        if self.silent:
            return
        if self.dead:
            if then is not None:
                self.fleet.timer.after(0.002, lambda: then(None, AgentDied(self.node)))
            return
        getattr(self, f"on_{method}", lambda *_: None)(*args, then)

    def kill(self) -> None:
        self.dead = True

    # -- the agent's methods

    def on_poll(self, cursor: int, wait: float, then: Any) -> None:
        del cursor
        token = object()
        self.waiting = (token, then)
        self.fleet.timer.after(0.0 if self.news else wait, lambda: self.answer_poll(token))

    def answer_poll(self, token: Any = None) -> None:
        if self.waiting is None or (token is not None and self.waiting[0] is not token):
            return
        (_, then), self.waiting = self.waiting, None
        if self.silent:
            return
        if self.dead:
            then(None, AgentDied(self.node))
            return
        news, self.news = tuple(self.news), []
        self.cursor += len(news)
        then(Report(self.node, self.cursor, news, self.pulse()), None)

    def tell(self, items: Iterable[News]) -> None:
        self.news += items
        self.answer_poll()

    def pulse(self) -> Pulse | None:
        if self.spec is None or self.fleet.generation != self.spec.generation:
            return None
        step = self.fleet.step()
        marks = step * 4 * len(self.spec.ranks)
        activity: Any = "start" if step <= self.spec.restore.step else "step"
        return Pulse(self.node, self.spec.generation, marks, step, activity, snapshot=step)

    def on_fence(self, generation: int, then: Any) -> None:
        self.fleet.fence_called(generation)
        if self.spec is not None and self.spec.generation <= generation:
            step = self.fleet.frozen_step()
            mine = Holding(self.spec.generation, step, self.fleet.dp, self.spec.seat, own=True)
            ward = (self.spec.seat - 1) % self.fleet.seats
            copy = Holding(
                self.spec.generation, step, self.fleet.dp, self.fleet.ward_of.get(self.node, ward), own=False
            )
            self.holdings, self.spec = (mine, copy), None
        if then is not None:
            answer = FenceAnswer(self.node, generation, self.holdings, ("127.0.0.1", 1))
            self.fleet.timer.after(FENCE_S, lambda: then(answer, None))

    def on_start(self, spec: Any, then: Any) -> None:
        self.spec = spec
        self.fleet.timer.after(0.001, lambda: then(0.0, None))
        number = spec.generation
        body: dict[str, float] = {}
        news = [News("ready", number, {"rank": r, "phases": body}) for r in spec.ranks]

        def ready() -> None:
            if self.spec is spec:
                self.tell(news)

        self.fleet.timer.after(START_S, ready)

    def on_ask_stop(self, generation: int, mode: int, then: Any) -> None:
        del mode, then
        step = self.fleet.frozen_step(margin=1)
        ended = [News("ended", generation, {"rank": r, "step": step, "asked": True}) for r in self.spec.ranks]
        self.fleet.timer.after(0.1, lambda: self.tell(ended))

    # -- faults

    def rank_dies(self, tile: int = 0) -> None:
        body = {"rank": self.spec.ranks[tile], "code": -9}
        self.tell([News("exit", self.spec.generation, body)])

    def dies(self) -> None:
        self.dead, self.holdings = True, ()
        self.answer_poll()


class FakeFleet:
    """All fake agents, the pace of training, and the driver that leads them; also the driver's `Watcher`."""

    def __init__(self, nodes: int, spares: int, tiles: int, ep: int, pp: int, step_s: float = 0.5) -> None:
        self.timer, self.step_s = Timer(), step_s
        moe = MoEConfig(experts=ep, top_k=1, expert_width=64)
        model = ModelConfig(layers=pp, hidden=64, heads=2, vocab_size=256, moe=moe)
        dp = nodes * tiles // (ep * pp)
        config = RunConfig(
            model=model,
            train=TrainConfig(steps=10**6, global_batch=dp * ep),
            parallel=ParallelConfig(dp=dp, ep=ep, pp=pp),
            cluster=ClusterConfig(nodes=nodes, spares=spares, tiles_per_node=tiles),
        )
        facts = RunFacts("fake", "/nowhere", config, cast(Any, None))
        rules = policy_config(config)
        self.generation, self.dp, self.seats = -1, rules.dp, rules.shape.seats(rules.dp)
        self.base, self.since, self.frozen = 0, 0.0, 0
        self.ward_of: dict[str, int] = {}
        self.fences: list[float] = []
        self.decisions: list[tuple[float, str, str]] = []
        self.running = threading.Event()
        self.lost: list[str] = []
        self.conductor = Conductor(facts, rules, ev.DriverStarted(), self, None, lambda n, _s: self.lost.append(n))
        self.agents = {f"n{i}": FakeAgent(self, f"n{i}", tiles, f"rack{i // 16}") for i in range(nodes + spares)}
        self.thread = threading.Thread(target=self._drive, daemon=True)
        self.result: tuple[int, str] | None = None

    def _drive(self) -> None:
        self.result = self.conductor.run()

    def processor_s(self) -> float:
        """Processor time that the driver's thread has used."""
        assert self.thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))

    def start(self) -> None:
        self.thread.start()
        for agent in self.agents.values():
            self.conductor.post("joined", agent)
        self.conductor.post("roster")

    def close(self) -> None:
        """A second Ctrl-C ends the driver at once."""
        self.conductor.post("event", ev.StopRequested("test", hard=True))
        self.thread.join(30)
        self.timer.close()
        assert not self.thread.is_alive()

    # -- the pace

    def step(self) -> int:
        return self.base + int((time.monotonic() - self.since) / self.step_s) if self.since else self.base

    def frozen_step(self, margin: int = 0) -> int:
        """The step at which everybody stopped, the same for all."""
        if self.since:
            self.frozen, self.since = self.step() + margin, 0.0
        return self.frozen

    def fence_called(self, generation: int) -> None:
        if generation == self.generation:
            self.fences.append(time.monotonic())

    # -- Watcher

    def decided(self, state: State, event: ev.Event, commands: tuple[cmd.Command, ...], reason: str) -> None:
        self.decisions.append((time.monotonic(), type(event).__name__, reason))
        for command in commands:
            if isinstance(command, cmd.StartGeneration):
                self.dp, self.seats = command.placement.dp, len(command.placement.seats)
                self.ward_of = {b: i for i, b in enumerate(command.buddies) if b is not None}
                self.base, self.since, self.fences = command.restore.step, 0.0, []
                self.generation = command.generation
        if isinstance(event, ev.GenerationReady):
            self.since = time.monotonic()
            self.running.set()
        elif any(isinstance(c, cmd.Fence) for c in commands):
            self.running.clear()
        del state

    def news(self, kind: str, generation: int, body: dict[str, Any]) -> None:
        pass

    def saved(self, saved: Any) -> None:
        pass

    def generation_begins(self, generation: int) -> None:
        pass

    def fault(self, fault: Any) -> None:
        pass
