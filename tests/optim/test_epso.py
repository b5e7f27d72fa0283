"""EPSO's reduction over ranks: buckets leave during backward, in one order, and what got no gradient goes too."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from dist_helper import run_ranks
from torch import nn

from mula_ray.config.run import OptimConfig
from mula_ray.optim.epso import Epso, clip_factor
from mula_ray.optim.reduce import owned_grad, sum_of_squares
from mula_ray.optim.schedule import learning_rate
from mula_ray.optim.zero1 import zero1_sharding
from mula_ray.parallel.collectives import all_reduce
from mula_ray.parallel.groups import Groups
from mula_ray.parallel.observe import Recorder, first_mismatch
from mula_ray.plan.layout import LocalParam, ParamSpec
from mula_ray.plan.topology import Topology

WIDTH, DEPTH = 16, 6


class Tower(nn.Module):
    """A stack of square linear maps; the one named `idle` takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(DEPTH))
        self.idle = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.maps:
            x = torch.tanh(layer(x))
        return x


def layout() -> list[LocalParam]:
    names = ["idle.weight"] + [f"maps.{n}.weight" for n in range(DEPTH)]
    specs = [ParamSpec(name, (WIDTH, WIDTH), "dense", "layer", n) for n, name in enumerate(names)]
    return [LocalParam(spec, (0, 0), spec.shape) for spec in specs]


def value(param: LocalParam) -> torch.Tensor:
    assert param.spec.layer is not None
    generator = torch.Generator().manual_seed(param.spec.layer)
    return torch.randn(param.shape, generator=generator) / WIDTH**0.5


def step_once(rank: int, world: int, port: int, overlap: bool) -> dict[str, Any]:
    topology, recorder = Topology(dp=world), Recorder()
    groups = Groups.connect(
        topology, rank, host="127.0.0.1", port=port, prefix="r/0", strict=True, observers=(recorder,)
    )
    tower = Tower()
    cfg = OptimConfig(bucket_mb=WIDTH * WIDTH * 4 / 2**20, clip=0.5)
    optimizer = Epso([tower], [layout()], topology, rank, groups, cfg, overlap=overlap, timed=True)
    optimizer.initialise(value)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
    in_backward = 0
    for step in range(2):
        optimizer.begin_step(micro_batches=2)
        for half in x.chunk(2):
            tower(half).square().sum().backward()
            in_backward += optimizer.reducer._next
        outcome = optimizer.finish(step, 1e-2, scale=0.25)
    weights = torch.cat([param.detach().view(-1) for param in tower.parameters()])
    return {"sent": in_backward, "norm": outcome.grad_norm, "weights": weights, "calls": recorder.calls}


def plain(world: int) -> tuple[torch.Tensor, float]:
    tower = Tower()
    for param in layout():
        tower.get_submodule(param.spec.name.rpartition(".")[0]).weight = nn.Parameter(value(param))
    optimizer = torch.optim.AdamW(
        tower.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    norm = 0.0
    for _ in range(2):
        optimizer.zero_grad()
        for rank in range(world):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
            (tower(x).square().sum() * 0.25).backward()
        tower.idle.weight.grad = torch.zeros(WIDTH, WIDTH)
        norm = float(nn.utils.clip_grad_norm_(tower.parameters(), 0.5))
        optimizer.step()
    return torch.cat([param.detach().view(-1) for param in tower.parameters()]), norm


@pytest.mark.dist
@pytest.mark.parametrize("overlap", [True, False])
def test_reduction_runs_behind_backward_in_one_order(overlap: bool) -> None:
    ranks = run_ranks(step_once, 3, overlap)
    weights, norm = plain(3)
    for rank in ranks:
        assert (rank["sent"] >= DEPTH) == overlap, "buckets of the last layers leave before backward ends"
        assert torch.equal(rank["weights"], ranks[0]["weights"])
        assert rank["norm"] == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close(rank["weights"], weights, rtol=1e-5, atol=1e-6)
    assert first_mismatch([rank["calls"] for rank in ranks]) is None


def partial_sums(rank: int, _world: int, port: int) -> dict[str, Any]:
    """dp 2 x tp 2: `idle` has partial sums over TP, everything else the same gradient on both TP ranks."""
    topology = Topology(dp=2, tp=2)
    groups = Groups.connect(topology, rank, host="127.0.0.1", port=port, prefix="r/0", strict=True)
    params = [LocalParam(replace(p.spec, tp_partial=p.spec.name == "idle.weight"), p.offset, p.shape) for p in layout()]
    tower = Tower()
    optimizer = Epso([tower], [params], topology, rank, groups, OptimConfig(bucket_mb=0.001))
    optimizer.initialise(value)
    optimizer.begin_step()
    at = topology.coords(rank)
    for name, param in tower.named_parameters():
        assert param.grad is not None
        param.grad.fill_(1.0 + at.dp + (10.0 * (at.tp + 1) if name == "idle.weight" else 0.0))
    squared = float(all_reduce(optimizer.reduce().reshape(1), groups.control))
    values = {}
    family = optimizer.families[0]
    for segment in family.segments:
        bucket = family.plan.buckets[segment.bucket]
        grad = owned_grad(family, bucket, torch.float32)[segment.shard - family.own(bucket)[1].start]
        values[segment.slot.param.spec.name] = float(grad)
    return {"squared": squared, "values": values}


@pytest.mark.dist
def test_partial_sums_over_tp_are_added_and_replicas_counted_once() -> None:
    size = WIDTH * WIDTH
    for rank in run_ranks(partial_sums, 4):
        for name, got in rank["values"].items():
            assert got == (66.0 if name == "idle.weight" else 3.0), name
        assert rank["squared"] == pytest.approx(size * (66.0**2 + DEPTH * 3.0**2))


def test_schedule_warms_up_decays_and_stays() -> None:
    cfg = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [learning_rate(step, cfg, 20) for step in range(40)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[4:])), "never rises again"
    assert rates[20:] == [0.1] * 20
    assert learning_rate(12, cfg, 20) == pytest.approx(0.55)


@pytest.mark.parametrize("numel", [0, 1, 1023, 1025, (1 << 22) + 777])
def test_the_norm_does_not_depend_on_length_or_cut(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    values[: numel // 1000] *= 1000.0
    exact = float(values.double().square().sum())
    bound = 2e-6 if numel < 10_000 else 5e-8  # short ones are a single fp32 sum
    assert float(sum_of_squares([values])) == pytest.approx(exact, rel=bound)
    parts = values.tensor_split([numel // 3, numel // 2])
    assert float(sum_of_squares(parts)) == pytest.approx(exact, rel=bound)


def test_clip_follows_torch() -> None:
    assert clip_factor(0.3, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)


def test_zero1_shards_dense_state_over_dp_alone() -> None:
    topology, groups = Topology(dp=2, ep=4), Groups(Topology(), 0, None)
    assert zero1_sharding("dense", topology, groups).shards == 2
    assert zero1_sharding("expert", topology, groups).shards == 2
