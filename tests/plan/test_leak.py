"""Memory stays flat from step to step, recomputed or not: nothing of a step outlives it."""

from __future__ import annotations

import gc

import pytest
import torch

from mula_ray.config.load import load
from mula_ray.parallel.executor import MicroBatch
from mula_ray.parallel.groups import Groups
from mula_ray.plan.topology import Topology
from mula_ray.train.engine import Engine


def live_tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor)


@pytest.mark.parametrize("recompute", ["none", "norms", "attention", "moe"])
def test_no_tensor_outlives_its_step(recompute: str) -> None:
    sets = ["cluster.nodes=1", "model.hidden=32", "model.heads=2", "model.vocab_size=256", "data.context=16"]
    config = load("mula-tiny", [*sets, f"parallel.recompute={recompute}", "train.global_batch=8"]).config
    engine = Engine(config, Topology(), 0, Groups(Topology(), 0, None), "cpu")
    batch = MicroBatch(torch.zeros(8, 17, dtype=torch.int64), torch.ones(8))
    engine.step(0, [batch])
    before = live_tensors()
    for step in range(1, 4):
        engine.step(step, [batch])
    assert live_tensors() <= before
