"""Calls between processes of a run that do not go through Ray: one request and one answer at a time over a socket.

A Ray actor that waits for its next call wakes its main thread a hundred times a second (measured: 0.5 % of a core more
than one that is in a call). Agents and workers therefore spend their lives inside one Ray call (`serve`), whose end
tells its caller what Ray knows of their death; everything else that is asked of them comes over lines.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from mula_ray.runtime import wire

Answered = Callable[[Any, BaseException | None], None]


class CallFailed(Exception):
    """The called method raised: its exception's type and text."""


def answer(target: Any, methods: frozenset[str], request: tuple[str, tuple[Any, ...]]) -> tuple[bool, Any]:
    """Carry out a request: (True, result), or (False, type and text of the exception)."""
    method, args = request
    if method not in methods:
        return False, f"no such call: {method!r}"
    try:
        return True, getattr(target, method)(*args)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


class Listener:
    """Answers calls of this user's processes on this machine: one thread a connection."""

    def __init__(self, label: str, target: Any, methods: frozenset[str]) -> None:
        self._target, self._methods = target, methods
        self._sock, self.address = wire.listen(label)
        threading.Thread(target=self._accept, name=label, daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._sock.accept()
            if wire.peer_is_us(sock):
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(EOFError, OSError), sock:
            while True:
                wire.send(sock, answer(self._target, self._methods, wire.receive(sock)[0]))


class Line:
    """Calls to one process from any thread. `connect`: a new connection; one that has answered is used again."""

    def __init__(self, connect: Callable[[], socket.socket], verb: str | None = None) -> None:
        """`verb`: word in front of a request, where the connection carries other things as well."""
        self._connect, self._verb = connect, verb
        self._idle: list[socket.socket] = []

    def call(self, method: str, *args: Any, bound_s: float | None = 60.0) -> Any:
        """The method's result.

        Raises:
            CallFailed: it raised.
            OSError, EOFError: the process does not answer (within `bound_s`), or is gone.
        """
        try:
            sock = self._idle.pop()
        except IndexError:
            sock = self._connect()
        try:
            sock.settimeout(bound_s)
            request = (method, args)
            wire.send(sock, request if self._verb is None else (self._verb, request))
            (fine, result), _ = wire.receive(sock)
        except BaseException:
            sock.close()
            raise
        self._idle.append(sock)
        if not fine:
            raise CallFailed(result)
        return result

    def close(self) -> None:
        """Close the connections that nobody is using."""
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()


class Lanes:
    """Asynchronous calls over a line: as many threads as there are calls at once, used again."""

    def __init__(self, call: Callable[..., Any], label: str) -> None:
        self._call, self._label = call, label
        self._free: list[queue.SimpleQueue[tuple[str, tuple[Any, ...], Answered | None] | None]] = []
        self._closed = False

    def ask(self, method: str, args: tuple[Any, ...], then: Answered | None) -> None:
        """Call; `then(result, error)` comes on a thread of the lanes."""
        try:
            lane = self._free.pop()
        except IndexError:
            lane = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(lane,), name=self._label, daemon=True).start()
        lane.put((method, args, then))

    def close(self) -> None:
        """End the threads; a call under way is still answered."""
        self._closed = True
        while self._free:
            with contextlib.suppress(IndexError):
                self._free.pop().put(None)

    def _work(self, lane: queue.SimpleQueue[tuple[str, tuple[Any, ...], Answered | None] | None]) -> None:
        while (item := lane.get()) is not None:
            method, args, then = item
            result: Any = None
            error: BaseException | None = None
            try:
                result = self._call(method, *args)
            except Exception as failure:
                error = failure
            if then is not None:
                then(result, error)
            if self._closed:
                return
            self._free.append(lane)
