"""Rank ↔ coordinates, and groups: a partition of the world for every kind, with the sizes that DESIGN names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mula_ray.plan.topology import GROUP_KINDS, Topology

axes = st.integers(1, 4)
topologies = st.builds(Topology, dp=axes, ep=axes, tp=axes, pp=axes)


@settings(deadline=None, max_examples=30)
@given(topologies)
def test_coordinates_are_a_bijection(topology: Topology) -> None:
    seen = {topology.coords(rank) for rank in range(topology.world)}
    assert len(seen) == topology.world == topology.dp * topology.ep * topology.tp * topology.pp
    assert all(topology.rank(topology.coords(rank)) == rank for rank in range(topology.world))


@settings(deadline=None, max_examples=30)
@given(topologies)
def test_groups_partition_the_world(topology: Topology) -> None:
    sizes = {
        "world": topology.world,
        "ddp": topology.ddp,
        "edp": topology.edp,
        "dp": topology.dp,
        "ep": topology.ep,
        "tp": topology.tp,
        "pp": topology.pp,
        "replica": topology.replica,
    }
    for kind in GROUP_KINDS:
        groups = topology.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world))
        assert {len(group) for group in groups} == {sizes[kind]}
        for group in groups:
            assert all(topology.group_of(kind, rank) == group for rank in group)


@settings(deadline=None, max_examples=30)
@given(topologies)
def test_samples_go_once_to_every_ddp_index(topology: Topology) -> None:
    for group in topology.groups("ddp"):
        assert sorted(topology.ddp_index(rank) for rank in group) == list(range(topology.ddp))
    for group in topology.groups("tp") + topology.groups("pp"):
        assert len({topology.ddp_index(rank) for rank in group}) == 1, "they hold the same sequences"


def test_replicas_are_contiguous_and_ep_lies_inside() -> None:
    topology = Topology(dp=2, ep=3, tp=2, pp=2)
    assert topology.groups("replica") == [tuple(range(12)), tuple(range(12, 24))]
    assert topology.group_of("ep", 0) == (0, 2, 4)


@pytest.mark.parametrize("axis", ["dp", "ep", "tp", "pp"])
def test_axes_start_at_one(axis: str) -> None:
    with pytest.raises(ValueError, match=rf"parallel\.{axis} is 0; it must be at least 1"):
        Topology(**{axis: 0})


def test_ranks_outside_the_world_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 4 is outside the world of 4"):
        Topology(dp=4).coords(4)
