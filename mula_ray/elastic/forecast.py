"""What `plan` says about failures: how many, how many spares, how often to save, what is left of the time. Pure.

Failures and repairs come from the site file, intervals from `interval.py`, goodput from the simulator: the same
policy as in a run, on a virtual clock, over `DAYS` days.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mula_ray.config.run import RunConfig
from mula_ray.config.site import SiteConfig
from mula_ray.elastic.fleet import Costs, Fleet
from mula_ray.elastic.interval import save_every, snapshot_every
from mula_ray.elastic.simulate import simulate
from mula_ray.elastic.state import policy_config
from mula_ray.plan.layout import total_params

DAYS = 10.0
STALL_SHARE = 0.1  # part of a checkpoint's writing that training waits for: the rest happens behind it
COPY_BYTES_S = 5e9  # of a tile's state into its node's memory: an assumption
ENOUGH = 0.99


@dataclass(frozen=True)
class Forecast:
    """`goodput`: share of the time that goes into steps that count. `lost`: shares of the time by cause."""

    failures_per_day: float
    spares: int
    checkpoint_every: int
    goodput: float
    lost: dict[str, float]
    lowest_dp: int
    days: float

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"failures: {self.failures_per_day:.2f} a day expected; {self.spares} spare nodes; full checkpoint every "
            f"{self.checkpoint_every} steps; goodput {self.goodput:.2%} ({self.days:.0f} simulated days, lowest dp "
            f"{self.lowest_dp})"
        )
        for cause, share in sorted(self.lost.items(), key=lambda item: -item[1])[:4]:
            yield f"  lost {share:.3%}: {cause}"


def forecast(config: RunConfig, site: SiteConfig, step_s: float, checkpoint_s: float) -> Forecast:
    """For the working nodes of `config`. `step_s`, `checkpoint_s`: seconds of a step, of writing a full checkpoint."""
    nodes = config.cluster.nodes
    between = site.reliability.node_mtbf_hours * 3600 / nodes
    stall = checkpoint_s * STALL_SHARE
    tiles = nodes * config.cluster.tiles_per_node
    copy = total_params(config.model) * 12 / tiles / COPY_BYTES_S
    every = save_every(stall, step_s, between)
    spares = enough_spares(nodes * site.reliability.repair_hours / site.reliability.node_mtbf_hours)
    fleet = Fleet(
        rules=policy_config(config),
        working=nodes,
        spares=spares,
        duration_s=DAYS * 86400,
        faults=DAYS * 86400 / between,
        repair_s=site.reliability.repair_hours * 3600,
        costs=Costs(step_s=step_s, snapshot_s=copy, checkpoint_s=stall, write_s=checkpoint_s, disk_s=30 + checkpoint_s),
        snapshot_every=snapshot_every(copy, step_s, between),
        checkpoint_every=every,
    )
    outcome = simulate(fleet)
    wall = max(outcome.wall_s, 1e-9)
    return Forecast(
        failures_per_day=86400 / between,
        spares=spares,
        checkpoint_every=every,
        goodput=outcome.goodput,
        lost={cause: seconds / wall for cause, seconds in outcome.lost_s.items()},
        lowest_dp=outcome.lowest_dp,
        days=outcome.wall_s / 86400,
    )


def enough_spares(mean: float) -> int:
    """Fewest spares that are enough 99 % of the time when `mean` nodes are being mended (Poisson)."""
    if mean > 500:
        return math.ceil(mean + 2.33 * math.sqrt(mean))
    term = total = math.exp(-mean)
    count = 0
    while total < ENOUGH:
        count += 1
        term *= mean / count
        total += term
    return count
