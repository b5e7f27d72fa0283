"""The engine of one rank: step, evaluate, state. One implementation for every layout; a world of one talks to nobody.

A step: forward and backward of all micro-batches (gradients reduced behind it) → rest of the reduction →
**agreement**, one small all-reduce on the control group that carries loss, norm, token count, stop request and
statistics → clip, update, all-gather.
A step whose loss or gradient is not finite on any rank changes nothing on any rank.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mula_ray.config.run import RunConfig
from mula_ray.data.ledger import NOTHING, SampleSum, sample_sum
from mula_ray.optim.epso import Epso, clip_factor, epso_sharding
from mula_ray.optim.integrity import ReplicaHashes, StateGuard
from mula_ray.optim.schedule import learning_rate
from mula_ray.optim.zero1 import zero1_sharding
from mula_ray.parallel.apply import DTYPES, build_stages, initial_value, layout_of
from mula_ray.parallel.backend import synchronize
from mula_ray.parallel.collectives import all_reduce
from mula_ray.parallel.executor import Divisors, Executor, MicroBatch, SingleStage, Sums
from mula_ray.parallel.groups import Group, Groups
from mula_ray.parallel.pipeline import make_executor
from mula_ray.plan.pieces import Piece, StateReader
from mula_ray.plan.topology import Topology
from mula_ray.train.agreement import ExpertStats, Verdict, agree

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
    cause: str = ""
    """of a step that is not finite: what is not, the first layer whose router is not; a rank whose own samples gave it
    says so in its own result"""
    damage: str = ""
    """empty, or which state or weights are not what they should be; then nothing was changed, on no rank"""
    experts: ExpertStats | None = None
    samples: SampleSum = NOTHING
    """what all ranks together read"""
    phases: dict[str, float] = field(default_factory=dict)
    """seconds of forward_backward, reduce, agree, update; of the first, dispatch is waiting for the EP group's calls"""


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
        self._guard = StateGuard(self.optimizer)
        self._executor = self._make_executor()

    def step(self, step: int, batches: list[MicroBatch], stop: bool = False) -> StepResult:
        """One optimizer step on this rank's micro-batches (as many as every rank of its EP group and pipeline has).

        `stop`: this rank's wish to stop; the result's `stop` is the same on all ranks.
        """
        clock = _Clock(self._hooks, self.device, step, self.groups.ep)
        expected = self.config.train.global_batch
        divisors = Divisors(float(expected), float(expected * self.config.data.context))
        sums = Sums(self.config.model, self.device)
        samples = self._read(batches)
        with clock.phase("forward_backward"):
            batches = self._executor.complete([batch.to(self.device) for batch in batches])
            self.optimizer.begin_step(len(batches))
            self._executor.run(batches, divisors, sums)
        clock.note_dispatch()
        with clock.phase("reduce"):
            squared = self.optimizer.reduce()
        with clock.phase("agree"):
            verdict, damage = self._agree(step, sums, squared, stop, samples)
        # The sums were divided by the batch that the configuration promises; correct when another one came.
        correction = divisors.tokens / verdict.tokens if verdict.tokens else 1.0
        norm = math.sqrt(verdict.squared_norm) * correction if verdict.squared_norm >= 0 else math.nan
        finite = all(math.isfinite(value) for value in (norm, verdict.loss, verdict.balance, verdict.z))
        lr = learning_rate(step, self.config.optim, self.config.train.steps)
        if finite and not damage:
            with clock.phase("update"):
                self.optimizer.update(step, lr, correction * clip_factor(norm, self.config.optim.clip))
                if self._checks(step + 1):
                    self._guard.write()
                else:
                    self._guard.forget()
        clock.done()
        return StepResult(
            step=step,
            loss=verdict.loss,
            aux_loss=verdict.balance,
            z_loss=verdict.z,
            grad_norm=norm,
            lr=lr,
            tokens=verdict.tokens,
            finite=finite,
            stop=verdict.stop,
            cause="" if finite else _cause(verdict, norm) + self._seen(sums),
            damage=damage,
            experts=verdict.experts,
            samples=verdict.samples,
            phases=dict(clock.seconds),
        )

    def evaluate(self, batches: list[MicroBatch]) -> EvalResult:
        """Mean cross-entropy over all ranks' samples; every rank passes the same number of micro-batches."""
        self._hooks.phase("evaluate", -1)
        sums = Sums(self.config.model, self.device)
        self._executor.run([batch.to(self.device) for batch in batches], None, sums)
        speaks = self.topology.coords(self.rank).tp == 0
        vector = sums.scalars.cpu() if speaks else torch.zeros(sums.scalars.shape, dtype=torch.float64)
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
        self._guard.forget()
        reader.read_many(self.pieces())
        self.optimizer.load_done()

    def close(self) -> None:
        """Drop the groups; end the process soon after."""
        self.groups.close()

    def _make_executor(self) -> Executor:
        if self.topology.pp > 1:
            sink = self.optimizer.sink
            return make_executor(self.stages, self.config, self.topology, self.rank, self.groups, sink)
        return SingleStage(self.stages[0], self.config.model)

    def _read(self, batches: list[MicroBatch]) -> SampleSum:
        """What this rank read and its TP and pipeline neighbours leave to it to count."""
        at = self.topology.coords(self.rank)
        if at.tp or at.pp:
            return NOTHING
        return sample_sum((batch.tokens.cpu().numpy(), batch.weight.cpu().numpy()) for batch in batches)

    def _agree(self, step: int, sums: Sums, squared: Tensor, stop: bool, samples: SampleSum) -> tuple[Verdict, str]:
        """The agreement, and what is damaged, in words ("" if nothing is)."""
        found = self._guard.damaged()
        at = self.topology.coords(self.rank)
        hashes = None
        if self._checks(step) and self.topology.world > 1:
            compare = ReplicaHashes(self.topology)
            hashes = compare, compare.vector(self.optimizer, at)
        verdict = agree(
            sums,
            squared,
            self.groups.control,
            speaks=at.tp == 0,
            stop=stop,
            damaged=bool(found),
            hashes=hashes,
            statistics=self.config.metrics.experts,
            samples=samples,
        )
        words = [f"optimizer state of rank {self.rank} changed at rest: {', '.join(found)}"] if found else []
        if verdict.damaged_ranks and not found:
            words.append(f"optimizer state of {verdict.damaged_ranks} other ranks changed at rest")
        words += [f"replicas differ: {name}" for name in verdict.unequal]
        return verdict, "; ".join(words)

    def _seen(self, sums: Sums) -> str:
        """Whether this rank's own samples were not finite, before anything was reduced."""
        return "" if bool(torch.isfinite(sums.scalars).all()) else f"; seen first on rank {self.rank}"

    def _checks(self, step: int) -> bool:
        every = self.config.elastic.check_state_every
        return every > 0 and step % every == 0


