"""Placement, buddies and usable memory: pure, property-tested."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mula_ray.config.errors import UserError
from mula_ray.config.model import ModelConfig
from mula_ray.config.run import ClusterConfig, ParallelConfig, RunConfig, TrainConfig
from mula_ray.elastic.memory import Holding, usable_memory
from mula_ray.elastic.placement import Node, Placement, Shape, buddies, exchange, place
from mula_ray.elastic.state import policy_config

SMALL = settings(deadline=None, max_examples=150)
shapes = st.builds(Shape, st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.integers(3, 12))


def placed(shape: Shape, dp: int) -> Placement:
    return place(shape, dp, (), set(), (f"n{i}" for i in range(shape.seats(dp))))


@SMALL
@given(shapes, st.integers(1, 7))
def test_seats_cut_the_world_into_whole_nodes(shape: Shape, dp: int) -> None:
    place = placed(shape, dp)
    assert [rank for rank, _, _ in place.assignments()] == list(range(place.world))
    assert all(0 <= tile < shape.tiles_per_node for _, _, tile in place.assignments())
    for rank, node, tile in place.assignments():
        assert place.locate(rank) == (node, tile)
        assert rank in place.ranks(shape.seat_of(rank))
    assert shape.capacity(shape.seats(dp)) >= dp
    assert shape.capacity(shape.seats(dp) - 1) < dp


@SMALL
@given(shapes, st.integers(1, 7))
def test_groups_stay_inside_nodes_where_they_fit(shape: Shape, dp: int) -> None:
    place = placed(shape, dp)
    topology = place.topology

    def nodes(ranks: tuple[int, ...]) -> int:
        return len({place.locate(rank)[0] for rank in ranks})

    assert all(nodes(group) == 1 for group in topology.groups("tp"))
    if shape.ep * shape.tp <= shape.tiles_per_node:
        assert all(nodes(group) == 1 for group in topology.groups("ep"))
    replicas = Counter(node for group in topology.groups("replica") for node in {place.locate(r)[0] for r in group})
    if not shape.replicas_per_seat:
        assert all(count == 1 for count in replicas.values()), "a node serves one replica"


@SMALL
@given(shapes, st.integers(1, 6), st.integers(0, 6), st.data())
def test_survivors_keep_their_seats(shape: Shape, dp: int, spares: int, data: st.DataObject) -> None:
    old = placed(shape, dp)
    lost = set(data.draw(st.lists(st.sampled_from(old.seats), unique=True)))
    alive = set(old.seats) - lost
    free = [f"s{i}" for i in range(spares)]
    room = min(dp, shape.capacity(len(alive) + spares))
    assume(room >= 1)
    new = place(shape, room, old.seats, alive, free)
    assert len(set(new.seats)) == len(new.seats) == shape.seats(room)
    assert set(new.seats) <= alive | set(free)
    for before, after in zip(old.seats, new.seats, strict=False):
        assert after == before or before in lost


@SMALL
@given(st.integers(2, 40), st.integers(1, 8))
def test_buddies_are_one_to_one_and_apart(count: int, rack: int) -> None:
    seats = [f"n{i}" for i in range(count)]
    nodes = {node: Node(f"rack{i // rack}", i) for i, node in enumerate(seats)}
    found = buddies(seats, nodes)
    assert sorted(b for b in found if b) == sorted(seats)
    assert all(a != b for a, b in zip(seats, found, strict=True))
    if rack * 2 <= count:
        assert all(b and nodes[a].domain != nodes[b].domain for a, b in zip(seats, found, strict=True))


def test_a_single_seat_has_a_spare_as_buddy_or_nobody() -> None:
    nodes = {"a": Node("r0", 0), "b": Node("r0", 1), "c": Node("r1", 2)}
    assert buddies(["a"], nodes, ["b", "c"]) == ("c",)
    assert buddies(["a"], nodes, ["b"]) == ("b",)
    assert buddies(["a"], nodes) == (None,)


def test_exchange_scatters_suspects_over_the_replicas() -> None:
    shape = Shape(ep=2, tp=1, pp=2, tiles_per_node=2)
    old = placed(shape, 3)
    new = exchange(old, {"n0", "n1"}, range(4), {})
    replicas = {new.seats.index(node) // 2 for node in ("n0", "n1")}
    assert replicas == {1, 2}
    assert sorted(new.seats) == sorted(old.seats)
    assert exchange(placed(shape, 1), {"n0", "n1"}, range(4), {}).seats == ("n1", "n0")
    assert exchange(old, (), (), {}).seats == (*old.seats[1:], old.seats[0])
    struck = exchange(old, {"n0"}, range(4), {"n2": 1, "n4": 1})
    assert struck.seats.index("n0") in (3, 5)


def test_memory_needs_every_seat_and_prefers_its_own_node() -> None:
    shape = Shape(ep=2, tp=1, pp=1, tiles_per_node=2)

    def held(seat: int, step: int, own: bool, generation: int = 1, dp: int = 2) -> Holding:
        return Holding(generation, step, dp, seat, own)

    answers = {
        "a": [held(0, 4, True), held(0, 5, True), held(1, 4, False)],
        "b": [held(1, 4, True), held(0, 4, False)],
        "c": [held(1, 5, True, generation=2), held(0, 3, True, dp=1)],
    }
    whole = usable_memory(shape, answers)
    assert [(m.step, m.generation, m.dp) for m in whole] == [(4, 1, 2), (3, 1, 1)]
    assert whole[0].holders == ("a", "b")
    assert whole[0].spare_holders == ("b", "a")
    del answers["a"]
    assert [(m.step, m.holders) for m in usable_memory(shape, answers)] == [(4, ("b", "b")), (3, ("c",))]
    assert usable_memory(shape, {}) == ()


def config(**parallel: object) -> RunConfig:
    return RunConfig(
        model=ModelConfig(hidden=64, layers=2, heads=2, ffn=64),
        train=TrainConfig(steps=1, global_batch=8),
        parallel=ParallelConfig.model_validate(parallel),
        cluster=ClusterConfig(nodes=3, tiles_per_node=4),
    )


def test_rules_follow_from_the_configuration() -> None:
    assert policy_config(config(ep=2)).dp == 6
    assert policy_config(config(ep=4, pp=2)).dp == 1
    assert policy_config(config(dp=2, ep=2)).dp == 2
    with pytest.raises(UserError, match=r"takes 4 nodes of 4 tiles, but cluster\.nodes is 3"):
        policy_config(config(dp=8, ep=2))
    with pytest.raises(UserError, match=r"raise cluster\.nodes"):
        policy_config(config(ep=4, pp=4))
