"""How long a step takes, by a stated roofline model of the site. Pure.

Work on a tile: time = max(matrix-product FLOPs / (peak x efficiency), bytes of weights read / memory bandwidth) for
each matrix product, plus element-wise bytes / memory bandwidth. Traffic: latency x calls + bytes sent / bandwidth of
the slowest link of the group. Pipelines: the real schedule table on a virtual clock, with each stage's own cost.
Gradient sums are hidden behind backward by the fraction `overlap`; everything else is exposed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mula_ray.config.site import SiteConfig, SpeedSpec
from mula_ray.plan.flops import mfu, train_flops_per_token
from mula_ray.plan.schedule import Action, Schedule, needs
from mula_ray.plan.shape import RankShape
from mula_ray.plan.traffic import Traffic, step_traffic

ELEMENTWISE = 30  # reads and writes of (T, H) a layer and forward pass: norms, rotations, residuals, casts


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause; `total` is the step."""

    compute: float
    experts: float
    """EP and TP traffic inside the layers"""
    bubble: float
    gradients: float
    """exposed part of the sums"""
    optimizer: float
    """update and all-gather of weights"""
    jitter: float
    bubble_share: float
    tokens_per_s: float
    mfu: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.experts + self.bubble + self.gradients + self.optimizer + self.jitter


@dataclass(frozen=True)
class ChunkCost:
    """Seconds of one stage on one micro-batch."""

    forward: float
    backward: float
    traffic: float
    """part of both that is EP and TP traffic"""


def step_time(ranks: list[RankShape], site: SiteConfig) -> StepTime:
    """Estimate for the whole run; the slowest pipeline rank counts."""
    config, topology, speed = ranks[0].config, ranks[0].topology, site.speed
    costs = {stage.index: _chunk(rank, at, site) for rank in ranks for at, stage in enumerate(rank.stages)}
    batches = ranks[0].batches
    schedule = ranks[0].schedule
    if schedule is None:
        only = costs[0]
        makespan = busy = batches * (only.forward + only.backward)
        traffic = batches * only.traffic
    else:
        boundary = ranks[0].tokens * config.model.hidden * ranks[0].item
        makespan = _makespan(schedule, costs, _link_s(site, "pp", boundary, 1, ranks[0]))
        loads = [batches * sum(costs[s.index].forward + costs[s.index].backward for s in r.stages) for r in ranks]
        busy = sum(loads) / len(loads)
        traffic = batches * sum(cost.traffic for cost in costs.values()) / len(ranks)
    sums, gathers = max(_optimizer_traffic(rank, site) for rank in ranks)
    update = max(_update(rank, speed) for rank in ranks)
    gradients = max(sums * (1 - speed.overlap), sums - busy / 2)
    nodes = max(1.0, topology.world / site.node.tiles)
    ideal = makespan + gradients + gathers + update
    jitter = ideal * speed.jitter_percent / 100 * math.log2(nodes)
    tokens = config.train.global_batch * config.data.context
    rate = tokens / (ideal + jitter)
    return StepTime(
        compute=busy - traffic,
        experts=traffic,
        bubble=makespan - busy,
        gradients=gradients,
        optimizer=gathers + update,
        jitter=jitter,
        bubble_share=(makespan - busy) / makespan,
        tokens_per_s=rate,
        mfu=mfu(config.model, config.data.context, rate, topology.world, speed.peak_tflops),
    )


def useful_flops(rank: RankShape) -> float:
    """Training FLOPs of a step over the whole run; recomputation never counts."""
    config = rank.config
    tokens = config.train.global_batch * config.data.context
    return float(tokens * train_flops_per_token(config.model, config.data.context))


def _chunk(rank: RankShape, at: int, site: SiteConfig) -> ChunkCost:
    """Cost of the stage at position `at` of this rank."""
    model, stage, speed = rank.config.model, rank.stages[at], site.speed
    layers = range(stage.first_layer, stage.stop_layer)
    attention, ffn = _attention_time(rank, speed), _ffn_time(rank, speed)
    other = ELEMENTWISE * rank.tokens * model.hidden * rank.item / (speed.memory_gb_s * 1e9)
    forward = len(layers) * (attention + ffn + other)
    again = 0.0
    for part, chosen in rank.recomputed.items():
        count = sum(1 for layer in layers if layer in chosen)
        again += count * {"norms": other / 2, "attention": attention, "moe": ffn}[part]
    if stage.last:
        forward += _product(rank.tokens, model.hidden, model.vocab_size / rank.topology.tp, rank, speed)
    inside = [t for t in step_traffic(rank) if t.group in ("ep", "tp")]
    traffic = _seconds(inside, rank, site) / rank.batches * len(layers) / max(1, rank.layers())
    return ChunkCost(forward + traffic * 0.4, 2 * forward + again + traffic * 0.6, traffic)


