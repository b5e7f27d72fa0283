"""The board of a rank: a page of shared words that the rank writes as it goes, and the node agent reads.

No message, no system call on the training path; a frozen rank simply stops changing it. Flags go the other way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from mula_ray.runtime.osproc import Words

PHASES = (
    "start", "groups", "build", "load", "ready", "data", "forward_backward", "reduce", "agree", "update", "done",
    "snapshot", "evaluate", "save", "end",
)  # fmt: skip
_CODE = {name: code for code, name in enumerate(PHASES)}

# words written by the rank
GENERATION, STEP, PHASE, SINCE_NS, BEATS, SNAPSHOT, COMMITTED, WORK_NS = range(8)
# words written by the agent
STOP, SAVE, COPIED, INJECT = range(16, 20)
STOP_NONE, STOP_MEMORY, STOP_DISK = range(3)


@dataclass(frozen=True)
class Reading:
    """What a board said: making step `step` (counted from 1), in `phase` since `since_s` (CLOCK_MONOTONIC, seconds).

    `committed`: steps done; `beats` grows with every phase.
    """

    rank: int
    generation: int
    step: int
    phase: str
    since_s: float
    beats: int
    committed: int


class Board:
    """The words with names."""

    def __init__(self, path: str | None = None) -> None:
        self.words = Words(path, "board")

    @property
    def path(self) -> str:
        """How another process of this node opens it."""
        return self.words.path

    def clear(self) -> None:
        """Before a new generation."""
        for index in range(24):
            self.words[index] = 0

    def enter(self, phase: str, step: int) -> None:
        """The rank enters a phase of making `step`."""
        words = self.words
        now = time.monotonic_ns()
        if words[PHASE] == _CODE["forward_backward"]:  # a rank's own work, as far as it does not wait in it
            words[WORK_NS] = words[WORK_NS] + now - words[SINCE_NS]
        words[PHASE] = _CODE.get(phase, 0)
        if step >= 0:
            words[STEP] = step
        words[SINCE_NS] = now
        words[BEATS] = words[BEATS] + 1

    def read(self, rank: int) -> Reading:
        """The board now."""
        generation, step, phase, since, beats, _, committed = self.words.snapshot(7)
        return Reading(rank, generation, step, PHASES[phase % len(PHASES)], since / 1e9, beats, committed)

    def close(self) -> None:
        """Unmap."""
        self.words.close()
