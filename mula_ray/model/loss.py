"""The head: logits of the vocabulary and the cross-entropy of the next token.

Shape suffixes: B sequences, S tokens of a sequence, N = B*S tokens, n of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mula_ray.config.model import ModelConfig

_CHUNK_LOGITS_CPU = 1 << 22  # logits alive at once: small enough for a CPU's cache, large enough for its GEMM
_CHUNK_LOGITS_DEVICE = 1 << 27


class LossHead(nn.Module):
    """The untied output projection with its loss. Tensor parallelism replaces it by a vocabulary-parallel one."""

    def __init__(self, cfg: ModelConfig, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cfg.vocab_size, cfg.hidden, device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of final-normed hidden states (..., H)."""
        return F.linear(hidden, self.weight)

    def loss(self, hidden_BSH: Tensor, targets_BS: Tensor, weight_B: Tensor | None = None) -> Tensor:
        """() fp32: cross-entropy summed over tokens, each times its sample's weight, nats.

        Divide by the number of real tokens of the global batch.
        """
        batch, seq = targets_BS.shape
        weight_BS = torch.ones(batch, seq, device=hidden_BSH.device)
        if weight_B is not None:
            weight_BS = weight_BS * weight_B[:, None]
        return linear_cross_entropy(hidden_BSH.flatten(0, 1), self.weight, targets_BS.flatten(), weight_BS.flatten())


def linear_cross_entropy(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, scale_N: Tensor) -> Tensor:
    """() fp32: sum over tokens of scale * cross_entropy(hidden @ weight^T, target), without ever holding all logits."""
    return cast(Tensor, _LinearCrossEntropy.apply(hidden_NH, weight_VH, target_N, scale_N))  # type: ignore[no-untyped-call]


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient, softmax minus one-hot, is at hand when the loss is: both are made chunk by chunk in forward, and
    backward only multiplies by the factor that comes from above. Three GEMMs, as many as with all logits kept."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, scale_N: Tensor) -> Tensor:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        on_cpu = hidden_NH.device.type == "cpu"
        # On a CPU bf16 is widened: its GEMMs are slower than fp32's. A device multiplies in the model's dtype.
        weight = weight_VH.float() if on_cpu else weight_VH
        dhidden = torch.empty_like(hidden_NH) if needs_hidden else None
        dweight = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device) if needs_weight else None
        total = torch.zeros((), device=hidden_NH.device)
        most = _CHUNK_LOGITS_CPU if on_cpu else _CHUNK_LOGITS_DEVICE
        rows = max(256, most // weight_VH.shape[0])
        for at in range(0, hidden_NH.shape[0], rows):
            hidden, target, scale = (t[at : at + rows] for t in (hidden_NH, target_N[:, None], scale_N[:, None]))
            hidden = hidden.to(weight.dtype)
            logits_nV = torch.mm(hidden, weight.t()).float()
            norm_n1 = torch.logsumexp(logits_nV, dim=1, keepdim=True)
            total += ((norm_n1 - logits_nV.gather(1, target)) * scale).sum()
            if dhidden is None and dweight is None:
                continue
            logits_nV.sub_(norm_n1).exp_().scatter_add_(1, target, torch.full_like(norm_n1, -1.0)).mul_(scale)
            dlogits_nV = logits_nV.to(weight.dtype)
            if dhidden is not None:
                dhidden[at : at + rows] = torch.mm(dlogits_nV, weight)
            if dweight is not None:
                _add_product(dweight, dlogits_nV.t(), hidden)
        ctx.save_for_backward(*(t for t in (dhidden, dweight) if t is not None))
        ctx.needs, ctx.dtype = (needs_hidden, needs_weight), weight_VH.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = iter(ctx.saved_tensors)
        dhidden, dweight = (next(kept) * grad if need else None for need in ctx.needs)
        return dhidden, None if dweight is None else dweight.to(ctx.dtype), None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; total is fp32 whatever the factors are."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right)
