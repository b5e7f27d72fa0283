"""A made-up run folder: what a long run with many failures writes, from a seed."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mula_ray.train.metrics import ExpertLoad, ExpertWindow, StepRecord, counts_every

START = datetime(2026, 11, 1, 8, 0, tzinfo=UTC)


class _Writer:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics = (folder / "metrics.jsonl").open("w")
        self.events = (folder / "events.jsonl").open("w")
        self.now = 0.0

    def time(self) -> str:
        return (START + timedelta(seconds=self.now)).isoformat(timespec="milliseconds")

    def event(self, event: str, generation: int, **fields: Any) -> None:
        line = {"time": self.time(), "event": event, "generation": generation, **fields}
        self.events.write(json.dumps(line) + "\n")

    def metric(self, line: dict[str, Any]) -> None:
        self.metrics.write(json.dumps({**line, "time": self.time()}) + "\n")


def write_run(
    folder: Path,
    *,
    steps: int = 10_000,
    layers: int = 16,
    experts: int = 64,
    failures: int = 50,
    seed: int = 0,
    finish: bool = True,
    dense: bool = False,
) -> Path:
    """Writes config.yaml, metrics.jsonl, events.jsonl, exit.json of a run with kills, replays and checkpoints."""
    rng = np.random.default_rng(seed)
    out = _Writer(folder)
    fail_at = set(rng.choice(np.arange(5, steps), failures, replace=False).tolist())
    _config(folder, steps, layers, experts, dense)
    out.event(
        "run_start",
        0,
        run_id="made-up",
        steps=steps,
        world=32,
        resumed_step=None,
        host="node0",
        pid=4242,
        versions={"torch": "2.13.0", "ray": "2.60.0", "python": "3.11.9"},
        device="cpu",
        threads=1,
        peak_tflops=0.11,
    )
    out.now += 12.0
    nodes = [f"node{index}" for index in range(8)]
    out.event("generation_start", 0, step=0, world=32, nodes=nodes, spares=2, reason="first start")
    window = ExpertWindow(counts_every(layers, experts, steps))
    bias = rng.normal(0, 0.25, (layers, experts))
    generation, step = 0, 1
    while step <= steps:
        load = None if dense else _load(rng, bias, step, steps, layers, experts)
        record = _record(rng, step, generation, steps, {} if load is None else window.add(step, load))
        out.now += record.step_s
        out.metric(record.to_json())
        if step % 250 == 0:
            out.metric({"step": step, "generation": generation, "eval_loss": _loss(step, steps) + 0.08, "eval_s": 3.0})
            out.now += 3.0
        if step % 100 == 0:
            slot = "full-a" if (step // 100) % 2 else "full-b"
            out.event("checkpoint", generation, step=step, slot=slot, bytes=26_000_000_000, seconds=4.1, stall_s=0.12)
        if step in fail_at:
            fail_at.remove(step)
            generation, step = _fail(out, rng, generation, step, nodes)
        step += 1
    if finish:
        out.event("run_end", generation, code=0, reason="done", step=steps)
        (folder / "exit.json").write_text(json.dumps({"code": 0, "reason": "done", "step": steps, "time": out.time()}))
    out.metrics.close()
    out.events.close()
    return folder


def _config(folder: Path, steps: int, layers: int, experts: int, dense: bool) -> None:
    model: dict[str, Any] = {"hidden": 2048, "layers": layers, "heads": 16}
    if dense:
        model["ffn"] = 8192
    else:
        model["moe"] = {"experts": experts, "top_k": 8, "expert_width": 1024}
    tree = {
        "model": model,
        "train": {"steps": steps, "global_batch": 256, "seed": 0},
        "data": {"path": "stdlib", "context": 2048},
        "metrics": {"every": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))


def _loss(step: int, steps: int) -> float:
    return 2.35 + 8.5 * math.exp(-step / (0.03 * steps)) + 0.9 * math.exp(-step / (0.35 * steps))


def _load(rng: np.random.Generator, bias: np.ndarray, step: int, steps: int, layers: int, experts: int) -> ExpertLoad:
    settle = 0.35 + 1.3 * math.exp(-step / (0.1 * steps))
    weight = np.exp(bias * settle + rng.normal(0, 0.05, bias.shape))
    counts = (weight / weight.sum(axis=1, keepdims=True) * 65536 * 8).astype(np.int64)
    if step > 0.4 * steps:
        counts[3 % layers, 5 % experts] = 0
    if step > 0.7 * steps:
        counts[11 % layers, 17 % experts] = 0
        counts[11 % layers, 40 % experts] = 0
    depth = np.linspace(0.02, 0.3, layers)
    entropy = math.log(experts) * (1 - depth * (1 - math.exp(-step / (0.2 * steps)))) + rng.normal(0, 0.01, layers)
    return ExpertLoad(counts, entropy)


def _record(rng: np.random.Generator, step: int, generation: int, steps: int, experts: dict[str, Any]) -> StepRecord:
    slow = 2.5 if rng.random() < 0.004 else 1.0
    seconds = 1.9 * slow * float(rng.lognormal(0, 0.02))
    stall = 0.12 if step % 100 == 0 else 0.0
    shares = {"forward": 0.17, "dispatch": 0.07, "expert": 0.18, "combine": 0.06, "backward": 0.36, "reduce": 0.08}
    phases = {name: share * seconds for name, share in shares.items()} | {"optimizer": 0.05 * seconds}
    if stall:
        phases["checkpoint"] = stall
    wait = 0.002 * seconds * float(rng.random())
    tokens = 256 * 2048
    warm = min(1.0, step / (0.02 * steps))
    rate = 4e-5 + 0.5 * 3.6e-4 * (1 + math.cos(math.pi * step / steps))
    total = seconds + stall + wait
    return StepRecord(
        step,
        generation,
        _loss(step, steps) + float(rng.normal(0, 0.05)),
        1.0 + 0.4 * math.exp(-step / (0.1 * steps)) + float(rng.normal(0, 0.004)),
        0.6 * math.exp(-step / (0.2 * steps)) + 0.2,
        float(rng.lognormal(-0.5, 0.25)) + 3 * math.exp(-step / (0.02 * steps)),
        rate * warm,
        tokens,
        tokens / total,
        0.41 * 1.9 / total,
        total,
        wait,
        phases=phases,
        experts=experts,
    )


def _fail(out: _Writer, rng: np.random.Generator, generation: int, step: int, nodes: list[str]) -> tuple[int, int]:
    """A failure at `step` and its recovery: the new generation, and the step to go on from."""
    kind = str(rng.choice(["hard", "hard", "hard", "hang", "numeric"]))
    node = str(rng.choice(nodes))
    reasons = {
        "hard": f"rank 3 on {node} ended by SIGKILL",
        "hang": "no step within 9.1 s",
        "numeric": "loss is not finite",
    }
    out.event("failure", generation, kind=kind, reason=reasons[kind], step=step, node=node, rank=3)
    phases = {
        "detect": float(rng.gamma(2, 0.02)) + (9.1 if kind == "hang" else 0.0),
        "decide": 0.002,
        "fence": float(rng.gamma(2, 0.03)),
        "start": float(rng.gamma(3, 0.05)),
        "groups": float(rng.gamma(2, 0.06)),
        "load": float(rng.gamma(2, 0.2)),
        "first_step": 1.9,
    }
    back = int(rng.integers(0, 4))
    seconds = sum(phases.values())
    out.now += seconds - phases["first_step"]
    generation += 1
    again = max(0, step - back)
    reason = f"{node}: same tile again, state from its memory"
    out.event("generation_start", generation, step=again, world=32, nodes=nodes, spares=2, reason=reason)
    out.event(
        "recovery",
        generation,
        step=again,
        source="own memory",
        phases=phases,
        seconds=seconds,
        lost_steps=step - again,
        reason=reason,
    )
    if rng.random() < 0.15:
        out.event("membership", generation, change="cordoned", node=node, reason="third failure within an hour")
    return generation, again
