"""The page: head figures, sections, configuration; one file with everything in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from mula_ray.train.progress import human_count, human_seconds
from mula_ray.train.report import curves, experts, gantt, timeline
from mula_ray.train.report.curves import Named
from mula_ray.train.report.downsample import POINTS
from mula_ray.train.report.figure import Figure, Table
from mula_ray.train.report.goodput import account, percentile, sessions
from mula_ray.train.report.load import Run, load_run, median, unique_names
from mula_ray.train.status import read_status

CODES = {
    0: ("done", "good"),
    10: ("stopped early, resumable", "warn"),
    20: ("ended: the input is wrong", "bad"),
    30: ("ended: could not go on", "bad"),
    40: ("ended: no valid checkpoint", "bad"),
    130: ("interrupted", "warn"),
}


def build(folders: Sequence[Path]) -> str:
    """The report of one run, or of several side by side.

    Raises:
        UserError: a folder that is no run folder.
    """
    runs = [load_run(folder) for folder in folders]
    named = [
        Named(run, name, index % 8) for index, (run, name) in enumerate(zip(runs, unique_names(runs), strict=True))
    ]
    sections: list[tuple[str, Sequence[Figure | None]]] = [
        ("Training", _training(named)),
        ("Speed", _speed(named)),
        ("Experts", _experts(named)),
        ("Reliability", _reliability(named)),
        ("Profile", [figure for one in named for figure in gantt.figures(one, named)]),
    ]
    data: dict[str, Any] = {}
    body = []
    for title, found in sections:
        figures = [figure for figure in found if figure is not None]
        if not figures:
            continue
        for figure in figures:
            data.update(_entries(figure))
        inner = "".join(figure.html for figure in figures)
        body.append(f'<section id="{title.lower()}"><h2>{title}</h2><div class="grid">{inner}</div></section>')
    body.append(_setup(named))
    return _html(named, "".join(body), data, [title for title, found in sections if any(found)])


def _entries(figure: Figure) -> dict[str, Any]:
    if figure.data is None:
        return {}
    return {figure.key: figure.data} if "kind" in figure.data else figure.data


def _training(named: Sequence[Named]) -> list[Figure | None]:
    return [
        curves.curve("loss", named, marks=True),
        curves.curve("loss", named, late=True),
        curves.curve("norm", named),
        curves.curve("lr", named),
        curves.curve("aux", named),
        curves.curve("z", named),
    ]


def _speed(named: Sequence[Named]) -> list[Figure | None]:
    return [
        curves.curve("rate", named),
        curves.curve("mfu", named),
        *(curves.breakdown(one, named) for one in named),
    ]


def _experts(named: Sequence[Named]) -> list[Figure | None]:
    return [
        *(experts.imbalance_map(one, named) for one in named),
        curves.curve("entropy", named, wide=True),
        *(experts.entropy_map(one, named) for one in named),
        *(experts.load_maps(one, named) for one in named),
    ]


def _reliability(named: Sequence[Named]) -> list[Figure | None]:
    return [
        *(timeline.timeline(one, named) for one in named),
        timeline.goodput(named),
        *(timeline.recoveries(one, named) for one in named),
    ]


def verdict(run: Run) -> tuple[str, str]:
    """What became of the run, and how good that is (good, warn, bad, live)."""
    found = read_status(run.folder)
    if found.exit_code is not None:
        text, tone = CODES.get(found.exit_code, ("ended with an internal error", "bad"))
        return f"{text} (exit {found.exit_code})", tone
    tone = {"dead": "bad", "silent": "warn", "failed": "bad"}.get(found.state, "live")
    return found.state + (f": {found.why}" if found.why else ""), tone


def head_figures(run: Run) -> list[tuple[str, str, str]]:
    """(name, figure, remark) of what a person asks first."""
    loss, rate = run.series("loss"), run.series("tokens_per_s")
    done = int(run.step[-1]) if len(run.step) else 0
    lines = [("steps", f"{done:,}", f"of {run.total_steps:,}")]
    if len(loss):
        lines.append(("loss", _figure(loss[-1]), f"from {_figure(loss[0])}"))
    evals = [line["eval_loss"] for line in run.metrics.evals if isinstance(line.get("eval_loss"), int | float)]
    if evals:
        lines.append(("held-out loss", _figure(evals[-1]), f"from {_figure(evals[0])}, {len(evals)} evaluations"))
    if np.isfinite(rate).any():
        tokens = float(np.nansum(run.series("tokens")))
        lines.append(("tokens/s", human_count(median(rate)), f"median; {human_count(tokens)} tokens"))
        mfu = run.series("mfu")
        if np.nanmax(mfu, initial=0.0) > 0:
            lines.append(("MFU", f"{100 * median(mfu):.1f} %", "median"))
    lines.extend(_reliability_figures(run))
    return lines


def _reliability_figures(run: Run) -> list[tuple[str, str, str]]:
    out = []
    spent = account(run)
    if spent.wall > 0:
        out.append(
            (
                "goodput",
                f"{100 * spent.goodput:.1f} %",
                f"of {human_seconds(spent.wall)} in {len(sessions(run))} session(s)",
            )
        )
    seconds = [float(line.get("seconds") or 0.0) for line in run.of("recovery")]
    failures = len(run.failures)
    remark = f"recovery p50 {percentile(seconds, 50):.2f} s, p99 {percentile(seconds, 99):.2f} s" if seconds else "none"
    out.append(("failures", str(failures), remark if failures else "nothing broke"))
    saves = run.of("checkpoint")
    if saves:
        size = human_count(float(saves[-1].get("bytes") or 0))
        out.append(("checkpoints", str(len(saves)), f"last: step {saves[-1].get('step')}, {size}B"))
    return out


def _figure(value: float) -> str:
    return f"{value:.4g}" if value == value else "not finite"


def _cards(run: Run) -> str:
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for name, value, remark in head_figures(run)
    )
    return f'<dl class="cards">{cells}</dl>'


def _compare(named: Sequence[Named]) -> str:
    """Head figures and the configuration values that differ, a column a run."""
    columns = [{name: f"{value} ({remark})" for name, value, remark in head_figures(one.run)} for one in named]
    names = list(dict.fromkeys(name for column in columns for name in column))
    table = Table(["", *(one.name for one in named)], caption="The runs side by side")
    table.rows.append(["end", *(verdict(one.run)[0] for one in named)])
    table.rows.extend([name, *(column.get(name, "-") for column in columns)] for name in names)
    flat = [dict(_flatten(one.run.config)) for one in named]
    keys = sorted({key for one in flat for key in one})
    for key in keys:
        texts = [str(one.get(key, "-")) for one in flat]
        if len(set(texts)) > 1:
            table.rows.append([key, *texts])
    return table.html()


def _flatten(node: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _setup(named: Sequence[Named]) -> str:
    parts = []
    for one in named:
        starts = one.run.of("run_start")
        table = Table(["environment", "value"])
        hidden = ("event", "generation", "time")
        pairs = _flatten({key: value for key, value in (starts[-1] if starts else {}).items() if key not in hidden})
        table.rows.extend([key, str(value)] for key, value in pairs)
        where = f": {escape(one.name)}" if len(named) > 1 else ""
        text = one.run.config_text or "not on file"
        parts.append(
            f"<h3>Environment{where}</h3>{table.html() if table.rows else '<p>not on file</p>'}"
            f'<details><summary>Configuration{where}</summary><pre tabindex="0">{escape(text)}</pre></details>'
        )
    return (
        f'<section id="setup"><h2>Configuration and environment</h2><div class="chart">{"".join(parts)}</div></section>'
    )


def _notes(named: Sequence[Named]) -> str:
    notes = [
        f"A curve of more than {POINTS} steps is drawn as the mean of equally many steps a point, with a band from "
        "their lowest to their highest value; nothing is smoothed and no step is left out.",
        "A step that was done again after a failure counts once, with its last value.",
    ]
    for one in named:
        bad, again = one.run.metrics.bad, one.run.metrics.replayed
        if bad or again:
            notes.append(f"{one.name}: {again} step lines were replaced by a replay, {bad} unreadable lines left out.")
    return "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"


def _html(named: Sequence[Named], body: str, data: dict[str, Any], titles: list[str]) -> str:
    title = " against ".join(one.name for one in named)
    state, tone = verdict(named[0].run)
    head = (
        f'<p class="verdict {tone}">{escape(state)}</p>{_cards(named[0].run)}' if len(named) == 1 else _compare(named)
    )
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in titles) + '<a href="#setup">Setup</a>'
    # "<" escaped, so that no run's text can end the script element
    blob = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{escape(title)} · mula-ray report</title>
<link rel="icon" href="data:,"><style>{_asset("page.css")}</style></head>
<body><a class="skip" href="#main">Skip to the charts</a>
<header><p class="brand">mula-ray report</p><h1>{escape(title)}</h1>{head}</header>
<nav aria-label="Sections">{links}</nav>
<main id="main">{body}</main>
<footer>{_notes(named)}<p>Made {made} from {escape(", ".join(str(one.run.folder) for one in named))}.</p></footer>
<output id="tip" aria-live="polite" hidden></output>
<script type="application/json" id="data">{blob}</script><script>{_asset("page.js")}</script></body></html>
"""


def _asset(name: str) -> str:
    return resources.files("mula_ray.train.report").joinpath("assets", name).read_text(encoding="utf-8")
