"""Nodes that compute wrong or slowly: bad nodes told from bad data, damaged state, pipelines, stragglers."""

from __future__ import annotations

import itertools

import pytest
from elastic_world import World, died, world

from mula_ray.elastic import events as ev
from mula_ray.elastic.placement import Shape
from mula_ray.elastic.state import PolicyConfig


def test_gone_on_other_hardware_cordons_the_node() -> None:
    w = world(3)
    w.run(4)
    w.send(ev.NonFinite(w.state.generation, 5, (2,)))
    w.settle()
    assert w.starts[-1].placement.seats == ("n0", "n2")
    assert w.starts[-1].restore.step == 4
    w.run(1)
    assert w.cordoned == {"n1"}
    assert any("passed on other hardware" in r for r in w.reasons)


def test_without_a_spare_the_suspect_changes_place_and_gets_a_strike() -> None:
    w = world(2)
    w.run(4)
    w.send(ev.NonFinite(w.state.generation, 5, (2,)))
    w.settle()
    assert w.starts[-1].placement.seats == ("n1", "n0")
    w.run(1)
    assert not w.cordoned
    assert w.state.strikes == {"n1": 1}


@pytest.mark.parametrize("spares", [0, 1])
def test_same_data_fails_on_other_hardware(spares: int) -> None:
    for skip in (False, True):
        w = world(2 + spares, skip_bad_data=skip)
        w.run(4)
        for _ in range(2):
            w.send(ev.NonFinite(w.state.generation, 5, (2,), "gradient"))
            w.settle()
        if skip:
            assert w.running
            assert w.starts[-1].skips == (5,)
        else:
            assert w.finish is not None
            assert w.finish.exit_code == 30
            assert "data or the model" in w.finish.reason
        assert not w.cordoned


def test_skipping_has_an_end() -> None:
    w = world(3, skip_bad_data=True)
    w.run(4)
    while w.finish is None:
        w.send(ev.NonFinite(w.state.generation, w.step + 1, (0,)))
        w.settle()
        if w.alive and w.step + 1 in w.alive.skips:
            w.run(1)
    assert w.finish.exit_code == 30
    assert len(w.state.skips) == 3


def test_damaged_state_twice_distrusts_memory() -> None:
    w = world(4)
    w.run(2)
    w.checkpoint()
    w.run(3)
    w.send(ev.StateDamaged(w.state.generation, 6, (0,)))
    w.settle()
    assert w.starts[-1].restore.step == 5
    w.send(ev.StateDamaged(w.state.generation, 6, (0,)))
    w.settle()
    assert (w.starts[-1].restore.tier, w.starts[-1].restore.step) == (ev.Tier.DISK, 2)


def test_damaged_copies_fall_back_one_by_one() -> None:
    w = world(3)
    w.run(2)
    w.checkpoint()
    w.run(2)
    w.checkpoint()
    w.run(2)
    died(w, 0)
    w.answer_fence()
    seen = []
    while w.finish is None:
        restore = w.starts[-1].restore
        seen.append((restore.tier, restore.step))
        node = restore.holders[0] if restore.holders else ""
        w.send(ev.RestoreFailed(w.state.generation, restore.step, restore.tier, "checksum", node))
        w.answer_fence()
    memory, disk = (ev.Tier.OWN, ev.Tier.MEMORY), ev.Tier.DISK
    assert seen[0] == (memory[0], 6)
    assert seen[1] == (memory[1], 6)
    assert seen[-2:] == [(disk, 4), (disk, 2)]
    assert [s for _, s in seen] == sorted((s for _, s in seen), reverse=True)
    assert w.finish.exit_code in (30, 40)


def test_a_failure_that_goes_with_the_node_cordons_it_though_there_is_no_spare() -> None:
    w = world(3, dp=3)
    w.run(2)
    w.send(ev.NonFinite(w.state.generation, 3, (2,)))
    w.settle()
    seats = w.starts[-1].placement.seats
    at = seats.index("n1")
    assert at != 1
    w.send(ev.NonFinite(w.state.generation, 3, (2 * at + 1,)))
    w.settle()
    assert w.cordoned == {"n1"}
    assert w.starts[-1].placement.dp == 2
    w.run(1)
    assert w.running


def pipeline(nodes: int, dp: int = 3, **rules: object) -> World:
    """Replicas of two stages, a node each."""
    made = World(PolicyConfig(Shape(ep=2, tp=1, pp=2, tiles_per_node=2), dp=dp, **rules))  # type: ignore[arg-type]
    made.boot(nodes)
    made.settle()
    made.run(2)
    return made


def sick_step(w: World, sick: str) -> None:
    """Step 3 fails on the last stage of the pipeline that `sick` is in, as long as it has a seat."""
    assert w.alive is not None
    place = w.alive.placement
    if sick in place.seats:
        replica = place.seats.index(sick) // 2
        w.send(ev.NonFinite(w.state.generation, 3, (replica * 4 + 2,)))
        w.settle()


@pytest.mark.parametrize("sick", ["n0", "n1", "n3"])
def test_the_bad_node_of_a_pipeline_is_found_though_its_last_stage_fails(sick: str) -> None:
    w = pipeline(6, skip_bad_data=False)
    for _ in range(4):
        sick_step(w, sick)
    w.run(2)
    assert w.running, w.reasons[-4:]
    assert w.cordoned == {sick}


def test_with_spares_for_all_suspects_a_pipeline_moves_and_nobody_is_cordoned_unproved() -> None:
    w = pipeline(8)
    sick_step(w, "n0")
    assert not {"n0", "n1"} & set(w.starts[-1].placement.seats)
    w.run(2)
    assert w.running
    assert not w.cordoned
    assert w.state.strikes == {"n0": 1, "n1": 1}


@pytest.mark.parametrize("sick", [{"n7", "n12"}, {"n2", "n9", "n13"}, {"n11", "n12", "n13"}], ids=str)
def test_several_bad_nodes_at_once_are_not_taken_for_bad_data_for_ever(sick: set[str]) -> None:
    """Also among the spares, so that the failure comes back on other hardware."""
    w = pipeline(14, dp=6, min_dp=2, skip_bad_data=True, max_recoveries=50)
    for _ in range(60):
        assert w.alive is not None, w.reasons[-1]
        seats = w.alive.placement.seats
        step = next(step for step in itertools.count(w.step + 1) if step not in w.alive.skips)
        bad = {seats.index(node) // 2 for node in sick & set(seats)}
        if not bad:
            break
        for replica in sorted(bad):
            w.send(ev.NonFinite(w.state.generation, step, (replica * 4 + 2,)))
        w.settle()
    w.run(5)
    assert w.running
    assert not sick & set(w.starts[-1].placement.seats)


def test_bad_data_in_a_pipeline_is_told_from_bad_nodes() -> None:
    w = pipeline(6, skip_bad_data=True)
    for _ in range(4):
        if 3 not in w.starts[-1].skips:
            w.send(ev.NonFinite(w.state.generation, 3, (2,)))
            w.settle()
    assert w.starts[-1].skips == (3,)
    assert not w.cordoned
    w.run(3)
    assert w.running


def test_straggler_gives_way_to_a_spare_at_a_boundary() -> None:
    w = world(3)
    w.run(2)
    w.send(ev.Straggler(w.state.generation, 0, 1.8))
    assert w.asked is not None
    w.run(1)
    w.settle()
    assert w.starts[-1].placement.seats == ("n2", "n1")
    assert w.starts[-1].restore.step == 3
    none = world(2)
    _, commands, reason = none.send(ev.Straggler(none.state.generation, 0, 1.8))
    assert not commands
    assert "no spare" in reason
