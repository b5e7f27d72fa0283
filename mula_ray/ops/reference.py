"""The expert computation written for reading: what every other backend must equal.

Shape suffixes: T tokens, k slots a token, R experts held here, H hidden, I expert width, n rows of one expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_ffn(hidden_TH: Tensor, weights_Tk: Tensor, ids_Tk: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """y_t = sum over the slots j of token t with 0 <= ids[t, j] < R of weights[t, j] * expert_ids[t, j](x_t).

    An expert is down(silu(gate x) * up x). Differentiable by plain autograd; sums in fp32 (fp64 for fp64 input).
    gate_up (R, 2I, H) has the gate's rows first, down is (R, H, I).
    """
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)
    out_TH = torch.zeros(hidden_TH.shape, dtype=wide, device=hidden_TH.device)
    for expert in range(gate_up.shape[0]):
        token_n, slot_n = torch.where(ids_Tk == expert)
        gate_nI, up_nI = F.linear(hidden_TH[token_n], gate_up[expert]).to(wide).chunk(2, dim=-1)
        act_nI = (F.silu(gate_nI) * up_nI).to(hidden_TH.dtype)
        y_nH = F.linear(act_nI, down[expert]).to(wide)
        out_TH = out_TH.index_add(0, token_n, y_nH * weights_Tk[token_n, slot_n, None].to(wide))
    return out_TH.to(hidden_TH.dtype)


def classic_ffn(
    hidden_TH: Tensor, weights_Tk: Tensor, ids_Tk: Tensor, experts: list[tuple[Tensor, Tensor, Tensor]]
) -> Tensor:
    """The classic eager block that published speed-ups are measured against: one-hot mask, Python loop, index_add_.

    experts: gate (I, H), up (I, H) and down (H, I) of each expert, its own set of weights.
    """
    out_TH = torch.zeros_like(hidden_TH)
    count = len(experts)
    inside_Tk = (ids_Tk >= 0) & (ids_Tk < count)
    mask_RkT = F.one_hot(torch.where(inside_Tk, ids_Tk, count), count + 1).permute(2, 1, 0)
    for expert, (gate, up, down) in enumerate(experts):
        slot_n, token_n = torch.where(mask_RkT[expert])
        x_nH = hidden_TH[token_n]
        y_nH = F.linear(F.silu(F.linear(x_nH, gate)) * F.linear(x_nH, up), down)
        out_TH.index_add_(0, token_n, (y_nH * weights_Tk[token_n, slot_n, None]).to(out_TH.dtype))
    return out_TH
