"""Dispatchers against the local one: same layer output and gradients, for any routing, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist_helper import run_ranks

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.model.moe import MoE
from mula_ray.parallel.dispatch import AllGatherDispatcher, AllToAllDispatcher
from mula_ray.parallel.groups import Groups
from mula_ray.plan.topology import Topology

pytestmark = pytest.mark.dist
EXPERTS, HIDDEN, TOKENS = 12, 16, 24
MODEL = ModelConfig(
    vocab_size=8, hidden=HIDDEN, layers=1, heads=2, moe=MoEConfig(experts=EXPERTS, top_k=3, expert_width=8)
)


def inputs(world: int, routing: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weights, ids, output gradient of all ranks' tokens."""
    generator = torch.Generator().manual_seed(5)
    tokens = TOKENS * world
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    weights = torch.rand(tokens, 3, generator=generator)
    grad = torch.randn(tokens, HIDDEN, generator=generator)
    if routing == "one":
        ids = torch.tensor([0, 1, 2]).expand(tokens, 3)
    else:
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:3] for _ in range(tokens)])
    return hidden, weights, ids, grad


def layer(first: int, count: int) -> MoE:
    made = MoE(MODEL, 0, 0, None, torch.float32)
    generator = torch.Generator().manual_seed(9)
    for name in ("gate_up_proj", "down_proj"):
        whole = torch.randn(getattr(made.experts, name).shape, generator=generator) * 0.2
        setattr(made.experts, name, torch.nn.Parameter(whole[first : first + count].clone()))
    return made


def run_layer(
    made: MoE, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    out = made.after_routing(hidden, weights, ids)
    out.backward(grad)
    assert hidden.grad is not None
    assert weights.grad is not None
    found = {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad}
    for name in ("gate_up_proj", "down_proj"):
        param = getattr(made.experts, name)
        found[name] = torch.zeros_like(param) if param.grad is None else param.grad
    return found


def on_rank(rank: int, world: int, port: int, routing: str) -> list[dict[str, Any]]:
    groups = Groups.connect(
        Topology(ep=world), rank, host="127.0.0.1", port=port, prefix="r/0", strict=True, timeout_s=30.0
    )
    assert groups.ep is not None
    own = slice(rank * TOKENS, (rank + 1) * TOKENS)
    share = EXPERTS // world
    results = []
    for dispatcher in (
        AllGatherDispatcher(groups.ep, EXPERTS, torch.float32),
        AllToAllDispatcher(groups.ep, EXPERTS),
    ):
        made = layer(rank * share, share)
        made.dispatcher = dispatcher
        results.append(run_layer(made, *(x[own] for x in inputs(world, routing))))
    return results


@pytest.mark.parametrize("routing", ["random", "one"])
@pytest.mark.parametrize("world", [2, 3])
def test_same_as_all_experts_on_one_rank(world: int, routing: str) -> None:
    want = run_layer(layer(0, EXPERTS), *inputs(world, routing))
    ranks = run_ranks(on_rank, world, routing)
    for which in range(2):
        for name, whole in want.items():
            got = torch.cat([rank[which][name] for rank in ranks])
            torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
