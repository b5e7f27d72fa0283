"""The preloaded fork server of a node: fresh processes that have torch imported, in milliseconds.

    python -m mula_ray.runtime.zygote FD PARENT_PID

Started by the node agent. It imports torch and our modules (no tensor operation, no device, no thread), then serves on
the listening Unix socket FD. An owner (a tile's worker, or the agent) connects and asks for children; a child waits on
its own channel for a `Job` (so one can be kept ready) and runs it.

Why not multiprocessing's forkserver: inside a Ray worker its children import the worker's main module, and with it Ray;
and its children survive the SIGKILL of their owner. Here three things end a child: the kernel when the zygote ends
(PDEATHSIG), the zygote when the owner's connection closes (however the owner died, and even if the child is stopped),
and the owner itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from mula_ray.runtime import wire
from mula_ray.runtime.osproc import die_with_parent, start_normal

PRELOAD = (
    "torch",
    "torch.distributed",
    "numpy",
    "mula_ray.runtime.rank",
    "mula_ray.runtime.jobs",
)


@dataclass(frozen=True)
class Job:
    """What a child is to run: `module:function(argument, channel)`. The environment is set before anything else."""

    entry: str
    argument: Any
    environment: dict[str, str] = field(default_factory=dict)
    nice: int = 0


def serve(listener: socket.socket, parent: int) -> None:
    """The loop of the zygote."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # pyarrow imports pandas at its first conversion if it can: a second in every rank's first step, for nothing.
    sys.modules.setdefault("pandas", cast(Any, None))
    for name in PRELOAD:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    Zygote(listener).run()


class Zygote:
    """Single-threaded: forks, reaps, and ends the children of owners that are gone."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._owners: dict[int, socket.socket] = {}
        self._children: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve until the parent is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    self._request(key.fd)
            self._reap()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        if not wire.peer_is_us(sock):
            sock.close()
            return
        self._owners[sock.fileno()] = sock
        self._selector.register(sock, selectors.EVENT_READ)

    def _request(self, owner: int) -> None:
        sock = self._owners.get(owner)
        if sock is None:
            return
        try:
            prepare, _ = wire.receive(sock)
            self._fork(owner, sock, str(prepare))
        except (EOFError, OSError):
            self._drop(owner)

    def _drop(self, owner: int) -> None:
        """The owner is gone: so are its children."""
        sock = self._owners.pop(owner)
        self._selector.unregister(sock)
        sock.close()
        for pid, of in self._children.items():
            if of == owner:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _fork(self, owner: int, sock: socket.socket, prepare: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._become_child(theirs, parent, prepare)
        theirs.close()
        self._children[pid] = owner
        try:
            wire.send(sock, ("child", pid), (ours.fileno(),))
        finally:
            ours.close()

    def _become_child(self, channel: socket.socket, parent: int, prepare: str) -> None:
        """In the child: let go of everything of the zygote, run the job, never return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            die_with_parent(parent)
            self._selector.close()
            self._listener.close()
            for sock in self._owners.values():
                sock.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            for sig in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(sig, signal.SIG_DFL)
            if prepare:
                with contextlib.suppress(Exception):
                    _function(prepare)()
            code = run_job(channel)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            owner = self._children.pop(pid, -1)
            sock = self._owners.get(owner)
            if sock is not None:
                try:
                    wire.send(sock, ("exit", pid, os.waitstatus_to_exitcode(status)))
                except OSError:
                    self._drop(owner)


def run_job(channel: socket.socket) -> int:
    """Wait for a `Job` on `channel`, run it, return its exit code. No job (owner gone): 0."""
    try:
        job, _ = wire.receive(channel)
    except EOFError:
        return 0
    os.environ.update(job.environment)
    if job.nice:
        os.nice(job.nice)
    return int(_function(job.entry)(job.argument, channel) or 0)


def _function(entry: str) -> Callable[..., Any]:
    module, _, name = entry.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def main() -> None:
    """Entry of `python -m`."""
    start_normal()
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))


if __name__ == "__main__":
    main()
