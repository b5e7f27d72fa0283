"""EPSO's pure plan: every element owned by one rank, buckets that cover, padding within its bound, one launch order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.plan.partition import MAX_PADDING, FamilyPlan, launch_order, local_params, plan_family
from mula_ray.plan.stages import split_stages
from mula_ray.plan.topology import Topology

MODEL = ModelConfig(vocab_size=37, hidden=10, layers=3, heads=1, moe=MoEConfig(experts=6, top_k=2, expert_width=7))


def plan(shards: int, bucket: int, first: frozenset[str] = frozenset()) -> FamilyPlan:
    (stage,) = split_stages(MODEL.layers, 1)
    params = list(enumerate(local_params(MODEL, Topology(), Topology().coords(0), stage)))
    return plan_family("dense", [p for p in params if p[1].spec.family == "dense"], shards, bucket, first=first)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 40), st.integers(1, 3000))
def test_every_element_has_one_owner(shards: int, bucket: int) -> None:
    made = plan(shards, bucket)
    assert made.numel - made.local_numel < max(MAX_PADDING + 1, shards)
    flat = np.zeros(made.numel, dtype=int)
    for index in range(shards):
        shard = np.zeros(made.shard_numel, dtype=int)
        for segment in made.owned(index):
            slot = segment.slot
            assert slot.start + segment.local == segment.flat
            assert segment.flat + segment.numel <= slot.stop
            flat[segment.flat : segment.flat + segment.numel] += 1
            shard[segment.shard : segment.shard + segment.numel] += 1
            start, shard_start, size = made.slice_of(made.buckets[segment.bucket], index)
            assert start <= segment.flat
            assert segment.flat + segment.numel <= start + size
            assert segment.shard - shard_start == segment.flat - start
        assert shard.max() <= 1
    assert (flat[: made.local_numel] == 1).all()
    assert (flat[made.local_numel :] == 0).all()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 20), st.integers(1, 3000))
def test_buckets_cover_the_flat_buffer(shards: int, bucket: int) -> None:
    made = plan(shards, bucket)
    assert made.buckets[0].start == 0
    assert made.buckets[-1].stop == made.numel
    assert all(a.stop == b.start for a, b in zip(made.buckets, made.buckets[1:], strict=False))
    assert all(b.numel % shards == 0 for b in made.buckets)


def test_last_layers_go_first_and_late_parameters_last() -> None:
    first = frozenset({"model.layers.2.mlp.gate.weight"})
    made = plan(2, 200, first)
    assert made.slots[0].param.spec.name in first
    order = launch_order([made])
    ready = [bucket.ready_at for _, bucket in order]
    assert ready == sorted(ready, reverse=True)
    assert ready[-1] == -1, "the buckets with partial sums wait for the end"


def test_pieces_name_the_global_elements() -> None:
    made = plan(3, 100)
    segment = list(made.owned(1))[5]
    piece = segment.piece("exp_avg", "fp32")
    assert piece.name == segment.slot.param.spec.name
    assert (piece.start, piece.stop) == (segment.local, segment.local + segment.numel)
    assert piece.nbytes == 4 * segment.numel
