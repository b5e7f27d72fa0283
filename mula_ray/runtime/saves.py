"""Saves as the driver coordinates them: begin, parts by the agents, commit, settle; one at a time, off the main thread.

A save that becomes ready while another is under way waits for it; its snapshots are pinned meanwhile (back-pressure).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mula_ray.checkpoint.failures import StoreFailure
from mula_ray.checkpoint.manager import CheckpointManager, Pending
from mula_ray.plan.format import Facts
from mula_ray.runtime.links import Link

PARTS_BOUND_S = 1200.0


@dataclass(frozen=True)
class Saved:
    """What became of a save: `slot` once it is committed, else `why` (and `no_space`)."""

    step: int
    kind: str
    generation: int
    slot: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    why: str = ""
    no_space: bool = False
    abandoned: bool = False


@dataclass
class _Save:
    step: int
    kind: str
    generation: int
    seats: Mapping[int, Link]
    ready: set[int] = field(default_factory=set)
    began: float = 0.0
    fault: str = ""


class Saves:
    """`facts(step, generation)` for the manifest; `done(saved)` is called on the worker thread."""

    def __init__(
        self,
        manager: CheckpointManager,
        shapes: Mapping[str, tuple[int, ...]],
        facts: Callable[[int, int], Facts],
        keep_models: int,
        done: Callable[[Saved], None],
    ) -> None:
        self._manager, self._shapes, self._facts, self._done = manager, shapes, facts, done
        self._keep = keep_models
        self._pool = ThreadPoolExecutor(1, "saves")
        self._collecting: dict[tuple[int, str], _Save] = {}
        self._running = 0
        self._lock = threading.Lock()
        self.fault = ""

    @property
    def busy(self) -> bool:
        """Whether a save is under way or waits."""
        return self._running > 0 or bool(self._collecting)

    def seat_ready(self, step: int, kind: str, generation: int, seat: int, seats: Mapping[int, Link]) -> None:
        """The ranks of a seat hold their pinned snapshots of `step`."""
        save = self._collecting.get((step, kind))
        if save is None or save.generation != generation:
            save = self._collecting[step, kind] = _Save(step, kind, generation, dict(seats))
        save.ready.add(seat)
        if save.ready >= set(save.seats):
            del self._collecting[step, kind]
            save.fault, self.fault = self.fault, ""
            with self._lock:
                self._running += 1
            self._pool.submit(self._run, save)

    def fence(self) -> None:
        """The generation ended: what is not complete in memory never will be."""
        self._collecting.clear()

    def close(self) -> None:
        """Wait for the save under way."""
        self._pool.shutdown(wait=True)

    def _run(self, save: _Save) -> None:
        save.began = time.monotonic()
        pending: Pending | None = None
        try:
            if save.kind == "model" and self._manager.has_model(save.step):
                result = Saved(save.step, save.kind, save.generation, abandoned=True, why="it is there already")
            else:
                pending = self._begin(save)
                result = self._finish(save, pending)
        except StoreFailure as failure:
            if pending is not None:
                pending.abandon()
            gone = failure.kind in ("lease", "snapshot") and self._manager.generation != save.generation
            result = Saved(
                save.step, save.kind, save.generation, why=str(failure), no_space=failure.kind == "no-space",
                abandoned=gone or failure.kind == "committed",
            )  # fmt: skip
        except Exception as error:
            if pending is not None:
                pending.abandon()
            result = Saved(save.step, save.kind, save.generation, why=f"{type(error).__name__}: {error}")
        for link in save.seats.values():
            link.call("unpin", save.step, save.kind)
        with self._lock:
            self._running -= 1
        self._done(result)

    def _begin(self, save: _Save) -> Pending:
        kind: Any = save.kind
        try:
            return self._manager.begin(save.step, kind)
        except StoreFailure as failure:
            if failure.kind != "no-space" or not self._manager.make_room():
                raise
            return self._manager.begin(save.step, kind)

    def _finish(self, save: _Save, pending: Pending) -> Saved:
        entries = self._parts(save, pending)
        manifest = pending.commit(self._facts(save.step, save.generation), entries, self._shapes)
        seconds = time.monotonic() - save.began
        pending.settle(verified=True)
        if save.kind == "model":
            self._manager.retain_models(self._keep)
        return Saved(save.step, save.kind, save.generation, pending.target, manifest.nbytes, seconds)

    def _parts(self, save: _Save, pending: Pending) -> list[Any]:
        """Every seat's file entry, written and re-read by its agent."""
        answers: dict[int, Any] = {}
        all_in = threading.Event()

        def answered(seat: int, answer: Any, error: BaseException | None) -> None:
            answers[seat] = error if error is not None else answer
            if len(answers) == len(save.seats):
                all_in.set()

        for seat, link in save.seats.items():
            link.call(
                "write", str(pending.folder), save.step, save.generation, save.kind, save.fault,
                then=partial(answered, seat),
            )  # fmt: skip
        if not all_in.wait(PARTS_BOUND_S):
            missing = ", ".join(link.node for seat, link in save.seats.items() if seat not in answers)
            raise StoreFailure("slow", pending.folder, f"no answer from {missing} after {PARTS_BOUND_S:.0f} s")
        entries = []
        for seat, answer in sorted(answers.items()):
            if isinstance(answer, StoreFailure):
                raise answer
            if isinstance(answer, BaseException):
                raise StoreFailure("snapshot", pending.folder, f"{save.seats[seat].node}: {answer}")
            entry, _, damages = answer
            if damages:
                raise StoreFailure("io", pending.folder, f"re-reading found other bytes: {damages[0]}")
            entries.append(entry)
        return entries
