"""Snapshots between nodes: every agent serves its memory to the agents of the same run, over TCP.

A connection starts with a challenge answered by HMAC-SHA256 with the run's secret; nothing is unpickled
before. Nodes that turn out to be one machine (a local cluster) hand over paths of shared memory, not bytes. Requests:
`copy` (keep this snapshot of my rank), `fetch` (give me a snapshot that you keep), and from the driver `call` (do this;
see `lines`).
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mula_ray.checkpoint.snapshot import SlotInfo, SnapshotBuffer
from mula_ray.runtime import wire
from mula_ray.runtime.osproc import boot_id

_DIGEST = 32


@dataclass(frozen=True)
class Parcel:
    """A snapshot on its way: whose, what it says about itself, and where it lies or how many bytes follow."""

    rank: int
    info: SlotInfo
    boot: str
    paths: tuple[str, ...]
    nbytes: int


def parcel_of(rank: int, buffer: SnapshotBuffer, info: SlotInfo) -> Parcel:
    """Describe a slot of a local buffer."""
    return Parcel(rank, info, boot_id(), tuple(buffer.paths), buffer.copy_out(info).nbytes)


class PeerServer:
    """`take(parcel, data)` keeps a copy; `give(rank, generation, step)` finds one: (buffer, info) or None;
    `call((method, args))` answers the driver."""

    def __init__(
        self,
        host: str,
        secret: bytes,
        take: Callable[[Parcel, memoryview], None],
        give: Callable[[int, int, int], tuple[SnapshotBuffer, SlotInfo] | None],
        call: Callable[[tuple[str, tuple[Any, ...]]], tuple[bool, Any]] | None = None,
    ) -> None:
        self._secret, self._take, self._give, self._call = secret, take, give, call
        self._sock = socket.create_server((host, 0), backlog=128)
        self.address = f"{host}:{self._sock.getsockname()[1]}"
        threading.Thread(target=self._accept, name="peers", daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._sock.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(EOFError, OSError), sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(10.0)
            nonce = secrets.token_bytes(_DIGEST)
            sock.sendall(nonce)
            answer = _exactly(sock, _DIGEST)
            if not hmac.compare_digest(answer, hmac.digest(self._secret, nonce, "sha256")):
                return
            sock.sendall(b"+")
            sock.settimeout(None)
            while True:
                verb, what = wire.receive(sock)[0]
                if verb == "copy":
                    wire.send(sock, self._keep(sock, what))
                elif verb == "call" and self._call is not None:
                    wire.send(sock, self._call(what))
                else:
                    self._hand_out(sock, *what)

    def _keep(self, sock: socket.socket, parcel: Parcel) -> str:
        if parcel.boot == boot_id():
            source = SnapshotBuffer(parcel.paths)
            try:
                self._take(parcel, source.copy_out(parcel.info))
                return "" if source.unchanged(parcel.info) else "overwritten while it was copied"
            finally:
                source.close()
        self._take(parcel, memoryview(_exactly(sock, parcel.nbytes)))
        return ""

    def _hand_out(self, sock: socket.socket, rank: int, generation: int, step: int, boot: str) -> None:
        found = self._give(rank, generation, step)
        if found is None:
            wire.send(sock, None)
            return
        parcel = parcel_of(rank, *found)
        wire.send(sock, parcel)
        if boot != parcel.boot:
            sock.sendall(found[0].copy_out(found[1]))

    def close(self) -> None:
        """Stop listening."""
        self._sock.close()


def open_peer(address: str, secret: bytes, timeout_s: float = 10.0) -> socket.socket:
    """A connection to an agent's server that has accepted us.

    Raises:
        OSError, EOFError: nobody answers there, or somebody who does not belong to this run.
    """
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        nonce = _exactly(sock, _DIGEST)
        sock.sendall(hmac.digest(secret, bytes(nonce), "sha256"))
        if _exactly(sock, 1) != b"+":
            raise ConnectionError(f"{address} does not belong to this run")
    except BaseException:
        sock.close()
        raise
    return sock


class PeerLink:
    """A connection for snapshots to another agent's server. One request at a time."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._sock = open_peer(address, secret)
        self._sock.settimeout(60.0)
        # Same machine: told by the address that both ends see; the parcel's boot id decides again.
        self._local = self._sock.getpeername()[0] == self._sock.getsockname()[0]

    def copy(self, rank: int, buffer: SnapshotBuffer, info: SlotInfo) -> str:
        """Have a snapshot kept there; "" when it is, else why not."""
        parcel = parcel_of(rank, buffer, info)
        if not self._local:
            parcel = Parcel(parcel.rank, parcel.info, "", parcel.paths, parcel.nbytes)
        wire.send(self._sock, ("copy", parcel))
        if not self._local:
            self._sock.sendall(buffer.copy_out(info))
            if not buffer.unchanged(info):
                wire.receive(self._sock)
                return "overwritten while it was copied"
        return str(wire.receive(self._sock)[0])

    def fetch(self, rank: int, generation: int, step: int) -> tuple[Parcel, memoryview | None] | None:
        """A snapshot kept there: bytes, or (None) paths that can be opened here; None: it has none."""
        wire.send(self._sock, ("fetch", (rank, generation, step, boot_id() if self._local else "")))
        parcel: Parcel | None = wire.receive(self._sock)[0]
        if parcel is None:
            return None
        if self._local and parcel.boot == boot_id():
            return parcel, None
        return parcel, memoryview(_exactly(self._sock, parcel.nbytes))

    def close(self) -> None:
        """Close."""
        self._sock.close()


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    at = 0
    while at < count:
        got = sock.recv_into(view[at:])
        if not got:
            raise EOFError("closed")
        at += got
    return data
