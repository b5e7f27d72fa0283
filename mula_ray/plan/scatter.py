"""Who writes which piece of a save: every byte once, equal bytes a node. Pure.

State may be replicated (working weights over a ddp group, moments over EP with `zero1`, norms over TP), so the plan
cuts what ranks hold at every border where the set of holders changes, gives what has one holder to it, and spreads the
rest, largest first, over the least loaded nodes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence

from mula_ray.plan.pieces import Piece

MAX_SHARD_BYTES = 64 << 20
MIN_SHARD_BYTES = 1 << 16
_Box = tuple[str, str, tuple[int, ...], tuple[int, ...]]


def scatter(
    held: Sequence[Sequence[Piece]], node_of: Sequence[int], shard_bytes: int | None = None
) -> list[list[Piece]]:
    """What each rank writes. `held[rank]`: the pieces that it has; `node_of[rank]`: the node it runs on.

    Every element that anybody holds is in exactly one of the lists, and is held by that rank. Bytes a node are equal
    within one shard as far as the replicas allow. `shard_bytes`: largest piece that is given away as one; by default
    an eighth of a node's share, between 64 KiB and 64 MiB. The same arguments give the same plan on every rank.
    """
    atoms = _atoms(held)
    if shard_bytes is None:
        total = sum(piece.nbytes for piece, _ in atoms)
        share = total // (8 * max(1, len(set(node_of))))
        shard_bytes = max(MIN_SHARD_BYTES, min(MAX_SHARD_BYTES, share))
    node_load: dict[int, int] = defaultdict(int)
    rank_load = [0] * len(held)
    taken: list[list[Piece]] = [[] for _ in held]

    def give(piece: Piece, rank: int) -> None:
        taken[rank].append(piece)
        rank_load[rank] += piece.nbytes
        node_load[node_of[rank]] += piece.nbytes

    shared = []
    for piece, holders in atoms:
        if len(holders) == 1:
            give(piece, holders[0])
        else:
            shared += [(part, holders) for part in split(piece, shard_bytes)]
    for piece, holders in sorted(shared, key=lambda item: (-item[0].nbytes, _key(item[0]))):
        give(piece, min(holders, key=lambda rank: (node_load[node_of[rank]], rank_load[rank], rank)))
    return [merge(pieces) for pieces in taken]


def split(piece: Piece, nbytes: int) -> list[Piece]:
    """Cut a piece into runs of nearly equal length, none longer than `nbytes`."""
    count = max(1, -(-piece.nbytes // max(nbytes, 4)))
    edges = [piece.start + piece.numel * i // count for i in range(count + 1)]
    return [dataclasses.replace(piece, start=a, stop=b) for a, b in itertools.pairwise(edges) if a < b]


def merge(pieces: Sequence[Piece]) -> list[Piece]:
    """The same elements in as few pieces as possible, in a fixed order."""
    merged: list[Piece] = []
    for piece in sorted(pieces, key=_key):
        if merged and _box(merged[-1]) == _box(piece) and merged[-1].stop == piece.start:
            merged[-1] = dataclasses.replace(merged[-1], stop=piece.stop)
        else:
            merged.append(piece)
    return merged


def _atoms(held: Sequence[Sequence[Piece]]) -> list[tuple[Piece, tuple[int, ...]]]:
    """Runs that the same ranks hold, with these ranks."""
    by_box: dict[_Box, list[tuple[Piece, int]]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            if piece.numel:
                by_box.setdefault(_box(piece), []).append((piece, rank))
    atoms = []
    for key in sorted(by_box):
        events: dict[int, list[tuple[bool, int]]] = defaultdict(list)
        for piece, rank in by_box[key]:
            events[piece.start].append((True, rank))
            events[piece.stop].append((False, rank))
        active: dict[int, int] = defaultdict(int)
        borders = sorted(events)
        for at, following in itertools.pairwise(borders):
            for begins, rank in events[at]:
                active[rank] += 1 if begins else -1
            holders = tuple(sorted(rank for rank, count in active.items() if count > 0))
            if holders:
                atoms.append((dataclasses.replace(by_box[key][0][0], start=at, stop=following), holders))
    return atoms


def _box(piece: Piece) -> _Box:
    return piece.name, piece.kind, piece.offset, piece.shape


def _key(piece: Piece) -> tuple[_Box, int]:
    return _box(piece), piece.start
