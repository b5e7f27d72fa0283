"""Saving from a loop that holds the whole state in one process: synchronous, or asynchronous with one save in flight.

The asynchronous way: copy the state into shared memory (the loop waits for this copy only), then a thread hands it to a
`WriterProcess`, commits, has every byte re-read, and lets it take its slot. When a save is asked for while the one
before is still being written, the loop waits for it: that is the back-pressure, and its seconds are in the result.
Runs of many nodes do the same steps from the driver, with one writer process a node (module `manager`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mula_ray.checkpoint.failures import Damage, StoreFailure
from mula_ray.checkpoint.manager import CheckpointManager, Pending
from mula_ray.checkpoint.snapshot import SlotInfo, SnapshotBuffer, SnapshotMemory
from mula_ray.checkpoint.store import part_name, write_part
from mula_ray.checkpoint.writer import Source, WriterProcess
from mula_ray.plan.format import CheckpointKind, Facts, FileEntry
from mula_ray.plan.pieces import Piece

Items = Sequence[tuple[Piece, Any]]


@dataclass(frozen=True)
class SaveResult:
    """What became of a save. `seconds`: wait (for the save before), snapshot, write, verify.

    Exactly one of three: `path` (committed and verified), `failure`, `damages` (re-reading found other bytes).
    """

    step: int
    kind: CheckpointKind
    nbytes: int = 0
    path: Path | None = None
    failure: StoreFailure | None = None
    damages: tuple[Damage, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def event(self) -> dict[str, Any]:
        """The fields for events.jsonl."""
        what: dict[str, Any] = {"step": self.step, "checkpoint": self.kind, "bytes": self.nbytes}
        what["seconds"] = {name: round(value, 4) for name, value in self.seconds.items()}
        if self.failure is not None:
            return {**what, "ok": False, **self.failure.event()}
        if self.damages:
            return {**what, "ok": False, "damages": [damage.event() for damage in self.damages[:20]]}
        return {**what, "ok": True, "path": str(self.path)}


class Saver:
    """Saves the state of one process through a manager. `shapes`: what a save must cover exactly.

    `timeout_s` bounds writing and verification together, seconds.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        mode: Literal["async", "sync"] = "async",
        *,
        keep_models: int = 0,
        timeout_s: float = 600.0,
        who: str = "rank 0",
    ) -> None:
        self.manager, self.shapes, self.mode = manager, shapes, mode
        self.keep_models, self.timeout_s, self.who = keep_models, timeout_s, who
        self._memory: SnapshotMemory | None = None
        self._buffer: SnapshotBuffer | None = None
        self._writer = WriterProcess(who)
        self._thread: threading.Thread | None = None
        self._results: list[SaveResult] = []
        self._lock = threading.Lock()

    def save(self, facts: Facts, items: Iterable[tuple[Piece, Any]], kind: CheckpointKind = "full") -> None:
        """Save now; failures are never raised here, they come out of `results`. Live tensors may change on return."""
        held = [(piece, buffer) for piece, buffer in items if piece.numel]
        began = time.monotonic()
        self._join()
        seconds = {"wait": time.monotonic() - began}
        if self.mode == "sync":
            self._finish(facts, kind, held, None, seconds)
            return
        try:
            began = time.monotonic()
            info = self._open().write(facts.step, facts.generation, held, pin=True)
            seconds["snapshot"] = time.monotonic() - began
        except StoreFailure as failure:
            self._report(SaveResult(facts.step, kind, failure=failure, seconds=seconds))
            return
        args = (facts, kind, held, info, seconds)
        self._thread = threading.Thread(target=self._finish, args=args, name="ckpt-save")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def results(self) -> list[SaveResult]:
        """What ended since the last call."""
        with self._lock:
            done, self._results = self._results, []
        return done

    def drain(self) -> list[SaveResult]:
        """Wait for the save in flight (bounded by `timeout_s`), then as `results`."""
        self._join()
        return self.results()

    def close(self) -> None:
        """Wait for the save in flight and give everything back; the manager stays open."""
        self._join()
        self._writer.close()
        if self._buffer is not None and self._memory is not None:
            self._buffer.close()
            self._memory.close()
            self._buffer = self._memory = None

    def prepare(self, items: Items) -> None:
        """Before training: start the writer process, touch the memory: the first save then costs as the others."""
        if self.mode == "async":
            self._writer.start()
            self._open().reserve(0, items)

    def _open(self) -> SnapshotBuffer:
        if self._buffer is None:
            self._memory = SnapshotMemory(1, "save")
            self._buffer = SnapshotBuffer(self._memory.paths)
        return self._buffer

    def _finish(
        self, facts: Facts, kind: CheckpointKind, held: Items, info: SlotInfo | None, seconds: dict[str, float]
    ) -> None:
        """Begin, write, commit, verify, settle; never raises a storage failure."""
        nbytes = sum(piece.nbytes for piece, _ in held)
        try:
            began = time.monotonic()
            pending, entry = self._commit(facts, kind, held, info)
            seconds["write"] = time.monotonic() - began
        except StoreFailure as failure:
            self._report(SaveResult(facts.step, kind, nbytes, failure=failure, seconds=seconds))
            return
        finally:
            if info is not None and self._buffer is not None:
                self._buffer.unpin(info)
        try:
            began = time.monotonic()
            read_back = info is not None and not self._writer.verify(pending.folder, entry, self.timeout_s)
            damages = pending.settle(verified=read_back)
            seconds["verify"] = time.monotonic() - began
            path = None if damages else self.manager.root / pending.target
            if kind == "model":
                self.manager.retain_models(self.keep_models)
            self._report(SaveResult(facts.step, kind, nbytes, path, None, tuple(damages), seconds))
        except StoreFailure as failure:
            self._report(SaveResult(facts.step, kind, nbytes, failure=failure, seconds=seconds))

    def _commit(
        self, facts: Facts, kind: CheckpointKind, held: Items, info: SlotInfo | None
    ) -> tuple[Pending, FileEntry]:
        """A new save, committed; when space is out, once more after giving up the older slot."""

        def attempt() -> tuple[Pending, FileEntry]:
            pending = self.manager.begin(facts.step, kind)
            try:
                entry = self._write(pending, held, info)
                pending.commit(facts, [entry], self.shapes)
                return pending, entry
            except BaseException:
                pending.abandon()
                raise

        try:
            return attempt()
        except StoreFailure as failure:
            if failure.kind not in ("no-space", "quota") or not self.manager.make_room():
                raise
            return attempt()

    def _write(self, pending: Pending, held: Items, info: SlotInfo | None) -> FileEntry:
        if info is None:
            return write_part(pending.folder, part_name(0), held, self.manager.fs, self.who)
        assert self._buffer is not None
        source = Source(tuple(self._buffer.paths), info)
        return self._writer.write(pending.folder, part_name(0), [source], self.timeout_s)

    def _report(self, result: SaveResult) -> None:
        with self._lock:
            self._results.append(result)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
