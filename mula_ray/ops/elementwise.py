"""RMS norm and rotary embedding with backward passes by hand: plain autograd reads and writes twice as much on a CPU.

Shape suffixes: N rows, H the normed dim; B sequences, N heads, S tokens, D width of a head.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dim of x (..., H), statistics in fp32; the dtype of x."""
    if x.device.type == "cpu":
        return cast(Tensor, _RmsNorm.apply(x, weight_H, eps))  # type: ignore[no-untyped-call]
    return weight_H * F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(norm.square().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight_H, scale)
        return (wide * scale).to(x.dtype).mul_(weight_H)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x * scale: dweight = sum(g n); dx = scale * (g w - n * mean(g w n))."""
        x, weight_H, scale = ctx.saved_tensors
        wide_H = weight_H.float()
        g, normed = grad.float(), x.float() * scale
        product = (g * normed).reshape(-1, x.shape[-1])
        mean = (product @ wide_H).view(scale.shape) / x.shape[-1]
        dx = (g * wide_H).addcmul_(normed, mean, value=-1).mul_(scale)
        return dx.to(x.dtype), product.sum(dim=0).to(weight_H.dtype), None


def rotate_pairs(x_BNSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of a head by its angle, in fp32; cos and sin broadcast to (B, N, S, D/2)."""
    return cast(Tensor, _Rotate.apply(x_BNSD, cos, sin))  # type: ignore[no-untyped-call]


class _Rotate(torch.autograd.Function):
    """A rotation: its backward is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x, dtype=torch.float32)
    first, second = x.float().chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out.to(x.dtype)
