"""Which checkpoints a run has, and the life of a save: begin, parts, commit, settle.

    pending = manager.begin(step)                        # driver: a fresh folder, `new-…`
    entry = write_part(pending.folder, part_name(n), …)  # any process on any node
    pending.commit(facts, entries)                       # driver: from here on the checkpoint exists
    pending.settle()                                     # driver, off the training path: re-read, then take its place

Full checkpoints alternate between the slots `full-a` and `full-b`. A committed save stays under its `new-…` name until
every byte has been re-read; only then is the older slot removed and the save renamed to it, so that two verified
checkpoints are on disk except in between. A crash leaves at most a `new-…` folder: with a manifest it is a checkpoint
like any other, without one it is rubbish; `tidy` finishes or removes it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mula_ray.checkpoint.failures import Damage, DamagedCheckpoint, StoreFailure
from mula_ray.checkpoint.filesystem import FileSystem, RealFileSystem
from mula_ray.checkpoint.lease import Lease
from mula_ray.checkpoint.reader import read_manifest
from mula_ray.checkpoint.scan import (
    NEW,
    OURS,
    SLOTS,
    Found,
    committed_folders,
    ever_committed,
    find_latest,
    names_in,
    scan,
    slot_of,
    verify_folder,
)
from mula_ray.checkpoint.store import part_name, remove_folder, write_manifest, write_part
from mula_ray.plan.format import MANIFEST, CheckpointKind, Facts, FileEntry, Manifest
from mula_ray.plan.overlap import coverage_problems
from mula_ray.plan.pieces import Piece


@dataclass(frozen=True)
class Pending:
    """A save under way. `target` is the name that it takes when it is settled."""

    manager: CheckpointManager = field(repr=False)
    kind: CheckpointKind
    step: int
    generation: int
    target: str
    folder: Path

    def commit(
        self, facts: Facts, files: Iterable[FileEntry], shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> Manifest:
        """Write the manifest: see CheckpointManager.commit."""
        return self.manager.commit(self, facts, tuple(files), shapes)

    def settle(self, verified: bool = False) -> list[Damage]:
        """Re-read and take the place: see CheckpointManager.settle."""
        return self.manager.settle(self, verified)

    def abandon(self) -> None:
        """Remove what was written; nothing was committed."""
        self.manager.abandon(self)


class CheckpointManager:
    """The one writer of a run's `checkpoints/` folder (readers need none: see scan.py).

    One save of a kind at a time. Thread-safe: `settle` may run in another thread.
    """

    def __init__(
        self, root: Path, run_id: str, generation: int = 0, fs: FileSystem | None = None, **lease: Any
    ) -> None:
        self.root = Path(root)
        self.fs: FileSystem = fs or RealFileSystem()
        self.generation = generation
        self.lease = Lease(self.root, run_id, self.fs, **lease)
        self._lock = threading.RLock()
        self._active: set[str] = set()
        self._bad: set[tuple[str, tuple[int, int]]] = set()

    def acquire(self, *, renew: bool = True) -> None:
        """Make the folder, take the lease (which may raise the generation), finish or remove what a crash left.

        Raises:
            StoreFailure: kind `lease` when another job is alive; else what the file system refused.
        """
        try:
            with contextlib.suppress(FileExistsError):
                self.root.parent.mkdir(parents=True, exist_ok=True) if isinstance(self.fs, RealFileSystem) else None
                self.fs.mkdir(self.root)
            self.fs.sync_folder(self.root.parent)
        except OSError as error:
            raise StoreFailure.of(error, self.root) from error
        self.generation = self.lease.acquire(self.generation, renew)
        self.tidy()

    def advance(self, generation: int) -> None:
        """A new generation of ranks: later saves carry it, earlier ones are refused."""
        self.lease.advance(generation)
        self.generation = generation

    def close(self) -> None:
        """Release the lease."""
        self.lease.release()

    def latest(self, deep: bool | None = None) -> Found | None:
        """The newest checkpoint with full state that is sound, and those rejected on the way; None when none is.

        `deep`: see `find_latest`. A checkpoint that fails in use all the same is passed over after `reject`.
        """
        with self._lock:
            found = find_latest(self.root, self.fs, deep=deep, skip=self._bad)
            for error in found.rejected if found else ():
                with contextlib.suppress(DamagedCheckpoint):  # its step may be saved again
                    path = Path(error.path)
                    self._bad.add((path.name, read_manifest(path, self.fs).order))
            return found

    def reject(self, found: Found) -> None:
        """Remember that a checkpoint failed in use, so that `latest` passes it over and the next save replaces it."""
        with self._lock:
            self._bad.add((found.path.name, found.manifest.order))

    def ever_committed(self) -> bool:
        """Whether anything that looks like a committed checkpoint (sound or not) is in the folder."""
        return ever_committed(self.root, self.fs)

    def has_model(self, step: int) -> bool:
        """Whether `model-<step>` is there already (a replayed step need not save it again)."""
        return MANIFEST in names_in(self.root / f"model-{step}", self.fs)

    def begin(self, step: int, kind: CheckpointKind = "full", replace: bool = False) -> Pending:
        """Make the folder of a new save.

        Raises:
            StoreFailure: `committed` when a sound checkpoint of this step is there (unless `replace`), `busy` when the
                save before it is still under way, `lease` when we are not the writer any more, else what the file
                system refused.
        """
        with self._lock:
            self.lease.check()
            if any(name.startswith(f"new-{kind}") for name in self._active):
                raise StoreFailure("busy", self.root, f"the save before this one ({kind}) is still under way")
            self.tidy()
            target = self._free_slot(step, replace) if kind == "full" else f"model-{step}"
            if kind == "model" and self.has_model(step) and not replace:
                raise StoreFailure("committed", self.root / target, "a checkpoint of this step is there already")
            name = f"new-{target}-g{self.generation}-{secrets.token_hex(3)}"
            try:
                self.fs.mkdir(self.root / name)
                self.fs.sync_folder(self.root)
            except OSError as error:
                raise StoreFailure.of(error, self.root / name) from error
            self._active.add(name)
            return Pending(self, kind, step, self.generation, target, self.root / name)

    def commit(
        self,
        pending: Pending,
        facts: Facts,
        files: Sequence[FileEntry],
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Manifest:
        """Write the manifest of a save whose parts are all durable; returning means that the checkpoint exists.

        `shapes`: global shape of every tensor that must be in it, exactly once for each kind.

        Raises:
            StoreFailure: `coverage` with the names when elements are missing, extra or stored twice; `lease` when a
                later generation or another job has taken over; else what the file system refused.
        """
        problems = _coverage(files, shapes)
        if problems:
            raise StoreFailure("coverage", pending.folder, "; ".join(problems[:8]))
        if (facts.step, facts.generation) != (pending.step, pending.generation):
            detail = (
                f"begun for step {pending.step}, generation {pending.generation}; got {facts.step}, {facts.generation}"
            )
            raise StoreFailure("coverage", pending.folder, detail)
        created = datetime.now(UTC).isoformat(timespec="milliseconds")
        manifest = Manifest(pending.kind, facts, tuple(sorted(files, key=lambda entry: entry.name)), created)
        with self._lock:
            self.lease.check()
            if pending.generation != self.generation:
                detail = f"save of generation {pending.generation}, now is generation {self.generation}"
                raise StoreFailure("lease", pending.folder, detail)
            write_manifest(pending.folder, manifest, self.fs)
        return manifest

    def settle(self, pending: Pending, verified: bool = False) -> list[Damage]:
        """After the commit, off the training path: re-read every byte, then take the place of the older slot.

        `verified`: the bytes were re-read already (by the nodes that wrote them). Returns what was found wrong; then
        the save is removed and the older checkpoints stay as they are.

        Raises:
            StoreFailure: what the file system refused; the checkpoint stays where it is and `tidy` tries again.
        """
        try:
            damages = [] if verified else verify_folder(pending.folder, self.fs)
            with self._lock:
                self.lease.check()
                if damages:
                    remove_folder(pending.folder, self.fs)
                else:
                    self._promote(pending.folder, pending.target)
        finally:
            self._active.discard(pending.folder.name)
        return damages

    def abandon(self, pending: Pending) -> None:
        """Remove a save that was not committed; a folder that cannot be removed is left to `tidy`."""
        with self._lock:
            self._active.discard(pending.folder.name)
            with contextlib.suppress(StoreFailure):
                self.lease.check()
                remove_folder(pending.folder, self.fs)

    def save(
        self,
        facts: Facts,
        items: Iterable[tuple[Piece, Any]],
        kind: CheckpointKind = "full",
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        replace: bool = False,
    ) -> list[Damage]:
        """All of it in this process, synchronously: returns what the re-reading found wrong (normally nothing)."""
        pending = self.begin(facts.step, kind, replace)
        try:
            pending.commit(facts, [write_part(pending.folder, part_name(0), items, self.fs)], shapes)
        except BaseException:
            pending.abandon()
            raise
        return pending.settle()

    def tidy(self) -> None:
        """Finish what a crash interrupted: settle committed saves, remove the rest. Saves under way are left alone."""
        with self._lock:
            self.lease.check()
            for name in names_in(self.root, self.fs):
                if name in self._active or not OURS.fullmatch(name):
                    continue
                folder = self.root / name
                if MANIFEST not in names_in(folder, self.fs):
                    remove_folder(folder, self.fs)
                    continue
                new = NEW.fullmatch(name)
                if new is None:
                    continue
                if verify_folder(folder, self.fs):
                    remove_folder(folder, self.fs)
                else:
                    self._promote(folder, self._tidy_target(folder, new[1]))

    def make_room(self) -> bool:
        """When space is out: give up the older full checkpoint if the newer one is sound. Whether space was freed."""
        with self._lock:
            self.lease.check()
            full = [(path, m) for path, m in scan(self.root, self.fs, "full")[0] if path.name not in self._active]
            if len(full) < 2 or verify_folder(full[0][0], self.fs):
                return False
            remove_folder(full[-1][0], self.fs)
            return True

    def retain_models(self, keep: int) -> list[str]:
        """Remove the oldest model-only checkpoints beyond `keep` (0 keeps all); returns their names."""
        if keep == 0:
            return []
        with self._lock:
            self.lease.check()
            models = [path for path in committed_folders(self.root, self.fs) if path.name.startswith("model-")]
            models.sort(key=lambda path: int(path.name.split("-")[1]), reverse=True)
            for path in models[keep:]:
                remove_folder(path, self.fs)
            return [path.name for path in models[keep:]]

    def _free_slot(self, step: int, replace: bool) -> str:
        """The slot that does not hold the newest sound full checkpoint."""
        full = scan(self.root, self.fs, "full")[0]
        full = [(path, m) for path, m in full if (path.name, m.order) not in self._bad]
        if not replace and any(m.facts.step == step for _, m in full):
            raise StoreFailure("committed", self.root, f"a full checkpoint of step {step} is there already")
        held = next((slot_of(path.name) for path, _ in full), SLOTS[1])
        return SLOTS[1] if held == SLOTS[0] else SLOTS[0]

    def _tidy_target(self, folder: Path, target: str) -> str:
        """The slot for a committed save that a crash left: its own, unless that now holds something newer."""
        manifest = read_manifest(folder, self.fs)
        if manifest.kind == "model":
            return target
        with contextlib.suppress(DamagedCheckpoint):
            if read_manifest(self.root / target, self.fs).order > manifest.order:
                return SLOTS[1] if target == SLOTS[0] else SLOTS[0]
        return target

    def _promote(self, folder: Path, target: str) -> None:
        remove_folder(self.root / target, self.fs)
        self._bad = {bad for bad in self._bad if bad[0] != target}
        try:
            self.fs.rename(folder, self.root / target)
            self.fs.sync_folder(self.root)
        except OSError as error:
            raise StoreFailure.of(error, self.root / target) from error


def _coverage(files: Iterable[FileEntry], shapes: Mapping[str, tuple[int, ...]] | None) -> list[str]:
    """Problems, by name, of what the files hold together; `shapes` None takes the pieces' own word for the shapes."""
    held: dict[tuple[str, str], list[Piece]] = {}
    for entry in files:
        for stored in entry.pieces:
            held.setdefault((stored.piece.name, stored.piece.kind), []).append(stored.piece)
    kinds = {kind for _, kind in held}
    names = set(shapes) if shapes is not None else {name for name, _ in held}
    problems = [] if held else ["nothing was saved"]
    problems += [
        f"{name}: {kind} is missing" for name in sorted(names) for kind in sorted(kinds) if (name, kind) not in held
    ]
    for (name, kind), pieces in sorted(held.items()):
        if name not in names:
            problems.append(f"{name}: {kind} is not a tensor of the model")
            continue
        shape = shapes[name] if shapes is not None else pieces[0].global_shape
        problems += [f"{kind} of {problem}" for problem in coverage_problems(name, shape, pieces)]
    return problems
