"""The decoder-only transformer: OLMoE-shaped with experts, OLMo-shaped without. Or a stage of it.

Shape suffixes: B sequences, S tokens of a sequence, H hidden.

Read in this order: this file, `layers.py`, `moe.py`, `router.py`, `loss.py`, `aux.py`. Nothing here knows that there is
more than one device: `parallel/apply.py` narrows parameters and sets dispatchers and regions from outside. Parameter
names are the global names of `plan/layout.py` (Hugging Face's OLMoE names), also in a stage.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from mula_ray.config.model import ModelConfig
from mula_ray.model.aux import AuxSink
from mula_ray.model.layers import Attention, DenseFfn, Region, Rope, make_norm, run_once
from mula_ray.model.loss import LossHead
from mula_ray.model.moe import MoE
from mula_ray.ops.runtime import Runtime


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)), the FFN dense or a mixture of experts.

    `norm_region` and `attention_region` say how these parts are run (see `layers.Region`); the MoE has its own.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        layer: int,
        rank: int,
        device: torch.device | None,
        dtype: torch.dtype,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = make_norm(cfg, device, dtype)
        self.self_attn = Attention(cfg, device, dtype)
        self.post_attention_layernorm = make_norm(cfg, device, dtype)
        self.mlp: nn.Module = (
            DenseFfn(cfg, device, dtype) if cfg.moe is None else MoE(cfg, layer, rank, device, dtype, runtime)
        )
        self.norm_region: Region = run_once
        self.attention_region: Region = run_once

    def forward(self, hidden_BSH: Tensor, rope: Rope, weight_B: Tensor | None, aux: AuxSink | None) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        normed_BSH = self.norm_region(self.input_layernorm, hidden_BSH)
        hidden_BSH = hidden_BSH + self.attention_region(lambda x: self.self_attn(x, rope), normed_BSH)
        normed_BSH = self.norm_region(self.post_attention_layernorm, hidden_BSH)
        moe = isinstance(self.mlp, MoE)
        out_BSH: Tensor = self.mlp(normed_BSH, weight_B, aux) if moe else self.mlp(normed_BSH)
        return hidden_BSH + out_BSH


class Trunk(nn.Module):
    """Embedding (first stage), a run of layers under their global numbers, final norm (last stage)."""

    def __init__(
        self,
        cfg: ModelConfig,
        layers: range,
        has_embed: bool,
        has_head: bool,
        rank: int,
        device: torch.device | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.cfg = cfg
        runtime = Runtime()  # pooled memory: one for all layers
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden, device=device, dtype=dtype) if has_embed else None
        self.layers = nn.ModuleDict({str(i): DecoderLayer(cfg, i, rank, device, dtype, runtime) for i in layers})
        self.norm = make_norm(cfg, device, dtype) if has_head else None

    def forward(self, x: Tensor, aux: AuxSink | None, weight_B: Tensor | None, doc_starts_BS: Tensor | None) -> Tensor:
        """Tokens (B, S) or hidden (B, S, H) -> hidden (B, S, H)."""
        hidden_BSH: Tensor = x if self.embed_tokens is None else self.embed_tokens(x)
        rope = Rope(self.cfg, x.shape[1], doc_starts_BS, x.device)
        for layer in self.layers.values():
            hidden_BSH = layer(hidden_BSH, rope, weight_B, aux)
        return hidden_BSH if self.norm is None else self.norm(hidden_BSH)


class Transformer(nn.Module):
    """The whole model, or the stage that holds layers [first_layer, stop_layer) of it.

    Built on the meta device by those who narrow it: `Transformer(cfg, device=torch.device("meta"))` allocates nothing.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        first_layer: int = 0,
        stop_layer: int | None = None,
        *,
        has_embed: bool = True,
        has_head: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
    ) -> None:
        """`rank` only names this process in error messages."""
        super().__init__()
        self.cfg = cfg
        layers = range(first_layer, cfg.layers if stop_layer is None else stop_layer)
        self.model = Trunk(cfg, layers, has_embed, has_head, rank, device, dtype)
        self.lm_head = LossHead(cfg, device, dtype) if has_head else None

    def forward(
        self,
        x: Tensor,
        aux: AuxSink | None = None,
        *,
        weight: Tensor | None = None,
        doc_starts: Tensor | None = None,
    ) -> Tensor:
        """Run the layers.

        Args:
            x: tokens (B, S) int64 where the embedding is here, else hidden states (B, S, H).
            aux: takes the routers' losses and statistics; a new one each forward pass.
            weight: (B,) fp32, 1.0 for a real sample, 0.0 for an empty one; None means all real.
            doc_starts: (B, S) index at which each token's document starts; None lets attention cross documents.

        Returns:
            hidden states (B, S, H), final-normed where the head is here: what `loss` and `logits` take.
        """
        return cast(Tensor, self.model(x, aux, weight, doc_starts))

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, S, H) final-normed -> (B, S, V)."""
        assert self.lm_head is not None, "this stage has no head"
        return cast(Tensor, self.lm_head(hidden))

    def loss(self, hidden: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        """() fp32: cross-entropy of targets (B, S), summed over tokens times their sample's weight."""
        assert self.lm_head is not None, "this stage has no head"
        return self.lm_head.loss(hidden, targets, weight)
