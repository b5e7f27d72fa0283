"""Reading a checkpoint: trust what the manifest names, check every block before use, take any layout from any other."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mula_ray.checkpoint.buffers import ELEMENT
from mula_ray.checkpoint.failures import Damage, DamagedCheckpoint
from mula_ray.checkpoint.filesystem import FileSystem, RealFileSystem, read_all
from mula_ray.checkpoint.resharding import ReshardingReader, copy_converted
from mula_ray.config.model import ModelConfig
from mula_ray.plan.crc import crc32
from mula_ray.plan.format import (
    BLOCK_BYTES,
    FULL_KINDS,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MODEL_KINDS,
    FileEntry,
    FormatError,
    Manifest,
    StoredPiece,
)
from mula_ray.plan.layout import param_specs
from mula_ray.plan.overlap import Array, Overlap, copy_overlap, coverage_problems, overlaps
from mula_ray.plan.pieces import Piece

_MAX_THREADS = 4


@dataclasses.dataclass(frozen=True)
class DiskPiece:
    """A stored piece and the file it lies in."""

    file: str
    stored: StoredPiece

    @property
    def piece(self) -> Piece:
        """Which elements."""
        return self.stored.piece


def read_manifest(path: Path, fs: FileSystem | None = None) -> Manifest:
    """The manifest of a checkpoint folder, checked against itself.

    Raises:
        DamagedCheckpoint: there is none, or it cannot be trusted.
    """
    try:
        return Manifest.load(read_all(fs or RealFileSystem(), path / MANIFEST, MAX_MANIFEST_BYTES))
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, [Damage("missing", MANIFEST, "", "no manifest: not a checkpoint")]) from error
    except FormatError as error:
        raise DamagedCheckpoint(path, [Damage("manifest", MANIFEST, "", str(error))]) from error
    except OSError as error:
        raise DamagedCheckpoint(path, [Damage("unreadable", MANIFEST, "", str(error))]) from error


class CheckpointReader(ReshardingReader[DiskPiece]):
    """A checkpoint on disk, as a `StateReader`. Close it, or use it as a context.

    Opening checks the manifest, that its files are there with the right sizes and headers, and that the pieces cover
    every tensor exactly. Payload is checked block by block when it is read; `verify` checks all of it.

    Raises:
        DamagedCheckpoint: with everything found wrong.
    """

    def __init__(
        self,
        path: Path,
        fs: FileSystem | None = None,
        *,
        optimizer_lost: bool = False,
        threads: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.fs: FileSystem = fs or RealFileSystem()
        self.manifest = read_manifest(self.path, self.fs)
        stored = (DiskPiece(entry.name, piece) for entry in self.manifest.files for piece in entry.pieces)
        super().__init__(str(self.path), stored, optimizer_lost)
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._pool = ThreadPoolExecutor(threads or _reading_threads(), "ckpt-read")
        damages = self._check_files() or self._check_coverage()
        if damages:
            self.close()
            raise DamagedCheckpoint(path, damages)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and end the reading threads."""
        self._pool.shutdown()
        with self._lock:
            for handle in self._handles.values():
                self.fs.close(handle)
            self._handles.clear()

    def expect(self, model: ModelConfig) -> None:
        """Refuse a checkpoint whose tensors are not exactly those of `model`, with the names.

        Raises:
            DamagedCheckpoint: missing, extra or differently shaped tensors, each by name.
        """
        kinds = FULL_KINDS if self.manifest.kind == "full" else MODEL_KINDS
        wanted = {(spec.name, kind): spec.shape for spec in param_specs(model) for kind in kinds}
        damages = []
        for (name, kind), shape in wanted.items():
            sources = self.sources(name, kind)
            if not sources:
                damages.append(Damage("coverage", MANIFEST, name, f"{kind} is missing"))
            elif sources[0].piece.global_shape != shape:
                detail = f"{kind} is stored as {sources[0].piece.global_shape}, the model wants {shape}"
                damages.append(Damage("coverage", MANIFEST, name, detail))
        extra = sorted(self._index.keys() - wanted.keys())
        damages += [Damage("coverage", MANIFEST, name, f"{kind} is not a tensor of the model") for name, kind in extra]
        if damages:
            raise DamagedCheckpoint(self.path, damages)

    def verify(self, files: Iterable[str] | None = None, cold: bool = False) -> list[Damage]:
        """Re-read every byte of `files` (default: all) and list what is wrong; `cold` asks the device, not a cache."""
        wanted = set(files) if files is not None else None
        damages: list[Damage] = []
        for entry in self.manifest.files:
            if wanted is None or entry.name in wanted:
                damages += verify_file(self.path, entry, self.fs, self._pool, cold)
        return damages

    def _check_files(self) -> list[Damage]:
        damages = []
        for entry in self.manifest.files:
            try:
                damages += _check_size_and_header(self.path, entry, self.fs)
            except FileNotFoundError:
                damages.append(Damage("missing", entry.name, "", "the manifest names it, the folder has it not"))
            except OSError as error:
                damages.append(Damage("unreadable", entry.name, "", str(error)))
        return damages

    def _check_coverage(self) -> list[Damage]:
        return [
            Damage("coverage", MANIFEST, name, f"{kind}: {problem}")
            for (name, kind), stored in self._index.items()
            for problem in coverage_problems(name, stored[0].piece.global_shape, [s.piece for s in stored])
        ]

    def _handle(self, name: str) -> int:
        with self._lock:
            if name not in self._handles:
                self._handles[name] = self.fs.open(self.path / name)
            return self._handles[name]

    def _copy(self, source: DiskPiece, common: list[Overlap], piece: Piece, target: Array) -> list[Future[None]]:
        per_block = BLOCK_BYTES // ELEMENT[source.piece.dtype].itemsize
        wanted = sorted(
            {
                block
                for overlap in common
                for first, stop in [overlap.src_range()]
                for block in range(first // per_block, (stop - 1) // per_block + 1)
            }
        )
        run = common[0].run() if len(common) == 1 else None
        length = common[0].numel
        return [
            self._pool.submit(self._read_block, source, block, piece, target, (*run, length) if run else None)
            for block in wanted
        ]

    def _read_block(
        self, source: DiskPiece, block: int, piece: Piece, target: Array, run: tuple[int, int, int] | None
    ) -> None:
        """Read and check a block, copy what is wanted of it. `run`: (first in source, first in target, length)."""
        dtype = ELEMENT[source.piece.dtype]
        first = block * (BLOCK_BYTES // dtype.itemsize)
        stop = min(first + BLOCK_BYTES // dtype.itemsize, source.piece.numel)
        direct = run is not None and run[0] <= first and stop <= run[0] + run[2] and source.piece.dtype == piece.dtype
        if direct and run is not None:
            into = target[run[1] + first - run[0] : run[1] + stop - run[0]]
            self._read_checked(source, block, into.data.cast("B"))
            return
        part = dataclasses.replace(source.piece, start=source.piece.start + first, stop=source.piece.start + stop)
        common = list(overlaps(part, piece))
        if not common:
            return
        scratch = self._scratch_bytes()[: (stop - first) * dtype.itemsize]
        self._read_checked(source, block, scratch.data)
        elements = scratch.view(dtype)
        for overlap in common:
            if source.piece.dtype == piece.dtype:
                copy_overlap(overlap, elements, target)
            else:
                copy_converted(overlap, elements, source.piece.dtype, target, piece.dtype)

    def _read_checked(self, source: DiskPiece, block: int, out: memoryview) -> None:
        at = source.stored.begin + block * BLOCK_BYTES
        damage = None
        try:
            if self.fs.read(self._handle(source.file), at, out) != out.nbytes:
                damage = Damage("size", source.file, source.piece.name, f"ends before byte {at + out.nbytes}")
            elif crc32(out) != source.stored.blocks[block]:
                detail = f"{source.piece.kind}: bytes {at} to {at + out.nbytes} are not those that were written"
                damage = Damage("checksum", source.file, source.piece.name, detail)
        except OSError as error:
            damage = Damage("unreadable", source.file, source.piece.name, str(error))
        if damage is not None:
            raise DamagedCheckpoint(self.path, [damage])

    def _scratch_bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if not hasattr(self._scratch, "bytes"):
            self._scratch.bytes = np.empty(BLOCK_BYTES, np.uint8)
        scratch: np.ndarray[Any, np.dtype[np.uint8]] = self._scratch.bytes
        return scratch


def verify_file(
    folder: Path,
    entry: FileEntry,
    fs: FileSystem | None = None,
    pool: ThreadPoolExecutor | None = None,
    cold: bool = False,
) -> list[Damage]:
    """Re-read one file of a checkpoint and list everything wrong; empty means every byte is the one written.

    `cold`: drop the file from the page cache first, so that the device is read.
    """
    fs = fs or RealFileSystem()
    owned = pool is None
    pool = pool or ThreadPoolExecutor(2, "ckpt-verify")
    try:
        handle = fs.open(folder / entry.name)
    except FileNotFoundError:
        return [Damage("missing", entry.name, "", "the manifest names it, the folder has it not")]
    except OSError as error:
        return [Damage("unreadable", entry.name, "", str(error))]
    try:
        if cold:
            fs.forget(handle)
        found = _check_size_and_header(folder, entry, fs)
        jobs = [pool.submit(_verify_piece, fs, handle, entry.name, stored) for stored in entry.pieces]
        return found + [damage for job in jobs for damage in job.result()]
    except OSError as error:
        return [Damage("unreadable", entry.name, "", str(error))]
    finally:
        fs.close(handle)
        if owned:
            pool.shutdown()


def _verify_piece(fs: FileSystem, handle: int, name: str, stored: StoredPiece) -> list[Damage]:
    scratch = memoryview(bytearray(min(BLOCK_BYTES, stored.piece.nbytes)))
    for block, crc in enumerate(stored.blocks):
        at = stored.begin + block * BLOCK_BYTES
        out = scratch[: min(BLOCK_BYTES, stored.end - at)]
        if fs.read(handle, at, out) != out.nbytes:
            return [Damage("size", name, stored.piece.name, f"ends before byte {at + out.nbytes}")]
        if crc32(out) != crc:
            detail = f"{stored.piece.kind}: bytes {at} to {at + out.nbytes} are not those that were written"
            return [Damage("checksum", name, stored.piece.name, detail)]
    return []


def _check_size_and_header(folder: Path, entry: FileEntry, fs: FileSystem) -> list[Damage]:
    size = fs.size(folder / entry.name)
    if size != entry.size:
        return [Damage("size", entry.name, "", f"{size} bytes, the manifest says {entry.size}")]
    header = read_prefix(folder / entry.name, entry.header, fs)
    if crc32(header) != entry.header_crc32:
        return [Damage("header", entry.name, "", "the safetensors header is not the one that was written")]
    return []


def read_prefix(path: Path, count: int, fs: FileSystem) -> bytes:
    """The first `count` bytes of a file (fewer when it is shorter)."""
    out = bytearray(count)
    handle = fs.open(path)
    try:
        return bytes(out[: fs.read(handle, 0, memoryview(out))]) if count else b""
    finally:
        fs.close(handle)


def _reading_threads() -> int:
    """One a core of this process, at most four: checksums keep a core busy, and more streams than cores only undo the
    kernel's reading ahead (4 threads on 2 cores read cold files at half the speed of 2)."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def total_elements(manifest: Manifest) -> int:
    """Elements of all tensors of a checkpoint, each once."""
    return sum(math.prod(shape) for shape in manifest.shapes().values())
