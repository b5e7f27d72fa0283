"""`mula-ray bench pipeline`: idle share and memory of the pipeline schedules, against 1F1B.

- `idle-emulated`: stage compute is a sleep (30 ms forward, 60 ms backward, split in halves for I and W), 4 ranks, 16
  micro-batches, 64 KB messages: what the schedule and its transfers cost, on any machine;
- `idle-real`: real compute on 2 ranks (no bar: two cores share memory bandwidth);
- `memory`: most bytes of activations that a stage holds, 1F1B against all-forward-then-backward.

Correctness first: each table's messages carry a number that the receiver checks.
"""

from __future__ import annotations

import resource
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from mula_ray.bench.ranks import run_ranks
from mula_ray.bench.timing import chosen, report
from mula_ray.config.model import ModelConfig
from mula_ray.config.run import DataConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from mula_ray.parallel.collectives import barrier
from mula_ray.parallel.groups import Groups
from mula_ray.parallel.pipeline import Mailbox, Pipeline, PipelineExecutor
from mula_ray.plan.schedule import Action, Schedule, build_schedule, simulate, splits_backward
from mula_ray.plan.topology import Topology
from mula_ray.train.engine import Engine, MicroBatch

FORWARD_S, BACKWARD_S = 0.030, 0.060
MESSAGE = (16, 1024)  # fp32: 64 KB
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2))
REPEATS = 5


def run(cases: tuple[str, ...] | None = None) -> dict[str, Any]:
    """All cases, or those named: idle-emulated, idle-real, memory."""
    names = chosen("pipeline", cases, ("idle-emulated", "idle-real", "memory"))
    rows: list[dict[str, Any]] = []
    if "idle-emulated" in names:
        rows += _idle_rows("idle-emulated", run_ranks(_emulate, 4, timeout=180.0))
    if "idle-real" in names:
        rows += _idle_rows("idle-real", run_ranks(_compute, 2, timeout=240.0))
    if "memory" in names:
        rows += _memory_rows()
    return report("pipeline", rows, threads=1)


def _idle_rows(case: str, ranks: list[dict[str, list[float]]]) -> list[dict[str, Any]]:
    """`ranks[r][schedule]`: idle share of rank r, a value a repeat. Speed-up: 1F1B's idle share over ours."""
    idle = {
        name: statistics.median(statistics.fmean(values) for values in zip(*(r[name] for r in ranks), strict=True))
        for name in ranks[0]
    }
    return [
        _row(f"{case}-{name}", "idle_share", value, "", "1f1b", idle["1f1b-1"] / value if value else None)
        for name, value in idle.items()
    ]


def _row(case: str, metric: str, value: float, unit: str, against: str, speedup: float | None) -> dict[str, Any]:
    return {"case": case, "metric": metric, "value": value, "unit": unit, "against": against, "speedup": speedup}


def _emulate(rank: int, world: int, port: int) -> dict[str, list[float]]:
    """Idle share of this rank under every schedule, interleaved repeats."""
    groups = Groups.connect(Topology(pp=world), rank, host="127.0.0.1", port=port, prefix="bench/pipeline")
    idle: dict[str, list[float]] = {f"{name}-{virtual}": [] for name, virtual in SCHEDULES}
    for _ in range(REPEATS):
        for name, virtual in SCHEDULES:
            schedule = build_schedule(name, world, virtual, 16)
            idle[f"{name}-{virtual}"].append(_run_emulated(schedule, rank, groups))
    return idle


def _run_emulated(schedule: Schedule, rank: int, groups: Groups) -> float:
    mailbox = Mailbox(schedule, rank, groups.channels, MESSAGE, torch.empty(0))
    pipeline = Pipeline(schedule, rank, _SleepingSink(schedule) if splits_backward(schedule.name) else None)
    forward = _SleepingStage(schedule)
    barrier(groups.control)
    started = time.perf_counter()
    pipeline.run(mailbox, forward)
    barrier(groups.control)
    wall = time.perf_counter() - started
    busy = schedule.micro_batches * (FORWARD_S + BACKWARD_S)
    return 1.0 - busy / wall


