"""What an agent sees of its ranks without asking them: marks on their boards, idleness and stops from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
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
        self._standing: _Standing | None = None

    def begin(self, generation: int, base_step: int, ranks: Mapping[int, tuple[Board, int]]) -> None:
        """Watch these ranks, which start from `base_step`."""
        self._ranks, self._generation, self._base = dict(ranks), generation, base_step
        self._marks, self._standing = -1, None

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
        idle = ran = 0.0
        if standing:
            pids = [pid for _, pid in self._ranks.values()]
            stopped = tuple(rank for rank, (_, pid) in self._ranks.items() if _state(pid) in "Tt")
            self._standing = self._standing or _Standing(pids)
            idle, ran = self._standing.look(pids)
        else:
            self._standing = None
        least = min(readings, key=lambda reading: (reading.committed, reading.beats))
        activity: Activity = "start" if committed <= self._base else _ACTIVITY.get(least.phase, "step")
        work = tuple((rank, board.words[WORK_NS] / 1e9) for rank, (board, _) in self._ranks.items())
        facts = (marks, committed, activity, behind, idle, stopped, snapshot, work, ran)
        return Pulse(self._node, self._generation, *facts)


class _Standing:
    """What the ranks' threads do since their marks stand still."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._first = self._last = _scheduled(pids)
        self._at = self._idle_since = time.monotonic()

    def look(self, pids: Sequence[int]) -> tuple[float, float]:
        """(seconds for which all threads together neither ran nor were ready to, seconds the busiest of them ran)."""
        now, times = time.monotonic(), _scheduled(pids)
        passed = now - self._at
        if passed > 0.04:
            busy = sum(sum(now_ns) - sum(self._last.get(thread, (0, 0))) for thread, now_ns in times.items())
            if busy / 1e9 > _IDLE_SHARE * passed:
                self._idle_since = now
            self._last, self._at = times, now
        ran = max((run - self._first.get(thread, (0, 0))[0] for thread, (run, _) in times.items()), default=0)
        return now - self._idle_since, ran / 1e9


def _behind(readings: list[Reading]) -> tuple[int, ...]:
    least = min((reading.committed, reading.beats) for reading in readings)
    ranks = tuple(reading.rank for reading in readings if (reading.committed, reading.beats) == least)
    return ranks if len(ranks) < len(readings) else ()


def _state(pid: int) -> str:
    fields = stat_fields(pid)
    return fields[0] if fields else "X"


def _scheduled(pids: Sequence[int]) -> dict[int, tuple[int, int]]:
    """(ns it ran, ns it waited for a core) of every thread of these processes."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                run, wait, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
                found[int(thread)] = (int(run), int(wait))
    return found
