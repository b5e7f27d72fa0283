"""`rows.RowOps` in torch operations round the grouped GEMM of torch (CUDA and XPU; on a CPU for the tests).

Shape suffixes: T tokens, k slots a token, N = T*k slots, C rows of a chunk, R experts held here, H hidden, I width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mula_ray.ops.rows import Chunk, SlotPlan


class GroupedRows:
    """See `rows.RowOps`."""

    def plan(self, ids_Tk: Tensor, experts: int) -> SlotPlan:
        """See `RowOps`."""
        here = (ids_Tk >= 0) & (ids_Tk < experts)
        keys = torch.where(here, ids_Tk, experts).reshape(-1).to(torch.int32)
        ordered, slot_N = torch.sort(keys, stable=True)
        first = torch.arange(experts + 1, dtype=torch.int32, device=keys.device)
        offsets = torch.searchsorted(ordered, first, out_int32=True)
        row_N = torch.empty_like(slot_N)
        row_N[slot_N] = torch.arange(slot_N.numel(), device=keys.device)
        row_Tk = torch.where(here, row_N.view_as(ids_Tk), -1)
        return SlotPlan(slot_N.to(torch.int32), row_Tk.to(torch.int32), offsets)

    def up(self, hidden_TH: Tensor, chunk: Chunk, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowOps`."""
        h_C2I = _grouped_mm(hidden_TH[chunk.token_C], gate_up.transpose(1, 2), chunk)
        gate, up = h_C2I.float().chunk(2, dim=1)
        return h_C2I, (F.silu(gate) * up).to(h_C2I.dtype)

    def down(self, act_CI: Tensor, chunk: Chunk, down: Tensor) -> Tensor:
        """See `RowOps`."""
        return _grouped_mm(act_CI, down.transpose(1, 2), chunk)

    def combine(self, y_CH: Tensor, chunk: Chunk, weights_Tk: Tensor | None, out_TH: Tensor) -> None:
        """See `RowOps`. A slot at a time: index_add_ on a device sums in no fixed order."""
        for slot in range(chunk.row_Tk.shape[1]):
            row_T = chunk.row_Tk[:, slot]
            held_T1 = ((row_T >= 0) & (row_T < chunk.size))[:, None]
            part_TH = y_CH[row_T.clamp(0, chunk.size - 1)].float()
            if weights_Tk is not None:
                part_TH = part_TH * weights_Tk[:, slot, None].float()
            out_TH += torch.where(held_T1, part_TH, 0.0)  # not a product with 0: rows that nobody computed may be NaN

    def act_grad(self, grad_TH: Tensor, chunk: Chunk, down: Tensor) -> Tensor:
        """See `RowOps`."""
        return _grouped_mm(grad_TH[chunk.token_C], down, chunk)

    def swiglu_backward(self, h_C2I: Tensor, dact_CI: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """See `RowOps`."""
        gate, up = h_C2I.float().chunk(2, dim=1)
        dact, weight = dact_CI.float(), chunk.weight_C[:, None]
        sig = torch.sigmoid(gate)
        silu = gate * sig
        act = silu * up
        dgate = dact * weight * up * (sig + silu * (1 - sig))
        dup = dact * weight * silu
        dtype = h_C2I.dtype
        return (act * weight).to(dtype), torch.cat([dgate, dup], dim=1).to(dtype), (dact * act).sum(dim=1)

    def rows_grad(self, dh_C2I: Tensor, chunk: Chunk, gate_up: Tensor) -> Tensor:
        """See `RowOps`."""
        return _grouped_mm(dh_C2I, gate_up, chunk)

    def add_weight_grad(
        self, left: Tensor, left_token: bool, right: Tensor, right_token: bool, chunk: Chunk, grad: Tensor
    ) -> None:
        """See `RowOps`. Makes a whole gradient on the way: torch's grouped GEMM cannot add in place."""
        left_Cm = left[chunk.token_C] if left_token else left
        right_Cn = right[chunk.token_C] if right_token else right
        grad.add_(_grouped_mm(left_Cm.t(), right_Cn, chunk))


def _grouped_mm(left: Tensor, right: Tensor, chunk: Chunk) -> Tensor:
    """(C, m) x (R, m, n) -> (C, n): each row times the matrix of its expert; or (m, C) x (C, n) -> (R, m, n)."""
    function = getattr(F, "grouped_mm", None) or torch._grouped_mm  # the public name is younger than torch 2.8
    out: Tensor = function(left, right, offs=chunk.offsets[1:])
    return out
