"""Rehearsed faults that come from outside a rank: carried out by the agent of the node that they hit."""

from __future__ import annotations

from mula_ray.runtime.generation import Generation
from mula_ray.runtime.inject import OF_NODES, Fault


def strike(generation: Generation, fault: Fault) -> None:
    """Hit a node's seat, a tile's actor, or (when the time is now, not a step of its own) a rank."""
    if fault.kind in OF_NODES:
        link = generation.seats.get(fault.index % max(1, len(generation.seats)))
        if link is not None:
            link.call("strike", fault.kind, 0)
    elif fault.kind == "kill-actor" or fault.at == "now":
        rank = fault.index % generation.world
        link, tile = generation.locate(rank)
        if link is None:
            return
        if fault.kind in ("kill-rank", "freeze-rank", "kill-actor"):
            link.call("strike", fault.kind, tile)
        else:
            link.call("inject", generation.number, rank, fault)
