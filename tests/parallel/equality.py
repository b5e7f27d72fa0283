"""Any layout, same training: run a few steps in a layout and compare with one rank.

Losses, gradient norm and all weights after five steps. `CASES` is the whole matrix; tests take a seeded sample of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dist_helper import run_ranks

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.config.run import DataConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from mula_ray.plan.order import assign
from mula_ray.plan.pieces import Piece
from mula_ray.plan.topology import Topology

STEPS = 5
ALL_PARTS = "norms+attention+moe"


@dataclass(frozen=True)
class Case:
    """One entry of the matrix. `batches`: micro-batches a rank runs in a step."""

    topology: Topology
    moe: bool = True
    batches: int = 4
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: str = "none"
    global_batch: int = 0
    dtype: str = "fp32"

    @property
    def label(self) -> str:
        """Short name for test ids and reports."""
        t = self.topology
        kind = "moe" if self.moe else "dense"
        parts = [f"dp{t.dp}-ep{t.ep}-tp{t.tp}-pp{t.pp}", kind, f"m{self.batches}"]
        parts += [f"{self.schedule}{self.virtual}"] if t.pp > 1 else []
        parts += ["sac"] if self.recompute != "none" else []
        return "-".join(parts)

    def config(self, topology: Topology) -> RunConfig:
        """The run of this case in another topology (the reference has one rank). The recipe's own learning rate."""
        moe = MoEConfig(experts=8, top_k=2, expert_width=16) if self.moe else None
        model = ModelConfig(
            vocab_size=64, hidden=32, layers=4, heads=4, ffn=None if self.moe else 48, moe=moe, init_std=0.2
        )
        piped = topology.pp > 1
        return RunConfig(
            model=model,
            train=TrainConfig(steps=STEPS, global_batch=self.batch, micro_batch=1, dtype=self.dtype),  # type: ignore[arg-type]
            data=DataConfig(context=16),
            optim=OptimConfig(warmup_steps=2, bucket_mb=0.01),
            parallel=ParallelConfig(
                dp=topology.dp,
                ep=topology.ep,
                tp=topology.tp,
                pp=topology.pp,
                schedule=self.schedule if piped else "1f1b",  # type: ignore[arg-type]
                virtual_stages=self.virtual if piped else 1,
                recompute=self.recompute,
            ),
        )

    @property
    def batch(self) -> int:
        """Global batch, sequences."""
        return self.global_batch or self.batches * self.topology.ddp


@dataclass(frozen=True)
class Outcome:
    """What a run came to: (loss, balance loss, z-loss, gradient norm) a step, evaluation loss, masters by name."""

    steps: list[tuple[float, float, float, float]]
    eval_loss: float
    weights: dict[str, torch.Tensor]


def run_case(case: Case, topology: Topology, timeout: float = 100.0) -> Outcome:
    """Train `case` in `topology`, every rank a process of its own."""
    results = run_ranks(_train, topology.world, case.config(topology), topology, timeout=timeout)
    pieces = [piece for _, _, owned in results for piece in owned]
    assert all(steps == results[0][0] for steps, _, _ in results), "ranks disagree about the losses"
    return Outcome(results[0][0], results[0][1], assemble(pieces))


def _train(rank: int, world: int, port: int, config: RunConfig, topology: Topology) -> Any:
    from mula_ray.parallel.groups import Groups
    from mula_ray.train.engine import Engine, MicroBatch

    assert world == topology.world
    groups = Groups.connect(topology, rank, host="127.0.0.1", port=port, prefix="equality/1", strict=True)
    engine = Engine(config, topology, rank, groups, "cpu")
    train, vocab = config.train, config.model.vocab_size
    data = torch.randint(0, vocab, (train.global_batch * STEPS, 17), generator=torch.Generator().manual_seed(5))
    steps = []
    for step in range(STEPS):
        index = topology.ddp_index(rank)
        batches = [
            MicroBatch(torch.stack([data[max(i, 0)] for i in ids]), torch.tensor([float(i >= 0) for i in ids]))
            for ids in assign(step, train.global_batch, topology.ddp, index, train.micro_batch, topology.ep)
        ]
        result = engine.step(step, batches)
        assert result.finite
        steps.append((result.loss, result.aux_loss, result.z_loss, result.grad_norm))
    evaluated = engine.evaluate(batches)
    owned = [(piece, tensor.numpy().copy()) for piece, tensor in engine.pieces() if piece.kind == "master"]
    return steps, evaluated.loss, owned


