"""Expected failures, spares, checkpoint interval and goodput of a run. Pure.

Closed form here (Young 1974, Daly 2006); `simulated` is filled in where the policy's own simulator was asked.

With N nodes of mean time between failures M each, failures come every M / N; a checkpoint that costs C seconds is best
taken every sqrt(2 C M / N); the time lost is that cost, half an interval of work a failure, and the recovery itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mula_ray.config.site import SiteConfig

RECOVERY_S = 30.0  # detection, new rank processes, groups, state from memory or disk: an assumption, at scale
STALL_SHARE = 0.1  # part of a checkpoint's writing that training waits for: it is asynchronous


@dataclass(frozen=True)
class Goodput:
    """What failures cost. `interval_steps` between full checkpoints; `goodput` is useful time over all time."""

    failures_per_day: float
    spares: int
    interval_s: float
    interval_steps: int
    goodput: float

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"failures: {self.failures_per_day:.2f} a day expected; {self.spares} spare nodes; full checkpoint every "
            f"{self.interval_steps} steps ({self.interval_s / 60:.1f} min); goodput {self.goodput:.1%}"
        )


def goodput(site: SiteConfig, nodes: int, step_s: float, checkpoint_s: float) -> Goodput:
    """Closed-form expectation for `nodes` working nodes."""
    between = site.reliability.node_mtbf_hours * 3600 / nodes
    cost = max(1e-3, checkpoint_s * STALL_SHARE)
    interval = min(math.sqrt(2 * cost * between), between)
    steps = max(1, round(interval / step_s))
    interval = max(interval, step_s)
    lost = cost / interval + (interval / 2 + RECOVERY_S) / between
    mending = nodes * site.reliability.repair_hours / site.reliability.node_mtbf_hours
    return Goodput(
        failures_per_day=86400 / between,
        spares=_spares(mending),
        interval_s=interval,
        interval_steps=steps,
        goodput=max(0.0, 1 - lost) if lost < 1 else 0.0,
    )


def _spares(mean: float) -> int:
    """Smallest number that is enough 99 % of the time, when `mean` nodes are being mended (Poisson)."""
    term = total = math.exp(-mean) if mean < 700 else 0.0
    if total == 0.0:
        return math.ceil(mean + 3 * math.sqrt(mean))
    count = 0
    while total < 0.99:
        count += 1
        term *= mean / count
        total += term
    return count
