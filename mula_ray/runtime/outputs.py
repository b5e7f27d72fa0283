"""All that a run says: the person's line, `metrics.jsonl`, `events.jsonl`; the screen is kept free of Ray's chatter."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from mula_ray.checkpoint.failures import DamagedCheckpoint
from mula_ray.config.run import RunConfig
from mula_ray.runtime.prometheus import RayMetrics
from mula_ray.train.metrics import EvalRecord, StepRecord
from mula_ray.train.progress import Progress
from mula_ray.train.services import open_sinks
from mula_ray.train.sinks import EventLog


@contextlib.contextmanager
def quiet_screen(log: Path) -> Iterator[TextIO]:
    """Descriptors 1 and 2 go to `log` (whatever a library prints, from any language); yields the true stdout."""
    sys.stdout.flush()
    sys.stderr.flush()
    out, err = os.dup(1), os.dup(2)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    screen = os.fdopen(os.dup(out), "w", encoding="utf-8", buffering=1)
    try:
        yield screen
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            screen.flush()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        with contextlib.suppress(OSError):
            screen.close()


class Outputs:
    """One object a run, used by one thread. `close` at the end, whatever happened."""

    def __init__(self, run_dir: Path, run_id: str, config: RunConfig, screen: TextIO, done: int) -> None:
        metrics = config.metrics
        self._sinks = open_sinks(
            run_dir, run_id, config.model_dump(mode="json"), tensorboard=metrics.tensorboard, wandb=metrics.wandb
        )
        self.events = EventLog(run_dir / "events.jsonl")
        self.progress = Progress(config.train.steps, done=done, stream=screen)
        self._replayed = 0
        self._scraped: RayMetrics | None = None

    def scrape(self, metrics: RayMetrics) -> None:
        """Put the run's figures among those that Ray shows to Prometheus, too; only once Ray is connected."""
        self._scraped = metrics
        self._sinks.add(metrics)

    def failure(self, generation: int, *, kind: str, **fields: Any) -> None:
        """Something broke."""
        self.events.failure(generation, kind=kind, **fields)
        if self._scraped is not None:
            self._scraped.failure(kind)

    def membership(self, generation: int, active: int, spares: int) -> None:
        """Nodes that train, and nodes that wait."""
        self.progress.membership(generation, active, spares)
        if self._scraped is not None:
            self._scraped.nodes(active=active, spares=spares)

    def step(self, record: StepRecord) -> None:
        """A step's line."""
        self._sinks.write(record)
        self.progress.step(record)

    def evaluation(self, record: EvalRecord) -> None:
        """An evaluation's line."""
        self._sinks.write(record)
        self.progress.evaluation(record)

    def say(self, text: str) -> None:
        """A line for the person."""
        self.progress.note(text)

    def decision(self, generation: int, reason: str, commands: tuple[str, ...], **more: Any) -> None:
        """What the policy decided, and why."""
        self.events.decision(generation, reason=reason, commands=commands, **more)

    def passed_over(self, generation: int, rejected: Sequence[DamagedCheckpoint]) -> None:
        """Checkpoints that are damaged, newer than the one that is resumed: which file, which tensor, what kind."""
        for error in rejected:
            self.say(f"passed over: {error}")
            for damage in error.damages:
                self.events.damaged(generation, path=error.path, **damage.event())

    def recovery(self, generation: int, fields: Mapping[str, Any]) -> None:
        """The first step after a failure is done."""
        self.events.recovery(generation, **fields)
        if self._scraped is not None:
            self._scraped.recovery(float(fields["seconds"]))
        self.say(
            f"recovered in {fields['seconds']:.2f} s from {fields['source']} at step {fields['step']} "
            f"({fields['lost_steps']} steps done again): {fields['reason']}"
        )

    def close(self) -> None:
        """Flush and close everything."""
        self.progress.close()
        self._sinks.close()
        self.events.close()
