"""The owners' side of the zygote: start one, ask it for children, learn of their deaths."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mula_ray.runtime import wire
from mula_ray.runtime.osproc import die_with_parent
from mula_ray.runtime.zygote import Job


@dataclass
class ZygoteProcess:
    """A running zygote; `address` is where owners connect."""

    process: subprocess.Popen[bytes]
    address: str

    @classmethod
    def start(cls, environment: Mapping[str, str], log: str | None = None) -> ZygoteProcess:
        """Start it; returns at once, while it still imports (connections wait in its backlog).

        Call it from a thread that lives as long as the zygote shall: the kernel's death signal follows the thread.
        """
        sock, address = wire.listen("zygote")
        sock.set_inheritable(True)
        command = [sys.executable, "-m", "mula_ray.runtime.zygote", str(sock.fileno()), str(os.getpid())]
        out = open(log, "ab") if log else None  # noqa: SIM115 (closed below)
        try:
            process = subprocess.Popen(
                command,
                pass_fds=[sock.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out or subprocess.DEVNULL,
                stderr=out or subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,
            )
        finally:
            sock.close()
            if out is not None:
                out.close()
        return cls(process, address)

    def stop(self) -> None:
        """End it and, by the kernel, all its children."""
        self.process.kill()
        self.process.wait()


@dataclass
class Child:
    """A process forked by the zygote. `exit`: its exit code once known (negative: killed by that signal)."""

    pid: int
    channel: socket.socket = field(repr=False)
    exit: int | None = None
    gone: threading.Event = field(default_factory=threading.Event, repr=False)

    def run(self, job: Job) -> None:
        """Give it its job."""
        wire.send(self.channel, job)

    def kill(self) -> None:
        """SIGKILL (also to one that is stopped); `gone` is set when it has been reaped."""
        if not self.gone.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Forks:
    """A connection to a zygote; `on_exit(child)` and `on_lost()` (it is gone) are called on the reader thread."""

    def __init__(
        self, address: str, on_exit: Callable[[Child], None], on_lost: Callable[[], None] = lambda: None
    ) -> None:
        self._sock = wire.connect(address)
        self._on_exit, self._on_lost = on_exit, on_lost
        self._new: queue.SimpleQueue[Child | None] = queue.SimpleQueue()
        self._children: dict[int, Child] = {}
        self._lock = threading.Lock()
        self.lost = False
        self._thread = threading.Thread(target=self._read, name="forks", daemon=True)
        self._thread.start()

    def fork(self, prepare: str = "", timeout_s: float = 120.0) -> Child:
        """A new child, waiting for its job; before that it runs `prepare` (`module:function`, no arguments).

        Raises:
            RuntimeError: the zygote is gone, or did not answer (it may still be importing).
        """
        with self._lock:
            if self.lost:
                raise RuntimeError("the fork server of this node is gone")
            wire.send(self._sock, prepare)
            try:
                child = self._new.get(timeout=timeout_s)
            except queue.Empty:
                raise RuntimeError(f"the fork server did not answer within {timeout_s:.0f} s") from None
        if child is None:
            raise RuntimeError("the fork server of this node is gone")
        return child

    def close(self) -> None:
        """Close the connection: the zygote kills the children."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        while True:
            try:
                message, fds = wire.receive(self._sock, max_fds=1)
            except (EOFError, OSError):
                break
            if message[0] == "child":
                child = Child(message[1], socket.socket(fileno=fds[0]))
                self._children[child.pid] = child
                self._new.put(child)
                continue
            child = self._children.pop(message[1])
            child.exit = message[2]
            child.gone.set()
            self._on_exit(child)
        self.lost = True
        self._new.put(None)
        for child in list(self._children.values()):  # the kernel ends them with the zygote
            child.exit = -signal.SIGKILL
            child.gone.set()
            self._on_exit(child)
        self._on_lost()


def spawn_child(environment: Mapping[str, str]) -> Child:
    """A child without a zygote (`cluster.rank_start: spawn`): a fresh interpreter that waits for its job."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.set_inheritable(True)
    command = [sys.executable, "-m", "mula_ray.runtime.spawned", str(theirs.fileno()), str(os.getpid())]
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True
    )
    theirs.close()
    child = Child(process.pid, ours)

    def reap() -> None:
        child.exit = process.wait()
        child.gone.set()

    threading.Thread(target=reap, name="reap", daemon=True).start()
    return child


__all__ = ["Child", "Forks", "Job", "ZygoteProcess", "die_with_parent", "spawn_child"]
