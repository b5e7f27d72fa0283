"""One test a kind of failure: what the policy answers, and that it says why."""

from __future__ import annotations

import dataclasses

import pytest
from elastic_world import World, died, world

from mula_ray.config.errors import UserError
from mula_ray.elastic import events as ev
from mula_ray.elastic.placement import Shape
from mula_ray.elastic.state import Phase, PolicyConfig


def test_starts_fresh_when_nothing_was_saved() -> None:
    w = world(3)
    assert w.running
    assert w.starts[0].restore.tier is ev.Tier.FRESH
    assert w.starts[0].placement.seats == ("n0", "n1")


def test_killed_rank_comes_back_on_the_same_tile_from_own_memory() -> None:
    w = world(3)
    w.run(5)
    died(w, 3)
    assert w.state.phase is Phase.FENCING
    w.settle()
    start = w.starts[-1]
    assert start.placement.seats == ("n0", "n1")
    assert (start.restore.tier, start.restore.step) == (ev.Tier.OWN, 5)
    assert w.running


def test_a_snapshot_that_all_own_nodes_have_counts_though_it_is_not_published() -> None:
    w = world(2)
    w.run(3)
    w.run(1, snapshot=False)
    start = w.alive
    assert start is not None
    from mula_ray.elastic.memory import Holding

    for seat, node in enumerate(start.placement.seats):
        w.nodes[node].append(Holding(start.generation, 4, 2, seat, own=True))
    died(w, 0)
    w.settle()
    assert w.starts[-1].restore.step == 4


def test_lost_node_is_replaced_by_a_spare_which_reads_the_buddy() -> None:
    w = world(3)
    w.run(4)
    w.lose("n0")
    w.settle()
    start = w.starts[-1]
    assert start.placement.seats == ("n2", "n1")
    assert (start.restore.tier, start.restore.step) == (ev.Tier.MEMORY, 4)
    assert start.restore.holders == ("n1", "n1")
    assert start.rebuild


def test_two_nodes_lost_at_once_fall_back_to_disk_or_to_the_start() -> None:
    w = world(4)
    w.run(3)
    w.checkpoint()
    w.run(3)
    w.lose("n0")
    w.lose("n1")
    w.settle()
    assert (w.starts[-1].restore.tier, w.starts[-1].restore.step) == (ev.Tier.DISK, 3)
    bare = world(4)
    bare.run(3)
    bare.lose("n0")
    bare.lose("n1")
    bare.settle()
    assert bare.starts[-1].restore.tier is ev.Tier.FRESH


def test_nothing_left_to_restore_is_exit_40() -> None:
    w = World(PolicyConfig(Shape(2, 1, 1, 2), dp=2))
    w.boot(2, generation=4, ever_saved=True)
    w.settle()
    assert w.finish is not None
    assert w.finish.exit_code == 40


def test_shrinks_by_whole_replicas_and_grows_back_at_a_step_boundary() -> None:
    w = world(4, dp=4)
    w.run(3)
    w.lose("n1")
    w.settle()
    assert w.starts[-1].placement.dp == 3
    assert w.starts[-1].placement.seats == ("n0", "n3", "n2")
    assert w.starts[-1].restore.step == 3
    w.run(2)
    w.lose("n0")
    w.settle()
    assert w.starts[-1].placement.dp == 2
    w.run(2)
    w.join("n7")
    w.join("n8")
    assert w.running
    w.tick()
    assert w.asked is not None
    assert w.asked.save == "memory"
    w.run(1)
    w.settle()
    start = w.starts[-1]
    assert start.placement.dp == 4
    assert (start.restore.step, start.restore.dp) == (8, 2)


def test_stop_policy_ends_with_30() -> None:
    w = world(2, policy="stop")
    w.run(1)
    w.lose("n0")
    w.settle()
    assert w.finish is not None
    assert w.finish.exit_code == 30
    assert "policy is stop" in w.finish.reason


