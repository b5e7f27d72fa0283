"""Estimates against the real thing: calls and bytes, memory; and what `plan` says about big layouts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mula_ray.config.errors import UserError
from mula_ray.config.load import load
from mula_ray.config.site import load_site
from mula_ray.plan.estimate import calibrate, checkpoint, estimate, scaling, with_tiles
from mula_ray.plan.legal import legal_topology
from mula_ray.plan.shape import RankShape, rank_shapes
from mula_ray.plan.speed import step_time
from mula_ray.plan.traffic import step_traffic

SMALL = [
    "model.hidden=64",
    "model.heads=4",
    "model.vocab_size=512",
    "model.moe={experts: 8, top_k: 2, expert_width: 32}",
    "data.context=16",
    "train.micro_batch=2",
    "optim.bucket_mb=0.1",
]
NODE = "cluster.tiles_per_node=2"
LAYOUTS = [
    ["parallel.ep=2", NODE, "train.global_batch=16"],
    ["parallel.ep=2", NODE, "train.global_batch=8", "train.dtype=bf16"],
    ["parallel.ep=4", "cluster.tiles_per_node=4", "cluster.nodes=1", "train.global_batch=8", "parallel.recompute=moe"],
    ["parallel.ep=2", NODE, "optim.kind=zero1", "train.global_batch=8"],
    [
        "parallel.tp=2",
        "cluster.nodes=1",
        "cluster.tiles_per_node=2",
        "train.global_batch=4",
        "parallel.recompute=attention",
    ],
    ["parallel.pp=2", "cluster.nodes=2", "train.global_batch=8"],
]


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout))
def test_bytes_of_a_step_are_exact(layout: list[str]) -> None:
    from tests.dist_helper import run_ranks
    from tests.plan.traffic_ranks import count_step

    sets = SMALL + layout
    config = load("mula-tiny", sets).config
    topology = legal_topology(config)
    for measured, pp in run_ranks(count_step, topology.world, sets):
        expected: Counter[tuple[str, str]] = Counter()
        for entry in step_traffic(RankShape(config, topology, pp)):
            kind = "all_reduce" if entry.kind == "reduce_scatter" else entry.kind  # gloo: all-reduce and slice
            group = "edp" if entry.group == "dp" and topology.tp == 1 else entry.group  # same members, one group
            expected[group, kind] += entry.payload
        sent = {
            ("pp", kind) if group.startswith("channel") else (group, kind): size
            for (group, kind), size in measured.items()
            if not group.startswith("channel") or group.startswith(f"channel{pp}>")  # the receiver sees the call too
        }
        assert sent == dict(expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["moe", "norms+moe", "attention+moe", "norms+attention+moe"])
def test_activation_formula_matches_what_is_kept(dtype: str, recompute: str) -> None:
    """Everything but the experts' own activations, which belong to the backend: they are recomputed here."""
    from mula_ray.plan.memory import layer_bytes
    from tests.plan.traffic_ranks import kept_bytes

    sets = [*SMALL, f"train.dtype={dtype}", f"parallel.recompute={recompute}", "data.context=64"]
    config = load("mula-tiny", sets).config
    measured = (kept_bytes(config, 2) - kept_bytes(config, 1)) / (2 * 64)
    assert measured == pytest.approx(layer_bytes(RankShape(config, legal_topology(config)), 0), rel=0.02)


def test_mula_220b_fits_64_gb_with_recomputation() -> None:
    site = load_site("aurora")
    config, topology = with_tiles(load("mula-220b-a10b").config, 3072, site)
    result = estimate(config, topology, site)
    assert (topology.dp, topology.pp, topology.ep) == (32, 8, 12)
    assert result.fits
    state = 16 * result.total  # bf16 weights and gradients, fp32 masters and moments, were nothing sharded
    assert result.memory.state < state / 96 < 64e9
    assert result.memory_without_recompute.activations > 3 * result.memory.activations


def test_sharded_state_adds_up() -> None:
    """Summed over all ranks, masters are the whole model once (and padding)."""
    for name in ("mula-20b-a2b", "mula-220b-a10b"):
        config = load(name).config
        topology = legal_topology(config)
        owned = sum(
            plan.shard_numel * (topology.world // topology.pp)
            for r in rank_shapes(config, topology)
            for plan in r.plans.values()
        )
        total = estimate(config, topology, load_site("aurora")).total
        assert total <= owned < total * 1.001


def test_virtual_stages_shrink_the_bubble() -> None:
    site = load_site("aurora")
    shares = {}
    for name, sets in (("interleaved", []), ("1f1b", ["parallel.schedule=1f1b", "parallel.virtual_stages=1"])):
        config = load("mula-220b-a10b", sets).config
        shares[name] = step_time(rank_shapes(config, legal_topology(config)), site).bubble_share
    assert shares["1f1b"] == pytest.approx(0.47, abs=0.04)
    assert 0.15 < shares["interleaved"] < 0.25


def test_scaling_curve() -> None:
    points = scaling(load("mula-220b-a10b").config, load_site("aurora"))
    assert [point.tiles for point in points] == [384, 768, 1536, 3072, 6144, 12288]
    efficiencies = [point.efficiency for point in points]
    assert efficiencies[0] == 1.0
    assert efficiencies == sorted(efficiencies, reverse=True)


def test_checkpoint_size() -> None:
    config = load("mula-7b-a1b").config
    result = checkpoint(config, load_site("aurora"), 3072)
    assert result.bytes == 12 * 6_919_161_856
    assert result.model_bytes == 2 * 6_919_161_856


def test_an_ep_that_does_not_divide_the_experts_is_the_first_thing_said() -> None:
    with pytest.raises(UserError, match=r"parallel.ep is 3, which does not divide .* nearest legal: 1, 2, 4, 8"):
        with_tiles(load("mula-tiny", ["parallel.ep=3"]).config, 16, None)


def test_tiles_that_do_not_fit_name_the_nearest() -> None:
    with pytest.raises(UserError, match=r"--tiles 1000 .* nearest legal: 960, 1056"):
        with_tiles(load("mula-220b-a10b").config, 1000, load_site("aurora"))


def run_folder(tmp_path: Path, seconds: float) -> Path:
    from mula_ray.config.load import write_resolved

    write_resolved(load("mula-tiny"), tmp_path / "config.yaml")
    rows = [json.dumps({"step": step, "step_s": seconds}) for step in range(20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 99, "st']))
    return tmp_path


def test_calibration_reproduces_the_measured_step(tmp_path: Path) -> None:
    site, note = calibrate(load_site("local"), run_folder(tmp_path, 0.4))
    config = load("mula-tiny").config
    again = step_time(rank_shapes(config, legal_topology(config)), site).total
    assert again == pytest.approx(0.4, rel=0.05)
    assert "0.4 s a step measured" in note


def test_calibration_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        calibrate(load_site("local"), tmp_path)


def test_forecast_counts_failures_and_spares() -> None:
    from mula_ray.elastic.forecast import enough_spares, forecast

    site = load_site("aurora")
    config, _ = with_tiles(load("mula-220b-a10b").config, 3072, site)
    result = forecast(config, site, 6.0, 8.0)
    assert result.failures_per_day == pytest.approx(24 * 256 / 1000)
    assert 0.85 < result.goodput < 1.0
    assert sum(result.lost.values()) + result.goodput == pytest.approx(1.0, abs=0.02)
    assert [enough_spares(mean) for mean in (0.0, 1.0, 10.0)] == [0, 4, 18]
