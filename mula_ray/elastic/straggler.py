"""Slow ranks: a rank whose own work takes much longer than its peers', for long. Pure.

Times are *work*: seconds a step outside collectives, since inside them everybody waits for the slowest. Agents report
one `Work` a node for a window of steps; O(nodes) a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_low


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
