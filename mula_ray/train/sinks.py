"""Where records go: `metrics.jsonl` and `events.jsonl` (services: `services.py`).

Both files are append-only, one JSON object a line, one `write` a line, so that a reader or a crash sees whole lines and
at most one torn one at the end. Every line carries `time`, ISO 8601 with zone. `records.py` reads them back.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from mula_ray.train.metrics import EvalRecord, StepRecord

Record = StepRecord | EvalRecord
log = logging.getLogger(__name__)


def now_text() -> str:
    """The time of a line: UTC, milliseconds, with zone."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def clean(value: Any) -> Any:
    """`value` as strict JSON: NaN and infinities, which JSON has not, become null; mappings and tuples are copied."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [clean(item) for item in value]
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)


class LineFile:
    """An append-only file of JSON lines.

    `fsync_s`: 0 flushes every line to the disk, otherwise at most once in so many seconds (a process's death loses
    nothing either way: only a dying machine does). A full disk does not end training: the line is dropped, counted in
    `dropped` and warned of once.
    """

    def __init__(self, path: Path, fsync_s: float = 5.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.dropped = path, 0
        self._fsync_s, self._synced = fsync_s, time.monotonic()
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._torn = self._ends_torn()

    def _ends_torn(self) -> bool:
        size = os.fstat(self._fd).st_size
        return size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def write(self, fields: Mapping[str, Any]) -> bool:
        """Appends one line; False when it had to be dropped."""
        body = json.dumps(clean(fields), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if self._torn:
            # a line that a crash cut off must not swallow ours
            body = b"\n" + body
        try:
            written = os.write(self._fd, body)
            self._torn = written != len(body)
            if self._torn:
                raise OSError(28, "short write")
            self._sync(False)
        except OSError as error:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("%s: line dropped (%s); training goes on", self.path, error)
            return False
        return True

    def _sync(self, force: bool) -> None:
        if force or time.monotonic() - self._synced >= self._fsync_s:
            os.fsync(self._fd)
            self._synced = time.monotonic()

    def close(self) -> None:
        """Flushes to the disk and closes; a second call does nothing."""
        if self._fd < 0:
            return
        try:
            self._sync(True)
        except OSError as error:
            log.warning("%s: not flushed (%s)", self.path, error)
        os.close(self._fd)
        self._fd = -1


class MetricSink(Protocol):
    """Something that takes records."""

    def write(self, record: Record) -> None:
        """Takes one record."""
        ...

    def close(self) -> None:
        """Flushes and closes."""
        ...


class JsonlSink:
    """`metrics.jsonl`."""

    def __init__(self, path: Path, fsync_s: float = 5.0) -> None:
        self._file = LineFile(path, fsync_s)

    @property
    def dropped(self) -> int:
        """Lines lost to a full disk."""
        return self._file.dropped

    def write(self, record: Record) -> None:
        """Appends the record's line."""
        self._file.write({**record.to_json(), "time": now_text()})

    def close(self) -> None:
        """Flushes and closes."""
        self._file.close()


class Sinks:
    """Several sinks as one. A sink that raises (a service that is away) is dropped with a warning."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = list(sinks)

    def add(self, sink: MetricSink) -> None:
        """One more."""
        self._sinks.append(sink)

    def write(self, record: Record) -> None:
        """Hands the record to every sink."""
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:
                log.warning("metric sink %s dropped: %s", type(sink).__name__, error)
                self._sinks.remove(sink)

    def close(self) -> None:
        """Closes every sink."""
        for sink in self._sinks:
            sink.close()


class EventLog:
    """`events.jsonl`: what happened to a run, each line with its reason, on the disk before the call returns.

    Every line has `time`, `event` and `generation`; one method an event fixes its other fields, so that the writer and
    the readers (`status`, `report`, people's scripts) agree. Extra fields are welcome.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path, fsync_s=0.0)

    def add(self, event: str, generation: int, **fields: Any) -> None:
        """Any event."""
        self._file.write({"time": now_text(), "event": event, "generation": generation, **fields})

    def run_start(self, *, run_id: str, steps: int, world: int, resumed_step: int | None, **more: Any) -> None:
        """A driver took over the run: fresh (`resumed_step` None) or resumed after so many steps.

        `more`: environment (host, versions, device, threads, peak_tflops), nodes, spares, pid.
        """
        self.add("run_start", 0, run_id=run_id, steps=steps, world=world, resumed_step=resumed_step, **more)

    def generation_start(
        self, generation: int, *, step: int, world: int, nodes: Sequence[str], spares: int, reason: str, **more: Any
    ) -> None:
        """A generation trains from `step` on `nodes`, with `spares` whole nodes left."""
        self.add(
            "generation_start",
            generation,
            step=step,
            world=world,
            nodes=list(nodes),
            spares=spares,
            reason=reason,
            **more,
        )

    def membership(self, generation: int, *, change: str, node: str, reason: str, **more: Any) -> None:
        """A node's state changed: `change` is joined, lost, cordoned, promoted (spare to active) or released."""
        self.add("membership", generation, change=change, node=node, reason=reason, **more)

    def failure(
        self,
        generation: int,
        *,
        kind: str,
        reason: str,
        step: int | None,
        node: str | None = None,
        rank: int | None = None,
        **more: Any,
    ) -> None:
        """Something broke at `step`: `kind` is hard, hang, straggler, numeric, storage, deadline or fatal."""
        self.add("failure", generation, kind=kind, reason=reason, step=step, node=node, rank=rank, **more)

    def recovery(
        self,
        generation: int,
        *,
        step: int,
        source: str,
        phases: Mapping[str, float],
        seconds: float,
        reason: str,
        lost_steps: int = 0,
        **more: Any,
    ) -> None:
        """The first step of the new generation ended, `seconds` after the failure.

        `phases`: seconds by name, in order (detect, decide, start, groups, load, first_step, ...). `source`: where the
        state came from (memory, buddy, disk, fresh). `step`: where it goes on; `lost_steps` are done again.
        """
        self.add(
            "recovery",
            generation,
            step=step,
            source=source,
            phases={name: round(value, 6) for name, value in phases.items()},
            seconds=round(seconds, 6),
            lost_steps=lost_steps,
            reason=reason,
            **more,
        )

    def damaged(self, generation: int, *, path: str, damage: str, file: str, tensor: str, detail: str) -> None:
        """A checkpoint was passed over: what is wrong with which tensor in which file."""
        self.add("damaged", generation, path=path, damage=damage, file=file, tensor=tensor, detail=detail)

    def checkpoint(
        self, generation: int, *, step: int, slot: str, bytes: int, seconds: float, stall_s: float, **more: Any
    ) -> None:
        """A checkpoint is committed: `seconds` to write it, `stall_s` of them on the training path."""
        self.add(
            "checkpoint",
            generation,
            step=step,
            slot=slot,
            bytes=bytes,
            seconds=round(seconds, 6),
            stall_s=round(stall_s, 6),
            **more,
        )

    def decision(self, generation: int, *, reason: str, commands: Sequence[str] = (), **more: Any) -> None:
        """What the policy decided, and why."""
        self.add("decision", generation, reason=reason, commands=list(commands), **more)

    def run_end(self, generation: int, *, code: int, reason: str, step: int, **more: Any) -> None:
        """The driver ended with `code` after `step` completed steps."""
        self.add("run_end", generation, code=code, reason=reason, step=step, **more)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
