"""The MoE-against-dense experiment: a fair pair of configurations, and what is made of its curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from mula_ray.bench import quality
from mula_ray.config.errors import UserError
from mula_ray.plan.layout import active_params, total_params
from mula_ray.train.status import read_status


def test_the_pair_differs_in_nothing_but_the_experts() -> None:
    moe, dense = (quality.configuration(name, "short-seed0") for name in quality.MODELS)
    ours, theirs = active_params(moe.model), active_params(dense.model)
    assert 0 <= theirs - ours <= 0.001 * ours, "equal active parameters, in doubt in favour of the dense model"
    assert total_params(moe.model) > 1.9 * total_params(dense.model)
    other = moe.model_copy(update={"model": dense.model, "checkpoint": dense.checkpoint})
    assert other == dense, "same data, batch, recipe and steps"
    changed = {name for name in type(moe.model).model_fields if getattr(moe.model, name) != getattr(dense.model, name)}
    assert changed == {"ffn", "moe", "router"}
    as_dense = {"norm_topk_prob": False, "balance_coef": dense.model.router.balance_coef}
    assert moe.model.router.model_copy(update=as_dense) == dense.model.router


def test_what_is_made_of_the_curves() -> None:
    moe, dense = [(1, 8.0), (50, 4.0), (100, 3.0)], [(1, 8.0), (50, 5.0), (100, 3.5)]
    rows = {row["metric"]: row for row in quality.rows_of("c", moe, dense, tokens=10)}
    assert rows["held_out_difference"]["value"] == pytest.approx(0.5)
    assert rows["tokens_to_dense_loss"]["value"] == pytest.approx(750.0)
    assert rows["tokens_to_dense_loss"]["speedup"] == pytest.approx(100 / 75)
    assert quality.reached(dense, 3.0) is None
    worse = {row["metric"] for row in quality.rows_of("c", dense, moe, tokens=10)}
    assert "tokens_to_dense_loss" not in worse


def test_a_model_trains_alone_and_leaves_a_run_folder(tmp_path: Path) -> None:
    config = quality.configuration("mula-tiny-dense", "short-seed1")
    brief = config.train.model_copy(update={"steps": 2, "global_batch": 2, "micro_batch": 2, "eval_samples": 4})
    curve = quality.train_alone(config.model_copy(update={"train": brief}), tmp_path)
    assert [step for step, _ in curve] == [1, 2]
    assert 0 < curve[-1][1] < 20
    assert read_status(tmp_path).step == 2


def test_an_unknown_case_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="short-seed0"):
        quality.run(["nonsense"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_moe_is_better_in_all_three_seeds(tmp_path: Path) -> None:
    """The bar of the project; figures in docs/moe_vs_dense.md."""
    result = quality.run(folder=tmp_path)
    better = [row["value"] for row in result["rows"] if row["metric"] == "held_out_difference"]
    assert len(better) == 3
    assert min(better) > 0
