"""A file system in memory that forgets what was not synced, and can be photographed after every single operation.

Contents are durable after `sync`, names (creations, renames, removals) after `sync_folder` of their folder: stricter
than any real file system. A crash image keeps nothing else (`lost`), everything (`kept`), or some of it (`torn`): any
subset of the name changes, any subset of the pages written.
"""

# ruff: noqa: ARG005
from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from pathlib import Path

PAGE = 512


class _File:
    def __init__(self, now: bytes = b"", durable: bytes = b"") -> None:
        self.now, self.durable = bytearray(now), durable


class _Folder:
    def __init__(self, now: dict | None = None) -> None:
        self.now: dict[str, _File | _Folder] = dict(now or {})
        self.durable = dict(self.now)
        self.changes: list[dict[str, _File | _Folder | None]] = []

    def change(self, entries: dict[str, _File | _Folder | None]) -> None:
        self.changes.append(entries)
        _apply(self.now, entries)


def _apply(names: dict, entries: dict) -> None:
    for name, node in entries.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class SimulatedFileSystem:
    """The FileSystem protocol. `after(op)` is called after every changing operation, `before(op, path)` before it."""

    def __init__(self, root: _Folder | None = None) -> None:
        self.root = root or _Folder({"run": _Folder()})
        self.after: Callable[[str], None] = lambda op: None
        self.before: Callable[[str, Path], None] = lambda op, path: None
        self.operations = 0
        self._handles: dict[int, tuple[_File, Path]] = {}
        self._lock = threading.RLock()

    # What a crash leaves.

    def crash(self, mode: str, seed: int = 0) -> SimulatedFileSystem:
        """The file system after the power failed now."""
        assert mode in ("lost", "kept", "torn")
        rng = random.Random(seed)
        seen: dict[int, _File | _Folder] = {}

        def image(node: _File | _Folder) -> _File | _Folder:
            if id(node) in seen:
                return seen[id(node)]
            if isinstance(node, _File):
                data = {"lost": node.durable, "kept": bytes(node.now)}.get(mode)
                data = _torn(node, rng) if data is None else data
                copy: _File | _Folder = _File(data, data)
            else:
                names = dict(node.now if mode == "kept" else node.durable)
                if mode == "torn":
                    for change in node.changes:
                        if rng.random() < 0.5:
                            _apply(names, change)
                copy = _Folder({name: image(child) for name, child in names.items()})
            seen[id(node)] = copy
            return copy

        with self._lock:
            root = image(self.root)
        assert isinstance(root, _Folder)
        return SimulatedFileSystem(root)

    def damage(self, path: Path, change: Callable[[bytearray], bytes | bytearray]) -> None:
        """Replace the contents of a file behind everybody's back."""
        node = self._file(path)
        node.now = bytearray(change(bytearray(node.now)))
        node.durable = bytes(node.now)

    # The protocol.

    def create(self, path: Path) -> int:
        with self._changing("create", path):
            folder = self._folder(path.parent)
            if path.name in folder.now:
                raise FileExistsError(errno.EEXIST, "exists", str(path))
            node = _File()
            folder.change({path.name: node})
            return self._handle(node, path)

    def open(self, path: Path) -> int:
        with self._lock:
            return self._handle(self._file(path), path)

    def write(self, handle: int, data: memoryview | bytes) -> None:
        with self._changing("write", self._handles[handle][1]):
            self._handles[handle][0].now += bytes(data)

    def flush(self, handle: int) -> None:
        pass

    def sync(self, handle: int) -> None:
        with self._changing("sync", self._handles[handle][1]):
            node = self._handles[handle][0]
            node.durable = bytes(node.now)

    def close(self, handle: int) -> None:
        del self._handles[handle]

    def read(self, handle: int, offset: int, out: memoryview) -> int:
        with self._lock:
            data = self._handles[handle][0].now[offset : offset + out.nbytes]
            out[: len(data)] = data
            return len(data)

    def forget(self, handle: int) -> None:
        pass

    def size(self, path: Path) -> int:
        with self._lock:
            return len(self._file(path).now)

    def names(self, path: Path) -> list[str]:
        with self._lock:
            return sorted(self._folder(path).now)

    def mkdir(self, path: Path) -> None:
        with self._changing("mkdir", path):
            folder = self._folder(path.parent)
            if path.name in folder.now:
                raise FileExistsError(errno.EEXIST, "exists", str(path))
            folder.change({path.name: _Folder()})

    def rename(self, old: Path, new: Path) -> None:
        with self._changing("rename", new):
            assert old.parent == new.parent
            folder = self._folder(old.parent)
            node = folder.now.get(old.name)
            if node is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(old))
            if isinstance(node, _Folder) and getattr(folder.now.get(new.name), "now", None):
                raise OSError(errno.ENOTEMPTY, "not empty", str(new))
            folder.change({old.name: None, new.name: node})

    def unlink(self, path: Path) -> None:
        with self._changing("unlink", path):
            self._file(path)
            self._folder(path.parent).change({path.name: None})

    def rmdir(self, path: Path) -> None:
        with self._changing("rmdir", path):
            if self._folder(path).now:
                raise OSError(errno.ENOTEMPTY, "not empty", str(path))
            self._folder(path.parent).change({path.name: None})

    def sync_folder(self, path: Path) -> None:
        with self._changing("sync_folder", path):
            folder = self._folder(path)
            folder.durable, folder.changes = dict(folder.now), []

    def _node(self, path: Path) -> _File | _Folder:
        node: _File | _Folder = self.root
        for name in path.parts[1:]:
            if not isinstance(node, _Folder):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
            if name not in node.now:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            node = node.now[name]
        return node

    def _file(self, path: Path) -> _File:
        node = self._node(path)
        if not isinstance(node, _File):
            raise IsADirectoryError(errno.EISDIR, "a folder", str(path))
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._node(path)
        if not isinstance(node, _Folder):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
        return node

    def _handle(self, node: _File, path: Path) -> int:
        handle = max(self._handles, default=0) + 1
        self._handles[handle] = (node, path)
        return handle

    def _changing(self, op: str, path: Path) -> _Operation:
        return _Operation(self, op, path)


class _Operation:
    """Holds the lock, and photographs after success."""

    def __init__(self, fs: SimulatedFileSystem, op: str, path: Path) -> None:
        self.fs, self.op, self.path = fs, op, path

    def __enter__(self) -> None:
        self.fs._lock.acquire()
        try:
            self.fs.before(self.op, self.path)
        except BaseException:
            self.fs._lock.release()
            raise

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                self.fs.operations += 1
                self.fs.after(f"{self.op} {self.path}")
        finally:
            self.fs._lock.release()


def _torn(node: _File, rng: random.Random) -> bytes:
    """Some pages new, some old or zero, any length in between."""
    if bytes(node.now) == node.durable:
        return node.durable
    size = rng.randint(min(len(node.now), len(node.durable)), max(len(node.now), len(node.durable)))
    pages = []
    for at in range(0, size, PAGE):
        source = node.now if rng.random() < 0.5 else node.durable
        pages.append(bytes(source[at : at + PAGE]).ljust(min(PAGE, size - at), b"\0"))
    return b"".join(pages)
