"""Figures as HTML: a stretched SVG for the lines, ordinary text for the labels.

The drawing fills its frame at any width (`preserveAspectRatio="none"`, strokes that do not scale), while titles, ticks
and legends stay text of readable size: the same page serves a phone, a wide screen and paper, without a script. The
script only adds values under the pointer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from mula_ray.train.report.axis import Axis, number
from mula_ray.train.report.load import Array

SIZE = 1000.0


@dataclass(frozen=True)
class Figure:
    """A finished figure and the values its script shows."""

    key: str
    html: str
    data: dict[str, Any] | None = None


@dataclass(frozen=True)
class Trace:
    """One line (or dots) of a chart; `low` and `high` draw a band. `color` picks one of the page's eight."""

    name: str
    x: Array
    y: Array
    color: int = 0
    low: Array | None = None
    high: Array | None = None
    dots: bool = False
    dashed: bool = False


def figure(
    key: str,
    title: str,
    summary: str,
    body: str,
    *,
    legend: str = "",
    table: str = "",
    wide: bool = False,
    data: dict[str, Any] | None = None,
) -> Figure:
    """Title, one sentence that says what is seen, the drawing, and its numbers as a table for whoever cannot see it."""
    numbers = f"<details><summary>Numbers</summary>{table}</details>" if table else ""
    kind = "chart wide" if wide else "chart"
    html = (
        f'<figure class="{kind}" id="fig-{key}"><figcaption><h3>{escape(title)}</h3>'
        f"<p>{escape(summary)}</p></figcaption>{legend}{body}{numbers}</figure>"
    )
    return Figure(key, html, data)


def plot(key: str, label: str, drawing: str, x: Axis, y: Axis | None, *, css: str = "", y_html: str = "") -> str:
    """A frame with its axes. `label` is the text alternative; `y_html` replaces the vertical axis' ticks."""
    x_ticks = "".join(f'<span style="left:{100 * at:.2f}%">{escape(text)}</span>' for at, text in x.ticks(6))
    y_ticks = y_html
    lines = ""
    if y is not None:
        ticks = y.ticks(5)
        y_ticks = "".join(f'<span style="bottom:{100 * at:.2f}%">{escape(text)}</span>' for at, text in ticks)
        lines = "".join(f'<path class="grid" d="M0 {SIZE - SIZE * at:.1f}H{SIZE:g}"/>' for at, _ in ticks)
    return (
        f'<div class="plot {css}" role="img" tabindex="0" aria-label="{escape(label)}" data-key="{key}">'
        f'<div class="ys">{y_ticks}</div><div class="frame">'
        f'<svg viewBox="0 0 {SIZE:g} {SIZE:g}" preserveAspectRatio="none" aria-hidden="true">{lines}{drawing}</svg>'
        f'</div><div class="xs">{x_ticks}</div></div>'
    )


def points(x: Array, y: Array) -> Iterable[tuple[float, float, bool]]:
    """(left, top, begins) in drawing units of the points that exist; `begins` where a gap was before."""
    begins = True
    for left, height in zip(x.tolist(), y.tolist(), strict=True):
        if height != height or left != left:
            begins = True
            continue
        yield SIZE * left, SIZE - SIZE * height, begins
        begins = False


def line_path(x: Array, y: Array) -> str:
    """An SVG path through positions 0..1, broken at NaN."""
    return "".join(f"{'M' if begins else 'L'}{left:.1f} {top:.1f}" for left, top, begins in points(x, y))


def dots_path(x: Array, y: Array) -> str:
    """Zero-length strokes: round dots, since a circle would be stretched."""
    return "".join(f"M{left:.1f} {top:.1f}h0" for left, top, _ in points(x, y))


def band_path(x: Array, low: Array, high: Array) -> str:
    """The area between two curves, one closed piece between gaps."""
    known = ~(np.isnan(low) | np.isnan(high))
    pieces: list[str] = []
    index = 0
    while index < len(x):
        if not known[index]:
            index += 1
            continue
        stop = index
        while stop < len(x) and known[stop]:
            stop += 1
        there = line_path(x[index:stop], high[index:stop])
        back = line_path(x[index:stop][::-1], low[index:stop][::-1]).replace("M", "L", 1)
        pieces.append(there + back + "Z")
        index = stop
    return "".join(pieces)


def draw(traces: Sequence[Trace], x: Axis, y: Axis, marks: Sequence[float] = ()) -> str:
    """Bands below, then failures' marks, then lines."""
    parts: list[str] = []
    for trace in traces:
        if trace.low is not None and trace.high is not None:
            area = band_path(x.at(trace.x), y.at(trace.low), y.at(trace.high))
            parts.append(f'<path class="band c{trace.color}" d="{area}"/>')
    if len(marks):
        stems = "".join(f"M{SIZE * left:.1f} 0V{SIZE:g}" for left in x.at(np.array(marks)).tolist())
        parts.append(f'<path class="mark{" many" if len(marks) > 12 else ""}" d="{stems}"/>')
    for trace in traces:
        make = dots_path if trace.dots else line_path
        kind = "dots" if trace.dots else "line dashed" if trace.dashed else "line"
        parts.append(f'<path class="{kind} c{trace.color}" d="{make(x.at(trace.x), y.at(trace.y))}"/>')
    return "".join(parts)


def legend_of(items: Sequence[tuple[str, int, str]]) -> str:
    """A legend of (name, colour, kind); kind is line, dots, dashed, area or mark."""
    body = "".join(f'<li><i class="key {kind} c{color}"></i>{escape(name)}</li>' for name, color, kind in items)
    return f'<ul class="legend">{body}</ul>'


def values(trace: Trace) -> dict[str, Any]:
    """What the script shows of a trace; six digits are what a pointer can tell apart."""
    out: dict[str, Any] = {"name": trace.name, "color": trace.color, "x": short(trace.x), "y": short(trace.y)}
    if trace.low is not None and trace.high is not None:
        out["low"], out["high"] = short(trace.low), short(trace.high)
    return out


def short(array: Array, digits: int = 5) -> list[float | None]:
    """Numbers for JSON, NaN as null."""
    return [float(f"{value:.{digits}g}") if value == value else None for value in array.tolist()]


@dataclass
class Table:
    """A small HTML table; the first cell of a row is its heading."""

    head: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    caption: str = ""

    def html(self) -> str:
        """The table in a box that scrolls sideways on a narrow screen."""
        caption = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        rows = "".join(
            "<tr>" + "".join(_cell(cell, index == 0) for index, cell in enumerate(row)) + "</tr>" for row in self.rows
        )
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.caption or self.head[0])}">'
            f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )


def _cell(text: str, first: bool) -> str:
    return f'<th scope="row">{escape(text)}</th>' if first else f"<td>{escape(text)}</td>"


def sample_table(traces: Sequence[Trace], x_name: str = "step", rows: int = 12) -> str:
    """A dozen points of each trace: what somebody reads who cannot see the curve."""
    table = Table([x_name, *(trace.name for trace in traces)])
    lead = max(traces, key=lambda trace: len(trace.x), default=None)
    if lead is None or not len(lead.x):
        return ""
    for index in np.unique(np.linspace(0, len(lead.x) - 1, rows).round().astype(int)):
        here = lead.x[index]
        cells = [_nearest(trace, float(here)) for trace in traces]
        table.rows.append([f"{here:.0f}" if x_name == "step" else number(float(here)), *cells])
    return table.html()


def _nearest(trace: Trace, x: float) -> str:
    if not len(trace.x):
        return "-"
    value = trace.y[int(np.abs(trace.x - x).argmin())]
    return f"{value:.5g}" if value == value else "-"
