"""The one table: all ranks together hold every element exactly as often as its family says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.plan.layout import narrow, param_specs
from mula_ray.plan.partition import local_params
from mula_ray.plan.stages import split_stages
from mula_ray.plan.topology import Topology

MOE = ModelConfig(vocab_size=48, hidden=24, layers=4, heads=12, moe=MoEConfig(experts=12, top_k=2, expert_width=8))
DENSE = ModelConfig(vocab_size=48, hidden=24, layers=4, heads=12, ffn=24, norm="layernorm", qk_norm=False)
legal = st.builds(
    Topology,
    dp=st.integers(1, 3),
    ep=st.sampled_from([1, 2, 3, 4]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 3),
)


@settings(deadline=None, max_examples=25)
@given(legal, st.sampled_from([MOE, DENSE]))
def test_every_element_is_held_as_often_as_its_family_says(topology: Topology, model: ModelConfig) -> None:
    held = {spec.name: np.zeros(spec.shape, dtype=int) for spec in param_specs(model)}
    stages = split_stages(model.layers, topology.pp)
    for rank in range(topology.world):
        at = topology.coords(rank)
        for param in local_params(model, topology, at, stages[at.pp]):
            box = tuple(slice(o, o + s) for o, s in zip(param.offset, param.shape, strict=True))
            held[param.spec.name][box] += 1
    for spec in param_specs(model):
        dense = topology.ddp * (topology.tp if spec.tp_axis is None else 1)
        times = topology.edp if spec.family == "expert" else dense
        assert (held[spec.name] == times).all(), spec.name


def test_a_dim_that_does_not_divide_is_refused() -> None:
    spec = next(spec for spec in param_specs(MOE) if spec.family == "expert")
    topology = Topology(ep=5)
    with pytest.raises(ValueError, match=r"dim 0 of size 12 is not divisible by parallel\.ep 5"):
        narrow(spec, topology, topology.coords(0))
