"""One rank of EPSO is torch.optim.AdamW on fp32 masters, bit for bit."""

from __future__ import annotations

import pytest
import torch

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.config.run import DataConfig, OptimConfig, RunConfig, TrainConfig
from mula_ray.optim.epso import Epso
from mula_ray.parallel.apply import DTYPES, build_stages, initial_value, layout_of
from mula_ray.parallel.groups import Groups
from mula_ray.plan.topology import Topology

torch.set_num_threads(1)


def config(dtype: str, **optim: object) -> RunConfig:
    model = ModelConfig(
        vocab_size=101, hidden=24, layers=2, heads=2, moe=MoEConfig(experts=3, top_k=2, expert_width=10)
    )
    return RunConfig(
        model=model,
        train=TrainConfig(steps=10, global_batch=4, dtype=dtype),  # type: ignore[arg-type]
        data=DataConfig(context=8),
        optim=OptimConfig(bucket_mb=0.003, **optim),  # type: ignore[arg-type]
    )


def single(cfg: RunConfig) -> tuple[Epso, torch.nn.Module]:
    topology = Topology()
    groups = Groups(topology, 0, None)
    stages = build_stages(cfg, topology, 0, groups, torch.device("cpu"), init=False)
    optimizer = Epso(stages, layout_of(cfg, topology, 0), topology, 0, groups, cfg.optim, dtype=DTYPES[cfg.train.dtype])
    optimizer.initialise(lambda param: initial_value(param, cfg))
    return optimizer, stages[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [True, False])
def test_same_bits_as_torch(dtype: str, fused: bool) -> None:
    cfg = config(dtype, clip=1e9, weight_decay=0.1)
    ours, stage = single(cfg)
    names = [name for name, _ in stage.named_parameters()]
    masters = {p.spec.name: torch.nn.Parameter(initial_value(p, cfg)) for p in layout_of(cfg, Topology(), 0)[0]}
    decayed = [masters[n] for n in names if not n.endswith("norm.weight")]
    plain = [masters[n] for n in names if n.endswith("norm.weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, fused=fused)
    generator = torch.Generator().manual_seed(1)
    for step in range(7):
        ours.begin_step()
        for name, param in stage.named_parameters():
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            assert param.grad is not None
            param.grad.copy_(grad)
            masters[name].grad = grad.float()
        for group in theirs.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        outcome = ours.finish(step, 1e-3 * (step + 1))
        theirs.step()
        assert outcome.finite
    for piece, value in ours.pieces():
        if piece.kind == "master":
            want = masters[piece.name].detach().reshape(-1)[piece.start : piece.stop]
            if fused:
                assert torch.equal(value, want), piece.name
            else:
                torch.testing.assert_close(value, want, rtol=1e-6, atol=1e-7)
    for name, param in stage.named_parameters():
        if fused:
            assert torch.equal(param.detach(), masters[name].detach().to(param.dtype)), name


def test_norm_and_clip_follow_torch() -> None:
    cfg = config("fp32", clip=0.5)
    ours, stage = single(cfg)
    ours.begin_step()
    params = list(stage.parameters())
    for at, param in enumerate(params):
        assert param.grad is not None
        param.grad.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(at)))
    want = torch.nn.utils.get_total_norm([p.grad for p in params])
    assert float(ours.reduce().sqrt()) == pytest.approx(float(want), rel=1e-6)


def test_non_finite_step_changes_nothing() -> None:
    ours, stage = single(config("bf16"))
    live = [value for _, value in ours.pieces()] + [param.detach() for param in stage.parameters()]
    before = [(value.clone(), value) for value in live]
    ours.begin_step()
    grad = next(iter(stage.parameters())).grad
    assert grad is not None
    grad.view(-1)[5] = float("nan")
    assert not ours.finish(0, 1e-3).finite
    assert all(torch.equal(old, new) for old, new in before)