def _attention_time(rank: RankShape, speed: SpeedSpec) -> float:
    hidden, tp = rank.config.model.hidden, rank.topology.tp
    projections = 4 * _product(rank.tokens, hidden, hidden / tp, rank, speed)
    scores = 2 * rank.tokens * rank.config.data.context * hidden / tp  # causal: half of 4 T S H
    return projections + scores / _rate(speed)


def _ffn_time(rank: RankShape, speed: SpeedSpec) -> float:
    model, topology = rank.config.model, rank.topology
    if model.moe is None:
        assert model.ffn is not None
        return 3 * _product(rank.tokens, model.hidden, model.ffn / topology.tp, rank, speed)
    held = model.moe.experts // topology.ep
    rows = rank.tokens // topology.tp * model.moe.top_k / held  # of each expert held here, balanced
    experts = 3 * held * _product(rows, model.hidden, model.moe.expert_width, rank, speed)
    return experts + _product(rank.tokens, model.hidden, model.moe.experts, rank, speed)


def _product(rows: float, inner: float, outer: float, rank: RankShape, speed: SpeedSpec) -> float:
    """Seconds of (rows, inner) x (inner, outer): bound by FLOPs, or by reading the weights and moving the rows."""
    moved = (inner * outer + rows * (inner + outer)) * rank.item
    return max(2 * rows * inner * outer / _rate(speed), moved / (speed.memory_gb_s * 1e9))


def _rate(speed: SpeedSpec) -> float:
    return speed.peak_tflops * 1e12 * speed.gemm_efficiency


def _makespan(schedule: Schedule, costs: dict[int, ChunkCost], transfer: float) -> float:
    """Seconds until the last rank has run its table, each stage at its own cost."""
    share = {
        "F": lambda c: c.forward,
        "B": lambda c: c.backward,
        "I": lambda c: c.backward / 2,
        "W": lambda c: c.backward / 2,
    }
    done: dict[Action, float] = {}
    clock, at = [0.0] * schedule.pp, [0] * schedule.pp
    total = sum(len(order) for order in schedule.orders)
    while len(done) < total:
        before = len(done)
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                waits = needs(action, schedule.stages)
                if any(need not in done for need in waits):
                    break
                start = clock[rank]
                for need in waits:
                    start = max(start, done[need] + (transfer if schedule.owner(need.stage) != rank else 0.0))
                clock[rank] = done[action] = start + share[action.kind](costs[action.stage])
                at[rank] += 1
        assert len(done) > before, f"schedule {schedule.name} cannot run"
    return max(clock)


def _optimizer_traffic(rank: RankShape, site: SiteConfig) -> tuple[float, float]:
    """(seconds of the gradient sums, of the weights' all-gather)."""
    entries = [t for t in step_traffic(rank) if t.group in ("ddp", "edp", "dp")]
    sums = _seconds((t for t in entries if t.what.endswith("gradients")), rank, site)
    return sums, _seconds((t for t in entries if t.what.endswith("weights")), rank, site)


def _update(rank: RankShape, speed: SpeedSpec) -> float:
    """AdamW on the owned shard: reads and writes masters, moments and gradients once (28 bytes an element)."""
    owned = sum(plan.shard_numel for plan in rank.plans.values())
    return owned * 28 / (speed.memory_gb_s * 1e9)


def _seconds(entries: Iterable[Traffic], rank: RankShape, site: SiteConfig) -> float:
    return sum(_link_s(site, t.group, t.sent, t.calls, rank) for t in entries)


def _link_s(site: SiteConfig, group: str, sent: float, calls: int, rank: RankShape) -> float:
    """Seconds of `calls` calls that send `sent` bytes a rank, over the slowest link that the group crosses."""
    speed, topology = site.speed, rank.topology
    span = {  # how many neighbouring ranks the group reaches over
        "tp": topology.tp,
        "ep": topology.ep * topology.tp,
        "pp": topology.replica,
        "edp": topology.world,
        "ddp": topology.world if topology.dp > 1 else topology.replica,
        "dp": topology.world,
        "control": topology.world,
    }[group]
    inside = span <= site.node.tiles
    size = {"tp": topology.tp, "ep": topology.ep, "pp": 2, "edp": topology.edp, "ddp": topology.ddp}.get(
        group, topology.dp
    )
    hops = max(1.0, math.log2(size))
    if inside:
        return calls * speed.node_latency_us * 1e-6 * hops + sent / (speed.node_gb_s * 1e9)
    bandwidth = speed.network_gb_s * speed.network_efficiency * 1e9
    return calls * speed.network_latency_us * 1e-6 * hops + sent / bandwidth
