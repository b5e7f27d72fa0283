"""No progress, and silence: deadlines learned from what the run itself takes. No number for the user to set.

Node agents send a `Pulse` five times a second, one a node whatever its number of tiles. Ranks count *marks* in memory
they share with their agent: one at every border between phases and micro-batches, by the thread that does the work.
One stuck rank stops everybody within a step, so the sign of a hang is that *no* rank of the generation makes marks any
more. How long that may last is learned from the gaps seen, by three clocks (Linux: the first two numbers of
`/proc/<pid>/task/*/schedstat`, read only when marks stand still):

- **idle**: the ranks' threads together neither ran nor were ready to run (less than a tenth of a core). Processes that
  compete for the cores with others are ready to run, hence not idle: load cannot make this gap long, so its deadline is
  short.
- **ran**: a rank that spins, or a backend that polls, is never idle, but its busiest thread uses up processor time,
  which load does not make longer either.
- **waited**: time itself, for what the two others do not see. The longest deadline, for load makes this gap long.

A rank that the operating system reports as stopped (state T) explains a gap at once.

Pure: the clock is an argument; times in seconds. Methods are O(1) a call, O(nodes) only when something stands still.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, get_args

Activity = Literal["start", "step", "save", "eval"]
Clock = Literal["idle", "ran", "waited"]

_IDLE_FLOOR_S = 0.5
_RAN_FLOOR_S = 2.0
_WAITED_FLOOR_S = 30.0
_STOPPED_S = 0.15
_COLD_GAPS = 10
_COLD_S: dict[str, float] = {"start": 120.0, "step": 60.0, "save": 600.0, "eval": 120.0}
_DECAY = 0.998
_SLOW = 2.2
_DRIVER_PAUSE_S = 0.2


@dataclass(frozen=True)
class Pulse:
    """What a node agent says about its ranks of `generation`.

    marks: progress marks of all its ranks, added up; only grows within a generation. step: lowest committed step among
    them. activity: of its least advanced rank; "start" until that rank has committed its first step of the generation.
    behind: its least advanced ranks, empty if all are equal. idle_s: for how long its ranks have been idle; ran_s: what
    the busiest of their threads has run since the last mark; both 0 while they make marks. stopped: ranks the operating
    system reports as stopped. snapshot: last step whose snapshots of all its ranks are written and acknowledged by the
    buddy; -1 none. work: (rank, seconds of its own work in this generation, collectives of the step left out as far as
    they can be) of every rank; for `straggler.py`.
    """

    node: str
    generation: int
    marks: int
    step: int
    activity: Activity = "step"
    behind: tuple[int, ...] = ()
    idle_s: float = 0.0
    stopped: tuple[int, ...] = ()
    snapshot: int = -1
    work: tuple[tuple[int, float], ...] = ()
    ran_s: float = 0.0


@dataclass(frozen=True)
class Hang:
    """Nobody makes progress. `ranks`: who is to blame, if it can be told; `detail` for the log."""

    step: int
    ranks: tuple[int, ...]
    waited_s: float
    detail: str


@dataclass
class Gaps:
    """Longest gap seen lately: a maximum that fades by half in about 350 gaps."""

    longest: float = 0.0
    count: int = 0

    def add(self, gap: float) -> None:
        """Learn from a gap that ended by itself."""
        self.count += 1
        self.longest = max(gap, self.longest * _DECAY)

    def deadline(self, floor: float, factor: float, cold: float) -> float:
        """How long the next gap may last: `factor` x the longest, at least `floor`; before enough are seen, `cold`."""
        learned = max(floor, factor * self.longest)
        return learned if self.count >= _COLD_GAPS else max(learned, cold)


class HangDetector:
    """Feed it every pulse, call `check` now and then (20 times a second); one object for the whole run.

    What it learned is kept across generations; `begin` starts a new one.
    """

    def __init__(self) -> None:
        self._gaps: dict[tuple[Clock, Activity], Gaps] = {}
        self._pulses: dict[str, Pulse] = {}
        self._generation = -1
        self._activity: Activity = "start"
        self._since = 0.0
        self._idle_seen = self._ran_seen = 0.0
        self._checked = 0.0
        self._patience = 1.0
        self._alarmed = True

    def begin(self, generation: int, now: float) -> None:
        """Ranks of `generation` are being started."""
        self._generation, self._activity = generation, "start"
        self._pulses = {}
        self._since = self._checked = now
        self._idle_seen, self._ran_seen, self._alarmed = 0.0, 0.0, False

    def end(self) -> None:
        """The generation is being ended: no more alarms until `begin`."""
        self._alarmed = True

    def pulse(self, pulse: Pulse, now: float) -> None:
        """Take one node's report."""
        if pulse.generation != self._generation:
            return
        last = self._pulses.get(pulse.node)
        self._pulses[pulse.node] = pulse
        self._idle_seen = max(self._idle_seen, min(pulse.idle_s, now - self._since))
        self._ran_seen = max(self._ran_seen, pulse.ran_s)
        if last is not None and pulse.marks == last.marks:
            return
        if last is not None or pulse.marks:
            self._learn(now - self._since)
            self._since, self._idle_seen, self._ran_seen = now, 0.0, 0.0
        self._activity = pulse.activity

    def _learn(self, gap: float) -> None:
        seen: dict[Clock, float] = {"idle": self._idle_seen, "ran": self._ran_seen, "waited": gap}
        for clock, length in seen.items():
            self._gaps.setdefault((clock, self._activity), Gaps()).add(length)
        if not self._alarmed:
            self._patience = max(1.0, self._patience * _DECAY)

    def deadlines(self) -> dict[Clock, float]:
        """What is too long now by each clock, seconds."""
        kind = self._activity
        cold = _COLD_S[kind]
        idle, ran, waited = (self._gaps.get((clock, kind), Gaps()) for clock in get_args(Clock))
        # A rank that sleeps twice as long as it works is slow, not stuck: the usual gap counts here too.
        idle_s = max(idle.deadline(_IDLE_FLOOR_S, 4.0, cold), _SLOW * waited.longest)
        ran_s, waited_s = ran.deadline(_RAN_FLOOR_S, 6.0, cold), waited.deadline(_WAITED_FLOOR_S, 6.0, cold)
        return {clock: self._patience * s for clock, s in zip(get_args(Clock), (idle_s, ran_s, waited_s), strict=True)}

    def check(self, now: float) -> Hang | None:
        """The hang, once a generation; None when there is none (yet)."""
        pause = now - self._checked
        self._checked = now
        if pause > _DRIVER_PAUSE_S:  # the driver itself did not run: pulses that came meanwhile are still to be read
            self._since += pause
        waited = now - self._since
        if self._alarmed or waited < _STOPPED_S or not self._pulses:
            return None
        stopped = tuple(r for p in self._pulses.values() for r in p.stopped)
        if stopped:
            return self._alarm(stopped, waited, "stopped by the operating system")
        limits, pulses = self.deadlines(), self._pulses.values()
        if waited < min(limits.values()):
            return None
        idle = min(min(p.idle_s for p in pulses), waited)
        if idle >= limits["idle"]:
            return self._alarm(self._behind(), waited, f"idle {idle:.2f} s, usual is {limits['idle']:.2f} s at most")
        ran = max(p.ran_s for p in pulses)
        if ran >= limits["ran"]:
            return self._alarm(self._behind(), waited, f"ran for {ran:.2f} s, usual is {limits['ran']:.2f} s at most")
        if waited >= limits["waited"]:
            return self._alarm(self._behind(), waited, f"usual is {limits['waited']:.2f} s at most")
        return None

    def _behind(self) -> tuple[int, ...]:
        """The ranks of the lowest step that are behind the others of their node."""
        step = min(p.step for p in self._pulses.values())
        ranks = tuple(r for p in self._pulses.values() if p.step == step for r in p.behind)
        return ranks if len(ranks) <= 4 else ()

    def _alarm(self, ranks: tuple[int, ...], waited: float, why: str) -> Hang:
        self._alarmed = True
        marks = sum(p.marks for p in self._pulses.values())
        if not ranks and marks == 0:
            self._patience = min(8.0, 2.0 * self._patience)  # never got going: perhaps the deadline was too short
        step = min(p.step for p in self._pulses.values()) + 1
        return Hang(step, ranks, waited, f"no mark for {waited:.2f} s ({self._activity}): {why}")


