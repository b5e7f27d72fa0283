"""Bytes that travel in one training step, by group and purpose: exactly the calls that the engine makes. Pure.

`payload` is the size of the larger tensor of each call (the whole gathered, scattered or reduced one), summed over a
step; `sent` is what one rank puts on the wire with ring algorithms: (n-1)/n of the payload for all-gather,
reduce-scatter and all-to-all, twice that for all-reduce, all of it for a broadcast between two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mula_ray.plan.schedule import messages
from mula_ray.plan.shape import ITEM, RankShape

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class Traffic:
    """One kind of call in one group, over a step of one rank."""

    group: str
    size: int
    kind: Kind
    what: str
    calls: int
    payload: int

    @property
    def sent(self) -> float:
        """Bytes that this rank sends."""
        if self.kind == "broadcast":
            return float(self.payload)
        share = (self.size - 1) / self.size
        return self.payload * share * (2 if self.kind == "all_reduce" else 1)


def step_traffic(rank: RankShape) -> list[Traffic]:
    """All calls of one training step of `rank`; groups of one send nothing and are left out."""
    entries = [*_experts(rank), *_tensor(rank), *_pipeline(rank), *_optimizer(rank), *_agreement(rank)]
    return [entry for entry in entries if entry.size > 1 and entry.calls]


def _experts(rank: RankShape) -> Iterator[Traffic]:
    """Dispatch and combine of the MoE layers over the EP group (all-gather dispatcher)."""
    moe, size = rank.config.model.moe, rank.topology.ep
    if moe is None or size == 1:
        return
    tokens = rank.tokens // rank.topology.tp
    rows, hidden = size * tokens, rank.config.model.hidden
    again = rank.moe_layers("moe")
    forward, backward = (rank.moe_layers() + again) * rank.batches, rank.moe_layers() * rank.batches
    if rank.all_to_all:
        # Every slice as large as the fullest: here for balanced routing, each token to min(k, P) ranks of P.
        slots = min(moe.top_k, size)
        rows = size * -(-tokens * slots // size)
        yield Traffic("ep", size, "all_to_all", "dispatch (balanced)", forward, forward * rows * (hidden * rank.item))
        yield Traffic("ep", size, "all_to_all", "ids, weights", 2 * forward, forward * rows * moe.top_k * 8)
        yield Traffic("ep", size, "all_to_all", "combine", backward, backward * rows * hidden * rank.item)
        yield Traffic("ep", size, "all_to_all", "backward", 3 * backward, backward * rows * (2 * hidden * rank.item))
        return
    combine = ITEM[rank.config.parallel.combine_dtype]
    yield Traffic("ep", size, "all_gather", "tokens", forward, forward * rows * hidden * rank.item)
    yield Traffic("ep", size, "all_gather", "weights and ids", forward, forward * rows * moe.top_k * (4 + 2))
    yield Traffic("ep", size, "reduce_scatter", "combine", backward, backward * rows * hidden * combine)
    yield Traffic("ep", size, "all_gather", "output gradients", backward, backward * rows * hidden * combine)
    yield Traffic("ep", size, "reduce_scatter", "token gradients", backward, backward * rows * hidden * combine)
    yield Traffic("ep", size, "reduce_scatter", "weight gradients", backward, backward * rows * moe.top_k * 4)


def _tensor(rank: RankShape) -> Iterator[Traffic]:
    """Everything that travels over the TP group."""
    size, model, batches = rank.topology.tp, rank.config.model, rank.batches
    if size == 1:
        return
    wide = rank.tokens * model.hidden * rank.item
    layers = rank.layers() * batches
    attention = layers + rank.part_layers("attention") * batches
    blocks = layers if model.moe is None else 0
    yield Traffic("tp", size, "all_reduce", "attention output", layers, layers * wide)
    yield Traffic("tp", size, "all_reduce", "attention input gradient", layers, layers * wide)
    if model.qk_norm:
        calls = 2 * (attention + layers)
        yield Traffic("tp", size, "all_reduce", "QK-norm", calls, calls * rank.tokens * 4)
    yield Traffic("tp", size, "all_reduce", "dense FFN", 2 * blocks, 2 * blocks * wide)
    if model.moe is not None:
        slots = rank.tokens * model.moe.top_k * 4
        yield Traffic("tp", size, "all_gather", "tokens joined, gradients", 2 * layers, 2 * layers * wide)
        yield Traffic("tp", size, "all_gather", "routing gradients", layers, layers * slots)
    if rank.stages[0].first:
        yield Traffic("tp", size, "all_reduce", "embedding", batches, batches * wide)
    if rank.stages[-1].last:
        yield Traffic("tp", size, "all_reduce", "head input gradient", batches, batches * wide)
        yield Traffic("tp", size, "all_gather", "cross-entropy", batches, batches * size * rank.tokens * 4)
        yield Traffic("tp", size, "all_reduce", "cross-entropy", batches, batches * 2 * rank.tokens * 4)


def _pipeline(rank: RankShape) -> Iterator[Traffic]:
    """Activations and gradients that this rank sends to other pipeline ranks."""
    if rank.schedule is None:
        return
    out = [queue for (source, _), queue in messages(rank.schedule).items() if source == rank.pp]
    calls = sum(len(queue) for queue in out)
    bytes_each = rank.tokens * rank.config.model.hidden * rank.item
    yield Traffic("pp", 2, "broadcast", "activations and gradients", calls, calls * bytes_each)


def _optimizer(rank: RankShape) -> Iterator[Traffic]:
    """Gradient sums and updated weights, over each family's replicas."""
    for family, plan in rank.plans.items():
        group = "ddp" if family == "dense" else "edp"
        buckets = len(plan.buckets)
        whole = rank.shards(family) != rank.replicas(family)
        reduce_kind: Kind = "all_reduce" if whole else "reduce_scatter"
        bytes_each = ITEM[rank.config.optim.reduce_dtype]
        yield Traffic(
            group, rank.replicas(family), reduce_kind, f"{family} gradients", buckets, plan.numel * bytes_each
        )
        shards = "dp" if whole else group
        yield Traffic(shards, rank.shards(family), "all_gather", f"{family} weights", buckets, plan.numel * rank.item)


def _agreement(rank: RankShape) -> Iterator[Traffic]:
    """The one small all-reduce of a step: losses; norm, flags, ledger; statistics, hashes of replicas when checked."""
    model, topology = rank.config.model, rank.topology
    numbers = 5 + 5
    if rank.config.elastic.check_state_every:
        numbers += 2 * topology.pp * (topology.tp + topology.ep)
    if model.moe is not None and rank.config.metrics.experts:
        numbers += model.layers * (model.moe.experts + 1)
    yield Traffic("control", topology.world, "all_reduce", "agreement", 1, numbers * 8)
