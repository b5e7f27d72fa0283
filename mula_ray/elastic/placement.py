"""Which rank sits where: replicas on whole nodes, EP groups inside a node, survivors keep their place.

A *seat* is what one node holds: a contiguous range of ranks. Ranks are laid out dp, pp, ep, tp (slowest first), so a
seat is either several whole replicas (small ones share a node), or some pipeline stages of one replica, each with its
whole EP x TP block. Only when EP x TP is larger than a node does a seat cut an EP group (never a TP group). Placing a
generation means giving a node to every seat; everything else follows from the shape. Pure; names only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import filterfalse
from operator import attrgetter

from mula_ray.config.errors import UserError
from mula_ray.plan.topology import Topology


@dataclass(frozen=True)
class Shape:
    """How replicas fill nodes of `tiles_per_node` tiles. Sizes of one replica: `ep`, `tp`, `pp`."""

    ep: int
    tp: int
    pp: int
    tiles_per_node: int

    def __post_init__(self) -> None:
        if self.tiles_per_node < self.tp:
            raise UserError(
                f"parallel.tp is {self.tp}, but a node has {self.tiles_per_node} tiles; a TP group must fit in a node: "
                "lower parallel.tp or raise cluster.tiles_per_node"
            )

    @cached_property
    def replica(self) -> int:
        """Ranks of a replica."""
        return self.ep * self.tp * self.pp

    @cached_property
    def replicas_per_seat(self) -> int:
        """Whole replicas a node holds; 0 when a replica needs several nodes."""
        return self.tiles_per_node // self.replica

    @cached_property
    def ranks_per_seat(self) -> int:
        """Ranks a full seat holds."""
        if self.replicas_per_seat:
            return self.replicas_per_seat * self.replica
        block = self.ep * self.tp
        unit = block if block <= self.tiles_per_node else self.tp
        return self.tiles_per_node // unit * unit

    @cached_property
    def seats_per_replica(self) -> int:
        """Nodes that a replica takes when it does not share one: 1 or more."""
        return -(-self.replica // self.ranks_per_seat) if not self.replicas_per_seat else 1

    def seats(self, dp: int) -> int:
        """Nodes that `dp` replicas take."""
        if self.replicas_per_seat:
            return -(-dp // self.replicas_per_seat)
        return dp * self.seats_per_replica

    def capacity(self, nodes: int) -> int:
        """Replicas that `nodes` whole nodes have room for."""
        if self.replicas_per_seat:
            return nodes * self.replicas_per_seat
        return nodes // self.seats_per_replica

    def span(self, seat: int, dp: int) -> tuple[int, int]:
        """Ranks [first, stop) of `seat` in a world of `dp` replicas."""
        if self.replicas_per_seat:
            first = seat * self.ranks_per_seat
            return first, min(first + self.ranks_per_seat, dp * self.replica)
        replica, part = divmod(seat, self.seats_per_replica)
        first = replica * self.replica + part * self.ranks_per_seat
        return first, min(first + self.ranks_per_seat, (replica + 1) * self.replica)

    def seat_of(self, rank: int) -> int:
        """Seat that holds `rank`."""
        if self.replicas_per_seat:
            return rank // self.ranks_per_seat
        replica, inside = divmod(rank, self.replica)
        return replica * self.seats_per_replica + inside // self.ranks_per_seat


@dataclass(frozen=True)
class Node:
    """A usable node. `domain`: failure domain (rack, chassis, host); `serial`: order in which nodes joined."""

    domain: str
    serial: int


@dataclass(frozen=True)
class Placement:
    """Nodes of one generation: `seats[i]` is the node of seat i."""

    shape: Shape
    dp: int
    seats: tuple[str, ...]

    @property
    def topology(self) -> Topology:
        """The layout of this generation."""
        return Topology(dp=self.dp, ep=self.shape.ep, tp=self.shape.tp, pp=self.shape.pp)

    @cached_property
    def nodes(self) -> frozenset[str]:
        """The nodes that have a seat."""
        return frozenset(self.seats)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.shape.replica

    def locate(self, rank: int) -> tuple[str, int]:
        """Node and tile of `rank`."""
        seat = self.shape.seat_of(rank)
        return self.seats[seat], rank - self.shape.span(seat, self.dp)[0]

    def ranks(self, seat: int) -> range:
        """Ranks of a seat; the i-th of them is on tile i of its node."""
        return range(*self.shape.span(seat, self.dp))

    def by_node(self) -> Iterator[tuple[str, range]]:
        """(node, its ranks), in rank order."""
        for seat, node in enumerate(self.seats):
            yield node, self.ranks(seat)

    def assignments(self) -> Iterator[tuple[int, str, int]]:
        """(rank, node, tile) of every rank, in rank order."""
        for node, ranks in self.by_node():
            for tile, rank in enumerate(ranks):
                yield rank, node, tile


def place(shape: Shape, dp: int, previous: Sequence[str], keep: Collection[str], free: Iterable[str]) -> Placement:
    """Seats for `dp` replicas: a node of `previous` that is in `keep` keeps its seat, `free` nodes fill holes in order.

    Nodes of seats that no longer exist (a shrunken world) fill holes before `free` ones: they hold a snapshot.
    The caller made sure that there are enough; else AssertionError.
    """
    wanted = shape.seats(dp)
    seats = list(previous[:wanted])
    lost = filterfalse(keep.__contains__, seats)  # in C: a thousand seats, most of them kept
    holes = [seats.index(node) for node in lost] + list(range(len(seats), wanted))
    seats += [""] * (wanted - len(seats))
    if holes:
        pool = iter([node for node in previous[wanted:] if node in keep])
        rest = iter(free)
        for hole in holes:
            node = next(pool, None) or next(rest, None)
            assert node is not None, f"{wanted} seats cannot be filled"
            seats[hole] = node
    return Placement(shape, dp, tuple(seats))


def exchange(
    placement: Placement, suspects: Collection[str], ranks: Collection[int], strikes: Mapping[str, int]
) -> Placement:
    """The same nodes with other seats: suspects leave the seats of `ranks`, each to a replica of its own if possible.

    They change with nodes without strikes first. Without suspects, or with too few others, all move on by one. A single
    node stays.
    """
    seats, shape = list(placement.seats), placement.shape
    failing = {shape.seat_of(rank) for rank in ranks if rank < placement.world}
    mine = [i for i, node in enumerate(seats) if node in suspects and (i in failing or not failing)]
    others = [i for i, node in enumerate(seats) if node not in suspects and i not in failing]
    apart = shape.seats_per_replica
    others.sort(key=lambda i: (strikes.get(seats[i], 0), i % apart, i))
    if suspects and len(others) >= len(mine):
        for seat, other in zip(mine, others, strict=False):
            seats[seat], seats[other] = seats[other], seats[seat]
    else:
        seats = seats[1:] + seats[:1]
    return replace(placement, seats=tuple(seats))


def buddies(seats: Sequence[str], nodes: Mapping[str, Node], idle: Sequence[str] = ()) -> tuple[str | None, ...]:
    """For every seat the node that keeps the copy of its snapshot: another node, in another failure domain if any is.

    Every node keeps one copy. Seats are ordered round the domains; the buddy is found one largest domain further on,
    which is in another domain whenever no domain has more than half of the nodes. A single seat takes the first of
    the `idle` nodes (a spare). None: there is no other node. `nodes` has a record of each of them.
    """
    domains = list(map(attrgetter("domain"), map(nodes.__getitem__, seats)))
    count = len(seats)
    if count == 1:
        apart = [n for n in idle if n in nodes and nodes[n].domain != domains[0]]
        return (next(iter(apart or idle), None),)
    largest = max(Counter(domains).values(), default=1)
    order = list(range(count))
    if largest > 1:
        order.sort(key=domains.__getitem__)
    shift = min(largest, max(1, count // 2))
    keeper = list(seats)
    for seat, other in zip(order, order[shift:] + order[:shift], strict=True):
        keeper[seat] = seats[other]
    return tuple(keeper)
