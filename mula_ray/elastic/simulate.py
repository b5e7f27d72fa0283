"""The policy of the driver, the same `decide`, on a virtual clock: goodput, spares used, time lost by cause.

    outcome = simulate(Fleet(rules, working=1024, spares=32, faults=1e5))

A discrete-event model of driver, nodes and ranks that keeps the protocol of `events.py`. Training between two events is
computed, not stepped through. A node that comes back does so under a new name, since its memory is empty. Everything
follows from the fleet and its seed; the policy's invariants are checked all along (`AssertionError`).
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from mula_ray.elastic import commands as cmd
from mula_ray.elastic import events as ev
from mula_ray.elastic.fleet import Fault, FaultKind, Fleet, Outcome, faults
from mula_ray.elastic.placement import Placement
from mula_ray.elastic.policy import decide
from mula_ray.elastic.state import initial

_SLOW = 1.5


def simulate(fleet: Fleet, happens: Iterable[Fault] | None = None) -> Outcome:
    """Run `fleet` through its own faults, or through those that are given, in order of time."""
    return _Simulation(fleet).run(faults(fleet) if happens is None else happens)


@dataclass
class _Training:
    """A generation that makes steps: since when, from which step, how long one takes."""

    generation: int
    since: float
    base: int
    step_s: float


@dataclass(frozen=True)
class _Snapshot:
    """A snapshot in the nodes' memory: whose, of which step, and whether the buddies have it."""

    start: cmd.StartGeneration
    step: int
    published: bool
    departures: int


