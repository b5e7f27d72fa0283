"""Time line of generations, failures, recoveries and checkpoints; recoveries by phase; goodput."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from mula_ray.train.progress import human_count, human_seconds
from mula_ray.train.records import Line
from mula_ray.train.report.axis import Axis
from mula_ray.train.report.curves import Named
from mula_ray.train.report.figure import Figure, Table, figure, legend_of
from mula_ray.train.report.goodput import KINDS, account, percentile, sessions
from mula_ray.train.report.load import Run, epoch

SHOWN = 60
"""Recoveries drawn as bars; all of them stand in the table."""


def timeline(named: Named, runs: Sequence[Named]) -> Figure | None:
    """What happened when, in wall time since the first driver's start."""
    run = named.run
    lived = sessions(run)
    if not lived:
        return None
    start, end = lived[0].start, max(session.end for session in lived)
    axis = _time_axis(end - start)
    rows = [
        ("generations", _generations(run, start, end, axis[0])),
        ("failures", _points(run.of("failure"), start, axis, _failure_text, "fault")),
        ("recoveries", _recoveries(run, start, axis)),
        ("checkpoints", _points(run.of("checkpoint"), start, axis, _checkpoint_text, "save")),
        ("nodes", _points(run.of("membership"), start, axis, _member_text, "node")),
    ]
    body = "".join(
        f'<div class="lane"><b>{name}</b><div class="track">{marks}</div></div>' for name, marks in rows if marks
    )
    ticks = "".join(f'<span style="left:{100 * at:.2f}%">{text}</span>' for at, text in axis[0].ticks(6))
    counts = {name: len(run.of(name)) for name in ("recovery", "checkpoint", "generation_start")}
    summary = (
        f"{human_seconds(end - start)} of wall time in {len(lived)} session(s): "
        f"{counts['generation_start']} generations, {len(run.failures)} failures, "
        f"{counts['recovery']} recoveries, {counts['checkpoint']} checkpoints."
    )
    return figure(
        f"time-{named.color}",
        f"Time line ({axis[1]} since the start)" + (f": {named.name}" if len(runs) > 1 else ""),
        summary,
        f'<div class="lanes" role="img" aria-label="{escape(summary)}">{body}'
        f'<div class="lane"><b></b><div class="xs">{ticks}</div></div></div>',
        legend=_lane_legend(run),
        table=_event_table(run, start),
        wide=True,
    )


def _lane_legend(run: Run) -> str:
    names = {"hard": "fault", "hang": "fault k-hang", "straggler": "fault k-straggler", "numeric": "fault k-numeric"}
    names |= {"storage": "fault k-storage", "deadline": "fault k-deadline", "fatal": "fault k-fatal"}
    seen = {str(line.get("kind")) for line in run.of("failure")}
    items = [
        ("stop asked for" if name == "deadline" else f"{name} failure", css)
        for name, css in names.items()
        if name in seen
    ]
    if any(str(line.get("slot", "")).startswith("full") for line in run.of("checkpoint")):
        items.append(("full checkpoint", "save"))
    if any(str(line.get("slot", "")).startswith("model") for line in run.of("checkpoint")):
        items.append(("model checkpoint", "save k-model"))
    body = "".join(f'<li><span class="track"><i class="at {css}"></i></span>{name}</li>' for name, css in items)
    return f'<ul class="legend lane-key">{body}</ul>' if items else ""


def _time_axis(span: float) -> tuple[Axis, str, float]:
    """Axis, the unit's name, and seconds a unit."""
    for bound, unit, name in ((180.0, 1.0, "seconds"), (3 * 3600.0, 60.0, "minutes"), (4 * 86400.0, 3600.0, "hours")):
        if span <= bound:
            return Axis(0.0, max(span, 1e-3) / unit), name, unit
    return Axis(0.0, span / 86400.0), "days", 86400.0


def _left(seconds: float, axis: Axis, unit: float = 1.0) -> float:
    return 100 * float(axis.at(np.array([seconds / unit]))[0])


