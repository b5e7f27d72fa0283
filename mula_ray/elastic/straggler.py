"""Slow ranks: a rank whose own work takes much longer than its peers', for long. Pure.

Times are *work*: seconds a step outside collectives, since inside them everybody waits for the slowest. Where a group
waits inside its work (EP), the whole group looks slow, and the node is named all the same. Agents add their ranks' work
to every pulse; `Windows` makes windows of it, O(1) a pulse and O(ranks) a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_low

from mula_ray.elastic.hang import Pulse

_WINDOW_STEPS = 20
_WINDOW_S = 5.0


@dataclass(frozen=True)
class Work:
    """A node's ranks over a window: the slowest one and its median work a step, and the median of all of them."""

    slowest: int
    slowest_s: float
    typical_s: float


@dataclass(frozen=True)
class SlowRank:
    """`rank` needs `factor` times as long as is typical."""

    rank: int
    factor: float


class StragglerDetector:
    """Names a rank that was the slowest by far in `patience` windows in a row.

    By far: more than `factor` times the typical work, and an outlier among the nodes' slowest ranks (beyond `spread`
    median absolute deviations), so that uneven layouts (pipeline stages) and a loaded machine raise no alarm.
    """

    def __init__(self, factor: float = 1.5, patience: int = 3, spread: float = 6.0) -> None:
        self._factor, self._patience, self._spread = factor, patience, spread
        self._streak: tuple[int, int] = (-1, 0)

    def begin(self) -> None:
        """A new generation: ranks may sit elsewhere."""
        self._streak = (-1, 0)

    def window(self, reports: Mapping[str, Work]) -> SlowRank | None:
        """Judge one window of all nodes; None: nobody stands out yet."""
        if not reports:
            return None
        typical = median_low([w.typical_s for w in reports.values()])
        worst = max(reports.values(), key=lambda w: w.slowest_s)
        others = [w.slowest_s for w in reports.values() if w is not worst] or [worst.typical_s]
        middle = median(others)
        scatter = median(abs(t - middle) for t in others)
        factor = worst.slowest_s / typical if typical > 0 else 1.0
        if factor < self._factor or worst.slowest_s < middle + self._spread * scatter:
            self._streak = (-1, 0)
            return None
        rank, run = self._streak
        run = run + 1 if rank == worst.slowest else 1
        self._streak = (worst.slowest, run)
        if run < self._patience:
            return None
        self._streak = (-1, 0)
        return SlowRank(worst.slowest, factor)


class Windows:
    """From pulses to windows of at least 20 steps and 5 s, judged by a `StragglerDetector`; one object for the run."""

    def __init__(self, detector: StragglerDetector | None = None) -> None:
        self._detector = detector or StragglerDetector()
        self._generation = -1
        self._last: dict[str, Pulse] = {}
        self._base: dict[str, Pulse] = {}
        self._since = 0.0

    def begin(self, generation: int, now: float) -> None:
        """Ranks of `generation` are being started."""
        self._detector.begin()
        self._generation, self._since = generation, now
        self._last, self._base = {}, {}

    def pulse(self, pulse: Pulse, now: float) -> SlowRank | None:
        """Take one node's report; the slow rank, when a window is complete and one stands out."""
        if pulse.generation != self._generation or not pulse.work or pulse.activity == "start":
            return None
        self._last[pulse.node] = pulse
        base = self._base.setdefault(pulse.node, pulse)
        if now - self._since < _WINDOW_S or pulse.step - base.step < _WINDOW_STEPS:
            return None
        reports = {node: work for node, last in self._last.items() if (work := _between(self._base[node], last))}
        if len(reports) < len(self._last):
            return None
        self._base, self._since = dict(self._last), now
        return self._detector.window(reports)


def _between(first: Pulse, last: Pulse) -> Work | None:
    """A node's work a step between two of its pulses; None when it made too few steps."""
    steps = last.step - first.step
    if steps < _WINDOW_STEPS // 2:
        return None
    before = dict(first.work)
    took = {rank: (seconds - before.get(rank, 0.0)) / steps for rank, seconds in last.work}
    slowest = max(took, key=lambda rank: took[rank])
    return Work(slowest, took[slowest], median_low(took.values()))
