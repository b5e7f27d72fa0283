"""The few file operations that a checkpoint needs, as a protocol: real here, simulated with crashes in the tests.

Every operation raises OSError when it fails. Nothing is durable before `sync` (contents) and `sync_folder` (names).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol


class FileSystem(Protocol):
    """File operations; a handle is an int."""

    def create(self, path: Path) -> int:
        """Open a new file for writing; FileExistsError when there is one."""

    def open(self, path: Path) -> int:
        """Open a file for reading."""

    def write(self, handle: int, data: memoryview | bytes) -> None:
        """Append all of `data`."""

    def flush(self, handle: int) -> None:
        """Get what was written so far on its way to the device, while more is written. A hint, but errors count."""

    def sync(self, handle: int) -> None:
        """Make the contents durable."""

    def close(self, handle: int) -> None:
        """Close a handle."""

    def read(self, handle: int, offset: int, out: memoryview) -> int:
        """Fill `out` from byte `offset` on; returns the bytes read, fewer only at the end of the file."""

    def forget(self, handle: int) -> None:
        """Drop the file's pages from the page cache, so that a later read comes from the device. A hint."""

    def size(self, path: Path) -> int:
        """Bytes of a file."""

    def names(self, path: Path) -> list[str]:
        """Names in a folder, sorted."""

    def mkdir(self, path: Path) -> None:
        """Make one folder; FileExistsError when there is one."""

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file (replacing) or a folder (onto nothing)."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""

    def sync_folder(self, path: Path) -> None:
        """Make the folder's entries durable."""


class RealFileSystem:
    """The operating system's files."""

    def create(self, path: Path) -> int:
        """Open a new file for writing."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)

    def open(self, path: Path) -> int:
        """Open a file for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def write(self, handle: int, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        rest = memoryview(data).cast("B")
        while rest.nbytes:
            rest = rest[os.write(handle, rest) :]

    def flush(self, handle: int) -> None:
        """fdatasync: the error of a failed write-out is reported once, here or by fsync, so it must be raised."""
        os.fdatasync(handle)

    def sync(self, handle: int) -> None:
        """fsync."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close a handle."""
        os.close(handle)

    def read(self, handle: int, offset: int, out: memoryview) -> int:
        """pread until `out` is full or the file ends."""
        done = 0
        while done < out.nbytes:
            count = os.preadv(handle, [out[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def forget(self, handle: int) -> None:
        """posix_fadvise(DONTNEED)."""
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def size(self, path: Path) -> int:
        """Bytes of a file."""
        return os.stat(path).st_size

    def names(self, path: Path) -> list[str]:
        """Names in a folder, sorted."""
        return sorted(os.listdir(path))

    def mkdir(self, path: Path) -> None:
        """Make one folder."""
        os.mkdir(path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        """fsync of the folder; a file system that cannot do that (EINVAL) keeps its own promises."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(handle)


def read_all(fs: FileSystem, path: Path, limit: int) -> bytes:
    """The whole of a small file; OSError(EFBIG) when it is larger than `limit` bytes."""
    size = fs.size(path)
    if size > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    out = bytearray(size)
    handle = fs.open(path)
    try:
        count = fs.read(handle, 0, memoryview(out))
    finally:
        fs.close(handle)
    return bytes(out[:count])


def write_atomic(fs: FileSystem, path: Path, data: bytes, temp: Path) -> None:
    """Write `data` to `temp`, sync, rename to `path`, sync the folder: afterwards the file is there, whole."""
    handle = fs.create(temp)
    try:
        fs.write(handle, data)
        fs.sync(handle)
    finally:
        fs.close(handle)
    fs.rename(temp, path)
    fs.sync_folder(path.parent)
