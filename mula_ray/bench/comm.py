"""`mula-ray bench comm`: what groups and collectives cost here, against the other way to do the same.

- `groups-4`: all groups of dp 2 x ep 2, from a store that listens to a first all-reduce done, against torch's
  `init_process_group` + `new_group`;
- `reduce-scatter-*`: the backend's reduce-scatter against all-reduce + slice (`Group.whole_sums` follows it);
- `agreement-4`: the small all-reduce of a step.

Correctness first: both ways give the same bits.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mula_ray.bench.ranks import run_ranks
from mula_ray.bench.timing import Row, chosen, report, row
from mula_ray.parallel.backend import TCPStore
from mula_ray.parallel.collectives import all_reduce, all_reduce_async, barrier, reduce_scatter_async
from mula_ray.parallel.groups import Group, Groups
from mula_ray.plan.topology import Topology

REPEATS = 7
SIZES_MIB = (4, 32)


def run(cases: Sequence[str] | None = None) -> dict[str, Any]:
    """All cases, or those of `groups-4`, `reduce-scatter` and `agreement-4` that are in `cases`.

    Raises:
        UserError: an unknown case.
    """
    known = {"groups-4": _group_rows, "reduce-scatter": _reduce_scatter_rows, "agreement-4": _agreement_rows}
    names = chosen("comm", cases, tuple(known))
    return report("comm", [line for name in names for line in known[name]()], threads=1)


def timed(group: Group | None, body: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of `body` on all ranks of `group`, each repeat started together; the slowest rank counts."""
    seconds = []
    for _ in range(repeats + 1):
        barrier(group)
        start = time.perf_counter()
        body()
        barrier(group)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _group_rows() -> list[Row]:
    ours = statistics.median(max(run_ranks(_make_groups, 4)) for _ in range(REPEATS))
    torchs = statistics.median(max(run_ranks(_make_torch_groups, 4)) for _ in range(REPEATS))
    return [row("groups-4", "create", ours * 1e3, "ms", "torch new_group", torchs / ours)]


def _make_groups(rank: int, _world: int, port: int) -> float:
    start = time.perf_counter()
    groups = Groups.connect(Topology(dp=2, ep=2), rank, host="127.0.0.1", port=port, prefix="bench/0")
    all_reduce(torch.ones(1), groups.control)
    return time.perf_counter() - start


def _make_torch_groups(rank: int, world: int, port: int) -> float:
    start = time.perf_counter()
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]):
        dist.new_group(ranks)
    dist.all_reduce(torch.ones(1))
    return time.perf_counter() - start


def _reduce_scatter_rows() -> list[Row]:
    rows = []
    for world in (2, 4):
        (result, *_) = run_ranks(_reduce_scatter, world, timeout=120.0)
        for (size, dtype), (plain, whole) in result.items():
            case = f"reduce-scatter-{world}-{dtype}-{size}mib"
            rows.append(row(case, "all_reduce_and_slice", whole * 1e3, "ms", "reduce_scatter", plain / whole))
    return rows


def _reduce_scatter(rank: int, world: int, port: int) -> dict[tuple[int, str], tuple[float, float]]:
    groups = Groups.connect(Topology(dp=world), rank, host="127.0.0.1", port=port, prefix="bench/0")
    group = groups.ddp
    assert group is not None
    found = {}
    for size in SIZES_MIB:
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            count = size * 2**20 // dtype.itemsize
            data = torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)
            out, work = torch.empty(count // world, dtype=dtype), data.clone()
            reduce_scatter_async(out, data, group).wait()
            all_reduce_async(work, group).wait()
            assert torch.equal(out, work.chunk(world)[rank]), "both ways must give the same bits"
            work.zero_()
            plain = timed(groups.control, lambda o=out, d=data: reduce_scatter_async(o, d, group).wait())  # type: ignore[misc]
            whole = timed(groups.control, lambda w=work: all_reduce_async(w, group).wait())  # type: ignore[misc]
            found[size, name] = (plain, whole)
    return found


def _agreement_rows() -> list[Row]:
    (seconds, *_) = run_ranks(_agreement, 4)
    return [row("agreement-4", "all_reduce_200_fp64", seconds * 1e3, "ms")]


def _agreement(rank: int, _world: int, port: int) -> float:
    groups = Groups.connect(Topology(dp=4), rank, host="127.0.0.1", port=port, prefix="bench/0")
    vector = torch.zeros(200, dtype=torch.float64)
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        all_reduce(vector, groups.control)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    for line in run()["rows"]:
        print(line)
    os._exit(0)