def test_wait_policy_waits_then_goes_on_or_ends_with_30() -> None:
    w = world(2, policy="wait", wait_s=60.0)
    w.run(2)
    w.lose("n0")
    w.settle()
    assert w.state.phase is Phase.GATHERING
    assert w.state.wake_at == 60.0
    w.join("n5")
    w.settle()
    assert w.running
    assert w.starts[-1].restore.step == 2
    w.lose("n1")
    w.settle()
    w.tick()
    assert w.finish is not None
    assert w.finish.exit_code == 30
    assert "too few nodes" in w.finish.reason


def test_failures_while_starting_and_fencing_are_events_like_any_other() -> None:
    w = world(4)
    w.run(2)
    died(w, 0)
    w.lose("n1")
    w.answer_fence()
    w.lose("n0")
    assert w.fence is not None
    w.settle()
    assert w.running
    assert set(w.starts[-1].placement.seats) == {"n2", "n3"}


def test_stale_generations_are_ignored() -> None:
    w = world(2)
    w.run(1)
    old = w.state.generation
    died(w, 0)
    w.settle()
    before = w.state
    for event in (
        ev.RankDied(old, 1, ev.Cause.SIGNAL),
        ev.StepCommitted(old, 99),
        ev.Fenced(old),
        ev.RankHung(old, 3),
        ev.GenerationReady(old, 3),
    ):
        _, commands, reason = w.send(event)
        assert not commands
        assert "ignored" in reason
        assert w.state == before


def test_twice_in_a_row_on_one_node_moves_to_a_spare() -> None:
    w = world(3)
    w.run(2)
    for _ in range(2):
        died(w, 2)
        w.settle()
    assert w.starts[-1].placement.seats == ("n0", "n2")
    assert any("suspect" in r for r in w.reasons)


def test_the_same_failure_on_fresh_nodes_is_systemic_and_spares_are_left() -> None:
    w = world(8, max_recoveries=50)
    w.run(2)
    while w.finish is None:
        w.lose(w.starts[-1].placement.seats[0])
        w.settle()
    assert w.finish.exit_code == 30
    assert "systemic" in w.finish.reason
    assert len(w.state.nodes) >= 5


def test_the_same_exception_everywhere_is_systemic() -> None:
    w = world(6, max_recoveries=50)
    w.run(2)
    while w.finish is None:
        for rank in range(4):
            died(w, rank, ev.Cause.ERROR, "IndexError: expert 7")
        w.settle()
    assert w.finish.exit_code == 30
    assert len(w.state.nodes) == 6
    assert len(w.starts) <= 4


def test_recoveries_without_progress_are_systemic() -> None:
    w = world(3, max_recoveries=4)
    w.run(2)
    for i in range(5):
        assert w.finish is None
        w.send(ev.RankHung(w.state.generation, 3, (i % 4,)))
        w.settle()
    assert w.finish is not None
    assert w.finish.exit_code == 30
    assert "without a new committed step" in w.finish.reason


def test_progress_resets_the_count() -> None:
    w = world(3, max_recoveries=2)
    for _ in range(20):
        w.run(1)
        died(w, 0)
        w.settle()
    assert w.running


def test_peers_of_a_dead_rank_are_not_blamed() -> None:
    w = world(3)
    w.run(1)
    for _ in range(2):
        died(w, 1, ev.Cause.PEER)
        died(w, 2, ev.Cause.SIGNAL)
        w.settle()
    assert "n1" in w.state.strikes
    assert "n0" not in w.state.strikes


def test_fatal_errors_are_never_retried() -> None:
    w = world(3)
    w.send(ev.FatalError(20, "data.path /nowhere does not exist", w.state.generation))
    assert w.finish is not None
    assert w.finish.exit_code == 20
    assert len(w.starts) == 1
    _, commands, reason = w.send(ev.NodeLost("n0"))
    assert not commands
    assert reason


def test_deadline_saves_once_and_ends_with_10() -> None:
    w = world(2)
    w.run(2)
    w.send(ev.DeadlineNear(end=w.now + 100))
    assert w.asked is not None
    assert w.asked.save == "disk"
    w.run(1)
    assert w.finish is not None
    assert w.finish.exit_code == 10
    assert w.disk[-1].step == 3


