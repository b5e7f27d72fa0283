"""The profiler window: a trace a rank that Perfetto opens, spans that make sense, and no change of the training."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_helper import run_ranks
from layouts import Case, micro_batches

from mula_ray.parallel.groups import Groups
from mula_ray.train.engine import Engine
from mula_ray.train.profile import Span, StepProfiler, spans_of
from mula_ray.train.report.page import build

STEPS = 3
Rows = list[tuple[float, float]]


def both(rank: int, world: int, port: int, folder: str) -> tuple[Rows, Rows]:
    """Losses and norms of a few steps with experts spread over all ranks: with steps 2 and 3 profiled, and without."""
    torch.set_num_threads(1)
    return tuple(_train(rank, world, port, Path(folder), window) for window in ((2, 4), (90, 91)))  # type: ignore[return-value]


def _train(rank: int, world: int, port: int, folder: Path, window: tuple[int, int]) -> Rows:
    case = Case(ep=world, recompute="moe")
    prefix = f"p{window[0]}"
    groups = Groups.connect(case.topology, rank, host="127.0.0.1", port=port, prefix=prefix, timeout_s=60.0)
    profiler = StepProfiler(folder / prefix / "profile", rank, window, torch.device("cpu"))
    engine = Engine(case.config(), case.topology, rank, groups, "cpu", profiler)
    profiler.attach(engine.stages)
    before = [type(layer.dispatcher) for layer in _layers(engine)]
    rows = []
    for step in range(STEPS):
        result = engine.step(step, micro_batches(case, rank, step))
        rows.append((result.loss, result.grad_norm))
    profiler.close()
    assert [type(layer.dispatcher) for layer in _layers(engine)] == before, "wrapping is undone"
    engine.close()
    return rows


def _layers(engine: Engine) -> list[Any]:
    return [module for stage in engine.stages for module in stage.modules() if hasattr(module, "dispatcher")]


@pytest.mark.dist
def test_a_window_of_two_ranks(tmp_path: Path) -> None:
    for profiled, plain in run_ranks(both, 2, str(tmp_path), timeout=100.0):
        assert profiled == plain, "profiling changes no bit"
    assert not (tmp_path / "p90").exists()
    run = tmp_path / "p2"
    names = sorted(path.name for path in (run / "profile").iterdir())
    stems = [f"rank{rank:05d}.{kind}" for rank in range(2) for kind in ("spans.json", "trace.json.gz")]
    assert names == stems, "no temporary file is left"
    for rank in range(2):
        _check_rank(run / "profile", rank)
    (run / "metrics.jsonl").write_text('{"step":1,"loss":1.0,"step_s":1.0}\n')
    page = build([run])
    assert "fig-gantt-0" in page
    for name in ("expert GEMM", "dispatch", "combine", "backward", "gradient reduction", "optimizer"):
        assert name in page


def _check_rank(folder: Path, rank: int) -> None:
    trace = json.loads(gzip.decompress((folder / f"rank{rank:05d}.trace.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"mula::dispatch", "mula::expert", "mula::combine", "mula::forward_backward"} <= names
    assert any(event.get("args", {}).get("name") == f"rank {rank}" for event in trace["traceEvents"])
    found = json.loads((folder / f"rank{rank:05d}.spans.json").read_text())
    spans = [Span(*span) for span in found["spans"]]
    kinds = {span.name for span in spans}
    assert kinds == {"forward", "backward", "reduce", "agree", "update", "dispatch", "expert", "combine"}
    course = [span for span in spans if span.name in ("forward", "backward", "reduce", "agree", "update")]
    for one, other in pairwise(course):
        assert one.stop <= other.start + 1.0, "the course of a step does not overlap"
    updates = [span for span in spans if span.name == "update"]
    assert len(updates) == 2, "steps 2 and 3"
    backward = [span for span in spans if span.name == "backward"]
    inside = [s for s in spans if s.name == "expert" and any(b.start <= s.start < b.stop for b in backward)]
    assert inside, "the experts' backward is told apart"
    assert 1.5e15 < spans[0].start < 4e15, "microseconds since the epoch"


def test_spans_of_a_trace() -> None:
    def event(name: str, ts: float, dur: float, cat: str = "cpu_op") -> dict[str, Any]:
        return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat}

    node = "autograd::engine::evaluate_function: "
    trace = {
        "baseTimeNanoseconds": 5000,
        "traceEvents": [
            event("mula::forward_backward", 0, 10_000, "user_annotation"),
            event("mula::dispatch", 100, 50, "user_annotation"),
            event(node + "MmBackward0", 2000, 100),
            event(node + "_GatherBackward", 2150, 100),
            event(node + "MmBackward0", 6000, 500),
            {"ph": "M", "name": "process_name", "args": {}},
        ],
    }
    spans = spans_of(trace, {"_GatherBackward": "dispatch"})
    assert spans == [
        Span("forward", 5.0, 2005.0),
        Span("dispatch", 105.0, 155.0),
        Span("backward", 2005.0, 2255.0),
        Span("dispatch", 2155.0, 2255.0),
        Span("forward", 2255.0, 6005.0),
        Span("backward", 6005.0, 6505.0),
        Span("forward", 6505.0, 10_005.0),
    ]
