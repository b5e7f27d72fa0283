"""A metric is a value and its reduction; a step's record is one line of `metrics.jsonl`.

Legend: L layers, E experts, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mula_ray.data.ledger import NOTHING, SampleSum

Reduction = Literal["sum", "mean", "max", "min"]

PHASES: tuple[str, ...] = (
    "forward_backward",
    "dispatch",
    "reduce",
    "agree",
    "update",
    "checkpoint",
)
"""Parts of a step whose seconds a line may carry. `dispatch` (waiting for tokens of other ranks, both ways) lies inside
`forward_backward`; all others follow each other. Data wait has a field of its own."""


@dataclass(frozen=True)
class Metric:
    """A value, how it is reduced over ranks, and for means its weight (tokens, samples, ranks)."""

    value: float
    reduction: Reduction
    weight: float = 1.0

    def merge(self, other: Metric) -> Metric:
        """Both as one; associative, so that node agents and the driver can fold reports in a tree."""
        assert self.reduction == other.reduction, (self, other)
        weight = self.weight + other.weight
        if self.reduction == "sum":
            return Metric(self.value + other.value, "sum", weight)
        if self.reduction == "mean":
            total = self.value * self.weight + other.value * other.weight
            return Metric(total / weight if weight else 0.0, "mean", weight)
        # NaN wins: a maximum that hides one rank's NaN would be a lie
        pair = (self.value, other.value)
        if any(math.isnan(value) for value in pair):
            return Metric(math.nan, self.reduction, weight)
        return Metric(max(pair) if self.reduction == "max" else min(pair), self.reduction, weight)


Gather = Callable[[Sequence[float]], Sequence[Sequence[float]]]
"""Every rank's equally long list of floats, in rank order, on every rank: one collective."""


def reduce_metrics(metrics: Mapping[str, Metric], gather: Gather | None = None) -> dict[str, Metric]:
    """All metrics of all ranks by one collective a report, whatever mix of reductions they have.

    Every rank must hold the same names with the same reductions; they travel in sorted order. Summation is in rank
    order, so the result is the same bits on every rank.
    """
    names = sorted(metrics)
    if gather is None:
        return {name: metrics[name] for name in names}
    flat = [number for name in names for number in (metrics[name].value, metrics[name].weight)]
    rows = gather(flat)
    assert all(len(row) == len(flat) for row in rows), "ranks report different metrics"
    reduced: dict[str, Metric] = {}
    for index, name in enumerate(names):
        kind = metrics[name].reduction
        parts = [Metric(row[2 * index], kind, row[2 * index + 1]) for row in rows]
        total = parts[0]
        for part in parts[1:]:
            total = total.merge(part)
        reduced[name] = total
    return reduced


@dataclass(frozen=True)
class ExpertLoad:
    """Routing of one step, over all ranks.

    `counts` (L, E): token slots routed to each expert. `entropy` (L,): mean over tokens of the router's entropy, nats;
    ln E is uniform, 0 is certain.
    """

    counts: NDArray[np.int64]
    entropy: NDArray[np.float64]

    def imbalance(self) -> NDArray[np.float64]:
        """(L,) load of the busiest expert against the mean: 1 is perfect, E / k the worst."""
        mean = self.counts.mean(axis=1)
        return _ratio(self.counts.max(axis=1), mean)

    def variation(self) -> NDArray[np.float64]:
        """(L,) standard deviation of the loads against their mean: 0 is perfect."""
        mean = self.counts.mean(axis=1)
        return _ratio(self.counts.std(axis=1), mean)

    def dead(self) -> NDArray[np.int64]:
        """(L,) experts that received no token."""
        return np.asarray((self.counts == 0).sum(axis=1), dtype=np.int64)


