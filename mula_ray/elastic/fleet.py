"""What the simulator is given and what it tells: a fleet with its costs and faults, and the outcome. Pure.

All times in seconds. Costs are measured ones (`events.jsonl` of a run, `bench recovery`) or given.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mula_ray.elastic.state import PolicyConfig

FaultKind = Literal["rank", "node", "agent", "rack", "hang", "numeric", "damaged", "straggler", "storage"]

# Shares of the causes of interruptions of a large run (Llama 3, table 5: about 60 % of them hardware of one node,
# 13 % software, the rest hangs, network, storage), in our kinds.
_MIX: dict[FaultKind, float] = {
    "rank": 0.40,
    "node": 0.25,
    "agent": 0.05,
    "rack": 0.01,
    "hang": 0.15,
    "numeric": 0.06,
    "damaged": 0.02,
    "straggler": 0.04,
    "storage": 0.02,
}


@dataclass(frozen=True)
class Costs:
    """What things take. `step_s`: a step at the wanted dp; with fewer replicas it takes dp / dp' times as long.

    detect_s: from a fault to its event, by kind. fence_s: ending all ranks. start_s: fresh ranks and groups. restore:
    from memory, from disk. snapshot_s, checkpoint_s: what training loses a save; publish_s, write_s: until it counts.
    """

    step_s: float = 10.0
    detect_s: Mapping[FaultKind, float] = field(
        default_factory=lambda: {"rank": 0.05, "node": 1.5, "agent": 1.5, "rack": 1.5, "hang": 2.0, "straggler": 600.0}
    )
    fence_s: float = 0.2
    start_s: float = 2.0
    memory_s: float = 1.0
    disk_s: float = 60.0
    snapshot_s: float = 0.1
    publish_s: float = 2.0
    checkpoint_s: float = 2.0
    write_s: float = 60.0
    agent_s: float = 10.0


@dataclass(frozen=True)
class Fleet:
    """A run on `working` + `spares` nodes in racks of `rack` nodes for `duration_s`.

    faults: how many are expected in that time, `mix` their shares. A lost node comes back after `repair_s` on average
    (exponential), a cordoned one too, mended. snapshot_every, checkpoint_every: steps.
    """

    rules: PolicyConfig
    working: int
    spares: int = 0
    rack: int = 64
    duration_s: float = 30 * 86400.0
    faults: float = 100.0
    mix: Mapping[FaultKind, float] = field(default_factory=lambda: dict(_MIX))
    repair_s: float = 4 * 3600.0
    costs: Costs = field(default_factory=Costs)
    snapshot_every: int = 1
    checkpoint_every: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Fault:
    """One fault: `where` picks its victim (a share of whatever is there), `lasting`: it stays with the hardware."""

    at: float
    kind: FaultKind
    where: float
    lasting: bool


def faults(fleet: Fleet) -> Iterator[Fault]:
    """Faults in order of time: Poisson, replayable from the seed alone, whatever the policy makes of them."""
    rng = random.Random(fleet.seed)
    kinds = list(fleet.mix)
    weights = [fleet.mix[kind] for kind in kinds]
    at = 0.0
    while fleet.faults > 0:
        at += rng.expovariate(fleet.faults / fleet.duration_s)
        if at >= fleet.duration_s:
            return
        yield Fault(at, rng.choices(kinds, weights)[0], rng.random(), rng.random() < 0.5)


@dataclass
class Outcome:
    """What became of the run. `lost_s`: seconds by cause; with `useful_s` they add up to `wall_s`."""

    wall_s: float = 0.0
    steps: int = 0
    useful_s: float = 0.0
    lost_s: dict[str, float] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    generations: int = 0
    replaced: int = 0
    spares_used: int = 0
    cordoned: int = 0
    lowest_dp: int = 0
    redone_steps: int = 0
    exit_code: int | None = None
    reason: str = ""
    decisions: int = 0

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps that count, at full speed."""
        return self.useful_s / self.wall_s if self.wall_s else 0.0

    def lose(self, cause: str, seconds: float) -> None:
        """Book lost time."""
        self.lost_s[cause] = self.lost_s.get(cause, 0.0) + seconds

    def lines(self) -> Iterator[str]:
        """For people."""
        days = self.wall_s / 86400
        yield (
            f"{days:.1f} days, {sum(self.faults.values())} faults, {self.generations} generations: "
            f"{self.steps} steps, goodput {self.goodput:.1%}"
        )
        yield (
            f"spares: {self.replaced} seats taken over, at most {self.spares_used} spares in use at once, "
            f"{self.cordoned} nodes cordoned, lowest dp {self.lowest_dp}"
        )
        for cause, seconds in sorted(self.lost_s.items(), key=lambda item: -item[1]):
            yield f"  {seconds / self.wall_s:7.3%}  {cause}" if self.wall_s else f"  {cause}"
        if self.exit_code is not None:
            yield f"ended with exit {self.exit_code}: {self.reason}"
