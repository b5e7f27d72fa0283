"""Detectors and intervals: pure, fed with made-up clocks."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mula_ray.elastic.hang import Activity, HangDetector, Heartbeats, Pulse
from mula_ray.elastic.interval import Cadence, FailureRate, daly, overhead, save_every, snapshot_every
from mula_ray.elastic.straggler import SlowRank, StragglerDetector, Windows, Work


class Run:
    """Two nodes whose ranks make four marks a step; the driver looks every `poll` seconds.

    `share`: of a core, that the busiest thread has while no mark is made.
    """

    def __init__(self, seed: int = 0, poll: float = 0.05) -> None:
        self.detector = HangDetector()
        self.random = random.Random(seed)
        self.now, self.poll, self.next_poll = 0.0, poll, poll
        self.marks, self.step = 0, 0
        self.idle_since: float | None = None
        self.share = 0.0
        self.detector.begin(1, 0.0)

    def look(
        self, until: float, stopped: tuple[int, ...] = (), activity: Activity = "step", behind: tuple[int, ...] = ()
    ):
        """Polls up to `until`; returns the hang and when."""
        while self.next_poll <= until:
            now = self.next_poll
            idle = now - self.idle_since if self.idle_since is not None and now > self.idle_since else 0.0
            for node in ("a", "b"):
                mine = node == "b"
                named = (behind, idle, stopped) if mine else ((), idle, ())
                ran = self.share * max(0.0, now - self.now)
                pulse = Pulse(node, 1, self.marks, self.step, activity, *named, ran_s=ran)
                self.detector.pulse(pulse, now)
            hang = self.detector.check(now)
            self.next_poll += self.poll
            if hang is not None:
                return hang, now
        self.now = until
        return None

    def steps(self, count: int, step_s: float, slow: float = 1.0) -> None:
        """Healthy steps; a phase takes up to `slow` times longer than usual."""
        for _ in range(count):
            for _ in range(4):
                took = step_s / 4 * self.random.uniform(1.0, slow)
                assert self.look(self.now + took, activity="step" if self.step else "start") is None
                self.marks += 1
            self.step += 1


def test_a_stopped_rank_is_named_at_once() -> None:
    run = Run()
    run.steps(30, 0.1)
    found = run.look(run.now + 5, stopped=(3,))
    assert found is not None
    hang, when = found
    assert hang.ranks == (3,)
    assert hang.step == 31
    assert when - run.now < 0.35


def test_a_hang_inside_a_collective_is_seen_by_idleness() -> None:
    run = Run()
    run.steps(30, 0.2)
    run.idle_since = run.now
    found = run.look(run.now + 5, behind=(2,))
    assert found is not None
    hang, when = found
    assert when - run.now < 0.75
    assert "idle" in hang.detail
    assert hang.ranks == (2,)


@pytest.mark.parametrize(("share", "seconds"), [(1.0, 2.6), (0.5, 4.4), (0.25, 8.4)])
def test_a_spinning_rank_is_seen_by_what_it_ran(share: float, seconds: float) -> None:
    run = Run()
    run.steps(30, 0.2)
    run.share = share
    found = run.look(run.now + 20)
    assert found is not None
    assert found[1] - run.now < seconds
    assert "ran for" in found[0].detail


def test_ranks_that_get_no_core_are_given_time() -> None:
    run = Run()
    run.steps(30, 0.2)
    run.share = 0.05
    assert run.look(run.now + 25) is None
    assert run.look(25 + run.now) is not None


@pytest.mark.parametrize("seed", range(3))
def test_no_false_alarm_in_10000_steps_under_load(seed: int) -> None:
    """Load makes phases up to 20 times longer, from one step to the next, and the driver late."""
    run = Run(seed)
    run.steps(5_000, 0.02)
    run.steps(4_000, 0.02, slow=20.0)
    run.next_poll += 1.5
    run.steps(1_000, 0.02, slow=40.0)


def test_the_driver_s_own_pause_is_no_hang() -> None:
    run = Run()
    run.steps(50, 0.1)
    run.detector.check(run.now)
    assert run.detector.check(run.now + 30.0) is None
    run.next_poll = run.now = run.now + 30.0
    run.steps(10, 0.1)


def test_first_steps_and_saves_are_given_time() -> None:
    run = Run()
    assert run.look(50.0, activity="start") is None
    run.marks += 1
    run.steps(100, 0.1)
    run.marks += 1
    assert run.look(run.now + 0.06, activity="save") is None
    assert run.look(run.now + 100, activity="save") is None


def test_one_alarm_a_generation_and_none_after_its_end() -> None:
    run = Run()
    run.steps(30, 0.1)
    assert run.look(run.now + 5, stopped=(0,)) is not None
    assert run.look(run.now + 5, stopped=(0,)) is None
    run.detector.begin(1, run.next_poll)
    run.detector.end()
    assert run.look(run.now + 300) is None


def test_pulses_of_an_old_generation_do_not_count() -> None:
    run = Run()
    run.steps(30, 0.1)
    for i in range(100):
        run.detector.pulse(Pulse("a", 0, 10**6 + i, 9), run.now + i * 0.05)
    assert run.look(run.now + 9, stopped=(1,)) is not None


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.001, 5.0), min_size=50, max_size=200))
def test_deadlines_stay_above_what_is_usual(gaps: list[float]) -> None:
    detector = HangDetector()
    detector.begin(1, 0.0)
    now = 0.0
    for i, gap in enumerate(gaps):
        now += gap
        detector.pulse(Pulse("a", 1, i + 1, 1), now)
    limits = detector.deadlines()
    assert limits["waited"] >= max(2.0, 3 * gaps[-1])
    assert limits["ran"] >= 2.0
    assert limits["idle"] >= max(0.5, 2 * gaps[-1])


def test_silent_agents_are_found_and_late_drivers_forgive() -> None:
    beats = Heartbeats()
    now = 0.0
    for node in ("a", "b", "c"):
        beats.watch(node, now)
    for _ in range(100):
        now += 0.05
        for node in ("a", "b", "c"):
            beats.beat(node, now)
        assert beats.silent(now) == []
    found, start = [], now
    while not found:
        now += 0.05
        for node in ("a", "c"):
            beats.beat(node, now)
        found = beats.silent(now)
    assert found == ["b"]
    assert now - start < 1.7
    assert beats.silent(now + 20) == []
    beats.forget("a")
    beats.beat("a", now)
    beats.beat("unknown", now)
    now += 20
    for _ in range(40):
        now += 0.05
        beats.beat("a", now)
        if beats.silent(now) == ["c"]:
            return
    raise AssertionError("c was never missed")


def test_stragglers_need_to_be_slow_for_long() -> None:
    detector = StragglerDetector()
    fine = {"a": Work(0, 1.0, 1.0), "b": Work(2, 1.05, 1.0)}
    slow = {"a": Work(0, 1.0, 1.0), "b": Work(2, 2.0, 1.5)}
    assert detector.window({}) is None
    assert [detector.window(slow), detector.window(slow), detector.window(fine)] == [None] * 3
    assert [detector.window(slow), detector.window(slow)] == [None] * 2
    found = detector.window(slow)
    assert found is not None
    assert (found.rank, found.factor) == (2, 2.0)
    one = {"a": Work(1, 3.0, 1.0)}
    assert [detector.window(one), detector.window(one)] == [None] * 2
    assert detector.window(one) is not None


def test_a_loaded_machine_has_no_straggler() -> None:
    rng = random.Random(1)
    detector = StragglerDetector()
    for _ in range(500):
        nodes = {f"n{i}": Work(i, rng.uniform(1.0, 3.0), rng.uniform(1.0, 2.0)) for i in range(8)}
        assert detector.window(nodes) is None


def test_daly_near_the_true_optimum() -> None:
    """Against the minimum of the exact expected time (exponential failures): Daly (2006), eq. 20, per unit of work."""
    for cost, mtbf in ((10.0, 3600.0), (60.0, 600.0), (1.0, 86400.0)):

        def exact(tau: float, cost: float = cost, mtbf: float = mtbf) -> float:
            return mtbf * (math.exp((tau + cost) / mtbf) - 1) / tau

        best = min(exact(t / 200 * mtbf) for t in range(1, 1000))
        assert exact(daly(cost, mtbf)) <= best * 1.005
    assert daly(0.0, 100.0) == 0.0
    assert daly(300.0, 100.0) == 100.0


def test_intervals_in_steps() -> None:
    assert snapshot_every(0.005, 0.2, 600) == 1
    assert snapshot_every(0.02, 0.2, 1e6) == 2, "as few apart as make it cheap"
    assert snapshot_every(20.0, 2.0, 3600) == save_every(20.0, 2.0, 3600) == round(daly(20.0, 3600) / 2.0)


def test_all_ranks_come_to_the_same_cadence() -> None:
    ranks = [Cadence(3), Cadence(3)]
    for index, cadence in enumerate(ranks):
        for turn in range(20):
            assert not cadence.due
            cadence.took(9.0 if turn < 4 else 0.02 + 0.01 * index, 0.2)
        assert cadence.due
        assert cadence.every == 1
    for cadence in ranks:
        cadence.agree([other.mine for other in ranks])
    assert {cadence.every for cadence in ranks} == {3}
    assert not ranks[0].due
    assert save_every(0.0, 1.0, 100) == 1
    assert overhead(100.0, 1.0, 10_000.0, 10.0) == pytest.approx(0.01 + 60 / 10_000)


def test_failure_rate_learns() -> None:
    rate = FailureRate(nodes=1024)
    assert rate.mtbf_s == pytest.approx(5700 * 3600 / 1024)
    for _ in range(50):
        rate = rate.ran(600.0).failed()
    assert rate.mtbf_s == pytest.approx(600.0, rel=0.7)


def windows(pace: dict[str, tuple[float, float]], seconds: float, step_s: float = 0.1) -> SlowRank | None:
    """Two ranks a node that work pace[node] seconds a step; pulses every half second."""
    seen = Windows()
    seen.begin(1, 0.0)
    for tick in range(int(seconds * 2)):
        now = tick / 2
        step = int(now / step_s)
        for at, (node, paces) in enumerate(pace.items()):
            work = tuple((2 * at + i, step * paces[i]) for i in range(2))
            found = seen.pulse(Pulse(node, 1, 8 * step, step, work=work), now)
            if found is not None:
                return found
    return None


def test_windows_of_pulses_name_the_slow_rank_in_half_a_minute() -> None:
    found = windows({"a": (0.05, 0.05), "b": (0.05, 0.15)}, 30.0)
    assert found is not None
    assert found.rank == 3
    assert found.factor == pytest.approx(3.0)
    assert windows({"a": (0.05, 0.05), "b": (0.05, 0.06)}, 60.0) is None
    assert windows({"a": (0.05, 0.05), "b": (0.05, 0.15)}, 9.0) is None
    whole_node = windows({"a": (0.05, 0.05), "b": (0.15, 0.15), "c": (0.05, 0.05)}, 30.0)
    assert whole_node is not None
    assert whole_node.rank in (2, 3)
