"""Which snapshots can be put together from what the agents hold in memory.

An agent answers `Fence` with one `Holding` for every snapshot of a seat that it has, valid by checksum: its own seats'
and those it keeps as a buddy. `usable_memory` finds the steps of which every seat is held by somebody. Holdings name
their own generation and placement, so a new driver can use them without knowing the earlier one's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mula_ray.elastic.events import MemoryCopy
from mula_ray.elastic.placement import Shape


@dataclass(frozen=True)
class Holding:
    """One seat's snapshot in a node's memory: of `generation`, after `step` steps, in a world of `dp` replicas.

    `own`: written by this node's ranks; else a buddy's copy.
    """

    generation: int
    step: int
    dp: int
    seat: int
    own: bool


def usable_memory(shape: Shape, answers: Mapping[str, Iterable[Holding]]) -> tuple[MemoryCopy, ...]:
    """Complete snapshots among the `answers` (node -> what it holds), newest first.

    The own node is preferred as holder, a second one is named as well. Parts of different generations are never mixed.
    O(holdings).
    """
    owners: dict[tuple[int, int, int], dict[int, str]] = {}
    copies: dict[tuple[int, int, int], dict[int, str]] = {}
    for node, holdings in answers.items():
        for held in holdings:
            kind = owners if held.own else copies
            kind.setdefault((held.step, held.generation, held.dp), {})[held.seat] = node
    found = []
    for key in sorted(owners.keys() | copies.keys(), reverse=True):
        step, generation, dp = key
        own, copy = owners.get(key, {}), copies.get(key, {})
        holders = tuple(own.get(seat) or copy.get(seat, "") for seat in range(shape.seats(dp)))
        if all(holders):
            second = tuple(copy.get(seat, "") if seat in own else "" for seat in range(len(holders)))
            found.append(MemoryCopy(generation, step, dp, holders, second))
    return tuple(found)