def test_a_failure_during_the_last_save_is_recovered_and_saved() -> None:
    w = world(2)
    w.run(2)
    w.send(ev.StopRequested("SIGTERM"))
    died(w, 0)
    w.settle()
    assert w.asked is not None
    w.run(1)
    assert w.finish is not None
    assert w.finish.exit_code == 10
    assert w.disk


def test_stop_during_growth_still_saves_to_disk() -> None:
    w = world(2, dp=3)
    w.run(1)
    assert w.state.phase is Phase.GATHERING
    w.now = 700.0
    w.send(ev.Tick())
    w.settle()
    assert w.starts[-1].placement.dp == 2
    w.run(1)
    w.join("n9")
    w.tick()
    asked = w.asked
    assert asked is not None
    w.send(ev.StopRequested("SIGTERM"))
    w.asked = asked
    w.end_asked()
    w.settle()
    w.run(1)
    assert w.finish is not None
    assert w.finish.exit_code == 10
    assert w.disk


def test_time_runs_out_while_recovering() -> None:
    w = world(2)
    w.run(2)
    w.send(ev.DeadlineNear(end=w.now + 5))
    died(w, 0)
    w.tick()
    assert w.finish is not None
    assert w.finish.exit_code == 10
    assert "time is up" in w.finish.reason


def test_second_interrupt_ends_with_130() -> None:
    w = world(2)
    w.send(ev.StopRequested("Ctrl-C"))
    w.send(ev.StopRequested("Ctrl-C", hard=True))
    assert w.finish is not None
    assert w.finish.exit_code == 130


def test_storage_failures() -> None:
    w = world(2)
    w.run(1)
    _, commands, _ = w.send(ev.StorageFailed(1, "disk quota"))
    assert not commands
    w.tick()
    assert "saving again" in w.reasons[-1]
    hard = world(2, storage_error="stop")
    hard.send(ev.StorageFailed(1, "no space", no_space=True))
    assert hard.finish is not None
    assert hard.finish.exit_code == 30


def test_driver_takes_over_surviving_agents_and_their_memory() -> None:
    w = world(3)
    w.run(6)
    again = World(w.rules)
    again.nodes = w.nodes
    again.boot(3, generation=w.state.generation, takeover=True, committed=6)
    again.settle()
    assert again.running
    assert again.starts[-1].generation > w.state.generation
    assert again.starts[-1].restore.step == 6


def test_takeover_with_a_node_missing_shrinks_at_once() -> None:
    w = World(PolicyConfig(Shape(2, 1, 1, 2), dp=2))
    w.disk = [ev.DiskCopy(7, "full-a")]
    w.boot(1, generation=3, takeover=True, committed=9, disk=(ev.DiskCopy(7, "full-a"),))
    w.settle()
    assert w.running
    assert w.starts[-1].placement.dp == 1
    assert w.starts[-1].restore.step == 7


def test_an_answer_that_never_comes_is_a_failure() -> None:
    w = world(2)
    w.run(1)
    died(w, 0)
    w.answer_fence()
    w.tick()
    assert w.fence is not None
    assert "did not start in time" in w.reasons[-1]
    w.tick()
    assert w.finish is not None
    assert w.finish.exit_code == 30


def test_nodes_with_too_few_tiles_or_cordoned_are_refused() -> None:
    w = world(2)
    w.send(ev.NodeJoined("small", 1))
    assert "small" in w.cordoned
    _, commands, reason = w.send(ev.NodeJoined("small", 2))
    assert not commands
    assert "cordoned" in reason


def test_rules_refuse_nonsense() -> None:
    with pytest.raises(UserError, match="min_dp"):
        PolicyConfig(Shape(1, 1, 1, 1), dp=1, min_dp=2)
    with pytest.raises(UserError, match="tp"):
        Shape(ep=1, tp=4, pp=1, tiles_per_node=2)


def test_state_is_a_value() -> None:
    w = world(3)
    before = dataclasses.replace(w.state)
    nodes = dict(w.state.nodes)
    state = w.state
    w.lose("n0")
    assert state == before
    assert state.nodes == nodes
