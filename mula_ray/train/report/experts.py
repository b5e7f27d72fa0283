"""Expert load and router entropy by layer and time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mula_ray.train.report.axis import Axis
from mula_ray.train.report.curves import Named, step_axis
from mula_ray.train.report.downsample import edges, reduce_rows
from mula_ray.train.report.figure import Figure, Table, figure
from mula_ray.train.report.heat import DEAD, Scale, cells, image, strip
from mula_ray.train.report.load import Array, Run

COLUMNS = 160
SUB = 4
CELLS = 500_000
"""Most cells of all maps of experts together: bounds the page for the largest models."""
DEAD_KEY = '<span class="dead-key">no token at all</span>'


@dataclass(frozen=True)
class Counts:
    """`load` (C, L, E): token slots by column, layer, expert; `span` the steps that the columns cover."""

    load: Array
    span: tuple[float, float]
    steps: int


def read_counts(run: Run) -> Counts | None:
    """The full expert counts, added up into at most `COLUMNS` columns; None without experts."""
    lines = [line for line in run.metrics.steps if line.get("expert_counts")]
    if not lines:
        return None
    shape = np.array(lines[-1]["expert_counts"]).shape
    rows = [np.array(line["expert_counts"], dtype=np.float64) for line in lines]
    stacked = np.stack([row for row in rows if row.shape == shape])
    columns = min(COLUMNS, max(24, CELLS // (shape[0] * shape[1])))
    starts, size = edges(len(stacked), columns)
    load = np.add.reduceat(stacked, starts, axis=0)
    first = float(lines[0]["step"]) - float(lines[0].get("expert_counts_steps", 1))
    return Counts(load, (max(0.0, first), float(lines[-1]["step"])), size)


def imbalance_map(named: Named, runs: Sequence[Named]) -> Figure | None:
    """Layer by time: load of the busiest expert against the mean; columns in which an expert got nothing are marked."""
    stats, dead = named.run.layers("imbalance"), named.run.layers("dead")
    if stats is None or dead is None:
        return None
    counts = read_counts(named.run)
    small = reduce_rows(stats, COLUMNS).T
    top = float(np.nanmax(small)) if np.isfinite(small).any() else 1.0
    scale = Scale(0.0, max(1.0, math.log2(max(top, 1.0))))
    levels = scale.levels(np.log2(np.maximum(small, 1.0)))
    sub = SUB if counts is not None else 1
    if counts is not None:
        levels = _mark_dead(levels, counts)
    x, span = step_axis(runs), (0.0, float(named.run.step[-1]))
    worst = int(np.nanargmax(np.nanmean(small, axis=1)))
    key = f"imbalance-{named.color}"
    last = int(np.nansum(dead[-1])) if len(dead) else 0
    summary = (
        f"Busiest expert against the mean: {float(np.nanmean(small[:, -1])):.2f}× over all layers at the end; "
        f"layer {worst} is the least even ({float(np.nanmean(small[worst])):.2f}× on average). "
        f"{last} experts got no token in the last step."
    )
    powers = [(math.log2(value), f"{value}×") for value in (1, 2, 4, 8, 16, 32)]
    marks = [mark for mark in powers if mark[0] <= 0.8 * scale.high]
    marks.append((scale.high, f"{2**scale.high:.2g}×"))
    return figure(
        key,
        "Expert load by layer and time" + _of(named, runs),
        summary,
        image(key, f"Heat map, layers by steps. {summary}", levels, scale, x, span, sub=sub),
        legend=strip(scale, marks, '<span class="dead-key">an expert got no token at all</span>'),
        table=_layer_table(named.run, counts),
        wide=True,
        data=cells(levels, scale, span, x, "layer", "× the mean load", power=True) | {"sub": sub},
    )


def _of(named: Named, runs: Sequence[Named]) -> str:
    return f": {named.name}" if len(runs) > 1 else ""


def _mark_dead(levels: NDArray[np.uint8], counts: Counts) -> NDArray[np.uint8]:
    """(L, C) to (SUB x L, C): the last of a layer's `SUB` lines is `DEAD` in columns in which one of its experts
    received nothing, so that the mark does not cover the load."""
    dead = (counts.load == 0).any(axis=2)
    columns = levels.shape[1]
    source = np.minimum((np.arange(columns) * len(dead)) // columns, len(dead) - 1)
    marked = np.repeat(levels, SUB, axis=0)
    marked[SUB - 1 :: SUB][dead[source].T] = DEAD
    return marked


def _layer_table(run: Run, counts: Counts | None) -> str:
    """By layer: load, entropy and the experts without a token at the end."""
    imbalance, entropy = run.layers("imbalance"), run.layers("entropy")
    assert imbalance is not None
    table = Table(["layer", "busiest ÷ mean, end", "entropy at first", "at the end", "dead experts at the end"])
    for layer in range(imbalance.shape[1]):
        names = "-"
        if counts is not None and layer < counts.load.shape[1]:
            idle = np.flatnonzero(counts.load[-1, layer] == 0).tolist()
            names = ", ".join(map(str, idle[:20])) + (" …" if len(idle) > 20 else "") if idle else "none"
        first, last = (entropy[0, layer], entropy[-1, layer]) if entropy is not None else (np.nan, np.nan)
        table.rows.append([str(layer), f"{imbalance[-1, layer]:.2f}", f"{first:.3f}", f"{last:.3f}", names])
    return table.html()


def entropy_map(named: Named, runs: Sequence[Named]) -> Figure | None:
    """Layer by time: the router's entropy against that of a uniform choice."""
    entropy = named.run.layers("entropy")
    experts = int(named.run.get("model.moe.experts") or 0)
    if entropy is None:
        return None
    full = math.log(experts) if experts > 1 else float(np.nanmax(entropy))
    small = reduce_rows(entropy, COLUMNS).T / max(full, 1e-9)
    least = float(np.nanmin(small)) if np.isfinite(small).any() else 0.0
    scale = Scale(min(0.9, math.floor(10 * least) / 10), 1.0, falling=True)
    levels = scale.levels(small)
    x, span = step_axis(runs), (0.0, float(named.run.step[-1]))
    low = int(np.nanargmin(np.nanmean(small, axis=1)))
    summary = (
        f"Share of the entropy of a uniform choice (ln {experts} = {full:.2f} nats): "
        f"{100 * float(np.nanmean(small[:, -1])):.1f} % over all layers at the end; layer {low} is the most decided "
        f"({100 * float(np.nanmean(small[low])):.1f} % on average)."
    )
    key = f"entropy-map-{named.color}"
    ends = [(scale.low, f"{100 * scale.low:.0f} %"), (1.0, "100 %")]
    return figure(
        key,
        "Router entropy by layer and time" + _of(named, runs),
        summary,
        image(key, f"Heat map, layers by steps. {summary}", levels, scale, x, span),
        legend=strip(scale, ends),
        wide=True,
        data=cells(levels, scale, span, x, "layer", "of a uniform router's entropy"),
    )


