"""Phases of a step: who spends how long with what."""

from __future__ import annotations

import time
from collections.abc import Callable


class PhaseClock:
    """`EngineHooks` that turns phase borders into seconds by name. A border ends the phase before it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._name: str | None = None
        self._since = 0.0

    def phase(self, name: str, step: int) -> None:  # noqa: ARG002 (the hook's signature)
        """The phase `name` of `step` begins."""
        now = self._clock()
        if self._name is not None:
            self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call; the phase under way is cut here and goes on."""
        if self._name is not None:
            self.phase(self._name, 0)
        seconds, self._seconds = self._seconds, {}
        return seconds
