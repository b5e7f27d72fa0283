"""What a configuration costs: parameters, memory, traffic, step time, checkpoints. Neither torch nor ray. Pure but for
`calibrate`, which reads a run folder.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from mula_ray.config.errors import UserError
from mula_ray.config.load import load
from mula_ray.config.run import RunConfig
from mula_ray.config.site import SiteConfig
from mula_ray.plan.layout import active_params, total_params
from mula_ray.plan.legal import legal_topology, refuse_for_the_model
from mula_ray.plan.memory import Memory, largest, rank_memory
from mula_ray.plan.shape import RankShape, rank_shapes
from mula_ray.plan.speed import StepTime, step_time
from mula_ray.plan.topology import Topology
from mula_ray.plan.traffic import Traffic, step_traffic

STATE_BYTES = 12  # fp32 master and two moments a parameter, in a full checkpoint
PUBLISHED_EFFICIENCY = 0.90  # 384 -> 12,288 tiles, Mula-220B (SYSTEM.md 5)
SCALING_TILES = (384, 768, 1536, 3072, 6144, 12288)


@dataclass(frozen=True)
class Checkpoint:
    """A full checkpoint: bytes, and seconds to write it with all nodes."""

    bytes: int
    model_bytes: int
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Everything that `plan` prints about a layout on a site."""

    topology: Topology
    total: int
    active: int
    memory: Memory
    memory_without_recompute: Memory
    traffic: list[Traffic]
    time: StepTime
    checkpoint: Checkpoint
    tile_bytes: float
    over_without_recompute: list[str]
    """pipeline ranks that would not fit a tile without recomputation, in words"""

    @property
    def fits(self) -> bool:
        """Whether a rank fits a tile."""
        return self.memory.total <= self.tile_bytes

    @property
    def fits_without_recompute(self) -> bool:
        """Whether it would without recomputation."""
        return self.memory_without_recompute.total <= self.tile_bytes


@dataclass(frozen=True)
class ScalingPoint:
    """One size of a weak-scaling curve: the same work a replica, more replicas."""

    tiles: int
    step_s: float
    tokens_per_s: float
    efficiency: float


def estimate(config: RunConfig, topology: Topology, site: SiteConfig) -> Estimate:
    """Cost of `config` in layout `topology` on `site`."""
    ranks = rank_shapes(config, topology)
    tile_bytes = (site.node.tile_memory_gb - site.node.reserved_gb) * 1e9
    return Estimate(
        topology=topology,
        total=total_params(config.model),
        active=active_params(config.model),
        memory=largest(ranks),
        memory_without_recompute=largest(ranks, recompute=False),
        traffic=busiest_traffic(ranks),
        time=step_time(ranks, site),
        checkpoint=checkpoint(config, site, topology.world),
        tile_bytes=tile_bytes,
        over_without_recompute=_too_large(ranks, tile_bytes),
    )


def busiest_traffic(ranks: list[RankShape]) -> list[Traffic]:
    """Calls of the rank that sends most in a step."""
    return max((step_traffic(rank) for rank in ranks), key=lambda entries: sum(entry.sent for entry in entries))


def _too_large(ranks: list[RankShape], tile_bytes: float) -> list[str]:
    """Where it does not fit when nothing is recomputed."""
    result = []
    for rank in ranks:
        need = rank_memory(rank, recompute=False)
        if need.total > tile_bytes:
            layers = ", ".join(f"{stage.first_layer}-{stage.stop_layer - 1}" for stage in rank.stages)
            result.append(
                f"pipeline rank {rank.pp} (layers {layers}): {need.total / 1e9:.1f} GB, "
                f"of which activations {need.activations / 1e9:.1f} GB"
            )
    return result