def _generations(run: Run, start: float, end: float, axis: Axis) -> str:
    unit = (end - start) / axis.high if end > start else 1.0
    lines = [line for line in run.of("generation_start") if not np.isnan(epoch(line))]
    bars = []
    for index, line in enumerate(lines):
        left = _left(epoch(line) - start, axis, unit)
        right = _left((epoch(lines[index + 1]) if index + 1 < len(lines) else end) - start, axis, unit)
        text = (
            f"generation {line['generation']} from step {line.get('step')}: {line.get('world')} ranks on "
            f"{len(line.get('nodes') or [])} nodes, {line.get('spares')} spare: {line.get('reason')}"
        )
        number = f"<s>{line['generation']}</s>" if right - left > 2.5 else ""
        bars.append(_bar(left, right, f"gen g{int(line['generation']) % 2}", text, number))
    return "".join(bars)


def _bar(left: float, right: float, css: str, text: str, inner: str = "") -> str:
    where = f"left:{left:.3f}%;width:{max(0.05, right - left):.3f}%"
    return f'<i class="{css}" style="{where}" title="{escape(text)}">{inner}</i>'


def _points(lines: Sequence[Line], start: float, axis: tuple[Axis, str, float], text_of: object, css: str) -> str:
    assert callable(text_of)
    marks = []
    for line in lines:
        at = epoch(line)
        if np.isnan(at):
            continue
        left = _left(at - start, axis[0], axis[2])
        kind = str(line.get("kind") or line.get("change") or str(line.get("slot", "")).split("-")[0])
        marks.append(
            f'<i class="at {css} k-{escape(kind)}" style="left:{left:.3f}%" title="{escape(str(text_of(line)))}"></i>'
        )
    return "".join(marks)


def _failure_text(line: Line) -> str:
    return f"step {line.get('step')}, {line.get('kind')}: {line.get('reason')}"


def _checkpoint_text(line: Line) -> str:
    return (
        f"{line.get('slot')} of step {line.get('step')}: {human_count(float(line.get('bytes') or 0))}B in "
        f"{float(line.get('seconds') or 0):.2f} s, stall {float(line.get('stall_s') or 0):.3f} s"
    )


def _member_text(line: Line) -> str:
    return f"{line.get('node')} {line.get('change')}: {line.get('reason')}"


def _recoveries(run: Run, start: float, axis: tuple[Axis, str, float]) -> str:
    bars = []
    for line in run.of("recovery"):
        stop = epoch(line) - start
        if np.isnan(stop):
            continue
        seconds = float(line.get("seconds") or 0.0)
        left, right = _left(max(0.0, stop - seconds), axis[0], axis[2]), _left(stop, axis[0], axis[2])
        bars.append(_bar(left, max(right, left + 0.25), "recover", f"{seconds:.2f} s from {line.get('source')}"))
    return "".join(bars)


def _event_table(run: Run, start: float) -> str:
    table = Table(["after", "generation", "event", "step", "what"], caption="Events, checkpoints left out")
    for line in run.events:
        if line.get("event") in ("checkpoint", None):
            continue
        at = epoch(line) - start
        when = human_seconds(at) if at == at else "-"
        what = " ".join(str(line[key]) for key in ("kind", "change", "source", "node", "reason") if line.get(key))
        table.rows.append(
            [when, str(line.get("generation", "-")), str(line["event"]), str(line.get("step", "-")), what]
        )
    total = len(table.rows)
    if total > 400:
        del table.rows[200:-200]
        table.caption += f" (the first and last 200 of {total})"
    return table.html()


