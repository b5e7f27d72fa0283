"""Rehearsed faults that come from outside a rank: carried out by the agent of the node that they hit."""

from __future__ import annotations

from mula_ray.runtime.generation import Generation
from mula_ray.runtime.inject import BY_RANK, OF_NODES, Fault


def strike(generation: Generation | None, fault: Fault) -> bool:
    """Whether the fault is played now: on a node's seat, a tile's actor or a rank of `generation`, or by whoever told.

    What only a rank can play when the time is now, it is asked to, and says so when it does.
    """
    node, actor = fault.kind in OF_NODES, fault.kind == "kill-actor"
    asked, outside = fault.kind in BY_RANK, fault.kind in ("kill-rank", "freeze-rank")
    if not (node or actor or (fault.at == "now" and (asked or outside))):
        return True
    if generation is None:
        return False
    link, tile = generation.locate(fault.index % generation.world)
    if node:
        link, tile = generation.seats.get(fault.index % max(1, len(generation.seats))), 0
    if link is None:
        return False
    if asked:
        link.call("inject", tile, fault)
    else:
        link.call("strike", fault.kind, tile)
    return not asked
