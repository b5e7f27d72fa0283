"""Small states for checkpoint tests: what each rank of a layout holds, from the tables of plan/ alone.

Values are a function of (name, kind, step), so that anybody can say what an element must be.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator

import numpy as np

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.plan.format import FULL_KINDS, Facts
from mula_ray.plan.layout import narrow, param_specs
from mula_ray.plan.overlap import boxes
from mula_ray.plan.pieces import Kind, Piece
from mula_ray.plan.stages import split_stages
from mula_ray.plan.topology import Topology

MOE = ModelConfig(
    vocab_size=24, hidden=8, layers=2, heads=2, moe=MoEConfig(experts=4, top_k=2, expert_width=6), qk_norm=True
)
DENSE = ModelConfig(vocab_size=24, hidden=8, layers=2, heads=2, ffn=12)


@functools.cache
def whole(name: str, kind: str, shape: tuple[int, ...], step: int = 0) -> np.ndarray:
    """The whole tensor, by integer arithmetic that no library version changes."""
    x = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(zlib.crc32(f"{name}{kind}{step}".encode()))
    x = (x * np.uint64(2654435761)) % np.uint64(1 << 32)
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(2246822519)) % np.uint64(1 << 24)
    return (x.astype(np.float32) / np.float32(1 << 23) - np.float32(1)).reshape(shape)


def values(piece: Piece, step: int = 0) -> np.ndarray:
    """The flat elements of a piece, cut out of the whole tensor."""
    tensor = whole(piece.name, piece.kind, piece.global_shape, step)
    box = tensor[tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))]
    return np.ascontiguousarray(box).reshape(-1)[piece.start : piece.stop].copy()


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global shapes."""
    return {spec.name: spec.shape for spec in param_specs(model)}


def rank_pieces(
    model: ModelConfig,
    topology: Topology,
    rank: int,
    kinds: tuple[Kind, ...] = FULL_KINDS,
    optimizer: str = "epso",
    virtual: int = 1,
) -> Iterator[Piece]:
    """What a rank holds: its box of each parameter of its stages, cut into equal runs over the ranks that share it.

    epso: dense over ddp, experts over edp. zero1: everything over dp alone, so EP ranks hold dense state twice.
    """
    at = topology.coords(rank)
    stages = split_stages(model.layers, topology.pp * virtual)[at.pp :: topology.pp]
    for spec in param_specs(model):
        if not any(stage.holds(spec) for stage in stages):
            continue
        local = narrow(spec, topology, at)
        if optimizer == "zero1":
            count, index = topology.dp, at.dp
        elif spec.family == "dense":
            count, index = topology.ddp, topology.ddp_index(rank)
        else:
            count, index = topology.edp, at.dp * topology.tp + at.tp
        start, stop = local.numel * index // count, local.numel * (index + 1) // count
        if start < stop:
            for kind in kinds:
                yield Piece(spec.name, kind, "fp32", spec.shape, local.offset, local.shape, start, stop)


def facts(step: int, generation: int = 0, **more: object) -> Facts:
    """Facts of a step."""
    return Facts(step=step, cursor=8 * step, tokens=800 * step, generation=generation, run_id="run", **more)


def spread(piece: Piece) -> np.ndarray:
    """Global flat indices of the elements of a piece, the slow and obvious way."""
    index = np.arange(np.prod(piece.global_shape)).reshape(piece.global_shape)
    box = index[tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))]
    return box.reshape(-1)[piece.start : piece.stop]


def box_count(piece: Piece) -> int:
    """Boxes of a piece."""
    return len(boxes(piece))
