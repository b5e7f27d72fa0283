"""What an agent sees of its ranks without asking them: marks on their boards, idleness and stops from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from mula_ray.elastic.hang import Activity, Pulse
from mula_ray.runtime.board import WORK_NS, Board, Reading
from mula_ray.runtime.osproc import stat_fields

_IDLE_SHARE = 0.1
_ACTIVITY: Mapping[str, Activity] = {"snapshot": "save", "save": "save", "evaluate": "eval"}
_BOOT: tuple[str, ...] = ("start", "groups", "build", "load", "ready")


class PulseTaker:
    """One object a node; `begin` at every generation with board and pid of every rank."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._ranks: dict[int, tuple[Board, int]] = {}
        self._generation = -1
        self._base = 0
        self._marks = -1
        self._ran_ns: int | None = None
        self._ran_at = self._idle_since = 0.0

    def begin(self, generation: int, base_step: int, ranks: Mapping[int, tuple[Board, int]]) -> None:
        """Watch these ranks, which start from `base_step`."""
        self._ranks, self._generation, self._base = dict(ranks), generation, base_step
        self._marks, self._ran_ns = -1, None
        self._ran_at = self._idle_since = time.monotonic()

    def end(self) -> None:
        """Nothing to watch."""
        self._ranks = {}

    def take(self, snapshot: int) -> Pulse | None:
        """The pulse now; None without ranks. `snapshot`: last step that is safe in two places."""
        if not self._ranks:
            return None
        readings = [board.read(rank) for rank, (board, _) in self._ranks.items()]
        marks = sum(reading.beats for reading in readings)
        committed = min(reading.committed for reading in readings)
        behind = _behind(readings)
        standing = marks == self._marks
        self._marks = marks
        stopped: tuple[int, ...] = ()
        idle = 0.0
        if standing:
            stopped = tuple(rank for rank, (_, pid) in self._ranks.items() if _state(pid) in "Tt")
            idle = self._idle()
        else:
            self._ran_ns = None
        least = min(readings, key=lambda reading: (reading.committed, reading.beats))
        activity: Activity = "start" if committed <= self._base else _ACTIVITY.get(least.phase, "step")
        work = tuple((rank, board.words[WORK_NS] / 1e9) for rank, (board, _) in self._ranks.items())
        return Pulse(self._node, self._generation, marks, committed, activity, behind, idle, stopped, snapshot, work)

    def _idle(self) -> float:
        """Seconds for which the ranks' threads together neither ran nor were ready to run."""
        now, ran = time.monotonic(), sum(_scheduled_ns(pid) for _, pid in self._ranks.values())
        if self._ran_ns is None:
            self._ran_ns, self._ran_at, self._idle_since = ran, now, now
            return 0.0
        passed = now - self._ran_at
        if passed > 0.04:
            if (ran - self._ran_ns) / 1e9 > _IDLE_SHARE * passed:
                self._idle_since = now
            self._ran_ns, self._ran_at = ran, now
        return now - self._idle_since


def _behind(readings: list[Reading]) -> tuple[int, ...]:
    least = min((reading.committed, reading.beats) for reading in readings)
    ranks = tuple(reading.rank for reading in readings if (reading.committed, reading.beats) == least)
    return ranks if len(ranks) < len(readings) else ()


def _state(pid: int) -> str:
    fields = stat_fields(pid)
    return fields[0] if fields else "X"


def _scheduled_ns(pid: int) -> int:
    """Time that the threads of a process ran or waited for a core (schedstat: run ns, wait ns)."""
    total = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            run, wait, _ = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
            total += int(run) + int(wait)
    except (OSError, ValueError):
        pass
    return total