def checkpoint(config: RunConfig, site: SiteConfig, tiles: int) -> Checkpoint:
    """Size and time of a full checkpoint, and the size of a model-only one (working weights)."""
    params = total_params(config.model)
    nodes = max(1, -(-tiles // site.node.tiles))
    rate = min(site.storage.write_gb_s, nodes * site.storage.node_write_gb_s) * 1e9
    item = 2 if config.train.dtype == "bf16" else 4
    return Checkpoint(params * STATE_BYTES, params * item, params * STATE_BYTES / rate)


def checkpoint_seconds(config: RunConfig, site: SiteConfig) -> float:
    """Seconds to write a full checkpoint from the configuration's own nodes."""
    return checkpoint(config, site, config.cluster.nodes * config.cluster.tiles_per_node).seconds


def with_tiles(config: RunConfig, tiles: int | None, site: SiteConfig | None) -> tuple[RunConfig, Topology]:
    """`config` moved to `tiles` tiles of `site`, dp refitted, everything checked.

    Raises:
        UserError: the layout does not fit that many tiles; names the nearest numbers that do.
    """
    per_node = site.node.tiles if site is not None else config.cluster.tiles_per_node
    if tiles is None:
        tiles = config.cluster.nodes * config.cluster.tiles_per_node
        if site is None or per_node == config.cluster.tiles_per_node:
            return config, legal_topology(config)
    refuse_for_the_model(config)
    replica = config.parallel.ep * config.parallel.tp * config.parallel.pp
    unit = math.lcm(replica, per_node)
    if tiles % per_node or tiles % replica:
        below, above = tiles // unit * unit, -(-tiles // unit) * unit
        legal = ", ".join(str(n) for n in dict.fromkeys((below, above)) if n)
        raise UserError(
            f"--tiles {tiles} does not hold whole nodes of {per_node} tiles and whole replicas of {replica} ranks "
            f"(ep x tp x pp); nearest legal: {legal}"
        )
    moved = config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"nodes": tiles // per_node, "tiles_per_node": per_node}),
            "parallel": config.parallel.model_copy(update={"dp": "auto"}),
        }
    )
    return moved, legal_topology(moved)


def scaling(config: RunConfig, site: SiteConfig, tiles: tuple[int, ...] = SCALING_TILES) -> list[ScalingPoint]:
    """Weak scaling: each replica keeps its micro-batches, so the global batch grows with the tiles."""
    replica = config.parallel.ep * config.parallel.tp * config.parallel.pp
    here = legal_topology(config)
    samples = config.train.global_batch / here.dp
    points: list[ScalingPoint] = []
    for count in tiles:
        dp = count // replica
        if not dp or count % replica or count % site.node.tiles:
            continue
        batch = config.train.model_copy(update={"global_batch": max(1, round(samples * dp))})
        moved, topology = with_tiles(config.model_copy(update={"train": batch}), count, site)
        time = step_time(rank_shapes(moved, topology), site)
        per_tile = time.tokens_per_s / count
        first = points[0].tokens_per_s / points[0].tiles if points else per_tile
        points.append(ScalingPoint(count, time.total, time.tokens_per_s, per_tile / first))
    return points


def calibrate(site: SiteConfig, run_dir: Path) -> tuple[SiteConfig, str]:
    """`site` with the speed that a measured run reached, and a sentence that says what was done.

    The model's step time for that run is compared with the median measured one (the first tenth left out); the ratio
    goes into peak and efficiency of matrix products, bandwidths and latencies alike.

    Raises:
        UserError: the folder has no configuration or too few steps.
    """
    config_file, metrics = run_dir / "config.yaml", run_dir / "metrics.jsonl"
    if not config_file.is_file() or not metrics.is_file():
        raise UserError(f"--calibrate {run_dir}: not a run folder (config.yaml and metrics.jsonl are needed)")
    steps = _step_seconds(metrics)
    if len(steps) < 5:
        raise UserError(f"--calibrate {run_dir}: {len(steps)} measured steps; at least 5 are needed")
    measured = statistics.median(steps[len(steps) // 10 :])
    config = load(config_file).config
    predicted = step_time(rank_shapes(config, legal_topology(config)), site).total
    factor = predicted / measured
    speed = site.speed
    efficiency = speed.gemm_efficiency * factor
    update = {
        "gemm_efficiency": min(1.0, efficiency),
        "peak_tflops": speed.peak_tflops * max(1.0, efficiency),
        "memory_gb_s": speed.memory_gb_s * factor,
        "node_gb_s": speed.node_gb_s * factor,
        "network_gb_s": speed.network_gb_s * factor,
        "node_latency_us": speed.node_latency_us / factor,
        "network_latency_us": speed.network_latency_us / factor,
    }
    note = (
        f"calibrated with {run_dir}: {measured:.3g} s a step measured, {predicted:.3g} s by the model of {site.name}: "
        f"all its rates times {factor:.3g}"
    )
    return site.model_copy(update={"speed": speed.model_copy(update=update)}), note


def _step_seconds(metrics: Path) -> list[float]:
    seconds: dict[int, float] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # a torn last line
        if isinstance(row, dict) and row.get("step_s") and "step" in row:
            seconds[int(row["step"])] = float(row["step_s"])
    return [seconds[step] for step in sorted(seconds)]
