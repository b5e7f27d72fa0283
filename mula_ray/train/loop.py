"""The loop of one rank over small Protocols: no Ray, no processes, no files. The same for every way to run.

Steps count from 1 in everything that is reported: `step` is the number of committed steps once it is done. The engine
and the data number the same step `step - 1`.

Every decision that changes which collectives are run (stop, evaluation, save) is a function of the step, or was agreed
on in the step's own all-reduce: ranks never differ in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from mula_ray.config.run import RunConfig
from mula_ray.parallel.executor import MicroBatch
from mula_ray.plan.flops import mfu
from mula_ray.train.agreement import ExpertStats
from mula_ray.train.engine import EvalResult, StepResult
from mula_ray.train.metrics import EvalRecord, ExpertLoad, ExpertWindow, StepRecord, counts_every

SaveTo = Literal["memory", "disk"]


class Steps(Protocol):
    """The engine, as the loop sees it."""

    def step(self, step: int, batches: list[MicroBatch], stop: bool = False) -> StepResult:
        """One optimizer step."""
        ...

    def evaluate(self, batches: list[MicroBatch]) -> EvalResult:
        """Held-out loss."""
        ...


class Batches(Protocol):
    """Where micro-batches come from; numpy batches as in `data/batches.py`."""

    def micro_batches(self, step: int) -> Sequence[Any]:
        """Of step number `step`, from 0."""
        ...

    def eval_batches(self) -> Sequence[Any]:
        """The held-out ones."""
        ...


class Checkpoints(Protocol):
    """What happens to the state between two steps."""

    def after_step(self, step: int, *, last: bool, stop: bool, record: StepRecord | None = None) -> float:
        """`step` is committed: snapshot and save as due. Returns seconds for which training stood still.

        `last`: the run ends here; `stop`: it was agreed to end here. `record`: of the step, to be kept with its state
        (its times still lack what this call takes)."""
        ...


class Control(Protocol):
    """The way to and from whoever watches over this rank."""

    def phase(self, name: str, step: int) -> None:
        """Entering a phase of making `step` (from 1)."""
        ...

    def committed(self, step: int) -> None:
        """`step` is committed."""
        ...

    def stop_wanted(self) -> bool:
        """Whether this rank wishes to stop at the next step boundary."""
        ...

    def prepare(self, step: int, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Last word on a step's batches (fault rehearsal)."""
        ...


class Reporter(Protocol):
    """Where records go."""

    def step(self, record: StepRecord) -> None:
        """A step ended."""
        ...

    def evaluation(self, record: EvalRecord) -> None:
        """An evaluation ended."""
        ...


class StepFailed(Exception):
    """The agreed outcome of a step was not to commit it: not finite, or state damaged at rest."""

    def __init__(self, kind: Literal["loss", "gradient", "damage"], step: int, detail: str) -> None:
        super().__init__(f"step {step}: {detail}")
        self.kind, self.step, self.detail = kind, step, detail


@dataclass(frozen=True)
class Plan:
    """What to run: steps `start`+1 … `config.train.steps`. `skips`: steps that count but are not trained."""

    config: RunConfig
    start: int
    generation: int
    world: int
    peak_tflops: float = 0.0
    skips: tuple[int, ...] = ()


@dataclass(frozen=True)
class End:
    """How the loop ended: after `step`; `asked`: a stop was agreed on."""

    step: int
    asked: bool


def run(
    engine: Steps, batches: Batches, checkpoints: Checkpoints, control: Control, reporter: Reporter, plan: Plan
) -> End:
    """Run the plan.

    Raises:
        StepFailed: all ranks raise it for the same step; nothing of it was applied.
    """
    steps = plan.config.train.steps
    experts = _expert_window(plan.config)
    for done in range(plan.start, steps):
        step = done + 1
        began = time.perf_counter()
        if step in plan.skips:
            checkpoints.after_step(step, last=step == steps, stop=False)
            control.committed(step)
            continue
        control.phase("data", step)
        ready = to_micro_batches(batches.micro_batches(done))
        waited = time.perf_counter() - began
        result = engine.step(done, control.prepare(step, ready), control.stop_wanted())
        if result.damage:
            raise StepFailed("damage", step, result.damage)
        if not result.finite:
            raise StepFailed("loss" if "loss" in result.cause else "gradient", step, result.cause)
        last = step == steps
        record = None
        if step % plan.config.metrics.every == 0 or last or result.stop:
            record = _record(plan, step, result, time.perf_counter() - began, waited, experts)
        stall = checkpoints.after_step(step, last=last, stop=result.stop and not last, record=record)
        control.committed(step)  # only now: a committed step is one that need not be made again
        if record is not None:
            reporter.step(_stalled(record, plan, stall))
        if last or _eval_due(plan.config, step):
            _evaluate(engine, batches, control, reporter, plan, step)
        if result.stop and not last:
            return End(step, asked=True)
    return End(steps, asked=False)


def to_micro_batches(batches: Sequence[Any]) -> list[MicroBatch]:
    """Numpy batches as the engine's, sharing memory."""
    return [
        MicroBatch(
            torch.from_numpy(batch.tokens),
            torch.from_numpy(batch.weight),
            None if batch.doc_starts is None else torch.from_numpy(batch.doc_starts),
        )
        for batch in batches
    ]


def _eval_due(config: RunConfig, step: int) -> bool:
    every = config.train.eval_every
    return every > 0 and (step % every == 0 or step == 1)


def _evaluate(engine: Steps, batches: Batches, control: Control, reporter: Reporter, plan: Plan, step: int) -> None:
    if not plan.config.train.eval_samples:
        return
    began = time.perf_counter()
    control.phase("evaluate", step)
    result = engine.evaluate(to_micro_batches(batches.eval_batches()))
    seconds = time.perf_counter() - began
    reporter.evaluation(EvalRecord(step, plan.generation, result.loss, result.tokens, seconds))


def _expert_window(config: RunConfig) -> ExpertWindow | None:
    moe = config.model.moe
    if moe is None or not config.metrics.experts:
        return None
    return ExpertWindow(counts_every(config.model.layers, moe.experts, config.train.steps))


def _record(
    plan: Plan, step: int, result: StepResult, seconds: float, waited: float, window: ExpertWindow | None
) -> StepRecord:
    rate = result.tokens / seconds
    config = plan.config
    phases = {"data": waited, **result.phases}
    return StepRecord(
        step=step,
        generation=plan.generation,
        loss=result.loss,
        aux_loss=result.aux_loss,
        z_loss=result.z_loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        tokens=result.tokens,
        tokens_per_s=rate,
        mfu=mfu(config.model, config.data.context, rate, plan.world, plan.peak_tflops),
        step_s=seconds,
        data_wait_s=waited,
        samples=result.samples,
        phases=phases,
        experts=window.add(step, _load(result.experts)) if window is not None and result.experts is not None else {},
    )


def _stalled(record: StepRecord, plan: Plan, stall: float) -> StepRecord:
    """The record with the time that snapshot and save took."""
    if not stall:
        return record
    seconds = record.step_s + stall
    rate = record.tokens / seconds
    return replace(
        record,
        step_s=seconds,
        tokens_per_s=rate,
        mfu=mfu(plan.config.model, plan.config.data.context, rate, plan.world, plan.peak_tflops),
        phases={**record.phases, "checkpoint": stall},
    )


def _load(stats: ExpertStats) -> ExpertLoad:
    return ExpertLoad(stats.counts.numpy().astype("int64"), stats.entropy.numpy().astype("float64"))
