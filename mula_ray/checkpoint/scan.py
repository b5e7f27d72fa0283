"""Finding checkpoints: by listing the folder and reading manifests, never by a pointer. Needs no lease."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mula_ray.checkpoint.failures import Damage, DamagedCheckpoint, StoreFailure
from mula_ray.checkpoint.filesystem import FileSystem, RealFileSystem
from mula_ray.checkpoint.reader import CheckpointReader, read_manifest
from mula_ray.plan.format import MANIFEST, CheckpointKind, Manifest

DEEP_BYTES = 32_000_000_000
SLOTS = ("full-a", "full-b")
NEW = re.compile(r"new-(full-a|full-b|model-\d+)-g\d+-[0-9a-f]{6}")
OURS = re.compile(rf"full-a|full-b|model-\d+|{NEW.pattern}")


@dataclass(frozen=True)
class Found:
    """A checkpoint that may be loaded, and those that had to be passed over on the way to it."""

    path: Path
    manifest: Manifest
    rejected: tuple[DamagedCheckpoint, ...] = ()


def scan(
    root: Path, fs: FileSystem | None = None, kind: CheckpointKind | None = None
) -> tuple[list[tuple[Path, Manifest]], list[DamagedCheckpoint]]:
    """Every checkpoint (of a kind), newest first, and those whose manifest cannot be trusted. Always re-listed."""
    fs = fs or RealFileSystem()
    sound, damaged = [], []
    for folder in committed_folders(root, fs):
        if kind is not None and not slot_of(folder.name).startswith(kind):
            continue  # by name: there may be hundreds of models, and their manifests are large
        try:
            sound.append((folder, read_manifest(folder, fs)))
        except DamagedCheckpoint as error:
            damaged.append(error)
    return sorted(sound, key=lambda item: (item[1].order, item[0].name), reverse=True), damaged


def find_latest(
    root: Path,
    fs: FileSystem | None = None,
    *,
    deep: bool | None = True,
    skip: Iterable[tuple[str, tuple[int, int]]] = (),
    kind: CheckpointKind = "full",
) -> Found | None:
    """The newest sound checkpoint of a kind; needs no lease.

    `deep`: re-read every byte first, or only manifest, sizes, headers and coverage; None re-reads up to 32 GB (15 s):
    beyond that one process would be too slow, and whoever loads checks every block before use anyway.
    """
    sound, rejected = scan(root, fs, kind)
    skipped = set(skip)
    for path, manifest in sound:
        if manifest.kind != kind or (path.name, manifest.order) in skipped:
            continue
        whole = manifest.nbytes <= DEEP_BYTES if deep is None else deep
        damages = verify_folder(path, fs or RealFileSystem(), whole)
        if not damages:
            return Found(path, manifest, tuple(rejected))
        rejected.append(DamagedCheckpoint(path, damages))
    return None


def committed_folders(root: Path, fs: FileSystem | None = None) -> list[Path]:
    """Folders with a manifest, sound or not, by name."""
    fs = fs or RealFileSystem()
    return [
        root / name for name in names_in(root, fs) if OURS.fullmatch(name) and MANIFEST in names_in(root / name, fs)
    ]


def ever_committed(root: Path, fs: FileSystem | None = None) -> bool:
    """Whether anything was ever committed here: then starting afresh would hide a loss."""
    return bool(committed_folders(root, fs))


def verify_folder(path: Path, fs: FileSystem, deep: bool = True) -> list[Damage]:
    """What is wrong with a checkpoint: manifest, files, coverage, and (`deep`) every byte, read from the device."""
    try:
        with CheckpointReader(path, fs) as reader:
            return reader.verify(cold=True) if deep else []
    except DamagedCheckpoint as error:
        return error.damages


def slot_of(name: str) -> str:
    """The slot that a folder is in, or is meant for."""
    new = NEW.fullmatch(name)
    return new[1] if new else name


def names_in(path: Path, fs: FileSystem) -> list[str]:
    """Names in a folder; none when there is no such folder. Raises StoreFailure for anything else."""
    try:
        return fs.names(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreFailure.of(error, path) from error
