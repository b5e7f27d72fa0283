"""What the policy tells the driver. The protocol is documented at the head of `events.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from mula_ray.elastic.events import Tier
from mula_ray.elastic.placement import Node, Placement, buddies


@dataclass(frozen=True)
class Restore:
    """What the ranks of a generation read. `holders` as in MemoryCopy; `dp` that of the snapshot, for resharding."""

    tier: Tier
    step: int
    slot: str = ""
    generation: int = -1
    dp: int = 0
    holders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fence:
    """End all ranks of generations <= `generation` on all nodes, verified; survey memory. Answer: `Fenced`."""

    generation: int


@dataclass(frozen=True)
class StartGeneration:
    """Start `placement` as `generation`. Answer: `GenerationReady`.

    `buddies[i]`: node that keeps the copy of seat i's snapshots (None: nobody); found on first use from `nodes` (all
    usable ones) and `idle` (without a seat). `skips`: steps that are counted but not trained (their window is left
    out). `rebuild`: copies in memory are not complete; the ranks write a snapshot of the restored state before their
    first step.
    """

    generation: int
    placement: Placement
    restore: Restore
    nodes: Mapping[str, Node] = field(default_factory=dict, compare=False, repr=False)
    idle: tuple[str, ...] = field(default=(), compare=False, repr=False)
    skips: tuple[int, ...] = ()
    rebuild: bool = False

    @cached_property
    def buddies(self) -> tuple[str | None, ...]:
        """One entry a seat."""
        return buddies(self.placement.seats, self.nodes, self.idle)


@dataclass(frozen=True)
class AskStop:
    """End `generation` at its next step boundary after a save to `save`. Answer: `GenerationEnded(asked=True)`."""

    generation: int
    save: Literal["memory", "disk"]
    why: str


@dataclass(frozen=True)
class RequestSave:
    """Write a full checkpoint at the next step boundary (a failed one is made up for)."""

    generation: int
    why: str


@dataclass(frozen=True)
class Cordon:
    """`node` is not used again. End its agent once a newer snapshot is published: until then it may hold the last."""

    node: str
    why: str


@dataclass(frozen=True)
class Wait:
    """Nothing can run: `missing` more whole nodes are needed; the run ends at `until` (clock of `now`) without them."""

    missing: int
    until: float


@dataclass(frozen=True)
class Finish:
    """The run is over."""

    exit_code: int
    reason: str


Command = Fence | StartGeneration | AskStop | RequestSave | Cordon | Wait | Finish
