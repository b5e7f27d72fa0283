"""Observers of collectives: the recorder behind the checker, and the counter of bytes on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from mula_ray.parallel.groups import Call


class Recorder:
    """Keeps every call of a rank, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def call(self, call: Call) -> None:
        """See `groups.Observer`."""
        self.calls.append(call)


def first_mismatch(recorded: Sequence[Sequence[Call]]) -> str | None:
    """The first place where two members of a group did not issue the same call; None when all agree.

    `recorded[r]` are the calls of rank r. Same: kind, dtype, size, in the same order, group by group.
    """
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, list[Call]]] = {}
    for rank, calls in enumerate(recorded):
        for call in calls:
            by_group.setdefault((call.group, call.ranks), {}).setdefault(rank, []).append(call)
    for (name, ranks), members in by_group.items():
        first = members.get(ranks[0], [])
        for rank in ranks[1:]:
            for at, (one, other) in enumerate(zip_longest(first, members.get(rank, []))):
                if one != other:
                    return f"group {name} {ranks}, call {at}: rank {ranks[0]} issues {one}, rank {rank} issues {other}"
    return None


class Traffic:
    """Counts the bytes that a rank sends, by group and kind, for the ring form of each collective.

    n ranks, b bytes of the larger tensor: all-reduce 2b(n-1)/n; all-gather, reduce-scatter, all-to-all b(n-1)/n;
    broadcast b.
    """

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, str]] = Counter()

    def call(self, call: Call) -> None:
        """See `groups.Observer`."""
        self.sent[call.group, call.kind] += wire_bytes(call)

    def total(self, *, without: tuple[str, ...] = ("control",)) -> int:
        """Bytes over all groups but those in `without`."""
        return sum(count for (group, _), count in self.sent.items() if group not in without)


def wire_bytes(call: Call) -> int:
    """Bytes that one rank sends for `call` in its ring form."""
    size, payload = len(call.ranks), call.numel * call.dtype.itemsize
    if call.kind == "broadcast":
        return payload
    factor = 2 if call.kind == "all_reduce" else 1
    return factor * payload * (size - 1) // size