def load_maps(named: Named, runs: Sequence[Named]) -> Figure | None:
    """One small map a layer: expert by time, load against the layer's mean, dead experts in their own colour."""
    counts = read_counts(named.run)
    if counts is None:
        return None
    columns, layers, experts = counts.load.shape
    mean = counts.load.mean(axis=2, keepdims=True)
    share = np.divide(counts.load, mean, out=np.ones_like(counts.load), where=mean > 0)
    octaves = np.log2(np.maximum(share, 2.0**-6))
    reach = float(np.clip(np.percentile(np.abs(octaves[counts.load > 0]), 99), 0.5, 3.0)) if counts.load.any() else 1.0
    scale = Scale(-reach, reach, diverging=True)
    levels = scale.levels(octaves)
    levels[counts.load == 0] = DEAD
    x = step_axis(runs)
    maps = "".join(_small_map(named, layer, levels[:, layer].T, scale, x, counts) for layer in range(layers))
    dead = int((counts.load[-1] == 0).sum())
    summary = (
        f"{experts} experts in each of {layers} layers, by load against the layer's mean; "
        f"{columns} columns, each the sum of {counts.steps} recorded count(s); "
        f"{dead} of {layers * experts} experts got no token in the last column."
    )
    marks = [(-reach, f"{2**-reach:.2f}×"), (0.0, "mean"), (reach, f"{2**reach:.2f}×")]
    return figure(
        f"loads-{named.color}",
        "Load of every expert" + _of(named, runs),
        summary,
        f'<div class="small-maps">{maps}</div>',
        legend=strip(scale, marks, DEAD_KEY),
        wide=True,
        data={
            f"loads-{named.color}-{layer}": cells(
                np.ascontiguousarray(levels[:, layer].T), scale, counts.span, x, "expert", "× the mean load", power=True
            )
            for layer in range(layers)
        },
    )


def _small_map(named: Named, layer: int, levels: NDArray[np.uint8], scale: Scale, x: Axis, counts: Counts) -> str:
    dead = int((levels[:, -1] == DEAD).sum())
    note = f", {dead} dead" if dead else ""
    spread = counts.load[-1, layer]
    label = (
        f"Layer {layer}: experts by steps. At the end the busiest expert has "
        f"{spread.max() / max(spread.mean(), 1e-9):.2f} times the mean load, {dead} experts have none."
    )
    body = image(f"loads-{named.color}-{layer}", label, levels, scale, x, counts.span, rows="expert", labels=4)
    return f'<div class="small"><h4>Layer {layer}<b>{note}</b></h4>{body}</div>'
