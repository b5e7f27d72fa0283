"""Where the wall time of a run went, and what its recoveries cost.

Goodput = seconds of steps that count (each step once) without their data wait and checkpoint stall, divided by the wall
time during which a driver was at work. Time between a driver's end and the next driver's start is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mula_ray.train.records import Line
from mula_ray.train.report.load import Run, epoch

KINDS: tuple[tuple[str, str], ...] = (
    ("training", "steps that count"),
    ("data wait", "ranks waiting for samples"),
    ("checkpoint stall", "training path held up by a save"),
    ("replayed steps", "work done again after a failure"),
    ("recovery", "from a failure to the first step of the next generation"),
    ("evaluation", "held-out loss"),
    ("start-up", "from a driver's start to its first step"),
    ("other", "everything else"),
)


@dataclass(frozen=True)
class Session:
    """One driver at work: from its `run_start` to its end, or to its last sign of life. Seconds since the epoch."""

    start: float
    end: float
    first_step: float | None


@dataclass(frozen=True)
class Account:
    """Seconds by kind (`KINDS`), and the wall time they add up to."""

    seconds: dict[str, float]
    wall: float

    @property
    def goodput(self) -> float:
        """Share of the wall time in steps that count; NaN for a run without time."""
        return self.seconds["training"] / self.wall if self.wall > 0 else float("nan")


def sessions(run: Run) -> list[Session]:
    """The drivers that worked on this run, one after the other."""
    starts = [epoch(line) - float(line.get("startup_s") or 0.0) for line in run.of("run_start")]
    stamps = np.array(sorted(t for line in (*run.events, *run.metrics.written) if not np.isnan(t := epoch(line))))
    if not len(stamps):
        return []
    ends = np.array([epoch(line) for line in run.metrics.written])
    seconds = np.array([float(line.get("step_s") or 0.0) for line in run.metrics.written])
    if not starts:
        starts = [float(stamps[0] - (seconds[0] if len(seconds) else 0.0))]
    found: list[Session] = []
    for start, after in zip(starts, [*starts[1:], float("inf")], strict=True):
        inside = stamps[(stamps >= start) & (stamps < after)]
        steps = (ends >= start) & (ends < after)
        first = float((ends - seconds)[steps].min()) if steps.any() else None
        found.append(Session(start, float(inside.max()) if len(inside) else start, first))
    return found


def _stride(run: Run) -> float:
    """Steps that a line of `metrics.jsonl` stands for (`metrics.every`)."""
    if len(run.step) < 2:
        return 1.0
    return float((run.step[-1] - run.step[0]) / (len(run.step) - 1))


def account(run: Run) -> Account:
    """Where the time of `run` went. What nothing explains is `other`; nothing is ever negative."""
    every = max(1.0, float(run.get("metrics.every") or _stride(run)))
    parts = dict.fromkeys((name for name, _ in KINDS), 0.0)
    lived = sessions(run)
    wall = sum(session.end - session.start for session in lived)
    step_s = float(np.nansum(run.series("step_s"))) * every
    parts["data wait"] = float(np.nansum(run.series("data_wait_s"))) * every
    stalls = sum(float(line.get("stall_s") or 0.0) for line in run.of("checkpoint"))
    parts["checkpoint stall"] = max(stalls, float(run.phase("checkpoint").sum()) * every)
    parts["training"] = max(0.0, step_s - parts["data wait"] - parts["checkpoint stall"])
    written = sum(float(line.get("step_s") or 0.0) for line in run.metrics.written) * every
    parts["replayed steps"] = max(0.0, written - step_s)
    parts["recovery"] = sum(_lost(line) for line in run.of("recovery"))
    parts["evaluation"] = sum(float(line.get("eval_s") or 0.0) for line in run.metrics.evals)
    parts["start-up"] = sum(max(0.0, session.first_step - session.start) for session in lived if session.first_step)
    known = sum(parts.values())
    parts["other"] = max(0.0, wall - known)
    return Account(parts, max(wall, known) if wall else 0.0)


def _lost(line: Line) -> float:
    """Seconds of a recovery that no step line holds: the first step has its own line."""
    seconds = float(line.get("seconds") or 0.0)
    return max(0.0, seconds - float((line.get("phases") or {}).get("first_step", 0.0)))


def percentile(values: list[float], share: float) -> float:
    """A percentile by linear interpolation; NaN of nothing."""
    return float(np.percentile(values, share)) if values else float("nan")