def counts_every(layers: int, experts: int, steps: int) -> int:
    """Steps between full expert counts in `metrics.jsonl`.

    Statistics by layer go into every line. The L x E counts do so while they are small (256 numbers a line at most, on
    average, and no more than 2,000 full lines a run); in between they are summed, so nothing is lost but resolution.
    """
    return max(1, -(-layers * experts // 256), -(-steps // 2000))


class ExpertWindow:
    """Sums expert counts between two full lines. Steps may be left out (`metrics.every`): a full line is due with the
    first step at or after a multiple of `every`."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._counts: NDArray[np.int64] | None = None
        self._steps = 0
        self._last = -1

    def add(self, step: int, load: ExpertLoad) -> dict[str, Any]:
        """Fields of the line of `step`: statistics by layer, and when due the counts since the last full line."""
        self._counts = load.counts.copy() if self._counts is None else self._counts + load.counts
        self._steps += 1
        fields: dict[str, Any] = {
            "router_entropy": _short(float(load.entropy.mean())),
            "expert_imbalance": _short(float(load.imbalance().max())),
            "dead_experts": int(load.dead().sum()),
            "layers": {
                "entropy": [_short(value) for value in load.entropy.tolist()],
                "imbalance": [_short(value) for value in load.imbalance().tolist()],
                "cv": [_short(value) for value in load.variation().tolist()],
                "dead": load.dead().tolist(),
            },
        }
        crossed = self._last >= 0 and step // self._every > self._last // self._every
        self._last = step
        if crossed or step % self._every == 0:
            fields["expert_counts"] = self._counts.tolist()
            fields["expert_counts_steps"] = self._steps
            self._counts, self._steps = None, 0
        return fields


@dataclass(frozen=True)
class StepRecord:
    """A step's line of `metrics.jsonl`. Steps count from 1: `step` is the number of committed steps once it is done,
    as in checkpoints and events. Seconds are wall time; `tokens` are those of this step, over all ranks; `step_s` is
    the whole step, data wait and checkpoint stall included.

    `samples` is the ledger (`data/ledger.py`): how many samples the ranks read, and the sum of their checksums.

    `loss` is the cross-entropy, mean over tokens; `aux_loss` and `z_loss` stand apart from it. `phases` are seconds by
    name (`PHASES`), of the reporting rank. `experts` is what `ExpertWindow.add` returned.
    """

    step: int
    generation: int
    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    mfu: float
    step_s: float
    data_wait_s: float
    samples: SampleSum = NOTHING
    finite: bool = True
    phases: Mapping[str, float] = field(default_factory=dict)
    experts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The line's fields. Loss and norm keep every bit (runs are compared by them), times are rounded to 1 us."""
        line: dict[str, Any] = {
            "step": self.step,
            "generation": self.generation,
            "loss": self.loss,
            "aux_loss": self.aux_loss,
            "z_loss": self.z_loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "mfu": round(self.mfu, 6),
            "step_s": round(self.step_s, 6),
            "data_wait_s": round(self.data_wait_s, 6),
            "samples": self.samples.count,
            "samples_crc": self.samples.crc_sum,
        }
        if not self.finite:
            line["finite"] = False
        if self.phases:
            line["phases"] = {name: round(seconds, 6) for name, seconds in self.phases.items()}
        line.update(self.experts)
        return line


@dataclass(frozen=True)
class EvalRecord:
    """An evaluation's line of `metrics.jsonl`: `step` completed steps, mean cross-entropy over the held-out tokens."""

    step: int
    generation: int
    eval_loss: float
    eval_tokens: int
    eval_s: float

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {
            "step": self.step,
            "generation": self.generation,
            "eval_loss": self.eval_loss,
            "eval_tokens": self.eval_tokens,
            "eval_s": round(self.eval_s, 6),
        }


def _ratio(top: NDArray[Any], bottom: NDArray[np.float64]) -> NDArray[np.float64]:
    """`top / bottom`, 0 where nothing was routed at all."""
    out = np.zeros(len(bottom), dtype=np.float64)
    np.divide(top, bottom, out=out, where=bottom > 0)
    return out


def _short(value: float) -> float:
    """Four significant digits: statistics to be looked at, not compared bit for bit."""
    return float(f"{value:.4g}")
