"""Bytes that one rank needs, by kind. Pure; formulas mirror what the model saves for backward (tests compare).

Notation: w bytes of an activation, T tokens of a micro-batch, H hidden, N heads, E experts, k slots, I expert width, F
width of the dense FFN, V vocabulary, P ranks of the EP group, n routed rows of a rank (T*k when balanced).

Per token and layer, kept for backward: a norm its input wH and its scale (accelerators: also the fp32 input, 4H), its
output wH; attention two such norms for Q and K and 4wH for q, k, v and output (accelerators 5wH, a copy); the router
8E + 12k; the dense FFN 4wF; experts see `_experts`. A recomputed part keeps its input only. The head keeps its own
gradients from the forward pass (H a token, and fp32 of its weight), and logits chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from mula_ray.plan.schedule import simulate
from mula_ray.plan.shape import ITEM, RankShape

PROCESS_BYTES = 160_000_000
"""Resident memory of a CPU rank beyond its tensors: code pages of the mathematics libraries on first use 40-50 MB, the
allocator's slack (huge pages included) 60-80 MB, gloo's buffers 30-40 MB (torch 2.13). Accelerators:
`node.reserved_gb` of the site."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    weights: int
    gradients: int
    masters: int
    exp_avg: int
    exp_avg_sq: int
    reduction: int
    """fp32 copies of gradients on their way and of the owned shard"""
    activations: int
    workspace: int
    """the largest short-lived tensors: loss or expert backward, the gradient of one dense parameter"""
    process: int
    """CPU only: what libraries, the allocator and gloo take once ranks compute (measured, see PROCESS_BYTES)"""

    @property
    def state(self) -> int:
        """What is there all the time."""
        return self.weights + self.gradients + self.masters + self.exp_avg + self.exp_avg_sq

    @property
    def total(self) -> int:
        """Everything."""
        return sum(getattr(self, field.name) for field in fields(self))

    def kinds(self) -> dict[str, int]:
        """Bytes by name of the kind."""
        return {field.name: int(getattr(self, field.name)) for field in fields(self)}


def rank_memory(rank: RankShape, *, recompute: bool = True) -> Memory:
    """Memory of `rank`; with `recompute` False as if `parallel.recompute` were none."""
    flat = sum(plan.numel for plan in rank.plans.values())
    shard = sum(plan.shard_numel for plan in rank.plans.values())
    return Memory(
        weights=flat * rank.item,
        gradients=flat * rank.item,
        masters=shard * 4,
        exp_avg=shard * 4,
        exp_avg_sq=shard * 4,
        reduction=_reduction(rank, shard),
        activations=_activations(rank, recompute),
        workspace=_workspace(rank),
        process=PROCESS_BYTES if on_cpu(rank) else 0,
    )


def largest(ranks: Iterable[RankShape], *, recompute: bool = True) -> Memory:
    """Memory of the rank that needs most."""
    return max((rank_memory(rank, recompute=recompute) for rank in ranks), key=lambda memory: memory.total)


def on_cpu(rank: RankShape) -> bool:
    """Whether ranks are CPU processes: a local cluster without an accelerator asked for."""
    cluster = rank.config.cluster
    return cluster.kind in ("local", "ray") and cluster.device in ("auto", "cpu")


def _largest_dense(rank: RankShape) -> int:
    """Autograd makes the gradient of a dense parameter before it is added to the flat buffer."""
    return max(param.numel for param in rank.params if param.spec.family == "dense") * rank.item


def _reduction(rank: RankShape, shard: int) -> int:
    """fp32 shards of the summed gradients, and fp32 copies of buckets on the wire where gradients are not fp32.

    A family without replicas (experts when edp is 1) travels nowhere.
    """
    if rank.item == ITEM[rank.config.optim.reduce_dtype]:
        return 0 if rank.item == 4 else shard * 4
    travelling = sum(plan.numel for family, plan in rank.plans.items() if rank.replicas(family) > 1)
    return shard * 4 + travelling * ITEM[rank.config.optim.reduce_dtype]