def assemble(pieces: list[tuple[Piece, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Whole tensors from everybody's pieces; elements that nobody owns stay NaN."""
    whole: dict[str, torch.Tensor] = {}
    for piece, values in pieces:
        full = whole.setdefault(piece.name, torch.full(piece.global_shape, math.nan))
        box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))
        flat = full[box].reshape(-1).clone()
        flat[piece.start : piece.stop] = torch.from_numpy(values)
        full[box] = flat.view(piece.shape)
    return whole


@dataclass(frozen=True)
class Difference:
    """Largest relative difference of losses and norm, largest absolute one of the weights."""

    losses: float
    norm: float
    weights: float


def difference(reference: Outcome, other: Outcome) -> Difference:
    """Compare; the balance and z losses count as losses. Weights must cover each other."""
    assert reference.weights.keys() == other.weights.keys()
    losses = [
        abs(a - b) / max(abs(a), 1e-12)
        for one, two in zip(reference.steps, other.steps, strict=True)
        for a, b in zip(one[:3], two[:3], strict=True)
    ]
    losses.append(abs(reference.eval_loss - other.eval_loss) / reference.eval_loss)
    norms = [abs(one[3] - two[3]) / one[3] for one, two in zip(reference.steps, other.steps, strict=True)]
    deltas = [(reference.weights[name] - other.weights[name]).abs().max().item() for name in reference.weights]
    assert not any(math.isnan(delta) for delta in deltas), "some elements are nobody's"
    return Difference(max(losses), max(norms), max(deltas))


def topologies(world: int, *, moe: bool) -> Iterator[Topology]:
    """Every way to split `world` ranks over the axes that the model of the matrix can take."""
    for dp, ep, tp, pp in itertools.product(range(1, world + 1), repeat=4):
        if dp * ep * tp * pp == world and 8 % ep == 0 and 4 % tp == 0 and pp <= 4 and (moe or ep == 1):
            yield Topology(dp, ep, tp, pp)


SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2))


def _of(topology: Topology, moe: bool) -> Iterator[Case]:
    schedules = [s for s in SCHEDULES if topology.pp * s[1] <= 4] if topology.pp > 1 else [("1f1b", 1)]
    for (schedule, virtual), recompute, batches in itertools.product(schedules, ("none", ALL_PARTS), (1, 2, 3, 4, 8)):
        if schedule == "interleaved" and batches % topology.pp:
            continue
        yield Case(topology, moe, batches, schedule, virtual, recompute)


CASES = [
    case
    for world in (2, 3, 4)
    for moe in (True, False)
    for topology in topologies(world, moe=moe)
    for case in _of(topology, moe)
]
EIGHT = [
    Case(Topology(1, 2, 2, 2), schedule="zero_bubble"),
    Case(Topology(2, 2, 1, 2), schedule="zbv", virtual=2, recompute=ALL_PARTS),
    Case(Topology(2, 1, 2, 2), schedule="interleaved", virtual=2),
    Case(Topology(1, 1, 2, 4), batches=8),
    Case(Topology(1, 4, 1, 2), recompute="moe"),
    Case(Topology(2, 2, 2, 1), recompute="attention"),
    Case(Topology(8, 1, 1, 1), batches=1),
    Case(Topology(2, 4, 1, 1), batches=2),
    Case(Topology(2, 1, 2, 2), moe=False, schedule="zero_bubble"),
    Case(Topology(3, 1, 1, 1), batches=6, global_batch=16),
]
