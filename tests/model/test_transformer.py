"""The whole model and stages of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.model import loss as loss_module
from mula_ray.model.aux import AuxSink
from mula_ray.model.init import init_param
from mula_ray.model.loss import linear_cross_entropy
from mula_ray.model.transformer import Transformer
from mula_ray.plan.layout import param_specs

MOE = ModelConfig(
    vocab_size=96, hidden=32, layers=4, heads=2, moe=MoEConfig(experts=8, top_k=2, expert_width=16), init_std=0.1
)
DENSE = ModelConfig(vocab_size=96, hidden=32, layers=4, heads=2, ffn=48, norm="layernorm", qk_norm=False)


def filled(model: Transformer, cfg: ModelConfig) -> Transformer:
    specs = {spec.name: spec for spec in param_specs(cfg)}
    with torch.no_grad():
        for name, param in model.named_parameters():
            spec = specs[name]
            whole = (0,) * len(spec.shape)
            param.copy_(init_param(name, 0, spec.shape, whole, spec.shape, spec.init, cfg.init_std))
    return model


def tokens(batch: int, seq: int) -> Tensor:
    return torch.randint(0, 96, (batch, seq), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("cfg", [MOE, DENSE], ids=["moe", "dense"])
def test_parameters_are_those_of_the_table(cfg: ModelConfig) -> None:
    model = Transformer(cfg, device=torch.device("meta"))
    ours = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    assert sorted(ours) == sorted((spec.name, spec.shape) for spec in param_specs(cfg))


@pytest.mark.parametrize("cfg", [MOE, DENSE], ids=["moe", "dense"])
def test_stages_make_up_the_whole(cfg: ModelConfig) -> None:
    whole = filled(Transformer(cfg), cfg)
    first = filled(Transformer(cfg, 0, 1, has_head=False), cfg)
    last = filled(Transformer(cfg, 1, 4, has_embed=False), cfg)
    x, aux, parts = tokens(2, 12), AuxSink(cfg), AuxSink(cfg)
    expected = whole(x, aux)
    assert torch.equal(last(first(x, parts), parts), expected)
    assert torch.equal(aux.loss(2, 24), parts.loss(2, 24))


def step(model: Transformer, x: Tensor) -> list[Tensor]:
    aux = AuxSink(model.cfg)
    hidden = model(x[:, :-1], aux)
    (model.loss(hidden, x[:, 1:]) + aux.loss(1, 1)).backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad(set_to_none=False)
    return [hidden.detach(), *grads]


def test_two_runs_are_bit_identical() -> None:
    model, x = filled(Transformer(MOE), MOE), tokens(3, 30)
    assert all(torch.equal(a, b) for a, b in zip(step(model, x), step(model, x), strict=True))


def test_bf16_is_close_to_fp32() -> None:
    x = tokens(2, 24)
    wide, narrow = filled(Transformer(MOE), MOE), filled(Transformer(MOE, dtype=torch.bfloat16), MOE)
    for a, b in zip(step(wide, x), step(narrow, x), strict=True):
        assert b.dtype == torch.bfloat16
        assert (a - b.float()).norm() <= 0.15 * a.norm()


def test_the_future_is_not_seen() -> None:
    model, x = filled(Transformer(MOE), MOE), tokens(1, 16)
    changed = x.clone()
    changed[0, 10:] = 0
    torch.testing.assert_close(model(x)[:, :10], model(changed)[:, :10])


def test_documents_do_not_see_each_other() -> None:
    model, x = filled(Transformer(MOE), MOE), tokens(1, 16)
    starts = torch.tensor([[0] * 6 + [6] * 10])
    together = model(x, doc_starts=starts)
    torch.testing.assert_close(together[:, :6], model(x[:, :6]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[:, 6:], model(x[:, 6:]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_equals_torchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_CHUNK_LOGITS_CPU", 1)  # chunks of 256 rows
    gen = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(700, 16, generator=gen), torch.randn(50, 16, generator=gen)
    target, scale = torch.randint(0, 50, (700,), generator=gen), torch.rand(700, generator=gen)
    ours = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    loss = 0.3 * linear_cross_entropy(*ours, target, scale)
    expected = 0.3 * (F.cross_entropy(theirs[0] @ theirs[1].t(), target, reduction="none") * scale).sum()
    loss.backward()
    expected.backward()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert abs(loss.item() - expected.item()) <= tolerance * expected.item()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad.double() - b.grad).norm() <= tolerance * b.grad.norm()


def test_empty_samples_weigh_nothing() -> None:
    model, x = filled(Transformer(MOE), MOE), tokens(2, 12)
    hidden = model(x[:, :-1])
    both = model.loss(hidden, x[:, 1:], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(both, model.loss(hidden[:1], x[:1, 1:]))