def recoveries(named: Named, runs: Sequence[Named]) -> Figure | None:
    """Each recovery as a bar of its phases."""
    lines = named.run.of("recovery")
    if not lines:
        return None
    names: list[str] = []
    for line in lines:
        names.extend(name for name in (line.get("phases") or {}) if name not in names)
    drawn = lines[-SHOWN:]
    top = max(max(_seconds(line), sum((line.get("phases") or {}).values())) for line in drawn) or 1.0
    axis = Axis(0.0, top)
    bars = "".join(_phase_bar(line, names, axis) for line in drawn)
    ticks = "".join(f'<span style="left:{100 * at:.2f}%">{text}</span>' for at, text in axis.ticks(6))
    every = [_seconds(line) for line in lines]
    summary = (
        f"{len(lines)} recoveries: median {percentile(every, 50):.2f} s, "
        f"99th percentile {percentile(every, 99):.2f} s, longest {max(every):.2f} s, "
        f"{sum(int(line.get('lost_steps') or 0) for line in lines)} steps done again."
    )
    if len(drawn) < len(lines):
        summary += f" The last {len(drawn)} are drawn."
    table = Table(["generation", "step", "state from", "seconds", *names, "reason"])
    for line in lines:
        phases = line.get("phases") or {}
        cells = [f"{phases[name]:.3f}" if name in phases else "-" for name in names]
        head = [str(line.get("generation")), str(line.get("step")), str(line.get("source"))]
        table.rows.append([*head, f"{_seconds(line):.3f}", *cells, str(line.get("reason", ""))])
    key = f"recoveries-{named.color}"
    return figure(
        key,
        "Recoveries by phase (seconds)" + (f": {named.name}" if len(runs) > 1 else ""),
        summary,
        f'<div class="lanes thin" role="img" aria-label="{escape(summary)}">{bars}'
        f'<div class="lane"><b></b><div class="xs">{ticks}</div></div></div>',
        legend=legend_of([(name.replace("_", " "), index % 8, "area") for index, name in enumerate(names)]),
        table=table.html(),
        wide=True,
    )


def _seconds(line: Line) -> float:
    return float(line.get("seconds") or 0.0)


def _phase_bar(line: Line, names: Sequence[str], axis: Axis) -> str:
    at, parts = 0.0, []
    for index, name in enumerate(names):
        seconds = float((line.get("phases") or {}).get(name, 0.0))
        if seconds > 0:
            text = f"{name.replace('_', ' ')} {seconds:.3f} s"
            parts.append(_bar(_left(at, axis), _left(at + seconds, axis), f"phase c{index % 8}", text))
        at += seconds
    return f'<div class="lane"><b>{line.get("generation")}</b><div class="track">{"".join(parts)}</div></div>'


def goodput(runs: Sequence[Named]) -> Figure | None:
    """One bar a run: where the wall time went."""
    found = [(named, account(named.run)) for named in runs]
    found = [(named, spent) for named, spent in found if spent.wall > 0]
    if not found:
        return None
    bars, table = [], Table(["where the time went", *(named.name for named, _ in found)])
    for named, spent in found:
        at, parts = 0.0, []
        for index, (name, _) in enumerate(KINDS):
            share = 100 * spent.seconds[name] / spent.wall
            if share > 0:
                text = f"{name}: {human_seconds(spent.seconds[name])}, {share:.2f} %"
                parts.append(_bar(at, at + share, f"phase c{index}", text))
            at += share
        label = named.name if len(found) > 1 else "wall time"
        bars.append(f'<div class="lane"><b>{escape(label)}</b><div class="track tall">{"".join(parts)}</div></div>')
    for name, meaning in KINDS:
        cells = [f"{spent.seconds[name]:.2f} s ({100 * spent.seconds[name] / spent.wall:.2f} %)" for _, spent in found]
        table.rows.append([f"{name} ({meaning})", *cells])
    table.rows.append(["wall time", *(f"{spent.wall:.2f} s" for _, spent in found)])
    said = "; ".join(
        (f"{named.name}: " if len(found) > 1 else "") + f"{100 * spent.goodput:.2f} % of {human_seconds(spent.wall)}"
        for named, spent in found
    )
    summary = f"Goodput, the share of wall time in steps that count: {said}."
    used = [
        (name, index, "area")
        for index, (name, _) in enumerate(KINDS)
        if any(spent.seconds[name] > 0 for _, spent in found)
    ]
    body = f'<div class="lanes" role="img" aria-label="{escape(summary)}">{"".join(bars)}</div>'
    return figure("goodput", "Goodput", summary, body, legend=legend_of(used), table=table.html(), wide=True)