class _Simulation:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.costs = fleet.costs
        self.out = Outcome(lowest_dp=fleet.rules.dp)
        self.state = initial(fleet.rules)
        self.now = 0.0
        self.heap: list[tuple[float, int, ev.Event | Fault]] = []
        self.order = 0
        self.rng = random.Random(fleet.seed + 1)
        self.nodes: list[str] = []
        self.domain: dict[str, str] = {}
        self.sick: dict[str, FaultKind] = {}
        self.start: cmd.StartGeneration | None = None
        self.training: _Training | None = None
        self.high = 0
        self.at = 0
        self.cause = "start"
        self.planned = ""
        self.down_since = 0.0
        self.waiting = False
        self.memory: list[_Snapshot] = []
        self.placement: Placement | None = None
        self.left: set[str] = set()
        self.departures = 0
        self.saved = 0
        self.pending: tuple[int, float] | None = None

    # -- the loop

    def run(self, happens: Iterable[Fault]) -> Outcome:
        """Until the time is over or the policy ends the run."""
        stream = iter(happens)
        self._boot()
        self._push_fault(next(stream, None))
        while self.out.exit_code is None:
            wake = self.state.wake_at
            upcoming = self.heap[0][0] if self.heap else float("inf")
            at = min(upcoming, float("inf") if wake is None else max(wake, self.now))
            if at >= self.fleet.duration_s:
                break
            self.now = at
            if upcoming > at:
                self._send(ev.Tick())
                continue
            _, _, item = heapq.heappop(self.heap)
            if isinstance(item, Fault):
                self._push_fault(next(stream, None))
                self._strike(item)
            else:
                self._arrive(item)
        else:
            return self._close(self.now)
        return self._close(self.fleet.duration_s)

    def _close(self, end: float) -> Outcome:
        self.now = end
        if self.training is not None:
            self._halt()
        self._book_down()
        self.out.wall_s, self.out.steps = end, self.high
        self.out.useful_s = self.high * self.costs.step_s
        return self.out

    def _boot(self) -> None:
        self._send(ev.DriverStarted())
        for i in range(self.fleet.working + self.fleet.spares):
            self._join(f"n{i}", f"rack{i // self.fleet.rack}")
        self._send(ev.RosterComplete())

    def _push(self, delay: float, item: ev.Event | Fault) -> None:
        self.order += 1
        heapq.heappush(self.heap, (self.now + delay, self.order, item))

    def _push_fault(self, fault: Fault | None) -> None:
        if fault is not None:
            self.order += 1
            heapq.heappush(self.heap, (fault.at, self.order, fault))

    def _send(self, event: ev.Event) -> None:
        before = self.state.generation
        self.state, commands, reason = decide(self.state, event, self.now)
        self.out.decisions += 1
        assert reason, "every decision has a reason"
        assert self.state.generation >= before, "generations only grow"
        for command in commands:
            self._carry_out(command)

    # -- the driver's part

    def _carry_out(self, command: cmd.Command) -> None:
        costs = self.costs
        match command:
            case cmd.Fence(generation):
                if self.training is not None:
                    self._halt()
                self._book_down()
                self.waiting, self.start = False, None
                self._push(costs.fence_s, ev.Fenced(generation))
            case cmd.StartGeneration():
                self._begin(command)
            case cmd.AskStop(generation, save, why):
                self._ask_stop(generation, save, why)
            case cmd.Cordon(node):
                self.out.cordoned += 1
                self._gone(node)
            case cmd.Wait():
                self._book_down()
                self.waiting = True
            case cmd.Finish(code, reason):
                if self.training is not None:
                    self._halt()
                self.out.exit_code, self.out.reason = code, reason

    def _begin(self, start: cmd.StartGeneration) -> None:
        assert self.start is None, "one generation at a time"
        if start.placement is not self.placement:
            assert start.placement.nodes <= self.state.nodes.keys(), "cordoned and lost nodes are never placed"
        self.placement = start.placement
        self.start, self.at = start, start.restore.step
        self.out.generations += 1
        self.out.lowest_dp = min(self.out.lowest_dp, start.placement.dp)
        self.out.replaced += len(self.state.fresh) if start.generation else 0
        away = self.fleet.working + self.fleet.spares - len(self.state.nodes)
        self.out.spares_used = max(self.out.spares_used, min(away, self.fleet.spares))
        restore = {
            ev.Tier.OWN: self.costs.memory_s / 2,
            ev.Tier.MEMORY: self.costs.memory_s,
            ev.Tier.FRESH: 0.0,
        }.get(start.restore.tier, self.costs.disk_s)
        self._push(self.costs.start_s + restore, ev.GenerationReady(start.generation, start.restore.step))

    def _arrive(self, event: ev.Event) -> None:
        """An answer, or a fault that has been noticed; facts are filled in as they are now."""
        if isinstance(event, ev.Fenced):
            event = ev.Fenced(event.generation, self._copies())
        elif isinstance(event, ev.GenerationReady):
            if self.start is None or self.start.generation != event.generation:
                return
            self._train(event.step)
        elif isinstance(event, ev.GenerationEnded):
            if self.training is None or self.training.generation != event.generation:
                return
            event = ev.GenerationEnded(event.generation, self._halt(), event.asked, event.saved, event.save)
            assert self.start is not None
            self.memory = [_Snapshot(self.start, event.step, published=True, departures=self.departures)]
            self.start, self.cause = None, self.planned
        elif isinstance(event, ev.NonFinite):
            if self.training is not None and self.training.generation == event.generation:
                self._hit("numeric")
        elif isinstance(event, ev.NodeJoined):
            self._join(event.node, event.domain)
            return
        self._send(event)

    # -- training

    def _train(self, base: int) -> None:
        """The generation runs: what was lost until now is booked, the pace is set."""
        assert self.start is not None
        self._book_down()
        sick = [(n, kind) for n, kind in self.sick.items() if self._seated(n)]
        pace = self.costs.step_s * self.fleet.rules.dp / self.start.placement.dp
        slow = [n for n, kind in sick if kind == "straggler"]
        pace *= _SLOW if slow else 1.0
        pace += (
            self.costs.snapshot_s / self.fleet.snapshot_every + self.costs.checkpoint_s / self.fleet.checkpoint_every
        )
        self.training = _Training(self.start.generation, self.now, base, pace)
        if self.start.rebuild:
            self.memory = [_Snapshot(self.start, base, published=True, departures=self.departures)]
        for node, kind in sick:
            if kind == "numeric" or node == slow[0]:
                self._notice(kind, node, 0.99 * pace)

    def _halt(self) -> int:
        """Training stands still from now on: count its steps, book its time. Returns the last step."""
        run, self.training = self.training, None
        assert run is not None
        assert self.start is not None
        spent = self.now - run.since
        steps = int(spent / run.step_s + 1e-9)
        last = run.base + steps
        redone = min(steps, max(0, self.high - run.base))
        self.out.redone_steps += redone
        ideal = self.costs.step_s
        self.out.lose(f"steps made again: {self.cause}", redone * ideal)
        self.out.lose("fewer replicas, slow nodes and saves", steps * (run.step_s - ideal))
        self.out.lose("steps cut off", spent - steps * run.step_s)
        self.high, self.at = max(self.high, last), last
        self.down_since = self.now
        if steps:
            self._send(ev.StepCommitted(run.generation, last))
            self._saves(run, last)
        return last

    def _saves(self, run: _Training, last: int) -> None:
        """Snapshots and checkpoints that were made on the way to `last`."""
        every = self.fleet.snapshot_every
        step = last // every * every
        if step > run.base:
            assert self.start is not None
            known = int((self.now - self.costs.publish_s - run.since) / run.step_s) + run.base
            older = min(step, known // every * every)
            last_published = [s for s in self.memory if s.published][:1]
            if older > run.base:
                last_published = [_Snapshot(self.start, older, published=True, departures=self.departures)]
            self.memory = (
                [_Snapshot(self.start, step, published=False, departures=self.departures)] if older < step else []
            ) + last_published
            if self.state.lingering:
                self._send(ev.SnapshotPublished(run.generation, older))
        checkpoint = (max(run.base, self.saved) // self.fleet.checkpoint_every + 1) * self.fleet.checkpoint_every
        while checkpoint <= last:
            made = run.since + (checkpoint - run.base) * run.step_s
            self._written(made)
            if self.pending is None:  # one write at a time; the agents do it, so it outlives the generation
                self.pending = (checkpoint, made + self.costs.write_s)
            checkpoint += self.fleet.checkpoint_every
        self._written(self.now)

    def _written(self, now: float) -> None:
        """Commit the checkpoint being written if that is done by `now`."""
        if self.pending is None or self.pending[1] > now:
            return
        self.saved, self.pending = self.pending[0], None
        slot = "full-a" if self.state.disk and self.state.disk[0].slot == "full-b" else "full-b"
        self._send(ev.CheckpointCommitted(self.state.generation, self.saved, slot))

    def _copies(self) -> tuple[ev.MemoryCopy, ...]:
        """What the agents would answer to a fence now; buddies matter only where a node is gone."""
        found = []
        for held in self.memory:
            place = held.start.placement
            whole = held.departures == self.departures or self.left.isdisjoint(place.seats)
            second = () if whole or not held.published else held.start.buddies
            if None in second:
                second = ()
            copy = ev.MemoryCopy(held.start.generation, held.step, place.dp, place.seats, cast(tuple[str, ...], second))
            found.append(copy)
        return tuple(found)

    def _ask_stop(self, generation: int, save: Literal["memory", "disk"], why: str) -> None:
        run = self.training
        if run is None:
            return
        self.planned = "growing back" if why.startswith("growing") else "slow node"
        spent = self.now - run.since
        rest = run.step_s - spent % run.step_s
        self._push(rest + 1e-6, ev.GenerationEnded(generation, 0, asked=True, save=save))

    def _book_down(self) -> None:
        """Book the time since training stood still, or since it was booked last."""
        cause = "waiting for nodes" if self.waiting else f"recovery: {self.cause}"
        self.out.lose(cause, self.now - self.down_since)
        self.down_since = self.now

    # -- machines

    def _join(self, node: str, domain: str) -> None:
        self.nodes.append(node)
        self.domain[node] = domain
        self._send(ev.NodeJoined(node, self.fleet.rules.shape.tiles_per_node, domain))

    def _gone(self, node: str, mend: bool = True) -> None:
        """The node leaves; a mended one comes back later."""
        if node not in self.domain:
            return
        domain = self.domain.pop(node)
        self.left.add(node)
        self.departures += 1
        self.nodes.remove(node)
        self.sick.pop(node, None)
        after = self.rng.expovariate(1 / self.fleet.repair_s) if mend else self.costs.agent_s
        name, _, count = node.partition("+")
        self._push(after, ev.NodeJoined(f"{name}+{int(count or 0) + 1}", 0, domain))

    def _strike(self, fault: Fault) -> None:
        """A fault happens: training stops now if it hits a rank, the policy hears of it later."""
        self.out.faults[fault.kind] = self.out.faults.get(fault.kind, 0) + 1
        if not self.nodes:
            return
        node = self.nodes[int(fault.where * len(self.nodes))]
        if fault.kind == "storage":
            self._send(ev.StorageFailed(self.high, "injected"))
        elif fault.kind in ("node", "agent", "rack"):
            rack = self.domain[node]
            for lost in [n for n in self.nodes if self.domain[n] == rack] if fault.kind == "rack" else [node]:
                self._notice(fault.kind, lost)
        elif self._seated(node):
            if fault.lasting and fault.kind in ("numeric", "straggler"):
                self.sick[node] = fault.kind
            if fault.kind != "straggler":
                self._notice(fault.kind, node)
            elif fault.lasting and self.training is not None:
                self._train(self._halt())

    def _seated(self, node: str) -> bool:
        return self.start is not None and node in self.start.placement.nodes

    def _notice(self, kind: FaultKind, node: str, after: float = 0.0) -> None:
        """Schedule the event of a fault that hits `node` now (numbers go wrong `after` seconds from now)."""
        delay = after + self.costs.detect_s.get(kind, 0.0)
        if kind in ("node", "agent", "rack"):
            if self._seated(node):
                self._hit(kind)
            self._gone(node, mend=kind != "agent")
            self._push(delay, ev.AgentLost(node) if kind == "agent" else ev.NodeLost(node))
            return
        assert self.start is not None
        place = self.start.placement
        generation = self.start.generation
        rank = place.ranks(place.seats.index(node))[0]
        if kind == "straggler":
            self._push(delay, ev.Straggler(generation, rank, 1.5))
            return
        if after == 0.0:
            self._hit(kind)
        step = next(s for s in itertools.count(self.at + 1) if s not in self.start.skips)
        event: ev.Event
        match kind:
            case "numeric":
                event = ev.NonFinite(generation, step, (rank,))
            case "damaged":
                event = ev.StateDamaged(generation, step, (rank,))
            case "hang":
                event = ev.RankHung(generation, step, (rank,))
            case _:
                event = ev.RankDied(generation, rank, ev.Cause.SIGNAL, "signal 9")
        self._push(delay, event)

    def _hit(self, kind: FaultKind) -> None:
        """A rank of the generation is hit: from now on it makes no steps."""
        if self.training is not None:
            self._halt()
        self.cause = str(kind)
