"""What a zygote's child may be besides a rank: the store of a generation, hosted outside any rank."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from datetime import timedelta

from mula_ray.runtime import wire


@dataclass(frozen=True)
class StoreJob:
    """Host the key-value store of one generation on `host`."""

    host: str


def store(job: StoreJob, channel: socket.socket) -> int:
    """Listen on a free port, say which, and stay until the owner is gone."""
    from mula_ray.parallel.backend import TCPStore

    server = TCPStore(job.host, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    wire.send(channel, ("store", job.host, server.port))
    with contextlib.suppress(EOFError):
        wire.receive(channel)
    return 0
