"""Pipeline tables: legal, complete, as good as their formulas, first-in first-out between ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mula_ray.config.errors import UserError
from mula_ray.config.load import load
from mula_ray.plan.legal import legal_topology, micro_batches
from mula_ray.plan.schedule import Action, bubble_formula, build_schedule, forward_only, messages, simulate

CASES = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2)]


@pytest.mark.parametrize(("name", "virtual"), CASES)
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_bubble_is_that_of_the_formula(name: str, virtual: int, pp: int, groups: int) -> None:
    timing = simulate(build_schedule(name, pp, virtual, groups * pp))
    assert timing.bubble == pytest.approx(bubble_formula(name, pp, virtual, groups * pp), abs=0.02)


@given(st.sampled_from(CASES), st.integers(2, 5), st.integers(1, 7))
def test_every_chunk_once_and_runnable(case: tuple[str, int], pp: int, count: int) -> None:
    name, virtual = case
    number = count * pp if name == "interleaved" else count
    schedule = build_schedule(name, pp, virtual, number)
    simulate(schedule)  # raises when the table cannot run
    actions = [action for order in schedule.orders for action in order]
    assert len(actions) == len(set(actions))
    split = name in ("zero_bubble", "zbv")
    kinds = ("F", "I", "W") if split else ("F", "B")
    assert set(actions) == {Action(k, s, m) for k in kinds for s in range(pp * virtual) for m in range(number)}
    assert all(schedule.owner(a.stage) == rank for rank, order in enumerate(schedule.orders) for a in order)


@given(st.sampled_from(CASES), st.integers(2, 4))
def test_messages_match_the_transfers(case: tuple[str, int], pp: int) -> None:
    name, virtual = case
    schedule = build_schedule(name, pp, virtual, 2 * pp)
    sent = [m for channel in messages(schedule).values() for m in channel]
    borders = sum(schedule.owner(a) != schedule.owner(b) for a, b in pairwise(range(schedule.stages)))
    assert len(sent) == len(set(sent)) == 2 * borders * 2 * pp


def test_peak_of_1f1b_is_bounded_by_stages() -> None:
    assert simulate(build_schedule("1f1b", 4, 1, 64)).peak == (4, 3, 2, 1)


@pytest.mark.parametrize("name", ["mula-100b-a7b", "mula-220b-a10b"])
def test_shipped_pipelines_idle_at_most_a_fifth(name: str) -> None:
    config = load(name, []).config
    parallel = config.parallel
    number = micro_batches(config, legal_topology(config))
    assert number == {"mula-100b-a7b": 4, "mula-220b-a10b": 8}[name]
    table = build_schedule(parallel.schedule, parallel.pp, parallel.virtual_stages, number)
    assert simulate(table).bubble <= 0.20
    assert simulate(build_schedule("1f1b", parallel.pp, 1, number)).bubble > 0.42


@pytest.mark.parametrize(
    ("name", "virtual", "number", "words"),
    [("interleaved", 2, 6, "nearest legal: 4, 8"), ("zbv", 1, 4, "set it to 2"), ("1f1b", 2, 4, "use interleaved")],
)
def test_refusals_name_the_fix(name: str, virtual: int, number: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_schedule(name, 4, virtual, number)


def test_forward_only_runs() -> None:
    for name, virtual in CASES:
        simulate(forward_only(name, 4, virtual, 3))
