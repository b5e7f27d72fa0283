"""The model against transformers' OLMoE and OLMo: same weights, same logits, loss and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mula_ray.config.model import ModelConfig, MoEConfig, RouterConfig
from mula_ray.model.aux import AuxSink
from mula_ray.model.transformer import Transformer

transformers = pytest.importorskip("transformers", reason="parity needs the hf extra")
VOCAB, HIDDEN, HEADS, LAYERS, BATCH, SEQ = 160, 64, 4, 3, 3, 24
TOLERANCE = 1e-5


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(3))


def olmoe(norm_topk: bool, clip: float | None, coef: float) -> nn.Module:
    config = transformers.OlmoeConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_experts=8, num_experts_per_tok=3, norm_topk_prob=norm_topk, clip_qkv=clip, router_aux_loss_coef=coef,
        output_router_logits=True, initializer_range=0.15, attn_implementation="eager", tie_word_embeddings=False,
        pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.OlmoeForCausalLM(config)


def ours(cfg: ModelConfig, reference: nn.Module) -> Transformer:
    model = Transformer(cfg)
    state = {name: p.detach().clone() for name, p in reference.named_parameters()}
    for name, p in state.items():  # norms away from 1, so that their gradients and products are tested too
        if "norm" in name:
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
            reference.get_parameter(name).data.copy_(p)
    model.load_state_dict(state)
    return model


def compare_gradients(model: nn.Module, reference: nn.Module) -> None:
    theirs = dict(reference.named_parameters())
    worst = {name: relative(p.grad, theirs[name].grad) for name, p in model.named_parameters()}
    assert len(worst) == len(theirs)
    assert max(worst.values()) <= TOLERANCE, worst


@pytest.mark.parametrize("backend", ["classic", "reference", "auto"])
@pytest.mark.parametrize(("norm_topk", "clip"), [(False, None), (True, 0.6)])
def test_olmoe(backend: str, norm_topk: bool, clip: float | None) -> None:
    coef = 0.05
    theirs = olmoe(norm_topk, clip, coef)
    cfg = ModelConfig(
        vocab_size=VOCAB, hidden=HIDDEN, layers=LAYERS, heads=HEADS, clip_qkv=clip,
        moe=MoEConfig(experts=8, top_k=3, expert_width=48, backend=backend),
        router=RouterConfig(balance="hf", balance_coef=coef, z_coef=0.0, norm_topk_prob=norm_topk),
    )  # fmt: skip
    model = ours(cfg, theirs)
    batch = tokens()
    out = theirs(input_ids=batch[:, :-1])
    logits = out.logits
    theirs_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + coef * out.aux_loss
    theirs_loss.backward()

    aux = AuxSink(cfg)
    hidden = model(batch[:, :-1], aux)
    count = BATCH * SEQ
    loss = model.loss(hidden, batch[:, 1:]) / count + aux.loss(BATCH, count)
    loss.backward()
    assert relative(model.logits(hidden), logits) <= TOLERANCE
    assert abs(loss.item() - theirs_loss.item()) <= TOLERANCE * theirs_loss.item()
    compare_gradients(model, theirs)


def test_olmo_dense() -> None:
    config = transformers.OlmoConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        tie_word_embeddings=False, initializer_range=0.15, attn_implementation="eager",
        pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.OlmoForCausalLM(config)
    cfg = ModelConfig(
        vocab_size=VOCAB, hidden=HIDDEN, layers=LAYERS, heads=HEADS, ffn=96, norm="layernorm", qk_norm=False
    )
    model = ours(cfg, theirs)
    batch = tokens()
    logits = theirs(input_ids=batch[:, :-1]).logits
    theirs_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    theirs_loss.backward()
    hidden = model(batch[:, :-1])
    loss = model.loss(hidden, batch[:, 1:]) / (BATCH * SEQ)
    loss.backward()
    assert relative(model.logits(hidden), logits) <= TOLERANCE
    assert abs(loss.item() - theirs_loss.item()) <= TOLERANCE * theirs_loss.item()
    compare_gradients(model, theirs)