def _cause(verdict: Verdict, norm: float) -> str:
    """What is not finite, in words."""
    parts = {"loss": verdict.loss, "balance loss": verdict.balance, "z-loss": verdict.z, "gradient norm": norm}
    words = [name for name, value in parts.items() if not math.isfinite(value)]
    if verdict.experts is not None and not bool(torch.isfinite(verdict.experts.entropy).all()):
        words.append(f"router of layer {int((~torch.isfinite(verdict.experts.entropy)).nonzero()[0])}")
    return ", ".join(words) + " not finite"


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

    def __init__(self, hooks: EngineHooks, device: torch.device, step: int, ep: Group | None) -> None:
        self.hooks, self.device, self.step, self._ep = hooks, device, step, ep
        self._waited = ep.meter.waited_s if ep is not None else 0.0
        self.seconds: dict[str, float] = {}

    def phase(self, name: str) -> _Phase:
        """Context of one phase."""
        return _Phase(self, name)

    def note_dispatch(self) -> None:
        """How long the forward and backward just done waited for tokens of other ranks."""
        if self._ep is not None:
            self.seconds["dispatch"] = self._ep.meter.waited_s - self._waited

    def done(self) -> None:
        """The step is over."""
        synchronize(self.device)
        self.hooks.phase("done", self.step)
