"""Writing: payload files beside their checksums, the manifest that makes a checkpoint of them, and removal.

The order of operations is the whole point; `plan/format.py` states it and tests/checkpoint/test_crash.py stops after
each single one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mula_ray.checkpoint.buffers import host_bytes
from mula_ray.checkpoint.failures import StoreFailure
from mula_ray.checkpoint.filesystem import FileSystem, RealFileSystem, write_atomic
from mula_ray.plan.crc import combine, combine_all, crc32
from mula_ray.plan.format import (
    BLOCK_BYTES,
    MANIFEST,
    FileEntry,
    Manifest,
    StoredPiece,
    block_lengths,
    safetensors_header,
)
from mula_ray.plan.pieces import Piece

_FLUSH_BYTES = 16 << 20
_SMALL = 1 << 16  # below this a checksum is cheaper than handing it to the other thread


def part_name(node: int, part: int = 0) -> str:
    """Name of a payload file: at most 4 parts a node."""
    assert 0 <= part < 4, "at most 4 files a node"
    return f"node-{node:05d}-{part}.safetensors"


def write_part(
    folder: Path, name: str, items: Iterable[tuple[Piece, Any]], fs: FileSystem | None = None, who: str = ""
) -> FileEntry:
    """Write one payload file of a save and make it durable under its final name.

    `items`: pieces and their flat tensors or buffers; a snapshot in shared memory is read in place. Empty pieces are
    left out. Checksums are computed in a second thread beside the writing. The buffers must not change meanwhile.

    Raises:
        StoreFailure: what the operating system refused, or a file of that name that is there already; the temporary
            file is gone again (when the file system still lets us).
    """
    fs = fs or RealFileSystem()
    # 4-byte elements first: every tensor stays aligned, as safetensors wants it.
    ordered = sorted(((p, b) for p, b in items if p.numel), key=lambda item: item[0].dtype != "fp32")
    temp, final = folder / f".{name}.tmp", folder / name
    with _classified(folder, who):
        if name in fs.names(folder):
            raise StoreFailure("committed", final, "a file of this name was written already", who)
        handle = fs.create(temp)
        try:
            try:
                entry = _write_body(fs, handle, name, ordered)
            finally:
                fs.close(handle)
            fs.rename(temp, final)
            fs.sync_folder(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                fs.unlink(temp)
            raise
    return entry


def _write_body(fs: FileSystem, handle: int, name: str, items: Sequence[tuple[Piece, Any]]) -> FileEntry:
    """Write and sync; the checksums and the way to the device run in threads beside the writing."""
    header = safetensors_header([piece for piece, _ in items])
    fs.write(handle, header)
    pending: list[tuple[Piece, list[int | Future[int]]]] = []
    with ThreadPoolExecutor(1, "ckpt-crc") as summer, ThreadPoolExecutor(1, "ckpt-flush") as flusher:
        flushing: Future[None] | None = None
        since = 0
        for piece, buffer in items:
            data = host_bytes(buffer, piece.nbytes)
            sums: list[int | Future[int]] = []
            for at in range(0, piece.nbytes, BLOCK_BYTES):
                block = data[at : at + BLOCK_BYTES]
                sums.append(crc32(block) if block.nbytes < _SMALL else summer.submit(crc32, block))
                fs.write(handle, block)
                since += block.nbytes
                if since >= _FLUSH_BYTES and (flushing is None or flushing.done()):
                    if flushing is not None:
                        flushing.result()
                    flushing, since = flusher.submit(fs.flush, handle), 0
            pending.append((piece, sums))
        if flushing is not None:
            flushing.result()
        fs.sync(handle)
    return _entry(
        name, header, [(p, tuple(s if isinstance(s, int) else s.result() for s in sums)) for p, sums in pending]
    )


def _entry(name: str, header: bytes, summed: Sequence[tuple[Piece, tuple[int, ...]]]) -> FileEntry:
    at, total, pieces = len(header), crc32(header), []
    for piece, blocks in summed:
        crc = combine_all(zip(blocks, block_lengths(piece.nbytes), strict=True))
        pieces.append(StoredPiece(piece, at, crc, blocks))
        total = combine(total, crc, piece.nbytes)
        at += piece.nbytes
    return FileEntry(name, at, len(header), crc32(header), total, tuple(pieces))


def write_manifest(folder: Path, manifest: Manifest, fs: FileSystem | None = None) -> None:
    """Make a checkpoint of the files in `folder`: after this returns it is there for good.

    Raises:
        StoreFailure: what the operating system refused, or a manifest that is there already.
    """
    fs = fs or RealFileSystem()
    with _classified(folder):
        if MANIFEST in fs.names(folder):
            raise StoreFailure("committed", folder / MANIFEST, "this checkpoint is committed already")
        write_atomic(fs, folder / MANIFEST, manifest.dump(), folder / f".{MANIFEST}.tmp")


def remove_folder(folder: Path, fs: FileSystem | None = None) -> None:
    """Remove a checkpoint or the remains of a save: the manifest first, so that no crash leaves half a checkpoint.

    A folder that is not there (any more) is fine.

    Raises:
        StoreFailure: what the operating system refused.
    """
    fs = fs or RealFileSystem()
    with _classified(folder):
        try:
            names = fs.names(folder)
        except FileNotFoundError:
            return
        if MANIFEST in names:
            fs.unlink(folder / MANIFEST)
            fs.sync_folder(folder)
        for name in names:
            if name != MANIFEST:
                fs.unlink(folder / name)
        fs.rmdir(folder)
        fs.sync_folder(folder.parent)


@contextlib.contextmanager
def _classified(path: Path, who: str = "") -> Iterator[None]:
    """Turn errors of the operating system into StoreFailure."""
    try:
        yield
    except OSError as error:
        raise StoreFailure.of(error, path, who) from error
