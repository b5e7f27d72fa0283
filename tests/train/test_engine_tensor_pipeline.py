"""Invariant 1 over all four axes: tensor and pipeline parallelism under every schedule, with everything else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from layouts import Case, Difference, Outcome, difference, run_cases

from mula_ray.plan.topology import Topology

pytestmark = pytest.mark.dist
ALL_PARTS = "norms+attention+moe"
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2))
BATCH = 8


def topologies(world: int, *, dense: bool) -> Iterator[Topology]:
    """Every way to split `world` ranks over the axes that the model of the tests (4 layers, 4 heads) can take."""
    for dp, ep, tp, pp in itertools.product((1, 2, 3, 4), repeat=4):
        if dp * ep * tp * pp == world and 4 % tp == 0 and tp * pp > 1 and not (dense and ep > 1):
            yield Topology(dp, ep, tp, pp)


def cases_of(topology: Topology, *, dense: bool) -> Iterator[Case]:
    """Schedules x SAC x micro-batches (1 to 8 a rank) of one topology."""
    t = topology
    schedules = [s for s in SCHEDULES if t.pp * s[1] <= 4] if t.pp > 1 else [SCHEDULES[0]]
    share = BATCH // t.ddp
    for (schedule, virtual), recompute, size in itertools.product(schedules, ("none", ALL_PARTS), (1, 2, 4, 8)):
        if size > share or (schedule == "interleaved" and (share // size) % t.pp):
            continue
        yield Case(
            t.dp, t.ep, t.tp, t.pp, dense=dense, global_batch=BATCH, micro_batch=size, recompute=recompute,
            schedule=schedule, virtual=virtual,
        )  # fmt: skip


MATRIX = {
    world: [c for dense in (False, True) for t in topologies(world, dense=dense) for c in cases_of(t, dense=dense)]
    for world in (2, 4)
}
EIGHT = [
    Case(1, 2, 2, 2, micro_batch=1, schedule="zero_bubble"),
    Case(2, 2, 1, 2, micro_batch=1, schedule="zbv", virtual=2, recompute=ALL_PARTS),
    Case(2, 1, 2, 2, micro_batch=1, schedule="interleaved", virtual=2),
    Case(1, 1, 2, 4, micro_batch=1),
    Case(1, 4, 1, 2, micro_batch=1, recompute="moe"),
    Case(2, 2, 2, 1, micro_batch=1, recompute="attention"),
    Case(2, 1, 2, 2, dense=True, micro_batch=1, schedule="zero_bubble"),
    Case(2, 1, 1, 4, micro_batch=1, schedule="zero_bubble", recompute=ALL_PARTS),
]


@pytest.fixture(scope="module")
def references() -> dict[bool, Outcome]:
    """One rank, one micro-batch, by dense or not."""
    cases = [Case(dense=dense, global_batch=BATCH, micro_batch=BATCH) for dense in (False, True)]
    return dict(zip((False, True), run_cases(cases), strict=True))


def check(cases: list[Case], references: dict[bool, Outcome]) -> list[Difference]:
    """Train the cases (one world size) and hold each against one rank."""
    found = []
    for case, outcome in zip(cases, run_cases(cases), strict=True):
        off = difference(outcome, references[case.dense])
        assert off.flips == 0, f"{case}: routing flipped; choose a seed with a larger router margin"
        assert off.scalar <= 1e-5, f"{case}: {off}"
        assert off.weight <= 1e-5, f"{case}: {off}"
        assert abs(outcome.eval_loss / references[case.dense].eval_loss - 1) <= 1e-5, f"{case}: evaluation differs"
        found.append(off)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_sampled_layouts_equal_one_rank(world: int, references: dict[bool, Outcome]) -> None:
    check(random.Random(2604).sample(MATRIX[world], 5), references)


def test_eight_ranks_all_axes(references: dict[bool, Outcome]) -> None:
    check(EIGHT[:1], references)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_whole_matrix(world: int, references: dict[bool, Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    cases = EIGHT if world == 8 else MATRIX[world]
    found = [off for at in range(0, len(cases), 8) for off in check(cases[at : at + 8], references)]
    with capsys.disabled():
        print(
            f"\n{len(cases)} cases of {world} ranks: worst loss or norm {max(f.scalar for f in found):.1e} (relative), "
            f"worst weight {max(f.weight for f in found):.1e} (absolute), routing flips {sum(f.flips for f in found)}"
        )


def test_same_layout_twice_is_bit_identical() -> None:
    for case in (
        Case(1, 2, 1, 2, micro_batch=1, schedule="zbv", virtual=2, steps=3),
        Case(1, 2, 2, 1, micro_batch=2, steps=3, dtype="bf16"),
    ):
        first, second = run_cases([case, case])
        assert first.rows == second.rows
        assert all((first.masters[name] == second.masters[name]).all() for name in first.masters)


def test_recompute_changes_no_bit_in_a_pipeline() -> None:
    cases = [
        Case(1, 1, 2, 2, micro_batch=1, schedule="zero_bubble", steps=3, recompute=r, dtype="bf16")
        for r in ("none", ALL_PARTS)
    ]
    plain, recomputed = run_cases(cases)
    assert plain.rows == recomputed.rows
    assert all((plain.masters[name] == recomputed.masters[name]).all() for name in plain.masters)


def test_forced_uniform_routing_and_unequal_work_in_a_pipeline(references: dict[bool, Outcome]) -> None:
    """FUR in bf16 runs; dp 2 with 9 samples gives one rank an empty one, and the same mean as one rank."""
    (fur,) = run_cases([Case(1, 2, 1, 2, micro_batch=1, fur=True, dtype="bf16", steps=2)])
    assert all(counts.max() - counts.min() <= 2 * 8 * 2 for counts in fur.counts)
    (one,) = run_cases([Case(global_batch=9, micro_batch=9)])
    (two,) = run_cases([Case(2, 1, 1, 2, global_batch=9, micro_batch=1)])
    off = difference(two, one)
    assert off.scalar <= 1e-5
    assert off.weight <= 1e-5
    assert references[False].rows != one.rows


def test_incomplete_group_of_micro_batches_is_filled_with_empty_ones(references: dict[bool, Outcome]) -> None:
    """Three micro-batches on two interleaved ranks: what a run that lost nodes may come to."""
    (uneven,) = run_cases([Case(1, 1, 1, 2, micro_batch=3, schedule="interleaved", virtual=2)])
    assert difference(uneven, references[False]).scalar <= 1e-5
