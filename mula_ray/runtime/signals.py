"""SIGINT and SIGTERM handed to one function while a run lasts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def stop_signals(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """`handle(number, frame)` takes both signals; the old handlers come back at the end.

    Outside the main thread nothing is changed: Python lets no other thread set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
