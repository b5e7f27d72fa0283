"""Line charts over steps: loss parts, gradient norm, learning rate, speed, step-time breakdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mula_ray.train.progress import human_count
from mula_ray.train.report.axis import Axis, axis_for
from mula_ray.train.report.downsample import reduce_series
from mula_ray.train.report.figure import (
    Figure,
    Trace,
    band_path,
    draw,
    figure,
    legend_of,
    plot,
    sample_table,
    short,
    values,
)
from mula_ray.train.report.load import Array, Run, median


@dataclass(frozen=True)
class Named:
    """A run, the name the page gives it, and its colour."""

    run: Run
    name: str
    color: int


@dataclass(frozen=True)
class Curve:
    """A field of `metrics.jsonl` as a chart."""

    field: str
    title: str
    unit: str = ""
    log: bool = False
    zero: bool = False
    scale: float = 1.0
    robust: bool = False


CURVES = {
    "loss": Curve("loss", "Cross-entropy loss", "nats per token"),
    "aux": Curve("aux_loss", "Load-balancing loss"),
    "z": Curve("z_loss", "Router z-loss"),
    "norm": Curve("grad_norm", "Gradient norm, before clipping", log=True),
    "lr": Curve("lr", "Learning rate", zero=True),
    "rate": Curve("tokens_per_s", "Tokens per second", zero=True, robust=True),
    "mfu": Curve("mfu", "Model FLOPs utilisation", "% of peak", zero=True, scale=100.0, robust=True),
    "entropy": Curve("router_entropy", "Router entropy, mean over layers", "nats"),
}


def step_axis(runs: Sequence[Named]) -> Axis:
    """Steps from 0 to the longest run's last one."""
    last = max((float(named.run.step[-1]) for named in runs if len(named.run.step)), default=1.0)
    return Axis(0.0, max(1.0, last))


def curve(
    key: str, runs: Sequence[Named], *, marks: bool = False, wide: bool = False, late: bool = False
) -> Figure | None:
    """One field over steps, all runs in one frame; None when no run has it. `late`: the last three quarters only."""
    spec = CURVES[key]
    whole = step_axis(runs)
    x = Axis(round(whole.high / 4), whole.high) if late else whole
    traces: list[Trace] = []
    size = 1
    for named in runs:
        inside = named.run.step >= x.low
        raw = named.run.series(spec.field)[inside] * spec.scale
        if not np.isfinite(raw).any():
            continue
        small = reduce_series(named.run.step[inside], raw)
        size = max(size, small.size)
        band = (small.low, small.high) if small.size > 1 else (None, None)
        traces.append(Trace(named.name, small.x, small.mean, named.color, *band))
    if not traces or (key in ("aux", "z", "mfu") and all(np.nanmax(np.abs(trace.y)) == 0 for trace in traces)):
        return None
    extra = _held_out(runs, x.low) if key == "loss" else []
    failures = [step for step in _failures(runs) if step >= x.low] if marks else []
    drawn = Drawn(key + ("-late" if late else ""), spec, x, size, late, wide)
    return _assemble(drawn, [*traces, *extra], runs, failures)


@dataclass(frozen=True)
class Drawn:
    """How a curve is drawn: its key, field, steps, steps a point, whether it is the late part, and its width."""

    key: str
    spec: Curve
    x: Axis
    size: int
    late: bool
    wide: bool


def _held_out(runs: Sequence[Named], first: float) -> list[Trace]:
    out = []
    for named in runs:
        lines = [
            line
            for line in named.run.metrics.evals
            if isinstance(line.get("eval_loss"), int | float) and line["step"] >= first
        ]
        if lines:
            x = np.array([line["step"] for line in lines], dtype=np.float64)
            y = np.array([line["eval_loss"] for line in lines], dtype=np.float64)
            name = f"{named.name}, held out" if len(runs) > 1 else "held out"
            out.append(Trace(name, x, y, named.color if len(runs) > 1 else 1, dots=True))
    return out


def _failures(runs: Sequence[Named]) -> list[float]:
    if len(runs) > 1:
        return []
    return [float(line["step"]) for line in runs[0].run.failures if isinstance(line.get("step"), int)]


def _range(spec: Curve, traces: Sequence[Trace]) -> tuple[Axis, int]:
    """The vertical axis, and how many drawn points lie above it."""
    parts = [part for trace in traces for part in (trace.y, trace.low, trace.high) if part is not None]
    axis = axis_for(parts, log=spec.log, zero=spec.zero)
    if not spec.robust:
        return axis, 0
    flat = np.concatenate([trace.y for trace in traces])
    flat = flat[np.isfinite(flat)]
    bound = 1.6 * float(np.percentile(flat, 98))
    if not len(flat) or axis.high <= bound or bound <= axis.low:
        return axis, 0
    over = sum(
        int((part > bound).sum()) for part in (trace.high if trace.high is not None else trace.y for trace in traces)
    )
    return Axis(axis.low, bound, axis.log), over


