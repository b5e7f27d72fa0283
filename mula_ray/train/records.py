"""Reads the files of a run folder, whatever state a crash left them in."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True)
class Lines:
    """The lines of a file, in order; `bad` were no JSON object (a torn one where a crash cut it off)."""

    lines: list[Line]
    bad: int


def read_lines(path: Path) -> Lines:
    """All whole lines of a JSON-lines file; a missing file has none."""
    lines: list[Line] = []
    bad = 0
    if not path.exists():
        return Lines(lines, bad)
    with path.open("rb") as file:
        for raw in file:
            try:
                value = json.loads(raw)
            except ValueError:
                bad += bool(raw.strip())
                continue
            if isinstance(value, dict):
                lines.append(value)
            else:
                bad += 1
    return Lines(lines, bad)


class Tail:
    """Follows a JSON-lines file that is being written: `lines` grows by what was added since the last `read`."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        """Whole lines only: a last one without its end is read when it has one."""
        if not self._path.exists() or self._path.stat().st_size == self._at:
            return self.lines
        with self._path.open("rb") as file:
            file.seek(self._at)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._at += len(raw)
                with contextlib.suppress(ValueError):
                    value = json.loads(raw)
                    if isinstance(value, dict):
                        self.lines.append(value)
        return self.lines


@dataclass(frozen=True)
class RunMetrics:
    """`metrics.jsonl`, sorted by step; of a replayed step only the last line counts.

    `replayed`: step lines that a later generation overwrote. `written`: step lines in the order of the file, which is
    what time lines need.
    """

    steps: list[Line]
    evals: list[Line]
    written: list[Line]
    replayed: int
    bad: int


def read_metrics(path: Path) -> RunMetrics:
    """Reads `metrics.jsonl`."""
    raw = read_lines(path)
    steps: dict[int, Line] = {}
    evals: dict[int, Line] = {}
    written: list[Line] = []
    bad = raw.bad
    for line in raw.lines:
        step = line.get("step")
        if not isinstance(step, int):
            bad += 1
        elif "eval_loss" in line:
            evals[step] = line
        else:
            steps[step] = line
            written.append(line)
    return RunMetrics(
        steps=[steps[step] for step in sorted(steps)],
        evals=[evals[step] for step in sorted(evals)],
        written=written,
        replayed=len(written) - len(steps),
        bad=bad,
    )


def tail_lines(path: Path, size: int = 65536) -> list[Line]:
    """The last lines of a file that fit into `size` bytes: enough for a look that must not read a whole run.

    Reads further back while not one whole line fits.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        end = file.seek(0, 2)
        while True:
            start = max(0, end - size)
            file.seek(start)
            lines = _parse_tail(file.read(end - start), whole=start == 0)
            if lines or start == 0:
                return lines
            size *= 4


def _parse_tail(chunk: bytes, whole: bool) -> list[Line]:
    raw = chunk.split(b"\n")
    lines: list[Line] = []
    for item in raw if whole else raw[1:]:
        try:
            value = json.loads(item)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines
