"""The single-writer lease of a checkpoint folder: one job writes, a second one is refused, a stale one changes nothing.

No locks (shared file systems have none to rely on) and no comparison of clocks: a lease is a small file with the
writer's identity and a counter that the writer renews. Another job takes it over only when its writer released it, is
known to be dead (same machine and boot, no such process), or let the counter stand still for `patience_s`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from mula_ray.checkpoint.failures import StoreFailure
from mula_ray.checkpoint.filesystem import FileSystem, RealFileSystem, read_all, write_atomic

LEASE = "lease.json"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Holder:
    """Who holds the lease. `nonce` is new for every job; `renewed` counts up while it lives."""

    run_id: str
    generation: int
    nonce: str
    host: str
    boot: str
    pid: int
    started: int
    renewed: int = 0
    released: bool = False

    def describe(self) -> str:
        """In words of a message."""
        return f"run {self.run_id} generation {self.generation} (process {self.pid} on {self.host})"


class Lease:
    """Acquired by the driver; checked before everything that changes what is committed.

    `patience_s`: how long the counter of a writer on another machine must stand still, seconds; several times
    `renew_s`. `fs`, `sleep`: replaced in tests.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        fs: FileSystem | None = None,
        *,
        patience_s: float = 30.0,
        renew_s: float = 5.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.path = folder / LEASE
        self.run_id = run_id
        self.fs: FileSystem = fs or RealFileSystem()
        self.patience_s, self.renew_s, self._sleep = patience_s, renew_s, sleep
        self._mine: Holder | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, generation: int = 0, renew: bool = True) -> int:
        """Take the lease; returns our generation: at least `generation`, and above every earlier one of the folder.

        Raises:
            StoreFailure: kind `lease`: another job is alive.
        """
        old = self._read()
        if old is not None and not old.released and not self._is_dead(old):
            raise StoreFailure("lease", self.path, f"held by {old.describe()}, which is alive", self.run_id)
        granted = max(generation, old.generation + 1 if old is not None else 0)
        mine = Holder(
            self.run_id,
            granted,
            secrets.token_hex(8),
            socket.gethostname(),
            _boot_id(),
            os.getpid(),
            _started(os.getpid()),
        )
        self._write(mine)
        if old is not None:
            self._sleep(min(0.2, self.renew_s))  # two jobs that took over at once: the later writer stays
        self._mine = mine
        self.check()
        if renew:
            self._thread = threading.Thread(target=self._renew_loop, name="ckpt-lease", daemon=True)
            self._thread.start()
        return granted

    def check(self) -> None:
        """Make sure that we still hold the lease, with this generation.

        Raises:
            StoreFailure: kind `lease`: never acquired, or another job took over; kind `gone`: the folder was removed.
        """
        mine, now = self._mine, self._read()
        if mine is None:
            raise StoreFailure("lease", self.path, "this process never acquired it", self.run_id)
        if now is None:
            raise StoreFailure("gone", self.path, "the folder or its lease was removed under the run", self.run_id)
        if now.nonce != mine.nonce:
            detail = f"was taken over by {now.describe()}; ours was generation {mine.generation}"
            raise StoreFailure("lease", self.path, detail, self.run_id)

    def advance(self, generation: int) -> None:
        """A new generation of ranks of the same job."""
        with self._lock:
            self.check()
            assert self._mine is not None
            assert generation >= self._mine.generation, "generations only go up"
            self._mine = Holder(**{**asdict(self._mine), "generation": generation})
            self._write(self._mine)

    def release(self) -> None:
        """Give it back (if it is still ours); the generation stays on record."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if self._mine is None:
                return
            with contextlib.suppress(StoreFailure, OSError):
                self.check()
                self._write(Holder(**{**asdict(self._mine), "released": True}))
            self._mine = None

    def _renew_loop(self) -> None:
        while not self._stop.wait(self.renew_s):
            with self._lock, contextlib.suppress(StoreFailure, OSError):
                self.check()  # a lost lease is never written over; the next commit finds out
                assert self._mine is not None
                self._mine = Holder(**{**asdict(self._mine), "renewed": self._mine.renewed + 1})
                self._write(self._mine)

    def _is_dead(self, old: Holder) -> bool:
        if old.host == socket.gethostname() and old.boot == _boot_id():
            return _started(old.pid) != old.started
        waited = 0.0
        while waited < self.patience_s:
            self._sleep(min(self.renew_s, self.patience_s))
            waited += min(self.renew_s, self.patience_s)
            if self._read() != old:
                return False
        return True

    def _read(self) -> Holder | None:
        try:
            return Holder(**json.loads(read_all(self.fs, self.path, _MAX_BYTES)))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise StoreFailure("lease", self.path, f"is not readable ({error}); remove it if no job runs") from error
        except OSError as error:
            raise StoreFailure.of(error, self.path, self.run_id) from error

    def _write(self, holder: Holder) -> None:
        temp = self.path.with_name(f".{LEASE}.{holder.nonce}")
        try:
            with contextlib.suppress(FileNotFoundError):
                self.fs.unlink(temp)
            write_atomic(self.fs, self.path, json.dumps(asdict(holder)).encode(), temp)
        except OSError as error:
            raise StoreFailure.of(error, self.path, self.run_id) from error


def _started(pid: int) -> int:
    """Start time of a process in clock ticks since boot (a pid alone is used again); 0 when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rsplit(")", 1)[1].split()[19])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
