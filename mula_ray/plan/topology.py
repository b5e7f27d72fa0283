"""Rank <-> coordinates, and the groups of ranks that talk to each other.

World size = dp x ep x tp x pp. The axes, slowest first, are dp, pp, ep, tp: a replica (pp x ep x tp ranks) is
contiguous, so that it fills whole nodes, and an EP group lies inside a node when ep x tp divides the node.

Dense view: a dense parameter is replicated over the `ddp` group (dp x ep ranks), each of which has its own samples.
Sparse view: an expert is replicated over the `edp` group (dp x tp ranks); TP ranks hold the same sequences, and in the
MoE layer each takes 1/tp of the tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

GroupKind = Literal["world", "ddp", "edp", "dp", "ep", "tp", "pp", "replica"]
GROUP_KINDS: tuple[GroupKind, ...] = ("world", "ddp", "edp", "dp", "ep", "tp", "pp", "replica")
_AXES = ("dp", "pp", "ep", "tp")
_VARYING: Mapping[GroupKind, tuple[str, ...]] = MappingProxyType(
    {
        "world": _AXES,
        "ddp": ("dp", "ep"),
        "edp": ("dp", "tp"),
        "dp": ("dp",),
        "ep": ("ep",),
        "tp": ("tp",),
        "pp": ("pp",),
        "replica": ("pp", "ep", "tp"),
    }
)
"""Axes along which the members of a group differ."""


@dataclass(frozen=True)
class Coords:
    """Position of a rank on the four axes."""

    dp: int
    pp: int
    ep: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the four axes. Pure: knows ranks, not processes."""

    dp: int = 1
    ep: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "ep", "tp", "pp"):
            size = getattr(self, axis)
            if size < 1:
                raise ValueError(f"parallel.{axis} is {size}; it must be at least 1")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.replica

    @property
    def replica(self) -> int:
        """Ranks of one replica (the elastic unit): pp x ep x tp."""
        return self.pp * self.ep * self.tp

    @property
    def ddp(self) -> int:
        """Ranks over which a dense parameter is replicated, each with its own samples: dp x ep."""
        return self.dp * self.ep

    @property
    def edp(self) -> int:
        """Ranks over which an expert parameter is replicated: dp x tp."""
        return self.dp * self.tp

    def coords(self, rank: int) -> Coords:
        """Coordinates of `rank`, 0 <= rank < world."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the world of {self.world}")
        rest, tp = divmod(rank, self.tp)
        rest, ep = divmod(rest, self.ep)
        dp, pp = divmod(rest, self.pp)
        return Coords(dp=dp, pp=pp, ep=ep, tp=tp)

    def rank(self, at: Coords) -> int:
        """Rank at coordinates `at`."""
        return ((at.dp * self.pp + at.pp) * self.ep + at.ep) * self.tp + at.tp

    def ddp_index(self, rank: int) -> int:
        """Index of `rank` in its ddp group, dp slowest: which samples of a step it gets."""
        at = self.coords(rank)
        return at.dp * self.ep + at.ep

    def groups(self, kind: GroupKind) -> list[tuple[int, ...]]:
        """All groups of `kind`, each a tuple of ranks in group order; every rank is in exactly one."""
        fixed = [range(1) if axis in _VARYING[kind] else range(getattr(self, axis)) for axis in _AXES]
        firsts = sorted(self.rank(Coords(*at)) for at in itertools.product(*fixed))
        return [self.group_of(kind, first) for first in firsts]

    def group_of(self, kind: GroupKind, rank: int) -> tuple[int, ...]:
        """The group of `kind` that `rank` is in, ascending."""
        at = self.coords(rank)
        places = (range(getattr(self, axis)) if axis in _VARYING[kind] else (getattr(at, axis),) for axis in _AXES)
        return tuple(self.rank(Coords(*place)) for place in itertools.product(*places))
