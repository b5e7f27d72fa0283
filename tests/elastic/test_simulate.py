"""The simulator: same seed, same outcome; time adds up; the policy's invariants hold (it asserts them itself)."""

from __future__ import annotations

import dataclasses
import time

import pytest

from mula_ray.elastic.fleet import Costs, Fault, Fleet, Outcome, faults
from mula_ray.elastic.placement import Shape
from mula_ray.elastic.simulate import simulate
from mula_ray.elastic.state import PolicyConfig

RULES = PolicyConfig(Shape(ep=12, tp=1, pp=2, tiles_per_node=12), dp=8, min_dp=4, max_recoveries=50, skip_bad_data=True)
QUICK = Costs(
    step_s=2.0, detect_s={"rank": 0.05, "node": 1.5, "agent": 1.5, "rack": 1.5, "hang": 2.0, "straggler": 20.0}
)


def fleet(**changes: object) -> Fleet:
    base = Fleet(RULES, working=16, spares=3, rack=4, duration_s=86400.0, faults=300, costs=QUICK, repair_s=1800.0)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def adds_up(out: Outcome) -> None:
    assert out.useful_s + sum(out.lost_s.values()) == pytest.approx(out.wall_s, rel=1e-9)
    assert all(seconds >= -1e-6 for seconds in out.lost_s.values())
    assert 0 <= out.goodput <= 1


def test_without_faults_only_saves_cost_time() -> None:
    out = simulate(fleet(faults=0))
    assert out.goodput > 0.93
    assert out.generations == 1
    assert out.exit_code is None
    adds_up(out)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["shrink", "wait"])
def test_a_day_with_300_faults(seed: int, policy: str) -> None:
    rules = dataclasses.replace(RULES, policy=policy, wait_s=86400.0)
    out = simulate(fleet(seed=seed, rules=rules))
    adds_up(out)
    assert out.exit_code is None, out.reason
    assert out.steps > 10_000
    assert sum(out.faults.values()) > 200
    assert (out.lowest_dp < 8) == (policy == "shrink")


def test_replayable_from_the_seed() -> None:
    assert simulate(fleet(seed=3)) == simulate(fleet(seed=3))
    assert simulate(fleet(seed=3)) != simulate(fleet(seed=4))
    assert list(faults(fleet(seed=3))) == list(faults(fleet(seed=3)))


def test_more_spares_do_not_hurt() -> None:
    goodputs = [simulate(fleet(spares=n, seed=1)).goodput for n in (0, 2, 8)]
    assert goodputs == sorted(goodputs)


def test_given_faults_are_taken_as_given() -> None:
    out = simulate(fleet(), [Fault(1000.0, "node", 0.5, False), Fault(2000.0, "rank", 0.1, False)])
    assert out.faults == {"node": 1, "rank": 1}
    assert out.generations == 3
    assert out.replaced == 1
    assert out.redone_steps <= 2
    adds_up(out)


def test_a_systemic_failure_ends_the_run_without_eating_the_spares() -> None:
    rules = dataclasses.replace(RULES, max_recoveries=5)
    every = [Fault(500.0 + i, "rank", 0.1 * (i % 7), False) for i in range(100)]
    out = simulate(fleet(rules=rules), every)
    assert out.exit_code == 30
    assert "systemic" in out.reason
    assert out.generations <= 7
    adds_up(out)
    assert any("exit 30" in line for line in out.lines())


def test_all_nodes_gone_waits_then_ends() -> None:
    gone = [Fault(100.0 + 10 * i, "rack", 0.0, False) for i in range(5)]
    rules = dataclasses.replace(RULES, wait_s=60.0)
    out = simulate(fleet(rules=rules, repair_s=1e9), gone)
    assert out.exit_code == 30
    assert "too few nodes" in out.reason
    assert out.lost_s["waiting for nodes"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_1024_nodes_30_days_100000_faults_in_a_minute() -> None:
    """Issue 8's bar. The time is printed, not asserted: docs/verified.md has it."""
    rules = PolicyConfig(
        Shape(ep=12, tp=1, pp=8, tiles_per_node=12),
        128,
        min_dp=64,
        max_recoveries=50,
        skip_bad_data=True,
        wait_s=86400.0,
    )
    big = Fleet(rules, working=1024, spares=96, duration_s=30 * 86400.0, faults=1e5, costs=QUICK, repair_s=3600.0)
    began = time.process_time()
    out = simulate(big)
    print(*out.lines(), f"{time.process_time() - began:.1f} s of processor time, {out.decisions} decisions", sep="\n")
    assert sum(out.faults.values()) > 99_000
    assert out.exit_code is None, out.reason
    adds_up(out)
