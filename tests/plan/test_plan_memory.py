"""Memory that `plan` reckons against the measured peak of real ranks."""

from __future__ import annotations

import pytest

from mula_ray.config.load import load
from mula_ray.plan.legal import legal_topology

BIG = [
    "model.vocab_size=8192",
    "model.hidden=512",
    "model.heads=8",
    "model.layers=4",
    "model.moe={experts: 8, top_k: 2, expert_width: 512}",
    "data.context=128",
    "train.micro_batch=4",
    "train.global_batch=8",
]
LAYOUTS = [
    ["cluster.nodes=1"],
    ["cluster.nodes=2"],
    ["cluster.nodes=2", "train.dtype=bf16", "model.layers=6"],
    ["cluster.nodes=2", "parallel.ep=2", "model.layers=8"],
    [
        "cluster.nodes=2",
        "parallel.ep=2",
        "train.dtype=bf16",
        "parallel.recompute=norms+attention+moe",
        "model.layers=8",
    ],
    ["cluster.nodes=2", "parallel.ep=2", "optim.kind=zero1", "model.layers=8"],
    ["cluster.nodes=1", "cluster.tiles_per_node=2", "parallel.tp=2", "model.layers=5"],
    ["cluster.nodes=2", "parallel.pp=2", "model.layers=8"],
]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout))
def test_peak_memory_is_within_ten_percent(layout: list[str]) -> None:
    from tests.dist_helper import run_ranks
    from tests.plan.memory_ranks import peak_of_steps

    sets = BIG + layout
    world = legal_topology(load("mula-tiny", sets).config).world
    for peak, expected in run_ranks(peak_of_steps, world, sets, timeout=110.0, allocator=True):
        assert expected["state"] >= 500e6
        assert peak == pytest.approx(expected["total"], rel=0.10), (peak / 1e6, expected)
