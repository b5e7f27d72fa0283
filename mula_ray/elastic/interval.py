"""How often to save: from measured cost and failure rate (Young 1974, Daly 2006). Pure; seconds and steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Llama 3 405B: 466 interruptions in 54 days on 16,384 GPUs, 8 a node: one in 5,700 h a node.
_NODE_MTBF_S = 5_700 * 3600.0
# A snapshot that costs no more than this share of a step is made every step.
_CHEAP = 0.05
_COLD_STEPS = 4
_MEASURED_STEPS = 16


def daly(cost_s: float, mtbf_s: float) -> float:
    """Optimal time between the starts of two saves' work, for a save that costs `cost_s`.

    Daly (2006), eq. 37: sqrt(2dM)(1 + sqrt(d/2M)/3 + (d/2M)/9) - d for d < 2M, else M. Its first term is Young's.
    """
    if cost_s <= 0:
        return 0.0
    ratio = cost_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def overhead(interval_s: float, cost_s: float, mtbf_s: float, recovery_s: float) -> float:
    """Share of time lost, first order: saves, half an interval made again a failure, and the recovery itself."""
    return cost_s / interval_s + (interval_s / 2 + recovery_s) / mtbf_s


def save_every(cost_s: float, step_s: float, mtbf_s: float) -> int:
    """Steps between saves of cost `cost_s` (what the training loses, not what the write takes): at least 1."""
    return max(1, round(daly(cost_s, mtbf_s) / step_s)) if step_s > 0 else 1


def snapshot_every(cost_s: float, step_s: float, mtbf_s: float) -> int:
    """Steps between memory snapshots: every step while that is cheap, else as few apart as make it cheap, but never
    further apart than cost and failure rate say (Daly)."""
    if step_s <= 0 or cost_s <= _CHEAP * step_s:
        return 1
    return min(math.ceil(cost_s / (_CHEAP * step_s)), save_every(cost_s, step_s, mtbf_s))


class Cadence:
    """Steps between memory snapshots, from what they cost in this generation: every step while it is measured, then by
    the slowest rank's figures, so that all ranks come to the same number.

        cadence = Cadence(nodes)
        cadence.took(stall_s, step_s)        # after each step with a snapshot
        if cadence.due: cadence.agree(every rank's cadence.mine)
    """

    def __init__(self, nodes: int) -> None:
        self._mtbf_s = FailureRate(nodes).mtbf_s
        self._taken: list[tuple[float, float]] = []
        self.every = 1
        self.agreed = False

    def took(self, stall_s: float, step_s: float) -> None:
        """A snapshot stopped training for `stall_s` in a step of `step_s` (without it)."""
        self._taken.append((stall_s, step_s))

    @property
    def due(self) -> bool:
        """Whether enough has been measured; at the same step on every rank."""
        return not self.agreed and len(self._taken) >= _COLD_STEPS + _MEASURED_STEPS

    @property
    def mine(self) -> tuple[float, float]:
        """(stall, step) of this rank, medians of the steps after the first few, seconds."""
        stalls, steps = zip(*self._taken[_COLD_STEPS:], strict=True)
        return statistics.median(stalls), statistics.median(steps)

    def agree(self, ranks: Sequence[tuple[float, float]]) -> None:
        """Decide by the figures of all ranks."""
        self.every = snapshot_every(max(s for s, _ in ranks), max(step for _, step in ranks), self._mtbf_s)
        self.agreed = True


@dataclass(frozen=True)
class FailureRate:
    """Mean time between failures of `nodes` nodes: a prior from a published run, then what this run sees.

    The prior weighs as much as one failure.
    """

    nodes: int
    failures: int = 0
    running_s: float = 0.0

    @property
    def mtbf_s(self) -> float:
        """Seconds between failures of the whole run (gamma prior: (prior + time) / (1 + failures))."""
        return (_NODE_MTBF_S / max(1, self.nodes) + self.running_s) / (1 + self.failures)

    def ran(self, seconds: float) -> FailureRate:
        """After `seconds` more of running."""
        return replace(self, running_s=self.running_s + seconds)

    def failed(self) -> FailureRate:
        """After one more failure."""
        return replace(self, failures=self.failures + 1)
