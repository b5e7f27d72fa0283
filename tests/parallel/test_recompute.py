"""Selective activation checkpointing: the parts asked for, the same bits, less memory, no extra routing."""

from __future__ import annotations

import pytest
import torch

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.model.aux import AuxSink
from mula_ray.model.layers import run_once
from mula_ray.model.transformer import Transformer
from mula_ray.parallel.recompute import apply_recompute, recomputed, saved_bytes

torch.set_num_threads(1)
MODEL = ModelConfig(vocab_size=64, hidden=32, layers=3, heads=2, moe=MoEConfig(experts=4, top_k=2, expert_width=16))


def stage(text: str) -> Transformer:
    torch.manual_seed(0)
    made = Transformer(MODEL)
    for param in made.parameters():
        torch.nn.init.normal_(param, std=0.1)
    apply_recompute(made, text, MODEL.layers)
    return made


def loss_of(made: Transformer, aux: AuxSink) -> torch.Tensor:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    return made.loss(made(tokens[:, :-1], aux), tokens[:, 1:]) + aux.loss(2, 32)


def test_only_the_parts_and_layers_asked_for() -> None:
    made = stage("norms+moe@1:3")
    layers = list(made.model.layers.values())
    assert [layer.norm_region is recomputed for layer in layers] == [True] * 3
    assert [layer.attention_region is run_once for layer in layers] == [True] * 3
    assert [layer.mlp.region is recomputed for layer in layers] == [False, True, True]  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["norms", "attention", "moe", "norms+attention+moe"])
def test_same_bits_less_memory_routed_once(text: str) -> None:
    plain, saving = stage("none"), stage(text)
    kept = [saved_bytes(lambda s=s: loss_of(s, AuxSink(MODEL)), s.parameters()) for s in (plain, saving)]  # type: ignore[misc]
    assert kept[1] < kept[0]
    sinks = [AuxSink(MODEL), AuxSink(MODEL)]
    for made, sink in zip((plain, saving), sinks, strict=True):
        loss_of(made, sink).backward()
    assert len(sinks[1].layers) == MODEL.layers, "routing is not run again in backward"
    for (name, one), other in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad), name


def test_nothing_is_kept_without_gradients() -> None:
    with torch.no_grad():
        assert torch.isfinite(loss_of(stage("moe"), AuxSink(MODEL)))