def _activations(rank: RankShape, recompute: bool) -> int:
    """Kept for backward at the busiest moment: as many chunks as the schedule holds at once."""
    if rank.schedule is None:
        stage = rank.stages[0]
        layers = range(stage.first_layer, stage.stop_layer)
        body = sum(layer_bytes(rank, layer, recompute) for layer in layers)
        return (body + _ends(rank, embed=True, head=True)) * rank.tokens
    chunks = simulate(rank.schedule).peak[rank.pp]
    sizes = []
    for stage in rank.stages:
        layers = range(stage.first_layer, stage.stop_layer)
        body = sum(layer_bytes(rank, layer, recompute) for layer in layers)
        received = rank.config.model.hidden * rank.item
        sizes.append((body + received + _ends(rank, embed=stage.first, head=stage.last)) * rank.tokens)
    # The chunks in flight are spread over this rank's stages; the last stage's backward follows its forward at once.
    held, left = 0, chunks
    for index, size in enumerate(sizes):
        share = -(-left // (len(sizes) - index))
        held += share * size
        left -= share
    return held


def layer_bytes(rank: RankShape, layer: int, recompute: bool = True) -> int:
    """Bytes a token that layer `layer` keeps for backward."""
    model, item, tp = rank.config.model, rank.item, rank.topology.tp
    hidden = model.hidden
    again = {part for part, chosen in rank.recomputed.items() if recompute and layer in chosen}
    learned = model.norm == "rmsnorm"
    norm = item * hidden if "norms" in again else _norm_bytes(rank, hidden, learned)
    total = 2 * (norm + item * hidden)
    if "attention" not in again:
        qk_norm = 2 * _norm_bytes(rank, hidden // tp, True) if model.qk_norm else 0
        total += qk_norm + (4 if on_cpu(rank) else 5) * item * hidden // tp + 4 * model.heads // tp
    if model.moe is None:
        assert model.ffn is not None
        return total + 4 * item * model.ffn // tp
    total += 8 * model.moe.experts + 12 * model.moe.top_k + 4
    return total + (0 if "moe" in again else _experts(rank))


def _norm_bytes(rank: RankShape, width: int, learned: bool) -> int:
    """Bytes a token that one norm keeps."""
    if not learned:
        return 4 * width + 8
    return rank.item * width + 4 + (0 if on_cpu(rank) else 4 * width)


def _experts(rank: RankShape) -> int:
    """Bytes a token of this rank kept by dispatch and experts when not recomputed; balanced routing."""
    moe, hidden = rank.config.model.moe, rank.config.model.hidden
    assert moe is not None
    gathered = rank.topology.ep * (hidden * rank.item + moe.top_k * (4 + 8)) if rank.topology.ep > 1 else 0
    return (gathered + moe.top_k * expert_row_bytes(rank)) // rank.topology.tp


def expert_row_bytes(rank: RankShape) -> int:
    """Bytes that the expert backends keep for a routed row: the products of gate and up, in fp32 on the CPU."""
    moe = rank.config.model.moe
    assert moe is not None
    return 2 * moe.expert_width * (4 if on_cpu(rank) else rank.item)


def _ends(rank: RankShape, *, embed: bool, head: bool) -> int:
    """Bytes a token kept by embedding and head."""
    model, item = rank.config.model, rank.item
    total = 8 if embed else 0
    if head:
        total += _norm_bytes(rank, model.hidden, model.norm == "rmsnorm") + 2 * item * model.hidden + 8
        if rank.topology.tp > 1:  # the vocabulary-parallel loss keeps its logits
            total += 4 * model.vocab_size // rank.topology.tp
    return total


def _loss(rank: RankShape) -> int:
    """Bytes of the head at its busiest; without TP a chunk of logits and fp32 gradients of the head's weight."""
    model, item, tp = rank.config.model, rank.item, rank.topology.tp
    if not rank.stages[-1].last:
        return 0
    if tp > 1:
        return rank.tokens * model.vocab_size // tp * (4 + item) + model.vocab_size * model.hidden // tp * item
    weight = model.vocab_size * model.hidden
    most = 1 << (22 if on_cpu(rank) else 27)
    chunk = min(rank.tokens * model.vocab_size, max(256 * model.vocab_size, most)) * (4 if on_cpu(rank) else 4 + item)
    forward = weight * (8 if on_cpu(rank) and item == 2 else 4) + chunk
    return max(forward, weight * (8 if item == 4 else 8 + item))


def _workspace(rank: RankShape) -> int:
    """The largest of: the loss, backward of one MoE layer, the gradient of one dense parameter before it is added."""
    model, item, tokens = rank.config.model, rank.item, rank.tokens
    loss = max(_loss(rank), _largest_dense(rank))
    if model.moe is None:
        assert model.ffn is not None
        return max(loss, tokens * 2 * model.ffn // rank.topology.tp * item)
    own = tokens // rank.topology.tp
    rows = own * model.moe.top_k
    gathered = own * rank.topology.ep * model.hidden
    moe = rows * (2 * model.hidden + 4 * model.moe.expert_width) * item
    moe += gathered * (item + ITEM[rank.config.parallel.combine_dtype]) if rank.topology.ep > 1 else 0
    return max(loss, moe)
