"""The one small all-reduce of a step: losses, norm, stop request, damage, statistics. All ranks get the same result."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mula_ray.data.ledger import NOTHING, SampleSum
from mula_ray.optim.integrity import ReplicaHashes
from mula_ray.parallel.collectives import all_reduce
from mula_ray.parallel.executor import Sums
from mula_ray.parallel.groups import Group

_FLAGS = 5


@dataclass(frozen=True)
class ExpertStats:
    """Load of the experts in a step, over all ranks."""

    counts: Tensor
    """(L, E) routed slots, fp64 on the CPU"""
    entropy: Tensor
    """(L,) mean router entropy, nats"""

    @property
    def imbalance(self) -> float:
        """Largest over mean load of an expert, worst layer; 1 is perfect."""
        mean = self.counts.mean(dim=1)
        return float((self.counts.max(dim=1).values / mean.clamp(min=1e-9)).max())

    @property
    def idle(self) -> int:
        """Experts, over all layers, that got no token."""
        return int((self.counts == 0).sum())


@dataclass(frozen=True)
class Verdict:
    """What all ranks know after the agreement."""

    loss: float
    """cross-entropy per token, nats"""
    balance: float
    """balance loss per sequence, mean of the layers, without its coefficient"""
    z: float
    """router z-loss per token, mean of the layers, without its coefficient"""
    tokens: int
    squared_norm: float
    stop: bool
    damaged_ranks: int
    """ranks whose optimizer state is not what the last update wrote"""
    unequal: tuple[str, ...]
    """replica groups whose working weights differ"""
    experts: ExpertStats | None
    samples: SampleSum = NOTHING


def agree(
    sums: Sums,
    squared_norm: Tensor,
    group: Group | None,
    *,
    speaks: bool,
    stop: bool,
    damaged: bool,
    hashes: tuple[ReplicaHashes, Tensor] | None,
    statistics: bool,
    samples: SampleSum,
) -> Verdict:
    """All-reduce over the control `group`.

    Args:
        squared_norm: () this rank's part of the squared gradient norm.
        speaks: False on ranks that hold the same samples as another one (TP).
        hashes: this rank's `ReplicaHashes` vector, where weights are compared in this step.
        statistics: whether expert loads are summed over all ranks.
        samples: that this rank read and no other one.
    """
    layers, experts = sums.counts_LE.shape
    statistics = statistics and experts > 0
    parts = [sums.scalars] + ([sums.counts_LE.flatten(), sums.entropy_L] if statistics else [])
    counted = torch.cat(parts).cpu()
    flags = [float(squared_norm), float(stop), float(damaged), float(samples.count), float(samples.crc_sum)]
    own = torch.tensor(flags, dtype=torch.float64)
    tail = [] if hashes is None else [hashes[1]]
    vector = torch.cat([counted if speaks else torch.zeros_like(counted), own, *tail])
    all_reduce(vector, group)
    told = vector[counted.numel() :].tolist()
    ce, tokens, sequences, balance, z = vector[:5].tolist()
    stats = None
    if statistics:
        counts = vector[5 : 5 + layers * experts].view(layers, experts).clone()
        stats = ExpertStats(counts, vector[5 + layers * experts : counted.numel()] / max(tokens, 1.0))
    return Verdict(
        loss=ce / tokens if tokens else math.nan,
        balance=balance / sequences if tokens else math.nan,
        z=z / tokens if tokens else math.nan,
        tokens=int(tokens) if math.isfinite(tokens) else 0,
        squared_norm=told[0],
        stop=told[1] > 0,
        damaged_ranks=int(told[2]),
        unequal=() if hashes is None else tuple(hashes[0].unequal(vector[counted.numel() + _FLAGS :])),
        experts=stats,
        samples=SampleSum(int(told[3]), int(told[4])),
    )
