"""`mula-ray bench optimizer`: EPSO against the classic scheme (`zero1`: state sharded over DP alone).

Case `ep4-20b-local`: 4 ranks, EP 4, per-rank proportions of Mula-20B-A2B (dense : local experts = 0.47 : 1), 17 M local
expert elements, fp32. `local` is norm, clip and update without traffic (bar 1.25x), `local_cpu` its CPU time; `total`
has reduction and gathering too; `sent` is counted from the calls themselves, in their ring form, with reduce-scatter as
oneCCL has it.

Case `overlap-2`: 2 ranks, dp 2, one thread each: how much of the reduction, from the first bucket's launch to the last
one's end, lies inside backward (bar 50 %), and backward + reduction against the same with all reduced at the end.

Correctness first: both give the same weights. Sides alternate; medians over the repeats; the slowest rank counts.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from mula_ray.bench.ranks import run_ranks
from mula_ray.bench.timing import Row, chosen, report, row
from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.config.run import DataConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from mula_ray.optim.epso import Epso, epso_sharding
from mula_ray.optim.zero1 import zero1_sharding
from mula_ray.parallel.apply import build_stages, initial_value, layout_of
from mula_ray.parallel.collectives import barrier
from mula_ray.parallel.groups import Groups
from mula_ray.parallel.observe import Traffic
from mula_ray.plan.topology import Topology

REPEATS = 11
WHAT = ("local", "local_cpu", "total")
KINDS = {"epso": epso_sharding, "zero1": zero1_sharding}


def run(cases: Sequence[str] | None = None) -> dict[str, Any]:
    """`ep4-20b-local` and `overlap-2`, or those of them in `cases`."""
    rows: list[Row] = []
    names = chosen("optimizer", cases, ("ep4-20b-local", "overlap-2"))
    if "ep4-20b-local" in names:
        ranks = run_ranks(_compare, 4, timeout=300.0)
        rows += _rows("ep4-20b-local", ranks)
    if "overlap-2" in names:
        rows += _overlap_rows(run_ranks(_overlap, 2, timeout=300.0))
    return report("optimizer", rows, threads=1)


def config() -> RunConfig:
    """44 experts over 4 ranks: 17.3 M local expert elements and 8.1 M dense ones."""
    model = ModelConfig(
        vocab_size=3776, hidden=512, layers=4, heads=4, moe=MoEConfig(experts=44, top_k=4, expert_width=256)
    )
    return RunConfig(
        model=model,
        train=TrainConfig(steps=100, global_batch=4, dtype="fp32"),
        data=DataConfig(context=128),
        optim=OptimConfig(),
        parallel=ParallelConfig(dp=1, ep=4),
    )


def _rows(case: str, ranks: list[dict[str, Any]]) -> list[Row]:
    def median(kind: str, what: str) -> float:
        repeats = zip(*(rank["seconds"][kind, what] for rank in ranks), strict=True)
        return float(statistics.median(max(one) for one in repeats))

    rows = []
    for what in WHAT:
        ours, theirs = median("epso", what), median("zero1", what)
        rows.append(row(case, what, ours * 1e3, "ms", "zero1", theirs / ours))
    sent = {kind: max(rank["sent"][kind] for rank in ranks) for kind in KINDS}
    rows.append(row(case, "sent", sent["epso"] / 2**20, "MiB", "zero1", sent["zero1"] / sent["epso"]))
    state = {kind: max(rank["state"][kind] for rank in ranks) for kind in KINDS}
    rows.append(row(case, "state", state["epso"] / 2**20, "MiB", "zero1", state["zero1"] / state["epso"]))
    return rows


def _compare(rank: int, _world: int, port: int) -> dict[str, Any]:
    cfg, topology = config(), Topology(ep=4)
    groups = Groups.connect(topology, rank, host="127.0.0.1", port=port, prefix="bench/run")
    optimizers = {kind: _optimizer(kind, cfg, topology, rank, groups) for kind in KINDS}
    seconds: dict[tuple[str, str], list[float]] = {(kind, what): [] for kind in KINDS for what in WHAT}
    noise = torch.randn(20_000_000, generator=torch.Generator().manual_seed(rank))
    for repeat in range(REPEATS + 1):
        for kind, optimizer in optimizers.items():
            times = _one_step(optimizer, repeat, noise, groups)
            if repeat:
                for what, value in zip(WHAT, times, strict=True):
                    seconds[kind, what].append(value)
    ours, theirs = (optimizers[kind].families for kind in KINDS)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            mine.weights[: mine.plan.local_numel], other.weights[: other.plan.local_numel], rtol=1e-6, atol=1e-7
        )
    return {
        "seconds": seconds,
        "sent": {kind: _sent(kind, cfg, topology, rank, port) for kind in KINDS},
        "state": {kind: sum(f.state_bytes() for f in optimizer.families) for kind, optimizer in optimizers.items()},
    }


def _optimizer(kind: str, cfg: RunConfig, topology: Topology, rank: int, groups: Groups) -> Epso:
    stages = build_stages(cfg, topology, rank, groups, torch.device("cpu"), init=False)
    layout = layout_of(cfg, topology, rank)
    optimizer = Epso(stages, layout, topology, rank, groups, cfg.optim, sharding=KINDS[kind])
    optimizer.initialise(lambda param: initial_value(param, cfg))
    return optimizer


def _one_step(optimizer: Epso, step: int, noise: torch.Tensor, groups: Groups) -> tuple[float, float, float]:
    """(seconds of the local part, its CPU seconds, seconds of everything)."""
    optimizer.begin_step()
    for family in optimizer.families:
        family.grads.copy_(noise[step : step + family.plan.numel])
    barrier(groups.control)
    start = time.perf_counter()
    optimizer.reducer.finish()
    barrier(groups.control)
    reduced, cpu = time.perf_counter(), time.thread_time()
    optimizer.squared_norm()
    optimizer.update(step, 1e-4, 0.5, gather=False)
    updated, cpu = time.perf_counter(), time.thread_time() - cpu
    barrier(groups.control)
    optimizer.load_done()  # the gathering alone: working weights from masters, then everybody's
    barrier(groups.control)
    return updated - reduced, cpu, time.perf_counter() - start


def _sent(kind: str, cfg: RunConfig, topology: Topology, rank: int, port: int) -> int:
    """Bytes that one step sends, with a reduce-scatter where the scheme asks for one."""
    traffic = Traffic()
    groups = Groups.connect(
        topology, rank, host="127.0.0.1", port=port, prefix=f"bench/{kind}", whole_sums=False, observers=(traffic,)
    )
    optimizer = _optimizer(kind, cfg, topology, rank, groups)
    optimizer.begin_step()
    optimizer.reduce()
    optimizer.update(0, 1e-4)
    return traffic.total()


def _overlap_rows(ranks: list[dict[str, Any]]) -> list[Row]:
    hidden = statistics.median(min(one) for one in zip(*(rank["hidden"] for rank in ranks), strict=True))
    times = {
        kind: statistics.median(max(one) for one in zip(*(rank[kind] for rank in ranks), strict=True))
        for kind in ("overlapped", "at the end")
    }
    speedup = times["at the end"] / times["overlapped"]
    return [
        row("overlap-2", "inside_backward", hidden, ""),
        row("overlap-2", "backward_and_reduction", times["overlapped"] * 1e3, "ms", "reduced at the end", speedup),
    ]


def _overlap(rank: int, _world: int, port: int) -> dict[str, list[float]]:
    model = ModelConfig(
        vocab_size=4096, hidden=512, layers=4, heads=4, moe=MoEConfig(experts=16, top_k=4, expert_width=256)
    )
    cfg = RunConfig(
        model=model,
        train=TrainConfig(steps=100, global_batch=8, micro_batch=4, dtype="fp32"),
        data=DataConfig(context=256),
        optim=OptimConfig(bucket_mb=4.0),
        parallel=ParallelConfig(dp=2),
    )
    topology = Topology(dp=2)
    groups = Groups.connect(topology, rank, host="127.0.0.1", port=port, prefix="bench/run")
    tokens = torch.randint(0, 4096, (4, 257), generator=torch.Generator().manual_seed(rank))
    sides = {}
    for kind in ("overlapped", "at the end"):
        (stage,) = build_stages(cfg, topology, rank, groups, torch.device("cpu"), init=False)
        optimizer = Epso(
            [stage], layout_of(cfg, topology, rank), topology, rank, groups, cfg.optim,
            overlap=kind == "overlapped", timed=True,
        )  # fmt: skip
        optimizer.initialise(lambda param: initial_value(param, cfg))
        sides[kind] = (stage, optimizer)
    found: dict[str, list[float]] = {"hidden": [], "overlapped": [], "at the end": []}
    for _ in range(REPEATS):
        for kind, (stage, optimizer) in sides.items():
            optimizer.begin_step()
            loss = stage.loss(stage(tokens[:, :-1]), tokens[:, 1:]) / tokens.numel()
            barrier(groups.control)
            start = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            backward_end = time.perf_counter()
            optimizer.reducer.finish()
            found[kind].append(time.perf_counter() - start)
            if kind == "overlapped":
                first = min(interval[0] for interval in optimizer.reducer.intervals)
                last = max(interval[1] for interval in optimizer.reducer.intervals)
                found["hidden"].append((min(last, backward_end) - first) / (last - first))
    return found


if __name__ == "__main__":
    for line in run()["rows"]:
        print(line)
    os._exit(0)
