"""The memory-bound passes between the GEMMs of the CPU backends, in torch operations.

Shape suffixes: n rows of a block, T tokens, H hidden, I expert width. All buffers are fp32 and contiguous unless said.
`kernel.py` has the same passes fused, in C++.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mula_ray.ops.sorting import RowPlan, plan_rows


class Passes(Protocol):
    """What the blocked backend does between GEMMs. Every method writes into its last arguments."""

    def plan(self, ids_Tk: Tensor, experts: int) -> RowPlan:
        """Sort the slots by expert; see `sorting.plan_rows`."""
        ...

    def gather(self, source_TH: Tensor, token_n: Tensor, out_nH: Tensor) -> None:
        """out = source[token], widened to fp32."""
        ...

    def scatter_add(self, rows_nH: Tensor, token_n: Tensor, out_TH: Tensor) -> None:
        """out[token] += rows, in row order."""
        ...

    def swiglu(self, h_n2I: Tensor, weight_n: Tensor, act_nI: Tensor) -> None:
        """act = silu(gate) * up * weight, where h = [gate | up]."""
        ...

    def swiglu_backward(
        self, h_n2I: Tensor, weight_n: Tensor, dact_nI: Tensor, act_nI: Tensor, dh_n2I: Tensor, dweight_n: Tensor
    ) -> None:
        """From dact = d loss / d (act / weight): act as in `swiglu`, dh and dweight. May overwrite dact."""
        ...


class TorchPasses:
    """The passes in torch operations."""

    def plan(self, ids_Tk: Tensor, experts: int) -> RowPlan:
        """See `Passes`."""
        return plan_rows(ids_Tk, experts)

    def gather(self, source_TH: Tensor, token_n: Tensor, out_nH: Tensor) -> None:
        """See `Passes`."""
        if source_TH.dtype == out_nH.dtype:
            torch.index_select(source_TH, 0, token_n, out=out_nH)
        else:
            out_nH.copy_(source_TH.index_select(0, token_n))

    def scatter_add(self, rows_nH: Tensor, token_n: Tensor, out_TH: Tensor) -> None:
        """See `Passes`."""
        out_TH.index_add_(0, token_n, rows_nH)

    def swiglu(self, h_n2I: Tensor, weight_n: Tensor, act_nI: Tensor) -> None:
        """See `Passes`."""
        gate_nI, up_nI = h_n2I.chunk(2, dim=1)
        torch.ops.aten.silu.out(gate_nI, out=act_nI)
        act_nI.mul_(up_nI).mul_(weight_n[:, None])

    def swiglu_backward(
        self, h_n2I: Tensor, weight_n: Tensor, dact_nI: Tensor, act_nI: Tensor, dh_n2I: Tensor, dweight_n: Tensor
    ) -> None:
        """With s = silu(gate): act = s u, dweight = dact . act, du = dact w s, dgate = dact w u silu'(gate)."""
        gate_nI, up_nI = h_n2I.chunk(2, dim=1)
        dgate_nI, dup_nI = dh_n2I.chunk(2, dim=1)
        torch.ops.aten.silu.out(gate_nI, out=act_nI)
        torch.mul(dact_nI, act_nI, out=dup_nI)
        torch.linalg.vecdot(dup_nI, up_nI, out=dweight_n)
        dup_nI.mul_(weight_n[:, None])
        act_nI.mul_(up_nI).mul_(weight_n[:, None])
        dact_nI.mul_(up_nI).mul_(weight_n[:, None])
        torch.ops.aten.silu_backward.grad_input(dact_nI, gate_nI, grad_input=dgate_nI)
