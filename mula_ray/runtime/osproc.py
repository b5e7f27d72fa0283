"""What the operating system is asked for: death signals, verified kills, shared words. Linux only, no Ray, no torch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """The kernel sends `sig` to this process when its parent ends, also while this one is stopped.

    `parent`: pid that the parent must have; if it is gone already, this process ends at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Orphaned descendants become children of this process instead of init, so that none can hide."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def stand_back(pid: int, niceness: int = 5) -> None:
    """Let ranks that share the cores go first: all threads of `pid` get at least this niceness and the batch policy
    (Linux: both are a thread's), with which they do not interrupt a rank when they wake up. What they need is little,
    and a rank that waits for another one leaves room for it."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                if os.getpriority(os.PRIO_PROCESS, int(thread)) < niceness:
                    os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def start_batch() -> None:
    """What this thread starts from now on does not interrupt ranks when it wakes up; ranks undo it (`start_normal`)."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def start_normal() -> None:
    """The inverse: for ranks, which descend from processes that stand back."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rsplit(")", 1)[1].split()


def start_ticks(pid: int) -> int:
    """Start time of a process, clock ticks since boot: with the pid it names a process for good; 0 when it is gone."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def descendants(root: int) -> list[int]:
    """Every living process below `root`, deepest last; `root` itself is not in it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat_fields(int(name))
            if fields and fields[0] not in "ZX":
                children.setdefault(int(fields[1]), []).append(int(name))
    found, queue = [], [root]
    while queue:
        for child in children.get(queue.pop(), ()):
            found.append(child)
            queue.append(child)
    return found


def kill_verified(pids: Iterable[int], bound_s: float = 10.0) -> list[int]:
    """SIGKILL, then wait until they are gone (zombies of other parents count as gone); returns those that are not."""
    left = {pid: start_ticks(pid) for pid in pids}
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + bound_s
    while True:
        left = {pid: ticks for pid, ticks in left.items() if ticks and start_ticks(pid) == ticks}
        if not left or time.monotonic() > end:
            return sorted(left)
        time.sleep(0.002)


def boot_id() -> str:
    """Identity of this machine since it booted; processes with the same one share memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Words:
    """A page of 64-bit words in anonymous shared memory (memfd): one writer a word, many readers, no locks."""

    def __init__(self, path: str | None = None, label: str = "words") -> None:
        self._owner = path is None
        if path is None:
            self._fd = os.memfd_create(f"mula-{label}", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, mmap.PAGESIZE)
            path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.path = path
        self._map = mmap.mmap(self._fd, mmap.PAGESIZE)
        self._words = memoryview(self._map).cast("q")

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def snapshot(self, count: int) -> list[int]:
        """The first `count` words."""
        return self._words[:count].tolist()

    def close(self) -> None:
        """Unmap; the memory goes when the last process that has it ends."""
        if self._fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1
