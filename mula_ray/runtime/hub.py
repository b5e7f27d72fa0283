"""Where the ranks of a node report to their agent: a Unix socket, one connection and one thread a rank.

A rank sends small dictionaries; `kind` names them (`messages.News`). The thread of a rank also carries each of its
snapshots to the buddy node, while the rank computes on.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from mula_ray.runtime import wire

Handler = Callable[[int, int, int, dict[str, Any]], None]


class Hub:
    """`handle(generation, rank, tile, message)` is called on the thread of the rank's connection."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._sock, self.address = wire.listen("hub")
        self._threads: dict[tuple[int, int], threading.Thread] = {}
        threading.Thread(target=self._accept, name="hub", daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._sock.accept()
            if not wire.peer_is_us(sock):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(EOFError, OSError), sock:
            (generation, rank, tile), _ = wire.receive(sock)
            self._threads[generation, rank] = threading.current_thread()
            while True:
                message, _ = wire.receive(sock)
                self._handle(generation, rank, tile, message)

    def drain(self, generation: int, rank: int, bound_s: float = 1.0) -> None:
        """The rank is dead: wait until everything it had sent is handled."""
        thread = self._threads.pop((generation, rank), None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(bound_s)
