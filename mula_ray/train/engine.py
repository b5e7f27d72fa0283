"""The engine of one rank: step, evaluate, state. One implementation for every layout; a world of one talks to nobody.

A step: forward and backward of all micro-batches (gradients reduced behind it) → rest of the reduction →
**agreement**, one small all-reduce on the control group that carries loss, norm, token count, stop request and
statistics → clip, update, all-gather.
A step whose loss or gradient is not finite on any rank changes nothing on any rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mula_ray.config.run import RunConfig
from mula_ray.optim.epso import Epso, clip_factor, epso_sharding
from mula_ray.optim.schedule import learning_rate
from mula_ray.optim.zero1 import zero1_sharding
from mula_ray.parallel.apply import DTYPES, build_stages, initial_value, layout_of
from mula_ray.parallel.backend import synchronize
from mula_ray.parallel.collectives import all_reduce
from mula_ray.parallel.executor import Divisors, Executor, MicroBatch, SingleStage, Sums
from mula_ray.parallel.groups import Groups
from mula_ray.parallel.pipeline import make_executor
from mula_ray.plan.pieces import Piece, StateReader
from mula_ray.plan.topology import Topology

__all__ = ["Engine", "EngineHooks", "EvalResult", "ExpertStats", "MicroBatch", "NoHooks", "StepResult"]


class EngineHooks(Protocol):
    """Called at the borders of a step's phases: heartbeat, fault injection, profiler."""

    def phase(self, name: str, step: int) -> None:
        """`name`: forward_backward, reduce, agree, update, done; evaluate, load."""
        ...


class NoHooks:
    """The default."""

    def phase(self, name: str, step: int) -> None:
        """Nothing."""


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
class StepResult:
    """What a step did, the same on all ranks. Losses are global means: `loss` cross-entropy per token in nats,
    `aux_loss` balance per sequence and layer, `z_loss` per token and layer, both without their coefficients."""

    step: int
    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    tokens: int
    finite: bool
    stop: bool
    experts: ExpertStats | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """seconds of forward_backward, reduce, agree, update"""


@dataclass(frozen=True)
class EvalResult:
    """Global mean cross-entropy per token, nats, over `tokens` tokens."""

    loss: float
    tokens: int


