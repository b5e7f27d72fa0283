"""Case `ep4` of `mula-ray bench step`: the whole step on 4 ranks, EP 4, against classic eager experts + `zero1`.

4 layers, H 512, I 256, E 64, k 8, vocabulary 4,096, 2,048 tokens a rank, fp32 (bar 1.3x; published 1.35-1.51x).
CPU time of the busiest rank, state, traffic and what recomputation saves are printed beside it. Correctness first:
equal loss and norm of the first step.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch

from mula_ray.bench.ranks import run_ranks
from mula_ray.bench.timing import Row, row
from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.config.run import DataConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from mula_ray.model.aux import AuxSink
from mula_ray.model.transformer import Transformer
from mula_ray.parallel.apply import build_stages
from mula_ray.parallel.collectives import barrier
from mula_ray.parallel.groups import Groups
from mula_ray.parallel.observe import Traffic
from mula_ray.parallel.recompute import saved_bytes
from mula_ray.plan.topology import Topology
from mula_ray.train.engine import Engine, MicroBatch

REPEATS = 5
SIDES = {"ours": ("auto", "epso"), "classic+zero1": ("classic", "zero1")}
TOKENS, CONTEXT = 2048, 512
RECOMPUTE = ("none", "norms", "attention", "moe", "norms+attention+moe")


def ep4_rows() -> list[Row]:
    """Rows of the case."""
    ranks = run_ranks(_compare, 4, timeout=400.0, allocator=True)
    rows = []
    for what, metric in (("seconds", "step"), ("cpu", "step_cpu")):
        ours, theirs = (
            statistics.median(max(one) for one in zip(*(rank[what][side] for rank in ranks), strict=True))
            for side in SIDES
        )
        rows.append(row("ep4", metric, ours, "s", "classic+zero1", theirs / ours))
    for what in ("state", "sent"):
        ours, theirs = (max(rank[what][side] for rank in ranks) for side in SIDES)
        rows.append(row("ep4", what, ours / 2**20, "MiB", "classic+zero1", theirs / ours))
    (kept,) = run_ranks(_kept, 1, timeout=200.0)
    for text in RECOMPUTE[1:]:
        rows.append(row("ep4", f"activations-{text}", kept[text] / 2**20, "MiB", "none", kept["none"] / kept[text]))
    return rows


def config(side: str) -> RunConfig:
    """The case's configuration."""
    backend, kind = SIDES[side]
    moe = MoEConfig(experts=64, top_k=8, expert_width=256, backend=backend)  # type: ignore[arg-type]
    return RunConfig(
        model=ModelConfig(vocab_size=4096, hidden=512, layers=4, heads=4, moe=moe),
        train=TrainConfig(steps=100, global_batch=4 * TOKENS // CONTEXT, micro_batch=TOKENS // CONTEXT, dtype="fp32"),
        data=DataConfig(context=CONTEXT),
        optim=OptimConfig(kind=kind),  # type: ignore[arg-type]
        parallel=ParallelConfig(dp=1, ep=4, dispatcher="allgather"),
    )


def _kept(_rank: int, _world: int, _port: int) -> dict[str, int]:
    """Bytes that a forward pass keeps for backward, by what is recomputed; one rank with a quarter of the experts."""
    base, groups = config("ours"), Groups(Topology(), 0, None)
    assert base.model.moe is not None
    moe = base.model.moe.model_copy(update={"experts": 16})
    tokens = torch.randint(0, 4096, (TOKENS // CONTEXT, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    kept = {}
    for text in RECOMPUTE:
        cfg = base.model_copy(
            update={
                "model": base.model.model_copy(update={"moe": moe}),
                "parallel": ParallelConfig(recompute=text),
            }
        )
        (stage,) = build_stages(cfg, Topology(), 0, groups, torch.device("cpu"))

        def forward(stage: Transformer = stage, cfg: RunConfig = cfg) -> torch.Tensor:
            return stage.loss(stage(tokens[:, :-1], AuxSink(cfg.model)), tokens[:, 1:])

        kept[text] = saved_bytes(forward, stage.parameters())
    return kept


def _compare(rank: int, _world: int, port: int) -> dict[str, Any]:
    topology = Topology(ep=4)
    engines, traffic = {}, {}
    for side in SIDES:
        traffic[side] = Traffic()
        groups = Groups.connect(
            topology, rank, host="127.0.0.1", port=port, prefix=f"bench/{side}", observers=(traffic[side],),
            timeout_s=200.0,
        )  # fmt: skip
        engines[side] = Engine(config(side), topology, rank, groups, "cpu")
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    sent, first = {}, {}
    for repeat in range(REPEATS + 1):
        generator = torch.Generator().manual_seed(10 * repeat + rank)
        tokens = torch.randint(0, 4096, (TOKENS // CONTEXT, CONTEXT + 1), generator=generator)
        batch = MicroBatch(tokens, torch.ones(TOKENS // CONTEXT))
        for side, engine in engines.items():
            before = traffic[side].total()
            barrier(engine.groups.control)
            start, worked = time.perf_counter(), time.process_time()
            result = engine.step(repeat, [batch])
            if repeat:
                seconds[side].append(time.perf_counter() - start)
                cpu[side].append(time.process_time() - worked)
            else:
                first[side] = (result.loss, result.grad_norm)
            sent[side] = traffic[side].total() - before
    for ours, theirs in zip(*first.values(), strict=True):
        assert math.isclose(ours, theirs, rel_tol=1e-4), f"the sides differ: {first}"
    state = {side: sum(f.state_bytes() for f in engine.optimizer.families) for side, engine in engines.items()}
    return {"seconds": seconds, "cpu": cpu, "sent": sent, "state": state}
