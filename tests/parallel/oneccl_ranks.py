"""Body of one rank of test_oneccl.py: python oneccl_ranks.py RANK WORLD STORE_FILE."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from mula_ray.parallel.oneccl import register


def main(rank: int, world: int, store_file: str) -> None:
    """Run every collective over oneCCL and over gloo and compare."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_file, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    group = dist.new_group(backend=register(), timeout=timedelta(seconds=60))
    for dtype in (torch.float32, torch.bfloat16):
        ours, gloo = (torch.arange(8, dtype=dtype) + rank for _ in range(2))
        dist.all_reduce(ours, group=group)
        dist.all_reduce(gloo)
        assert torch.equal(ours, gloo)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        ours, gloo = (torch.arange(8.0) * (-1) ** rank + rank for _ in range(2))
        dist.all_reduce(ours, op, group=group)
        dist.all_reduce(gloo, op)
        assert torch.equal(ours, gloo)
    each_rank = torch.arange(world)
    for dtype in (torch.float32, torch.uint8):
        parts = [torch.empty(4, dtype=dtype) for _ in range(world)]
        dist.all_gather(parts, torch.full((4,), rank, dtype=dtype), group=group)
        assert torch.equal(torch.stack(parts)[:, 0].long(), each_rank)
    out, spread = torch.empty(4), torch.arange(world * 4.0)
    group.reduce_scatter_single(out, spread).wait()
    assert torch.equal(out, world * spread.view(world, 4)[rank])
    out = torch.empty(world * 2)
    dist.all_to_all_single(out, torch.full((world * 2,), float(rank)), group=group)
    assert torch.equal(out.view(world, 2)[:, 0].long(), each_rank)
    root = torch.full((5,), float(rank))
    dist.broadcast(root, 1, group=group)
    assert root.eq(1).all()
    work = dist.all_reduce(torch.ones(1_000_000), group=group, async_op=True)
    work.wait()
    pairs = [dist.new_group([first, first + 1], backend=register()) for first in range(0, world, 2)]
    ones = torch.ones(3)
    dist.all_reduce(ones, group=pairs[rank // 2])
    assert ones.eq(2).all()
    for bad, error in ((torch.zeros(4, dtype=torch.int16), TypeError), (torch.zeros(4, 4).t()[1:], ValueError)):
        try:
            dist.all_reduce(bad, group=group)
        except error:
            continue
        raise AssertionError(f"{bad.dtype} {bad.stride()} was accepted")
    dist.barrier()
    print("all equal", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
