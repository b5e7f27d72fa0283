"""Does MoE pay? A dense and a MoE model of equal active parameters on equal tokens: held-out loss side by side.

    mula-ray bench quality                         three seeds of 1,200 steps (docs/moe_vs_dense.md)
    mula-ray bench quality --case short-seed0      the 360 steps of configs/mula-tiny.yaml

Both models of a case train at the same time, one core each, with the same seed: same samples in the same order, same
held-out windows. Each leaves a run folder in runs/bench-quality/, so `mula-ray report` draws them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from mula_ray.bench.ranks import run_ranks
from mula_ray.bench.timing import chosen, report
from mula_ray.config.load import load
from mula_ray.config.run import RunConfig
from mula_ray.data.batches import BatchSource, Share
from mula_ray.data.source import open_run_data
from mula_ray.parallel.executor import MicroBatch
from mula_ray.parallel.groups import Groups
from mula_ray.plan.layout import active_params
from mula_ray.plan.topology import Topology
from mula_ray.train import loop
from mula_ray.train.engine import Engine
from mula_ray.train.metrics import EvalRecord, StepRecord
from mula_ray.train.sinks import EventLog, JsonlSink

MODELS = ("mula-tiny", "mula-tiny-dense")
STEPS = {"short": 360, "long": 1200}
RECIPE = ("optim.lr=3e-3", "optim.min_lr=3e-4", "train.global_batch=16", "train.micro_batch=8", "data.context=128")
# The k routing weights of a fresh router add up to about k / E: experts would start at an eighth of a dense layer's
# size, which a short run is long in making up for. Renormalised to 1 they start alike. The load-balancing loss is per
# sequence, here of only 128 tokens for 16 experts: the usual weight of 0.01 keeps them from becoming different.
MOE_SETS = ("model.router.norm_topk_prob=true", "model.router.balance_coef=0.003")
SEEDS = 3
FOLDER = Path("runs") / "bench-quality"
Curve = list[tuple[int, float]]


def case_names() -> list[str]:
    """All cases; without --case the long ones run."""
    return [f"{length}-seed{seed}" for length in STEPS for seed in range(SEEDS)]


def configuration(model: str, case: str) -> RunConfig:
    """The shipped model with the steps and seed of a case and one recipe for both, evaluated on more windows."""
    length, _, seed = case.partition("-seed")
    steps = STEPS[length]
    sets = [
        f"train.steps={steps}",
        f"train.seed={seed}",
        f"train.eval_every={steps // 6}",
        "train.eval_samples=128",
        f"optim.warmup_steps={min(50, steps // 8)}",
        *RECIPE,
    ]
    return load(model, [*sets, *(MOE_SETS if model == MODELS[0] else ())]).config


class _Alone:
    """`Control`, `Checkpoints` and `Reporter` of a loop that nobody watches."""

    def __init__(self, folder: Path) -> None:
        self.curve: Curve = []
        self._sink = JsonlSink(folder / "metrics.jsonl", fsync_s=60.0)

    def phase(self, name: str, step: int) -> None:
        """Nobody wants to know."""

    def committed(self, step: int) -> None:
        """Nobody wants to know."""

    def stop_wanted(self) -> bool:
        """Never."""
        return False

    def prepare(self, step: int, batches: list[MicroBatch]) -> list[MicroBatch]:  # noqa: ARG002
        """As they are."""
        return batches

    def after_step(self, step: int, *, last: bool, stop: bool, record: StepRecord | None = None) -> float:  # noqa: ARG002
        """Nothing is saved."""
        return 0.0

    def step(self, record: StepRecord) -> None:
        """To the run folder."""
        self._sink.write(record)

    def evaluation(self, record: EvalRecord) -> None:
        """To the run folder, and kept."""
        self.curve.append((record.step, record.eval_loss))
        self._sink.write(record)

    def close(self) -> None:
        """Closes the file."""
        self._sink.close()


def train_alone(config: RunConfig, folder: Path) -> Curve:
    """Trains in this process on one thread and returns (step, held-out loss) of every evaluation."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "events.jsonl"):
        (folder / name).unlink(missing_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    events = EventLog(folder / "events.jsonl")
    events.run_start(run_id=folder.name, steps=config.train.steps, world=1, resumed_step=None, device="cpu", threads=1)
    topology = Topology()
    engine = Engine(config, topology, 0, Groups(topology, 0, None), "cpu")
    source = BatchSource(open_run_data(config), Share.of(config, topology, 0))
    alone = _Alone(folder)
    loop.run(engine, source, alone, alone, alone, loop.Plan(config, 0, 0, 1))
    engine.close()
    alone.close()
    events.run_end(0, code=0, reason="done", step=config.train.steps)
    events.close()
    return alone.curve


def _one(rank: int, world: int, port: int, case: str, folder: str) -> Curve:  # noqa: ARG001
    return train_alone(configuration(MODELS[rank], case), Path(folder) / f"{case}-{MODELS[rank]}")


def reached(curve: Curve, loss: float) -> float | None:
    """Steps after which a curve is at or below `loss`, linear between evaluations; None if it never is."""
    for (start, above), (stop, below) in pairwise(curve):
        if below <= loss:
            share = (above - loss) / (above - below) if above > below else 1.0
            return start + min(1.0, max(0.0, share)) * (stop - start)
    return None


def rows_of(case: str, moe: Curve, dense: Curve, tokens: int) -> list[dict[str, Any]]:
    """Held-out losses, and how many tokens MoE needs for the dense model's last loss (`tokens` a step)."""
    needed = reached(moe, dense[-1][1])
    rows = [
        _row(case, "held_out_loss", moe[-1][1], "nats", "dense", None),
        _row(case, "held_out_loss_dense", dense[-1][1], "nats", None, None),
        _row(case, "held_out_difference", dense[-1][1] - moe[-1][1], "nats", "dense", None),
    ]
    if needed is not None:
        ratio = dense[-1][0] / needed
        rows.append(_row(case, "tokens_to_dense_loss", needed * tokens, "tokens", "dense", ratio))
    return rows


def _row(case: str, metric: str, value: float, unit: str, against: str | None, speedup: float | None) -> dict[str, Any]:
    return {"case": case, "metric": metric, "value": value, "unit": unit, "against": against, "speedup": speedup}


def run(
    cases: Sequence[str] | None = None,
    folder: Path = FOLDER,
    pair: Callable[[str, str], list[Curve]] | None = None,
) -> dict[str, Any]:
    """Runs the cases (default: the long ones). `pair`: how a case's two models are trained (tests give their own).

    Raises:
        UserError: no such case.
    """
    known = case_names()
    names = chosen("quality", cases, known, [name for name in known if name.startswith("long")])
    both = pair or (lambda case, where: run_ranks(_one, len(MODELS), case, where, timeout=7200.0))
    rows: list[dict[str, Any]] = []
    for case in names:
        configs = [configuration(model, case) for model in MODELS]
        open_run_data(configs[0])  # the corpus is prepared once, before two processes want it
        moe, dense = both(case, str(folder))
        train, context = configs[0].train, configs[0].data.context
        rows += rows_of(case, moe, dense, train.global_batch * context)
    moe_active, dense_active = (active_params(load(model).config.model) for model in MODELS)
    return report("quality", rows, threads=1) | {"active_params": {"moe": moe_active, "dense": dense_active}}
