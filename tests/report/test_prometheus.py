"""The run's figures among Ray's metrics: names, tags, and values that are not finite (a real Ray: docs/verified.md)."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from mula_ray.runtime.prometheus import GAUGES, RayMetrics
from mula_ray.train.metrics import EvalRecord, StepRecord


class Recorder:
    """Stands for Gauge, Counter and Histogram."""

    made: dict[str, Recorder]

    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] = (), **_: Any) -> None:
        assert description
        self.tag_keys, self.values = tag_keys, []
        Recorder.made[name] = self

    def set_default_tags(self, tags: dict[str, str]) -> None:
        self.default = tags

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert set(self.default) | set(tags or {}) == set(self.tag_keys)
        self.values.append((value, tags))

    inc = observe = set


def test_figures_reach_ray_under_stable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder.made = {}
    fake = types.ModuleType("ray.util.metrics")
    fake.Gauge = fake.Counter = fake.Histogram = Recorder  # type: ignore[attr-defined]
    util = types.ModuleType("ray.util")
    util.metrics = fake  # type: ignore[attr-defined]
    for name, module in (("ray", types.ModuleType("ray")), ("ray.util", util), ("ray.util.metrics", fake)):
        monkeypatch.setitem(sys.modules, name, module)
    metrics = RayMetrics("run-1")
    metrics.write(StepRecord(7, 0, float("nan"), 0, 0, 1.5, 1e-3, 64, 128.0, 0.2, 0.5, 0.0))
    metrics.write(EvalRecord(7, 0, 2.5, 640, 0.1))
    metrics.failure("hang")
    metrics.recovery(0.2)
    metrics.nodes(active=2, spares=1)
    metrics.close()
    made = Recorder.made
    assert {f"mula_ray_{name}" for name in GAUGES} <= set(made)
    assert made["mula_ray_loss"].values == [], "a NaN is not a figure"
    assert made["mula_ray_grad_norm"].values == [(1.5, None)]
    assert made["mula_ray_eval_loss"].values == [(2.5, None)]
    assert made["mula_ray_tokens"].values == [(64.0, None)]
    assert made["mula_ray_failures"].values == [(1.0, {"kind": "hang"})]
    assert made["mula_ray_nodes"].values == [(2.0, {"role": "active"}), (1.0, {"role": "spare"})]
    assert all(recorder.default == {"run": "run-1"} for recorder in made.values())
