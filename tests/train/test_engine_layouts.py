"""Invariant 1: any dp x ep layout trains the same, under the strict backend, with the same calls on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layouts import Case, Difference, Outcome, difference, run_cases

pytestmark = pytest.mark.dist


def check(cases: list[Case], references: dict[tuple[bool, int], Outcome]) -> list[Difference]:
    """Compare each case with its reference."""
    found = []
    for case, outcome in zip(cases, run_cases(cases), strict=True):
        off = difference(outcome, references[case.dense, case.global_batch])
        assert off.flips == 0, f"routing flipped in {case}: {off}; choose a seed with a larger router margin"
        assert off.scalar <= 1e-5, f"{case}: {off}"
        assert off.weight <= 1e-5, f"{case}: {off}"
        found.append(off)
    return found


def report(world: int, found: list[Difference]) -> None:
    """The worst, on standard output."""
    scalar, weight = max(off.scalar for off in found), max(off.weight for off in found)
    print(f"{world} ranks, {len(found)} cases: worst loss or norm {scalar:.1e}, worst weight {weight:.1e}, 0 flips")


@pytest.fixture(scope="module")
def references() -> dict[tuple[bool, int], Outcome]:
    """One rank, one micro-batch, by (dense, global batch)."""
    keys = [(False, 8), (True, 8), (False, 16), (True, 16)]
    cases = [Case(dense=dense, global_batch=batch, micro_batch=batch) for dense, batch in keys]
    return dict(zip(keys, run_cases(cases), strict=True))


SAMPLE = {
    1: [Case(micro_batch=2, recompute="norms+attention+moe"), Case(micro_batch=4, dense=True)],
    2: [
        Case(dp=2),
        Case(ep=2, micro_batch=4),
        Case(dp=2, dense=True, recompute="attention"),
        Case(ep=2, dispatcher="alltoall"),
    ],
    3: [Case(dp=3, global_batch=16, micro_batch=3), Case(ep=3, global_batch=16)],
    4: [
        Case(dp=2, ep=2, micro_batch=1, recompute="norms+attention+moe"),
        Case(ep=4, micro_batch=2, recompute="moe"),
        Case(dp=2, ep=2, kind="zero1"),
        Case(dp=2, ep=2, dispatcher="alltoall", recompute="moe@1:3"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("world", sorted(SAMPLE))
def test_sampled_layouts_equal_one_rank(world: int, references: dict[tuple[bool, int], Outcome]) -> None:
    report(world, check(SAMPLE[world], references))


def whole_matrix() -> dict[int, list[Case]]:
    """Every legal (dp, ep) of 1 to 4 ranks, two of 8, with and without SAC, 1 / 2 / 4 micro-batches a rank."""
    layouts = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4), (2, 4), (4, 2)]
    matrix: dict[int, list[Case]] = {}
    for dp, ep in layouts:
        world = dp * ep
        for dense in (False, True) if ep == 1 else (False,):
            for recompute in ("none", "norms+attention+moe"):
                for count in (1, 2, 4):
                    batch = 8 if world in (1, 2) else 16
                    share = -(-batch // world)
                    size = -(-share // count)
                    case = Case(dp, ep, dense=dense, global_batch=batch, micro_batch=size, recompute=recompute)
                    if case not in matrix.setdefault(world, []):
                        matrix[world].append(case)
    return matrix


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_whole_matrix(world: int, references: dict[tuple[bool, int], Outcome]) -> None:
    cases = whole_matrix()[world]
    report(world, [off for at in range(0, len(cases), 4) for off in check(cases[at : at + 4], references)])


def test_same_layout_twice_is_bit_identical() -> None:
    case = Case(dp=2, ep=2, micro_batch=1, steps=3)
    first, second = run_cases([case, case])
    assert first.rows == second.rows
    assert all((first.masters[name] == second.masters[name]).all() for name in first.masters)
    assert all((first.moments[name] == second.moments[name]).all() for name in first.moments)


def test_recompute_changes_no_bit() -> None:
    plain = Case(ep=2, steps=3, dtype="bf16")
    for dispatcher in ("allgather", "alltoall"):
        cases = [replace(plain, dispatcher=dispatcher, recompute=r) for r in ("none", "norms+attention+moe", "moe@0:1")]
        base, *others = run_cases(cases)
        for other in others:
            assert other.rows == base.rows
            assert all((other.masters[name] == base.masters[name]).all() for name in base.masters)


def test_stop_is_agreed_and_calls_match() -> None:
    (outcome,) = run_cases([Case(dp=2, ep=2, micro_batch=1, stop_at=1)])
    assert len(outcome.rows) == 2


def test_forced_uniform_routing_bf16_and_bf16_reduction() -> None:
    plain = Case(ep=2, fur=True, steps=2)
    kinds = [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")]
    cases = [replace(plain, dtype=dtype, reduce_dtype=reduce) for dtype, reduce in kinds]
    base, *others = run_cases(cases)
    for counts in base.counts:
        assert counts.max() - counts.min() <= 2 * 8 * 2, "every expert gets about the same number of slots"
    for other in others:
        assert abs(other.rows[-1][0] - base.rows[-1][0]) < 0.02
