"""Tensor parallelism: full logits exist nowhere; the parallel cross-entropy and QK-norm equal the plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dist_helper import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.config.run import DataConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from mula_ray.model.layers import RMSNorm
from mula_ray.model.loss import LossHead
from mula_ray.parallel.groups import Groups
from mula_ray.parallel.tensor import VocabLossHead, WideRMSNorm
from mula_ray.plan.topology import Topology
from mula_ray.train.engine import Engine, MicroBatch

pytestmark = pytest.mark.dist
VOCAB, HIDDEN, TOKENS = 512, 16, 24


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return out


def _groups(rank: int, world: int, port: int) -> Groups:
    topology = Topology(tp=world)
    return Groups.connect(topology, rank, host="127.0.0.1", port=port, prefix="tensor/1", strict=True)


def _step(rank: int, world: int, port: int) -> int:
    groups = _groups(rank, world, port)
    config = RunConfig(
        model=ModelConfig(
            vocab_size=VOCAB, hidden=HIDDEN, layers=2, heads=4, moe=MoEConfig(experts=4, top_k=2, expert_width=8)
        ),
        train=TrainConfig(steps=1, global_batch=2, micro_batch=2, dtype="fp32"),
        data=DataConfig(context=128),
        optim=OptimConfig(bucket_mb=0.01),
        parallel=ParallelConfig(tp=world),
    )
    engine = Engine(config, groups.topology, rank, groups, "cpu")
    with LargestTensor() as largest:
        assert engine.step(0, [MicroBatch(torch.zeros(2, 129, dtype=torch.int64), torch.ones(2))]).finite
    return largest.most


def test_full_logits_are_never_materialised() -> None:
    """The largest tensor of a step is a rank's share of the logits: 256 tokens x 512 entries / 2."""
    assert run_ranks(_step, 2) == [2 * 128 * VOCAB // 2] * 2
    assert run_ranks(_step, 4) == [2 * 128 * VOCAB // 4] * 4


def _compare(rank: int, world: int, port: int) -> list[float]:
    groups = _groups(rank, world, port)
    assert groups.tp is not None
    generator = torch.Generator().manual_seed(1)
    errors = []

    def error(got: torch.Tensor, want: torch.Tensor) -> None:
        errors.append(((got - want).abs().max() / want.abs().max()).item())

    def share(whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.chunk(world, dim)[rank]

    whole = LossHead(ModelConfig(vocab_size=VOCAB, hidden=HIDDEN, layers=1, heads=2, ffn=8), None, torch.float32)
    torch.nn.init.normal_(whole.weight, generator=generator)
    hidden = (3 * torch.randn(2, TOKENS, HIDDEN, generator=generator)).requires_grad_()
    targets = torch.randint(0, VOCAB, (2, TOKENS), generator=generator)
    weight = torch.tensor([1.0, 0.0])
    want = whole.loss(hidden, targets, weight)
    want_hidden, want_weight = torch.autograd.grad(want, (hidden, whole.weight))
    part = LossHead(ModelConfig(vocab_size=VOCAB, hidden=HIDDEN, layers=1, heads=2, ffn=8), None, torch.float32)
    part.weight = torch.nn.Parameter(share(whole.weight.detach(), 0).clone())
    split = VocabLossHead(part, groups.tp)
    got = split.loss(hidden, targets, weight)
    got_hidden, got_weight = torch.autograd.grad(got, (hidden, split.weight))
    error(got, want)
    error(got_hidden, want_hidden)
    error(got_weight, share(want_weight, 0))

    norm = RMSNorm(32, 1e-5, None, torch.float32)
    torch.nn.init.normal_(norm.weight, generator=generator)
    x = torch.randn(3, 5, 32, generator=generator, requires_grad=True)
    upstream = torch.randn(3, 5, 32, generator=generator)
    want_x, want_scale = torch.autograd.grad(norm(x), (x, norm.weight), upstream)
    narrow = RMSNorm(32 // world, 1e-5, None, torch.float32)
    narrow.weight = torch.nn.Parameter(share(norm.weight.detach(), 0).clone())
    wide = WideRMSNorm(narrow, groups.tp)
    mine = share(x.detach(), 2).clone().requires_grad_()
    out = wide(mine)
    got_x, got_scale = torch.autograd.grad(out, (mine, wide.weight), share(upstream, 2))
    error(out, share(norm(x), 2))
    error(got_x, share(want_x, 2))
    error(got_scale, share(want_scale, 0))
    return errors


@pytest.mark.parametrize("world", [2, 4])
def test_parallel_loss_and_wide_norm_equal_the_plain_ones(world: int) -> None:
    for errors in run_ranks(_compare, world):
        assert max(errors) <= 1e-5, errors


def test_reference_of_the_loss() -> None:
    """The plain head is cross-entropy itself, so that the comparison above is with the truth."""
    head = LossHead(ModelConfig(vocab_size=VOCAB, hidden=HIDDEN, layers=1, heads=2, ffn=8), None, torch.float32)
    torch.nn.init.normal_(head.weight)
    hidden, targets = torch.randn(1, TOKENS, HIDDEN), torch.randint(0, VOCAB, (1, TOKENS))
    want = F.cross_entropy((hidden @ head.weight.t()).flatten(0, 1), targets.flatten(), reduction="sum")
    assert head.loss(hidden, targets).item() == pytest.approx(want.item(), rel=1e-5)
