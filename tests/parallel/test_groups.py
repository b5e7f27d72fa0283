"""Groups: what exists, who is in it, bounded building that names who is missing; the strict wrapper; the checker."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helper import RankFailed, run_ranks

from mula_ray.parallel.collectives import (
    CollectiveError,
    all_gather,
    all_reduce,
    all_to_all_async,
    barrier,
    broadcast,
    copy_in,
    gather_rows,
    join_rows,
    reduce_rows,
    reduce_scatter,
    split_rows,
    sum_out,
)
from mula_ray.parallel.groups import Call, Groups, NoGroups
from mula_ray.parallel.observe import Recorder, Traffic, first_mismatch, wire_bytes
from mula_ray.parallel.strict import NotInOneCCL, StrictGroup
from mula_ray.plan.topology import Topology

pytestmark = pytest.mark.dist


def connect(topology: Topology, rank: int, port: int, **options: Any) -> Groups:
    return Groups.connect(topology, rank, host="127.0.0.1", port=port, prefix="run/0", **options)


def facts(rank: int, _world: int, port: int, topology: Topology) -> dict[str, Any]:
    groups = connect(topology, rank, port, strict=True)
    kinds = {kind: getattr(groups, kind) for kind in ("ddp", "edp", "dp", "ep", "tp", "pp")}
    found = {kind: None if group is None else group.ranks for kind, group in kinds.items()}
    objects = len({id(group.pg) for group in groups.all()})
    groups.close()
    return {**found, "objects": objects}


def test_only_groups_of_several_ranks_exist_and_equal_ones_are_shared() -> None:
    for rank, found in enumerate(run_ranks(facts, 4, Topology(dp=2, ep=2))):
        assert found["tp"] is found["pp"] is None
        assert found["ddp"] == (0, 1, 2, 3)
        assert found["edp"] == found["dp"] == (rank % 2, rank % 2 + 2)
        assert found["objects"] == 4, "control, ddp, edp (shared with dp), ep"


def test_a_world_of_one_needs_no_store() -> None:
    groups = Groups(Topology(), 0, None)
    assert groups.control is groups.ddp is groups.ep is None
    assert all_reduce(torch.ones(2), groups.control).tolist() == [1.0, 1.0]
    barrier(groups.control)
    groups.close()


def lonely(rank: int, _world: int, port: int) -> tuple[str, float]:
    if rank == 2:
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(NoGroups) as caught:
        connect(Topology(dp=3), rank, port, timeout_s=1.5)
    return str(caught.value), time.monotonic() - start


def test_missing_ranks_are_named_within_the_bound() -> None:
    for message, seconds in run_ranks(lonely, 3)[:2]:
        assert "ranks [2] did not come" in message
        assert seconds < 8


def test_a_store_that_does_not_listen_is_named() -> None:
    with pytest.raises(NoGroups, match=r"cannot reach the store at 127\.0\.0\.1:9 within 1 s"):
        Groups.connect(Topology(dp=2), 0, host="127.0.0.1", port=9, prefix="r/0", timeout_s=1.0)


def late(rank: int, _world: int, port: int) -> str:
    groups = connect(Topology(dp=2), rank, port, timeout_s=1.0)
    if rank == 1:
        time.sleep(3)
        return ""
    with pytest.raises(CollectiveError) as caught:
        all_reduce(torch.ones(1), groups.ddp)
    return str(caught.value)


def test_a_collective_is_bounded_and_says_where() -> None:
    assert "all-reduce in group ddp of ranks (0, 1) failed on rank 0" in run_ranks(late, 2)[0]


def values(rank: int, world: int, port: int) -> list[Any]:
    """Forward and backward of the collectives with autograd on every rank."""
    groups = connect(Topology(dp=world), rank, port, strict=True)
    group = groups.ddp
    assert group is not None
    out: list[Any] = []
    for fn, each in ((gather_rows, 2), (reduce_rows, 4), (copy_in, 2), (sum_out, 2), (split_rows, 4), (join_rows, 2)):
        rows = each if each == 2 else 2 * world
        x = (torch.arange(rows * 3.0).view(rows, 3) + 10 * rank).requires_grad_()
        y = fn(x, group)
        y.backward(torch.full_like(y, rank + 1.0))
        assert x.grad is not None
        out.append((fn.__name__, y.detach().clone(), x.grad.clone()))
    out.append(("broadcast", broadcast(torch.full((2,), float(rank)), 1, group), None))
    a2a = torch.empty(world * 2)
    all_to_all_async(a2a, torch.arange(world * 2.0) + 100 * rank, group).wait()
    out.append(("all_to_all", a2a, None))
    return out


def test_values_and_gradients_of_the_collectives() -> None:
    first, second = ({name: (y, grad) for name, y, grad in rank} for rank in run_ranks(values, 2))
    x0, x1 = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 10
    assert torch.equal(first["gather_rows"][0], torch.cat([x0, x1]))
    assert (first["gather_rows"][1] == 3).all()
    whole = torch.arange(12.0).view(4, 3)
    assert torch.equal(second["reduce_rows"][0], (2 * whole + 10)[2:])
    assert torch.equal(first["reduce_rows"][1], torch.tensor([[1.0], [1.0], [2.0], [2.0]]).expand(4, 3))
    assert (first["copy_in"][1] == 3).all()
    assert torch.equal(first["sum_out"][0], x0 + x1)
    assert (second["sum_out"][1] == 2).all()
    assert torch.equal(second["split_rows"][0], (whole + 10)[2:])
    assert torch.equal(second["split_rows"][1], torch.tensor([[1.0], [1.0], [2.0], [2.0]]).expand(4, 3))
    assert torch.equal(first["join_rows"][0], torch.cat([x0, x1]))
    assert (second["join_rows"][1] == 2).all()
    assert first["broadcast"][0].tolist() == [1.0, 1.0]
    assert first["all_to_all"][0].tolist() == [0.0, 1.0, 100.0, 101.0]


def both_ways(rank: int, world: int, port: int, dtype: torch.dtype) -> bool:
    data = torch.randn(world * 1000, generator=torch.Generator().manual_seed(rank)).to(dtype)
    sums = []
    for number, whole in enumerate((True, False)):
        groups = Groups.connect(
            Topology(dp=world), rank, host="127.0.0.1", port=port, prefix=f"r/{number}", whole_sums=whole
        )
        sums.append(reduce_scatter(data, groups.ddp))
    return torch.equal(*sums)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_both_ways_to_reduce_scatter_give_the_same_bits(world: int) -> None:
    assert all(run_ranks(both_ways, world, torch.float32))
    assert all(run_ranks(both_ways, world, torch.bfloat16))


def refused(rank: int, _world: int, port: int) -> list[str]:
    groups = connect(Topology(dp=2), rank, port, strict=True)
    group = groups.ddp
    assert group is not None
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    calls = [
        lambda: group.pg.abort(),
        lambda: group.pg.allreduce([torch.ones(1)], options),
        lambda: group.pg.send([torch.ones(1)], 1, 0),
        lambda: group.pg.recv([torch.ones(1)], 1, 0),
        lambda: group.pg.all_to_all_single(torch.empty(0), torch.empty(0), [], []),
        lambda: group.pg.all_to_all_single(torch.empty(3), torch.empty(3), [1, 2], [2, 1]),
        lambda: all_reduce(torch.ones(2, dtype=torch.int16), group),
        lambda: all_gather(torch.ones(2, dtype=torch.bool), group),
        lambda: group.pg.allgather([[torch.ones(1)] * 2], [torch.ones(1)]),
        lambda: StrictGroup(group.pg, groups._store, rank, 2, "ddp/0-1"),
    ]
    messages = []
    for call in calls:
        with pytest.raises(NotInOneCCL) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_strict_refuses_what_oneccl_lacks() -> None:
    words = ["abort", "AVG", "send", "receive", "empty", "unequal", "int16", "bool", "allgather", "again"]
    for message, word in zip(run_ranks(refused, 2)[0], words, strict=True):
        assert word in message


def failing(rank: int, _world: int, port: int) -> None:
    groups = connect(Topology(dp=3), rank, port, timeout_s=20.0)
    if rank == 1:
        raise ArithmeticError("the real one")
    all_reduce(torch.ones(1), groups.ddp)


def test_helper_shows_the_real_failure_and_ends_the_rest() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match="the real one"):
        run_ranks(failing, 3)
    assert time.monotonic() - start < 15


def test_checker_finds_the_first_difference() -> None:
    ranks = (0, 1)
    one = [Call("all_reduce", "ddp", ranks, torch.float32, 4), Call("all_gather", "ddp", ranks, torch.float32, 8)]
    assert first_mismatch([one, list(one)]) is None
    other = [one[0], Call("all_gather", "ddp", ranks, torch.float32, 9)]
    found = first_mismatch([one, other])
    assert found is not None
    assert "call 1" in found
    assert "group ddp" in (first_mismatch([one, one[:1]]) or "")


def test_traffic_counts_ring_bytes() -> None:
    ranks = (0, 1, 2, 3)
    assert wire_bytes(Call("all_reduce", "ddp", ranks, torch.float32, 100)) == 600
    assert wire_bytes(Call("reduce_scatter", "ddp", ranks, torch.bfloat16, 100)) == 150
    traffic, recorder = Traffic(), Recorder()
    for observer in (traffic, recorder):
        observer.call(Call("all_gather", "ep", ranks, torch.float32, 100))
        observer.call(Call("all_reduce", "control", ranks, torch.float64, 100))
    assert traffic.total() == 300
    assert len(recorder.calls) == 2