class Heartbeats:
    """Which agents have fallen silent, by what is usual: O(1) a beat and a check."""

    def __init__(self, floor_s: float = 1.5, factor: float = 8.0) -> None:
        self._last: OrderedDict[str, float] = OrderedDict()
        self._gaps = Gaps()
        self._floor, self._factor = floor_s, factor
        self._checked: float | None = None

    def watch(self, node: str, now: float) -> None:
        """Begin to expect beats of `node`."""
        self._last[node] = now
        self._last.move_to_end(node)

    def forget(self, node: str) -> None:
        """Stop expecting beats of `node`."""
        self._last.pop(node, None)

    def beat(self, node: str, now: float) -> None:
        """`node` was heard; unknown nodes are ignored."""
        last = self._last.get(node)
        if last is None:
            return
        self._gaps.add(now - last)
        self._last[node] = now
        self._last.move_to_end(node)

    @property
    def deadline(self) -> float:
        """Longest silence that is still usual, seconds."""
        return self._gaps.deadline(self._floor, self._factor, 10 * self._floor)

    def silent(self, now: float) -> list[str]:
        """Nodes silent for longer than the deadline, longest first; each is then forgotten."""
        pause = 0.0 if self._checked is None else now - self._checked
        self._checked = now
        if pause > _DRIVER_PAUSE_S:  # we were away, not they
            for node in self._last:
                self._last[node] = min(now, self._last[node] + pause)
        found: list[str] = []
        while self._last:
            node, last = next(iter(self._last.items()))
            if now - last <= self.deadline:
                break
            found.append(node)
            del self._last[node]
        return found
