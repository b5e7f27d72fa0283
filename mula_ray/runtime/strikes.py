"""Rehearsed faults that come from outside a rank: carried out by the agent of the node that they hit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mula_ray.runtime.generation import Generation
from mula_ray.runtime.inject import BY_RANK, OF_NODES, Fault


def strike(generation: Generation | None, fault: Fault, played: Callable[[], None]) -> None:
    """Play the fault now on a node's seat, a tile's actor or a rank of `generation`; `played()` when it has hit.

    What only a rank can play when the time is now, it is asked to, and says so itself when it does. What is neither of
    these was or is played by whoever told of it.
    """
    node, actor = fault.kind in OF_NODES, fault.kind == "kill-actor"
    asked, outside = fault.kind in BY_RANK, fault.kind in ("kill-rank", "freeze-rank")
    if not (node or actor or (fault.at == "now" and (asked or outside))):
        played()
        return
    if generation is None:
        return
    link, tile = generation.locate(fault.index % generation.world)
    if node:
        link, tile = generation.seats.get(fault.index % max(1, len(generation.seats))), 0

    def answered(pid: Any, error: BaseException | None) -> None:
        if node or (error is None and pid):
            played()

    if link is not None and asked:
        link.call("inject", tile, fault)
    elif link is not None:
        link.call("strike", fault.kind, tile, then=answered)
