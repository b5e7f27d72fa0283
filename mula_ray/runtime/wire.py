"""Messages between processes of one node: pickled objects with a length in front, over Unix sockets.

Only sockets of the same user are trusted (`peer_is_us`): an abstract address has no file permissions.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


def listen(label: str) -> tuple[socket.socket, str]:
    """A listening socket with an abstract address (no file is left behind), and the address."""
    address = f"\0mula-{label}-{os.getpid()}-{secrets.token_hex(8)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(address)
    sock.listen(256)
    return sock, address


def connect(address: str, timeout_s: float = 10.0) -> socket.socket:
    """Connect to an address of `listen`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    sock.connect(address)
    sock.settimeout(None)
    return sock


def peer_is_us(sock: socket.socket) -> bool:
    """Whether the other end runs under our user id."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", raw)[1] == os.getuid())


def send(sock: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Send one message; `fds` travel with its first byte."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    head = _LENGTH.pack(len(body))
    if fds:
        socket.send_fds(sock, [head[:1]], list(fds))
        head = head[1:]
    sock.sendall(head + body)


def receive(sock: socket.socket, max_fds: int = 0) -> tuple[Any, list[int]]:
    """Receive one message and the descriptors that came with it.

    Raises:
        EOFError: the other end is closed.
    """
    fds: list[int] = []
    if max_fds:
        first, fds, _, _ = socket.recv_fds(sock, 1, max_fds)
        head = first + _exactly(sock, _LENGTH.size - 1) if first else b""
    else:
        head = _exactly(sock, _LENGTH.size)
    if not head:
        raise EOFError("closed")
    return pickle.loads(_exactly(sock, _LENGTH.unpack(head)[0])), fds


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            chunk = sock.recv(min(count - len(parts), 1 << 20))
        except ConnectionError as error:
            raise EOFError("closed") from error
        if not chunk:
            raise EOFError("closed")
        parts += chunk
    return bytes(parts)