class _Sleep(torch.autograd.Function):
    """Identity plus one; its backward takes the seconds of a backward chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class _SleepingStage:
    """A stage that only takes time, and checks that it got its own micro-batch's number from the stage before."""

    def __init__(self, schedule: Schedule) -> None:
        self._stages, self._virtual = schedule.stages, schedule.virtual
        self._backward = BACKWARD_S / self._virtual / (2 if splits_backward(schedule.name) else 1)

    def __call__(self, stage: int, micro_batch: int, received: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x = torch.full(MESSAGE, 1000.0 * micro_batch, requires_grad=True) if received is None else received
        assert x[0, 0].item() == 1000 * micro_batch + stage, "a message went astray"
        time.sleep(FORWARD_S / self._virtual)
        out: Tensor = _Sleep.apply(x, self._backward)  # type: ignore[no-untyped-call]
        return out, out.sum() if stage == self._stages - 1 else None


class _SleepingSink:
    """Weight gradients that only take time."""

    def __init__(self, schedule: Schedule) -> None:
        self._seconds = BACKWARD_S / 2 / schedule.virtual

    def keep(self, key: tuple[int, int] | None) -> None:
        """Nothing to keep."""

    def drain(self, key: tuple[int, int]) -> None:  # noqa: ARG002
        """Take the time of a W chunk."""
        time.sleep(self._seconds)


def _config(batches: int, schedule: str, virtual: int, hidden: int = 256) -> RunConfig:
    return RunConfig(
        model=ModelConfig(vocab_size=1024, hidden=hidden, layers=8, heads=4, ffn=4 * hidden),
        train=TrainConfig(steps=100, global_batch=batches, micro_batch=1, dtype="fp32"),
        data=DataConfig(context=256),
        optim=OptimConfig(),
        parallel=ParallelConfig(pp=2, schedule=schedule, virtual_stages=virtual),  # type: ignore[arg-type]
    )


def _batches(count: int) -> list[MicroBatch]:
    return [MicroBatch(torch.randint(0, 1024, (1, 257)), torch.ones(1)) for _ in range(count)]


def _compute(rank: int, world: int, port: int) -> dict[str, list[float]]:
    """Idle share with real compute: 1 - (time of this rank's chunks run alone) / step."""
    topology, count = Topology(pp=world), 8
    groups = Groups.connect(topology, rank, host="127.0.0.1", port=port, prefix="bench/pipeline")
    engines = {
        f"{name}-{virtual}": Engine(_config(count, name, virtual), topology, rank, groups, "cpu")
        for name, virtual in SCHEDULES
    }
    idle: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(REPEATS + 1):
        for name, engine in engines.items():
            barrier(groups.control)
            cpu, wall = time.thread_time(), time.perf_counter()
            engine.step(repeat, _batches(count))
            if repeat:
                idle[name].append(1.0 - (time.thread_time() - cpu) / (time.perf_counter() - wall))
    return idle


def _memory_rows() -> list[dict[str, Any]]:
    rows = []
    for batches in (4, 16):
        one = max(run_ranks(_peak, 2, batches, False))
        everything = max(run_ranks(_peak, 2, batches, True))
        case = f"memory-pp2-m{batches}"
        rows.append(_row(case, "peak_1f1b", one / 2**20, "MiB", "all-forward-then-backward", everything / one))
    return rows


def _peak(rank: int, world: int, port: int, batches: int, forward_first: bool) -> int:
    """Bytes that a step adds to the resident peak of a fresh process."""
    topology = Topology(pp=world)
    groups = Groups.connect(topology, rank, host="127.0.0.1", port=port, prefix="bench/pipeline")
    engine = Engine(_config(batches, "1f1b", 1, hidden=512), topology, rank, groups, "cpu")
    if forward_first:
        executor = engine._executor
        assert isinstance(executor, PipelineExecutor)
        executor._tables[batches, True] = _all_forward(world, batches)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engine.step(0, _batches(batches))
    return 1024 * max(1, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def _all_forward(pp: int, batches: int) -> Schedule:
    orders = tuple(tuple(Action(kind, rank, m) for kind in ("F", "B") for m in range(batches)) for rank in range(pp))
    schedule = Schedule(pp, 1, batches, "1f1b", orders)
    simulate(schedule)  # it can run
    return schedule