class Engine:
    """Model, optimizer and groups of one rank.

    Args:
        init: False leaves weights and state at zero: a run that will `load` at once need not draw them.
    """

    def __init__(
        self,
        config: RunConfig,
        topology: Topology,
        rank: int,
        groups: Groups,
        device: torch.device | str,
        hooks: EngineHooks | None = None,
        *,
        init: bool = True,
    ) -> None:
        self.config, self.topology, self.rank, self.groups = config, topology, rank, groups
        self.device = torch.device(device)
        self._hooks: EngineHooks = hooks or NoHooks()
        self.stages = build_stages(config, topology, rank, groups, self.device, init=False)
        self.optimizer = Epso(
            self.stages,
            layout_of(config, topology, rank),
            topology,
            rank,
            groups,
            config.optim,
            dtype=DTYPES[config.train.dtype],
            sharding=zero1_sharding if config.optim.kind == "zero1" else epso_sharding,
        )
        if init:
            self.optimizer.initialise(lambda param: initial_value(param, config))
        self._executor = self._make_executor()

    def step(self, step: int, batches: list[MicroBatch], stop: bool = False) -> StepResult:
        """One optimizer step on this rank's micro-batches (as many as every rank of its EP group and pipeline has).

        `stop`: this rank's wish to stop; the result's `stop` is the same on all ranks.
        """
        clock = _Clock(self._hooks, self.device, step)
        expected = self.config.train.global_batch
        divisors = Divisors(float(expected), float(expected * self.config.data.context))
        sums = Sums(self.config.model, self.device)
        with clock.phase("forward_backward"):
            self.optimizer.begin_step(len(batches))
            self._executor.run([batch.to(self.device) for batch in batches], divisors, sums)
        with clock.phase("reduce"):
            squared = self.optimizer.reduce()
        with clock.phase("agree"):
            scalars, stats, squared_norm, stopping = self._agree(sums, squared, stop)
        loss, aux, z = _means(scalars)
        # The sums were divided by the batch that the configuration promises; correct when another one came.
        correction = divisors.tokens / scalars[1] if scalars[1] else 1.0
        norm = math.sqrt(squared_norm) * correction if squared_norm >= 0 else math.nan
        finite = all(math.isfinite(value) for value in (norm, loss, aux, z))
        lr = learning_rate(step, self.config.optim, self.config.train.steps)
        if finite:
            with clock.phase("update"):
                self.optimizer.update(step, lr, correction * clip_factor(norm, self.config.optim.clip))
        clock.done()
        return StepResult(step, loss, aux, z, norm, lr, int(scalars[1]), finite, stopping, stats, dict(clock.seconds))

    def evaluate(self, batches: list[MicroBatch]) -> EvalResult:
        """Mean cross-entropy over all ranks' samples; every rank passes the same number of micro-batches."""
        self._hooks.phase("evaluate", -1)
        sums = Sums(self.config.model, self.device)
        self._executor.run([batch.to(self.device) for batch in batches], None, sums)
        vector = self._once_per_sample(sums.scalars.cpu())
        total = all_reduce(vector, self.groups.control)
        tokens = int(total[1])
        return EvalResult(float(total[0]) / tokens if tokens else math.nan, tokens)

    def pieces(self) -> list[tuple[Piece, Tensor]]:
        """The state of this rank: fp32 masters and moments, live flat views."""
        return self.optimizer.pieces()

    def weights(self) -> list[tuple[Piece, Tensor]]:
        """The working weights that this rank owns, live flat views, for model-only checkpoints."""
        return self.optimizer.weights()

    def load(self, reader: StateReader) -> None:
        """Fill the state in place from `reader`, then everybody's working weights from the masters."""
        self._hooks.phase("load", -1)
        for piece, out in self.pieces():
            reader.read_into(piece, out)
        self.optimizer.load_done()

    def close(self) -> None:
        """Drop the groups; end the process soon after."""
        self.groups.close()

    def _make_executor(self) -> Executor:
        if self.topology.pp > 1:
            sink = self.optimizer.sink
            return make_executor(self.stages, self.config, self.topology, self.rank, self.groups, sink)
        return SingleStage(self.stages[0], self.config.model)

    def _once_per_sample(self, vector: Tensor) -> Tensor:
        """TP ranks hold the same samples: the first of them speaks."""
        return vector if self.topology.coords(self.rank).tp == 0 else torch.zeros_like(vector)

    def _agree(self, sums: Sums, squared: Tensor, stop: bool) -> tuple[list[float], ExpertStats | None, float, bool]:
        """The one small all-reduce: (scalars of `Sums`), statistics, squared norm, whether anybody wants to stop."""
        layers, experts = sums.counts_LE.shape
        wants_stats = experts > 0 and self.config.metrics.experts
        parts = [sums.scalars]
        if wants_stats:
            parts += [sums.counts_LE.flatten(), sums.entropy_L]
        counted = self._once_per_sample(torch.cat(parts).cpu())
        vector = torch.cat([counted, squared.reshape(1), torch.tensor([float(stop)], dtype=torch.float64)])
        all_reduce(vector, self.groups.control)
        scalars: list[float] = vector[:5].tolist()
        stats = None
        if wants_stats:
            counts = vector[5 : 5 + layers * experts].view(layers, experts).clone()
            stats = ExpertStats(counts, vector[5 + layers * experts : -2] / max(scalars[1], 1.0))
        return scalars, stats, float(vector[-2]), bool(vector[-1] > 0)


def _means(scalars: Sequence[float]) -> tuple[float, float, float]:
    """(cross-entropy per token, balance per sequence, z per token)."""
    loss, tokens, sequences, balance, z = scalars
    if not tokens:
        return math.nan, math.nan, math.nan
    return loss / tokens, balance / sequences, z / tokens


class _Phase:
    def __init__(self, clock: _Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._clock.hooks.phase(self._name, self._clock.step)
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._clock.seconds[self._name] = time.perf_counter() - self._start


class _Clock:
    """Times the phases of one step and tells the hooks. Host time: no device synchronisation is added."""

    def __init__(self, hooks: EngineHooks, device: torch.device, step: int) -> None:
        self.hooks, self.device, self.step = hooks, device, step
        self.seconds: dict[str, float] = {}

    def phase(self, name: str) -> _Phase:
        """Context of one phase."""
        return _Phase(self, name)

    def done(self) -> None:
        """The step is over."""
        synchronize(self.device)
        self.hooks.phase("done", self.step)
