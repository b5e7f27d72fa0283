"""A metric's reduction, expert statistics, FLOPs and the record of a step."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.plan.flops import gemm_params, mfu, train_flops_per_token
from mula_ray.plan.layout import active_params
from mula_ray.train.metrics import ExpertLoad, ExpertWindow, Metric, StepRecord, counts_every, reduce_metrics

floats = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(floats, st.floats(0, 100)), min_size=1, max_size=8))
def test_reduction_over_ranks_is_what_one_rank_would_say(pairs: list[tuple[float, float]]) -> None:
    ranks = [
        {
            "loss": Metric(value, "mean", weight),
            "wait": Metric(value, "max"),
            "least": Metric(value, "min"),
            "tokens": Metric(value, "sum"),
        }
        for value, weight in pairs
    ]
    sent = [[number for name in sorted(rank) for number in (rank[name].value, rank[name].weight)] for rank in ranks]
    calls = []

    def gather(mine):
        calls.append(mine)
        return sent

    out = reduce_metrics(ranks[0], gather)
    assert len(calls) == 1, "one collective a report"
    values = [value for value, _ in pairs]
    weight = sum(weight for _, weight in pairs)
    assert out["wait"].value == max(values)
    assert out["least"].value == min(values)
    assert out["tokens"].value == pytest.approx(sum(values), abs=1e-6)
    if weight > 1e-3:
        mean = sum(value * weight for value, weight in pairs) / weight
        assert out["loss"].value == pytest.approx(mean, rel=1e-6, abs=1e-3)


def test_a_nan_on_one_rank_is_not_hidden_by_a_maximum() -> None:
    for kind in ("max", "min", "mean", "sum"):
        for pair in ((math.nan, 1.0), (1.0, math.nan)):
            assert math.isnan(Metric(pair[0], kind).merge(Metric(pair[1], kind)).value), kind  # type: ignore[arg-type]


def test_expert_statistics() -> None:
    load = ExpertLoad(np.array([[4, 4, 4, 4], [16, 0, 0, 0], [0, 0, 0, 0]]), np.array([1.0, 0.5, 0.0]))
    assert load.imbalance().tolist() == [1.0, 4.0, 0.0]
    assert load.dead().tolist() == [0, 3, 4]
    assert load.variation()[0] == 0.0
    assert load.variation()[1] == pytest.approx(math.sqrt(3))


def test_expert_window_loses_no_token_between_full_lines() -> None:
    window = ExpertWindow(every=4)
    rng = np.random.default_rng(0)
    sent, got, steps = 0, 0, 0
    for step in range(1, 9):
        load = ExpertLoad(rng.integers(0, 9, (2, 8)), np.ones(2))
        sent += int(load.counts.sum())
        fields = window.add(step, load)
        assert len(fields["layers"]["entropy"]) == 2
        if "expert_counts" in fields:
            got += sum(map(sum, fields["expert_counts"]))
            steps += fields["expert_counts_steps"]
    assert (got, steps) == (sent, 8)


def test_full_lines_come_also_when_only_some_steps_are_written() -> None:
    window = ExpertWindow(every=4)
    load = ExpertLoad(np.ones((1, 2), dtype=np.int64), np.ones(1))
    full = [step for step in range(3, 40, 3) if "expert_counts" in window.add(step, load)]
    assert full == [6, 9, 12, 18, 21, 24, 30, 33, 36]


def test_full_counts_are_rare_enough_for_the_largest_model() -> None:
    assert counts_every(4, 16, 300) == 1
    every = counts_every(64, 240, 636_000)
    assert 636_000 // every <= 2000
    assert 64 * 240 / every <= 256


def test_record_is_strict_json_with_the_contract_names() -> None:
    record = StepRecord(3, 1, 0.1 + 0.2, 0.01, 0.001, 1.5, 4e-4, 4096, 1000.0, 0.123, 0.5, 0.001)
    line = record.to_json()
    names = "step generation loss aux_loss z_loss grad_norm lr tokens tokens_per_s mfu step_s data_wait_s"
    assert list(line)[:12] == names.split()
    assert json.loads(json.dumps(line))["loss"] == record.loss, "every bit survives"


MULA_7B = ModelConfig(hidden=2048, layers=16, heads=16, moe=MoEConfig(experts=64, top_k=8, expert_width=1024))


def test_flops_follow_the_formula() -> None:
    norms = 16 * 4 * 2048 + 2048
    embedding = 50304 * 2048
    assert gemm_params(MULA_7B) == active_params(MULA_7B) - norms - embedding
    assert train_flops_per_token(MULA_7B, 2048) == 6 * gemm_params(MULA_7B) + 6 * 16 * 2048 * 2048
    rate = 1000.0
    full = train_flops_per_token(MULA_7B, 2048) * rate / 1e12
    assert mfu(MULA_7B, 2048, rate, 2, peak_tflops=full) == pytest.approx(0.5)
    assert mfu(MULA_7B, 2048, rate, 2, peak_tflops=0.0) == 0.0
