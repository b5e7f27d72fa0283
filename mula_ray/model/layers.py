"""The dense parts of a decoder layer: norms, rotary embedding, attention, SwiGLU.

Shape suffixes: B sequences, S tokens of a sequence, H hidden, N heads held here, D width of a head, F width of the FFN.

Everything that narrowing may change (heads, FFN width) is read from the weights' shapes, so a module whose parameters
were replaced by local slices computes with what it holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mula_ray.config.model import ModelConfig
from mula_ray.ops.elementwise import rms_norm, rotate_pairs

Region = Callable[..., Tensor]
"""How a part of a layer is run: `region(fn, *tensors)` returns `fn(*tensors)`, perhaps computing it again later."""


def run_once(fn: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """The plain region: run `fn`, keep its activations."""
    return fn(*tensors)


class RMSNorm(nn.Module):
    """Root-mean-square norm with fp32 statistics: x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, width: int, eps: float, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of x (..., width)."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm without parameters, fp32 statistics (OLMo)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of x (..., width)."""
        return F.layer_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype)


def make_norm(cfg: ModelConfig, device: torch.device | None, dtype: torch.dtype) -> nn.Module:
    """The norm of `cfg` over the hidden dim."""
    return RMSNorm(cfg.hidden, cfg.norm_eps, device, dtype) if cfg.norm == "rmsnorm" else LayerNorm(cfg.norm_eps)


def linear(inputs: int, outputs: int, device: torch.device | None, dtype: torch.dtype) -> nn.Linear:
    """A linear map without bias: the only kind in these models."""
    return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)


class Rope:
    """Cosine and sine of the rotary embedding, half-rotation form, and the causal mask that belongs to them.

    Made once a forward pass and shared by its layers.
    """

    def __init__(self, cfg: ModelConfig, seq: int, doc_starts_BS: Tensor | None, device: torch.device) -> None:
        """Positions are 0..seq-1, or count from the start of each token's document where `doc_starts_BS` is given."""
        half = cfg.head_dim // 2
        frequency = cfg.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        index_S = torch.arange(seq, device=device)
        position = index_S[None] if doc_starts_BS is None else index_S - doc_starts_BS
        angle = position.float()[:, None, :, None] * frequency  # (B or 1, 1, S, D/2)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.mask: Tensor | None = None  # (B, 1, S, S); None is plain causal
        if doc_starts_BS is not None:
            causal = index_S[:, None] >= index_S
            self.mask = (causal & (index_S >= doc_starts_BS[..., None]))[:, None]

    def rotate(self, x_BNSD: Tensor) -> Tensor:
        """Rotate each pair (x[i], x[i + D/2]) of a head by its position's angle, in fp32."""
        return rotate_pairs(x_BNSD, self.cos, self.sin)


class Attention(nn.Module):
    """Causal multi-head attention; Q and K normed over the whole projection (not per head), before RoPE."""

    def __init__(self, cfg: ModelConfig, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim, self.clip = cfg.head_dim, cfg.clip_qkv
        self.q_proj = linear(cfg.hidden, cfg.hidden, device, dtype)
        self.k_proj = linear(cfg.hidden, cfg.hidden, device, dtype)
        self.v_proj = linear(cfg.hidden, cfg.hidden, device, dtype)
        self.o_proj = linear(cfg.hidden, cfg.hidden, device, dtype)
        self.q_norm: nn.Module = RMSNorm(cfg.hidden, cfg.norm_eps, device, dtype) if cfg.qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(cfg.hidden, cfg.norm_eps, device, dtype) if cfg.qk_norm else nn.Identity()

    def forward(self, hidden_BSH: Tensor, rope: Rope) -> Tensor:
        """Attend over the sequence; returns (B, S, H)."""
        q_BNSD = rope.rotate(self._heads(self._clip(self.q_norm(self.q_proj(hidden_BSH)))))
        k_BNSD = rope.rotate(self._heads(self._clip(self.k_norm(self.k_proj(hidden_BSH)))))
        v_BNSD = self._heads(self._clip(self.v_proj(hidden_BSH)))
        out_BNSD = F.scaled_dot_product_attention(
            q_BNSD, k_BNSD, v_BNSD, attn_mask=rope.mask, is_causal=rope.mask is None
        )
        out: Tensor = self.o_proj(out_BNSD.transpose(1, 2).flatten(2))
        return out

    def _clip(self, x: Tensor) -> Tensor:
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, S, N*D) -> (B, N, S, D)."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class DenseFfn(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: ModelConfig, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        assert cfg.ffn is not None
        self.gate_proj = linear(cfg.hidden, cfg.ffn, device, dtype)
        self.up_proj = linear(cfg.hidden, cfg.ffn, device, dtype)
        self.down_proj = linear(cfg.ffn, cfg.hidden, device, dtype)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden_BSH)) * self.up_proj(hidden_BSH))
        return out
