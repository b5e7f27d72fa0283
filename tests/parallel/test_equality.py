"""Any layout, same training: a seeded sample of the matrix by default, the whole of it by `pytest -m slow`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from equality import CASES, EIGHT, Case, Outcome, difference, run_case

from mula_ray.plan.topology import Topology

pytestmark = pytest.mark.dist
RELATIVE = 1e-5
ABSOLUTE = 1e-5
SAMPLE = random.Random(2604).sample([case for case in CASES if case.topology.world > 2], 8) + EIGHT[:2]


@cache
def _reference(moe: bool, batch: int) -> Outcome:
    return run_case(Case(Topology(), moe=moe, global_batch=batch), Topology())


def _check(case: Case) -> tuple[float, float, float]:
    got = difference(_reference(case.moe, case.batch), run_case(case, case.topology))
    assert got.losses <= RELATIVE, f"{case.label}: losses differ by {got.losses:.1e}"
    assert got.norm <= RELATIVE, f"{case.label}: gradient norm differs by {got.norm:.1e}"
    assert got.weights <= ABSOLUTE, f"{case.label}: weights differ by {got.weights:.1e}"
    return got.losses, got.norm, got.weights


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.label)
def test_layout_trains_like_one_rank(case: Case) -> None:
    _check(case)


@pytest.mark.parametrize(
    "case",
    [Case(Topology(1, 2, 1, 2), schedule="zbv", virtual=2), Case(Topology(2, 1, 2, 1), recompute="moe")],
    ids=lambda case: case.label,
)
def test_same_layout_twice_is_the_same_bits(case: Case) -> None:
    first, second = run_case(case, case.topology), run_case(case, case.topology)
    assert first.steps == second.steps
    assert all(first.weights[name].equal(second.weights[name]) for name in first.weights)


def _whole(cases: Sequence[Case], report: Callable[[str], None]) -> None:
    worst = (0.0, 0.0, 0.0)
    for case in cases:
        got = _check(case)
        worst = (max(worst[0], got[0]), max(worst[1], got[1]), max(worst[2], got[2]))
    report(
        f"{len(cases)} layouts: worst loss {worst[0]:.1e}, worst norm {worst[1]:.1e} (relative, bar {RELATIVE:.0e}), "
        f"worst weight {worst[2]:.1e} (absolute, bar {ABSOLUTE:.0e})"
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whole_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    def report(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    _whole(CASES, report)
    _whole(EIGHT, report)
