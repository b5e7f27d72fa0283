"""Turns what the conductor does into lines of the person, metrics and events. Also plays the driver's own faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mula_ray.elastic import commands as cmd
from mula_ray.elastic import events as ev
from mula_ray.elastic.state import Phase, State
from mula_ray.runtime.folder import RunFolder
from mula_ray.runtime.inject import Fault
from mula_ray.runtime.outputs import Outputs
from mula_ray.runtime.saves import Saved

KINDS: Mapping[type, str] = MappingProxyType(
    {
        ev.NodeLost: "hard", ev.AgentLost: "hard", ev.WorkerLost: "hard", ev.RankDied: "hard", ev.RankHung: "hang",
        ev.Straggler: "straggler", ev.NonFinite: "numeric", ev.StateDamaged: "numeric", ev.StorageFailed: "storage",
        ev.RestoreFailed: "storage", ev.FatalError: "fatal", ev.DeadlineNear: "deadline", ev.StopRequested: "deadline",
    }
)  # fmt: skip
"""Failure kinds of `events.jsonl`, by event."""

_SOURCE = {ev.Tier.OWN: "memory", ev.Tier.MEMORY: "buddy"}


@dataclass
class _Recovery:
    """Clock of the recovery at hand."""

    reason: str
    failed: float
    committed: int
    fenced: float = 0.0
    started: float = 0.0
    ready: float = 0.0
    restore: cmd.Restore | None = None
    parts: dict[str, float] = field(default_factory=dict)


class View:
    """The conductor's `Watcher`. `phases()`: slowest rank's seconds of the generation's start."""

    def __init__(self, outputs: Outputs, folder: RunFolder, run_start: Callable[[State], None]) -> None:
        self._out, self._folder, self._run_start = outputs, folder, run_start
        self._recovery: _Recovery | None = None
        self._recoveries = 0
        self._reason = "the run starts"
        self._first = True
        self._stepped = -1
        self.step = folder.committed
        self.first_step_at: float | None = None
        self.on_recovery: Callable[[int], None] = lambda _: None
        self._working = 0  # nodes of the generation at work; 0 before the first

    def decided(self, state: State, event: ev.Event, commands: tuple[cmd.Command, ...], reason: str) -> None:
        """See `Watcher`."""
        now, events = time.monotonic(), self._out.events
        if isinstance(event, ev.NodeJoined):
            events.membership(state.generation, change="joined", node=event.node, reason=reason)
        elif isinstance(event, ev.NodeLost | ev.AgentLost):
            events.membership(state.generation, change="lost", node=event.node, reason=reason)
        if self._working and isinstance(event, ev.NodeJoined | ev.NodeLost | ev.AgentLost):
            self._out.membership(state.generation, self._working, max(0, len(state.nodes) - self._working))
        kind = KINDS.get(type(event))
        if kind is not None:
            self._failure(state, event, kind, reason, now)
        events.decision(state.generation, reason=reason, commands=[type(c).__name__ for c in commands])
        if isinstance(event, ev.Fenced) and self._recovery is not None:
            self._recovery.fenced = now
        if isinstance(event, ev.GenerationReady) and self._recovery is not None:
            self._recovery.ready = now
        for command in commands:
            self._command(state, command, reason, now)

    def _failure(self, state: State, event: ev.Event, kind: str, reason: str, now: float) -> None:
        step = getattr(event, "step", None)
        rank = getattr(event, "rank", None)
        node = getattr(event, "node", None)
        detail = getattr(event, "detail", None) or getattr(event, "why", None)
        self._out.failure(
            state.generation, kind=kind, reason=reason, step=step if step is not None else state.committed + 1,
            node=node, rank=rank, detail=detail, what=type(event).__name__,
        )  # fmt: skip
        if self._recovery is None and state.phase is Phase.FENCING and not isinstance(event, ev.StopRequested):
            self._recovery = _Recovery(reason, now, state.committed)
            self._recoveries += 1
            self.on_recovery(self._recoveries)
            self._out.progress.state("recovering")

    def _command(self, state: State, command: cmd.Command, reason: str, now: float) -> None:
        events = self._out.events
        if isinstance(command, cmd.StartGeneration):
            seats = command.placement.seats
            spares = len(state.nodes) - len(set(seats))
            if self._first:
                self._first = False
                self._run_start(state)
            elif self._recovery is None:
                self._recovery = _Recovery(reason, now, state.committed, now)
            if state.skips:
                self._folder.remember(skips=list(state.skips))
            events.generation_start(
                command.generation, step=command.restore.step, world=command.placement.world, nodes=list(seats),
                spares=spares, reason=reason, dp=command.placement.dp, source=str(command.restore.tier),
            )  # fmt: skip
            self._working = len(set(seats))
            self._out.membership(command.generation, self._working, spares)
            if self._recovery is not None:
                self._recovery.started, self._recovery.restore = now, command.restore
                self._recovery.committed = max(self._recovery.committed, state.committed)
        elif isinstance(command, cmd.Cordon):
            events.membership(state.generation, change="cordoned", node=command.node, reason=command.why)
            self._folder.remember(cordoned=sorted(state.cordoned))
        elif isinstance(command, cmd.Wait) and command.missing:
            self._out.progress.state(f"waiting for {command.missing} nodes")

    def news(self, kind: str, generation: int, body: dict[str, Any]) -> None:
        """See `Watcher`."""
        if kind == "step":
            record = body["record"]
            if body.get("again"):
                if record.step > self.step:
                    self.step = record.step
                    self._out.step(record)
                return
            self.step = record.step
            self._out.step(record)
            if self.first_step_at is None:
                self.first_step_at = time.monotonic()
            if generation != self._stepped:
                self._stepped = generation
                self._recovered(generation, record.step)
        elif kind == "eval":
            self._out.evaluation(body["record"])
        elif kind == "cadence":
            self._out.events.add("snapshot_cadence", generation, every=body["every"])
        elif kind == "ready":
            self._out.events.add("rank_ready", generation, rank=body["rank"], node=body["node"], pid=body["pid"])
            if self._recovery is None:
                return
            for name, seconds in body["phases"].items():
                self._recovery.parts[name] = max(seconds, self._recovery.parts.get(name, 0.0))
        elif kind == "copy-failed":
            self._out.events.add("copy_failed", generation, **body)
        elif kind == "error" and body.get("where"):
            self._out.events.add("traceback", generation, rank=body["rank"], where=body["where"])

    def _recovered(self, generation: int, step: int) -> None:
        recovery, self._recovery = self._recovery, None
        if recovery is None or recovery.restore is None:
            return
        now = time.monotonic()
        phases = {
            "fence": recovery.fenced - recovery.failed,
            "decide": recovery.started - recovery.fenced,
            "start": max(0.0, recovery.ready - recovery.started - sum(recovery.parts.values())),
            **recovery.parts,
            "first_step": now - recovery.ready,
        }
        self._out.recovery(
            generation,
            {
                "step": recovery.restore.step,
                "source": _SOURCE.get(recovery.restore.tier, str(recovery.restore.tier)),
                "phases": phases,
                "seconds": now - recovery.failed,
                "lost_steps": max(0, recovery.committed - recovery.restore.step),
                "reason": recovery.reason,
                "first_step": step,
            },
        )

    def saved(self, saved: Saved) -> None:
        """See `Watcher`."""
        if saved.slot:
            self._out.events.checkpoint(
                saved.generation, step=saved.step, slot=saved.slot, bytes=saved.nbytes, seconds=saved.seconds,
                stall_s=0.0, kind=saved.kind,
            )  # fmt: skip
            if saved.kind == "full":
                self._out.progress.checkpoint(saved.step)
        elif not saved.abandoned:
            self._out.say(f"checkpoint of step {saved.step} failed: {saved.why}")

    def generation_begins(self, generation: int) -> None:
        """See `Watcher`."""
        self._folder.remember(generation=generation)
        self._folder.manager.advance(max(generation, self._folder.manager.generation))

    def fault(self, fault: Fault) -> None:
        """See `Watcher`."""
        self._out.events.add(
            "injected", self._stepped, kind=fault.kind, index=fault.index, at=f"{fault.at}={fault.number}"
        )
        if fault.kind == "kill-driver":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "torn-checkpoint":
            tear_newest(self._folder.path / "checkpoints")


def tear_newest(root: Path) -> None:
    """Rehearsal: cut the largest file of the newest checkpoint in half."""
    folders = [root / name for name in ("full-a", "full-b") if (root / name / "manifest.json").exists()]
    if folders:
        newest = max(folders, key=lambda folder: (folder / "manifest.json").stat().st_mtime)
        file = max(newest.iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(file, file.stat().st_size // 2)
