"""Sample order: a permutation an epoch, a pure function, each sample exactly once whatever world sizes and failures."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mula_ray.plan.order import (
    SampleOrder,
    assign,
    global_to_epoch,
    micro_batch_count,
    sample_indices,
    share,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 50))
def test_an_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    found = sample_indices(seed, epoch, np.arange(count), count)
    assert np.array_equal(np.sort(found), np.arange(count))


def test_the_order_is_pinned() -> None:
    """Changing these numbers changes what every unfinished run would read next."""
    assert sample_indices(7, 3, np.arange(8), 1000).tolist() == [982, 436, 815, 922, 216, 426, 823, 116]
    assert SampleOrder.of("content", 5, 100).windows(np.array([0, 99, 100, 250])).tolist() == [11, 46, 89, 92]


def test_order_differs_by_seed_epoch_and_content() -> None:
    at = np.arange(500)
    base = SampleOrder.of("a", 0, 500).windows(at)
    assert not np.array_equal(base, SampleOrder.of("a", 1, 500).windows(at))
    assert not np.array_equal(base, SampleOrder.of("b", 0, 500).windows(at))
    assert not np.array_equal(base, SampleOrder.of("a", 0, 500).windows(at + 500))
    assert np.array_equal(base, SampleOrder.of("a", 0, 500).windows(at))


def test_positions_look_random() -> None:
    """Neighbours do not stay neighbours, and no region of an epoch prefers a region of the data."""
    found = sample_indices(1, 0, np.arange(100_000), 100_000)
    assert np.count_nonzero(np.abs(np.diff(found)) == 1) < 20
    assert abs(np.corrcoef(np.arange(100_000), found)[0, 1]) < 0.02
    first_tenth = np.bincount(found[:10_000] // 10_000, minlength=10)
    assert first_tenth.min() > 850
    assert first_tenth.max() < 1150


def test_huge_epochs_need_no_table() -> None:
    count = 10**13 + 7
    positions = np.array([0, 1, count // 2, count - 1])
    found = sample_indices(3, 1, positions, count)
    assert len(set(found.tolist())) == 4
    assert found.min() >= 0
    assert found.max() < count


def test_an_epoch_continues_into_the_next() -> None:
    order = SampleOrder.of("x", 0, 10)
    first, second = order.windows(np.arange(10)), order.windows(np.arange(10, 20))
    assert sorted(first) == sorted(second) == list(range(10))
    assert np.array_equal(order.windows(np.arange(8, 12)), np.concatenate([first[8:], second[:2]]))
    assert global_to_epoch(25, 10) == (2, 5)


@given(st.integers(1, 64), st.integers(1, 12), st.integers(1, 6), st.integers(0, 1000))
def test_a_step_is_cut_exactly(global_batch: int, ddp: int, micro_batch: int, step: int) -> None:
    batches = [assign(step, global_batch, ddp, index, micro_batch) for index in range(ddp)]
    assert {len(mine) for mine in batches} == {micro_batch_count(global_batch, ddp, micro_batch)}
    assert {len(batch) for mine in batches for batch in mine} == {micro_batch}
    real = [sample for mine in batches for batch in mine for sample in batch if sample >= 0]
    assert real == list(range(step * global_batch, (step + 1) * global_batch))
    sizes = [stop - first for first, stop in (share(global_batch, ddp, index) for index in range(ddp))]
    assert max(sizes) - min(sizes) <= 1


Event = tuple[int, bool, int]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 24),
    st.integers(5, 80),
    st.lists(st.tuples(st.integers(1, 8), st.booleans(), st.integers(0, 4)), min_size=1, max_size=30),
)
def test_each_sample_exactly_once_whatever_happens(global_batch: int, count: int, events: list[Event]) -> None:
    """A ledger over a run of changing world sizes, failing steps and rewinds to an earlier checkpoint.

    Only the last execution of a step counts, as in `metrics.jsonl`; the committed steps together read a prefix of the
    epochs' orders, each window once an epoch.
    """
    order = SampleOrder.of("content", 1, count)
    ledger: dict[int, list[int]] = {}
    step = 0
    for ddp, fails, back in events:
        batches = [batch for index in range(ddp) for batch in assign(step, global_batch, ddp, index, 2)]
        read = [sample for batch in batches for sample in batch if sample >= 0]
        if fails:
            step = max(0, step - back)
            continue
        ledger[step] = order.windows(np.array(read)).tolist()
        step += 1
    consumed = [window for at in range(step) for window in ledger[at]]
    assert consumed == order.windows(np.arange(step * global_batch)).tolist()
    for epoch in range(len(consumed) // count):
        assert set(Counter(consumed[epoch * count : (epoch + 1) * count]).values()) == {1}


@pytest.mark.parametrize(("count", "positions"), [(0, [0]), (5, [5]), (5, [-1])])
def test_positions_outside_are_refused(count: int, positions: list[int]) -> None:
    with pytest.raises(ValueError, match=r"count|positions"):
        sample_indices(0, 0, np.array(positions), count)