def _assemble(drawn: Drawn, traces: list[Trace], runs: Sequence[Named], failures: list[float]) -> Figure:
    spec, x = drawn.spec, drawn.x
    y, over = _range(spec, traces)
    named = [trace if len(runs) > 1 or trace.dots else _renamed(trace, "training step") for trace in traces]
    items = [(trace.name, trace.color, "dots" if trace.dots else "line") for trace in named]
    if any(trace.low is not None for trace in named):
        items.append((f"lowest to highest of {drawn.size} steps", named[0].color, "area band"))
    if failures:
        items.append(("failure", 0, "mark"))
    summary = "The same from a quarter of the run on." if drawn.late else _sentence(spec, runs)
    if over:
        summary += f" {over} points lie above the frame."
    title = spec.title + (f" ({spec.unit})" if spec.unit else "") + (", later part" if drawn.late else "")
    return figure(
        drawn.key,
        title,
        summary,
        plot(drawn.key, f"{title}, line chart over steps. {summary}", draw(named, x, y, failures), x, y),
        legend=legend_of(items) if len(items) > 1 else "",
        table=sample_table(named),
        wide=drawn.wide,
        data={"kind": "line", "x": [x.low, x.high], "series": [values(trace) for trace in named]},
    )


def _renamed(trace: Trace, name: str) -> Trace:
    return Trace(name, trace.x, trace.y, trace.color, trace.low, trace.high)


def _sentence(spec: Curve, runs: Sequence[Named]) -> str:
    """What the curve does, in words and figures (of single steps, not of drawn points)."""
    parts = []
    for named in runs:
        raw = named.run.series(spec.field) * spec.scale
        known = raw[np.isfinite(raw)]
        if not len(known):
            continue
        who = f"{named.name}: " if len(runs) > 1 else ""
        if spec.field == "tokens_per_s":
            parts.append(f"{who}median {human_count(float(np.median(known)))}")
        elif spec.field == "mfu":
            parts.append(f"{who}median {float(np.median(known)):.1f} %")
        else:
            parts.append(f"{who}from {known[0]:.4g} to {known[-1]:.4g}")
        evals = [line["eval_loss"] for line in named.run.metrics.evals if isinstance(line.get("eval_loss"), float)]
        if spec.field == "loss" and evals:
            parts.append(f"held out from {evals[0]:.4g} to {evals[-1]:.4g}")
        if spec.field == "loss" and len(known) < len(raw):
            parts.append(f"{len(raw) - len(known)} steps were not finite")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if len(runs) == 1 else text + "."


# Each part of a step: what it is made of, and its colour.
PARTS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("compute", ("forward", "expert", "backward", "forward_backward"), 0),
    ("optimizer", ("optimizer", "update"), 3),
    ("dispatch and combine", ("dispatch", "combine"), 1),
    ("gradient reduction", ("reduce",), 2),
    ("agreement", ("agree",), 7),
    ("data wait", (), 4),
    ("checkpoint", ("checkpoint",), 5),
)
OTHER = ("not accounted for", 6)


def step_parts(run: Run) -> dict[str, Array]:
    """Seconds of each part of every step, (N,) each; they add up to `step_s` unless the phases exceed it."""
    parts: dict[str, Array] = {}
    for name, phases, _ in PARTS:
        if name == "data wait":
            parts[name] = np.nan_to_num(run.series("data_wait_s"))
        else:
            parts[name] = np.sum([run.phase(phase) for phase in phases], axis=0)
    # the engine's forward_backward holds the waiting for tokens in it
    inside = np.where(run.phase("forward_backward") > 0, parts["dispatch and combine"], 0.0)
    parts["compute"] = np.maximum(0.0, parts["compute"] - inside)
    parts[OTHER[0]] = np.maximum(0.0, np.nan_to_num(run.series("step_s")) - np.sum(list(parts.values()), axis=0))
    return parts


def breakdown(named: Named, runs: Sequence[Named]) -> Figure | None:
    """Stacked seconds of a step by part; None when the run measured no step."""
    run = named.run
    if not np.isfinite(run.series("step_s")).any():
        return None
    parts = step_parts(run)
    reduced = {name: reduce_series(run.step, part, 240) for name, part in parts.items()}
    x = step_axis(runs)
    colors = {name: color for name, _, color in PARTS} | {OTHER[0]: OTHER[1]}
    shown = [name for name in parts if float(parts[name].sum()) > 0]
    base = np.zeros(len(next(iter(reduced.values())).x))
    top = np.sum([reduced[name].mean for name in shown], axis=0) if shown else base
    high = 1.35 * float(np.percentile(top, 97)) if len(top) else 1.0
    y = Axis(0.0, max(high, 1e-9))
    drawing, traces = [], []
    for name in shown:
        part = reduced[name]
        drawing.append(
            f'<path class="stack c{colors[name]}" d="{band_path(x.at(part.x), y.at(base), y.at(base + part.mean))}"/>'
        )
        base = base + part.mean
        traces.append(Trace(name, part.x, part.mean, colors[name]))
    total = sum(float(parts[name].sum()) for name in shown) or 1.0
    shares = ", ".join(f"{name} {100 * float(parts[name].sum()) / total:.1f} %" for name in shown)
    key = f"parts-{named.color}"
    title = "Step time by part (seconds)" + (f": {named.name}" if len(runs) > 1 else "")
    summary = f"Median step {median(run.series('step_s')):.4g} s. Shares of all step time: {shares}."
    over = int((top > y.high).sum())
    if over:
        summary += f" {over} points lie above the frame."
    return figure(
        key,
        title,
        summary,
        plot(key, f"Stacked areas over steps. {summary}", "".join(drawing), x, y),
        legend=legend_of([(name, colors[name], "area") for name in reversed(shown)]),
        table=sample_table(traces),
        wide=True,
        data={
            "kind": "line",
            "x": [x.low, x.high],
            "series": [
                {"name": trace.name, "color": trace.color, "x": short(trace.x), "y": short(trace.y)}
                for trace in reversed(traces)
            ],
        },
    )
