"""Train the same thing on any layout and bring everything to one place: the helper of the equality tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from dist_helper import run_ranks

from mula_ray.config.model import ModelConfig, MoEConfig, RouterConfig
from mula_ray.config.run import DataConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from mula_ray.parallel.groups import Call, Groups
from mula_ray.parallel.observe import Recorder, first_mismatch
from mula_ray.plan.order import assign
from mula_ray.plan.topology import Topology
from mula_ray.train.engine import Engine, MicroBatch

torch.set_num_threads(1)
VOCAB, CONTEXT = 96, 16


@dataclass(frozen=True)
class Case:
    """One way to run the same training."""

    dp: int = 1
    ep: int = 1
    tp: int = 1
    pp: int = 1
    dense: bool = False
    global_batch: int = 8
    micro_batch: int = 2
    recompute: str = "none"
    dispatcher: str = "allgather"
    kind: str = "epso"
    dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    fur: bool = False
    schedule: str = "1f1b"
    virtual: int = 1
    steps: int = 5
    seed: int = 7
    stop_at: int | None = None
    bucket_mb: float = 0.01

    @property
    def topology(self) -> Topology:
        """Axes of the case."""
        return Topology(dp=self.dp, ep=self.ep, tp=self.tp, pp=self.pp)

    def config(self, **router: Any) -> RunConfig:
        """The run configuration."""
        moe = None if self.dense else MoEConfig(experts=12, top_k=2, expert_width=16)
        model = ModelConfig(
            vocab_size=VOCAB,
            hidden=32,
            layers=4,
            heads=4,
            ffn=64 if self.dense else None,
            moe=moe,
            router=RouterConfig(fur=self.fur, **router),
            init_std=0.1,
        )
        return RunConfig(
            model=model,
            train=TrainConfig(
                steps=10, global_batch=self.global_batch, micro_batch=self.micro_batch, seed=self.seed, dtype=self.dtype
            ),
            data=DataConfig(context=CONTEXT),
            optim=OptimConfig(
                warmup_steps=2, bucket_mb=self.bucket_mb, kind=self.kind,
                reduce_dtype=self.reduce_dtype,
            ),
            parallel=ParallelConfig(
                dp=self.dp, ep=self.ep, tp=self.tp, pp=self.pp, dispatcher=self.dispatcher, recompute=self.recompute,
                schedule=self.schedule, virtual_stages=self.virtual,
            ),
        )  # fmt: skip


@dataclass
class Outcome:
    """What a case gave: a row a step, whole master weights, expert counts, the calls of every rank."""

    rows: list[tuple[float, float, float, float]]
    """loss, gradient norm, balance, z"""
    masters: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    counts: list[np.ndarray]
    eval_loss: float
    tokens: list[int]
    calls: list[list[Call]] = field(default_factory=list)


def sample(number: int) -> torch.Tensor:
    """(S+1,) tokens of global sample `number`."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randint(0, VOCAB, (CONTEXT + 1,), generator=generator)


def micro_batches(case: Case, rank: int, step: int) -> list[MicroBatch]:
    """This rank's share of a step."""
    topology = case.topology
    shares = assign(step, case.global_batch, topology.ddp, topology.ddp_index(rank), case.micro_batch, topology.ep)
    return [
        MicroBatch(
            torch.stack([sample(max(n, 0)) for n in numbers]),
            torch.tensor([1.0 if n >= 0 else 0.0 for n in numbers]),
        )
        for numbers in shares
    ]


def train(rank: int, world: int, port: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Run on one rank; everything under the strict wrapper and the recorder."""
    results = []
    for number, case in enumerate(cases):
        recorder = Recorder()
        groups = Groups.connect(
            case.topology, rank, host="127.0.0.1", port=port, prefix=f"case/{number}", strict=True,
            observers=(recorder,), timeout_s=60.0,
        )  # fmt: skip
        engine = Engine(case.config(), case.topology, rank, groups, "cpu")
        rows, counts, tokens = [], [], []
        for step in range(case.steps):
            result = engine.step(step, micro_batches(case, rank, step), stop=case.stop_at == step and rank == world - 1)
            assert result.finite
            rows.append((result.loss, result.grad_norm, result.aux_loss, result.z_loss))
            tokens.append(result.tokens)
            if result.experts is not None:
                counts.append(result.experts.counts.numpy())
            if result.stop:
                break
        evaluated = engine.evaluate(micro_batches(case, rank, 99))
        pieces = [(piece, value.numpy().copy()) for piece, value in engine.pieces()]
        results.append(
            {"rows": rows, "counts": counts, "eval": evaluated.loss, "pieces": pieces, "calls": recorder.calls,
             "tokens": tokens}
        )  # fmt: skip
        engine.close()
    return results


def run_cases(cases: Sequence[Case], timeout: float = 110.0) -> list[Outcome]:
    """Outcomes of cases that have the same world size; checks that all ranks agree in numbers and in calls."""
    world = cases[0].topology.world
    assert all(case.topology.world == world for case in cases)
    ranks = run_ranks(train, world, tuple(cases), timeout=timeout)
    return [_join(case, [rank[at] for rank in ranks]) for at, case in enumerate(cases)]


def _join(case: Case, ranks: list[dict[str, Any]]) -> Outcome:
    for other in ranks[1:]:
        assert other["rows"] == ranks[0]["rows"], f"{case}: ranks report different numbers"
    mismatch = first_mismatch([rank["calls"] for rank in ranks])
    assert mismatch is None, f"{case}: {mismatch}"
    whole: dict[str, dict[str, np.ndarray]] = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    seen: dict[str, np.ndarray] = {}
    for rank in ranks:
        for piece, value in rank["pieces"]:
            full = whole[piece.kind].setdefault(piece.name, np.full(piece.global_shape, np.nan, np.float32))
            box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))
            part = full[box].reshape(-1)
            part[piece.start : piece.stop] = value
            full[box] = part.reshape(piece.shape)
    for name, full in whole["master"].items():
        assert not np.isnan(full).any(), f"{case}: {name} is not covered by the ranks' pieces"
    del seen
    first = ranks[0]
    moments = {f"{kind}/{name}": full for kind in ("exp_avg", "exp_avg_sq") for name, full in whole[kind].items()}
    return Outcome(
        first["rows"], whole["master"], moments, first["counts"], first["eval"], first["tokens"],
        [rank["calls"] for rank in ranks],
    )  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """How far an outcome is from the reference."""

    scalar: float
    """largest relative difference of loss and gradient norm"""
    weight: float
    """largest absolute difference of a master weight"""
    flips: int
    """routed slots that went to another expert"""


def difference(outcome: Outcome, reference: Outcome) -> Difference:
    """Compare with the reference."""
    assert len(outcome.rows) == len(reference.rows)
    scalar = max(
        abs(a - b) / max(abs(b), 1e-12)
        for row, want in zip(outcome.rows, reference.rows, strict=True)
        for a, b in zip(row[:2], want[:2], strict=True)
    )
    weight = max(float(np.abs(outcome.masters[name] - want).max()) for name, want in reference.masters.items())
    flips = sum(int(np.abs(a - b).sum() / 2) for a, b in zip(outcome.counts, reference.counts, strict=True))
    return Difference(scalar, weight, flips)
