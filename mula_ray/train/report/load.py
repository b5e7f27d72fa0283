"""A run folder as the report sees it: configuration, metrics, events. Reads files only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from mula_ray.config.errors import UserError
from mula_ray.train.records import Line, RunMetrics, read_lines, read_metrics

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """One run folder."""

    name: str
    folder: Path
    config: dict[str, Any]
    metrics: RunMetrics
    events: list[Line]

    @cached_property
    def step(self) -> Array:
        """(N,) step numbers of the lines that count."""
        return np.array([line["step"] for line in self.metrics.steps], dtype=np.float64)

    def series(self, name: str) -> Array:
        """(N,) values of a field; NaN where a line lacks it or holds null (a non-finite value)."""
        return np.array([_number(line.get(name)) for line in self.metrics.steps], dtype=np.float64)

    def phase(self, name: str) -> Array:
        """(N,) seconds of a phase of the step; 0 where it was not measured."""
        return np.array(
            [float((line.get("phases") or {}).get(name, 0.0)) for line in self.metrics.steps], dtype=np.float64
        )

    def layers(self, name: str) -> Array | None:
        """(N, L) a statistic by layer, or None for a model without experts. NaN where a line lacks it."""
        rows = [(line.get("layers") or {}).get(name) for line in self.metrics.steps]
        width = max((len(row) for row in rows if row), default=0)
        if not width:
            return None
        out = np.full((len(rows), width), np.nan)
        for index, row in enumerate(rows):
            if row:
                out[index, : len(row)] = row
        return out

    def of(self, event: str) -> list[Line]:
        """Events of one kind, in order."""
        return [line for line in self.events if line.get("event") == event]

    @property
    def failures(self) -> list[Line]:
        """What broke; a stop on purpose (`deadline`: signal, walltime) is on file as well, but nothing broke."""
        return [line for line in self.of("failure") if line.get("kind") != "deadline"]

    @cached_property
    def config_text(self) -> str:
        """config.yaml as it stands, with the origin of every value; empty where it cannot be read."""
        try:
            return (self.folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def get(self, path: str, default: Any = None) -> Any:
        """A configuration value by its dotted name."""
        node: Any = self.config
        for part in path.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    @property
    def total_steps(self) -> int:
        """Steps the run was asked for; what it did, where the configuration is missing."""
        return int(self.get("train.steps") or (self.step[-1] if len(self.step) else 0))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def median(values: Array) -> float:
    """Median of the values that are there; NaN when none is."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def epoch(line: Line) -> float:
    """Seconds since the epoch of a line's `time`; NaN where it has none."""
    try:
        return datetime.fromisoformat(line["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return float("nan")


def load_run(folder: Path) -> Run:
    """Reads a run folder.

    Raises:
        UserError: no such folder, or nothing in it that a run writes.
    """
    if not folder.is_dir():
        raise UserError(f"run folder {folder} does not exist; give the folder that `mula-ray train` printed")
    metrics = read_metrics(folder / "metrics.jsonl")
    events = read_lines(folder / "events.jsonl")
    if not (folder / "config.yaml").exists() and not metrics.steps and not events.lines:
        raise UserError(
            f"{folder} is no run folder: it has neither config.yaml nor metrics.jsonl nor events.jsonl; "
            "give the folder that `mula-ray train` printed"
        )
    return Run(
        name=folder.resolve().name,
        folder=folder,
        config=_yaml(folder / "config.yaml"),
        metrics=metrics,
        events=events.lines,
    )


def _yaml(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    if not isinstance(value, dict):
        return {}
    inner = value.get("config")
    return inner if isinstance(inner, dict) and "model" not in value else value


def unique_names(runs: list[Run]) -> list[str]:
    """A short name for each run; folders of the same name get their parent's in front."""
    names = [run.name for run in runs]
    return [f"{run.folder.resolve().parent.name}/{run.name}" if names.count(run.name) > 1 else run.name for run in runs]
