"""Gantt picture of the profiled steps, by rank."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from mula_ray.train.report.axis import Axis
from mula_ray.train.report.curves import Named
from mula_ray.train.report.figure import SIZE, Figure, Table, figure, legend_of

RANKS = 48
"""Most ranks drawn: more would be lines thinner than can be seen."""
# name, colour, lane (0: the step's course, 1: inside it)
KINDS: tuple[tuple[str, int, int], ...] = (
    ("forward", 0, 0),
    ("backward", 3, 0),
    ("reduce", 2, 0),
    ("agree", 7, 0),
    ("update", 6, 0),
    ("dispatch", 1, 1),
    ("expert", 5, 1),
    ("combine", 4, 1),
)
NAMES = {"expert": "expert GEMM", "update": "optimizer", "reduce": "gradient reduction", "agree": "agreement"}


def read_spans(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The span files that can be read, by rank."""
    found = []
    for path in paths:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value["spans"]:
                found.append(value)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda value: int(value["rank"]))


def figures(named: Named, runs: Sequence[Named]) -> list[Figure]:
    """The picture of a run's profile window; nothing where none was asked for."""
    ranks = read_spans(sorted((named.run.folder / "profile").glob("rank*.spans.json")))
    if not ranks:
        return []
    start = min(span[1] for rank in ranks for span in rank["spans"])
    stop = max(span[2] for rank in ranks for span in rank["spans"])
    axis = Axis(0.0, (stop - start) / 1000.0)
    seconds = _seconds(ranks)
    lanes = "".join(_lane(rank, start, axis) for rank in ranks[:RANKS])
    ticks = "".join(f'<span style="left:{100 * at:.2f}%">{text}</span>' for at, text in axis.ticks(8))
    total = stop - start
    shares = ", ".join(
        f"{NAMES.get(name, name)} {100 * sum(seconds[name]) / len(ranks) / total:.1f} %"
        for name, _, _ in KINDS
        if seconds[name]
    )
    summary = f"{total / 1000:.1f} ms of {len(ranks)} ranks; mean shares: {shares}."
    if len(ranks) > RANKS:
        summary += f" The first {RANKS} ranks are drawn."
    traces = len(list((named.run.folder / "profile").glob("rank*.trace.json.gz")))
    summary += f" {traces} trace files in profile/ open in Perfetto."
    return [
        figure(
            f"gantt-{named.color}",
            "Profiled steps by rank (milliseconds)" + (f": {named.name}" if len(runs) > 1 else ""),
            summary,
            f'<div class="lanes gantt" role="img" aria-label="{escape(summary)}">{lanes}'
            f'<div class="lane"><b></b><div class="xs">{ticks}</div></div></div>',
            legend=legend_of([(NAMES.get(name, name), color, "area") for name, color, _ in KINDS if seconds[name]]),
            table=_table(ranks),
            wide=True,
        )
    ]


def _seconds(ranks: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Microseconds of each kind, one number a rank that has it."""
    out: dict[str, list[float]] = defaultdict(list)
    for rank in ranks:
        for name, spent in _sums(rank).items():
            out[name].append(spent)
    return out


def _sums(rank: dict[str, Any]) -> dict[str, float]:
    out: dict[str, float] = defaultdict(float)
    for name, start, stop in rank["spans"]:
        out[name] += stop - start
    return out


def _lane(rank: dict[str, Any], start: float, axis: Axis) -> str:
    """One rank: the step's course on top, dispatch, expert GEMM and combine below it."""
    scale = SIZE / (axis.high * 1000.0)
    paths = []
    for name, color, lane in KINDS:
        boxes = "".join(
            f"M{(begin - start) * scale:.2f} {500 * lane}h{max(0.15, (end - begin) * scale):.2f}v{500 - 60 * lane}"
            f"H{(begin - start) * scale:.2f}Z"
            for kind, begin, end in rank["spans"]
            if kind == name and end > begin
        )
        if boxes:
            paths.append(f'<path class="stack c{color}" d="{boxes}"/>')
    picture = (
        f'<svg viewBox="0 0 {SIZE:g} {SIZE:g}" preserveAspectRatio="none" aria-hidden="true">{"".join(paths)}</svg>'
    )
    return f'<div class="lane"><b>rank {rank["rank"]}</b><div class="track">{picture}</div></div>'


def _table(ranks: Sequence[dict[str, Any]]) -> str:
    table = Table(["rank", *(NAMES.get(name, name) for name, _, _ in KINDS)], caption="Milliseconds by rank")
    for rank in ranks[:200]:
        sums = _sums(rank)
        table.rows.append([str(rank["rank"]), *(f"{sums.get(name, 0.0) / 1000:.2f}" for name, _, _ in KINDS)])
    return table.html()
