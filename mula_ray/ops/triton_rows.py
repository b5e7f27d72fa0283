"""`rows.RowOps` in Triton kernels, for CUDA and XPU.

Shape suffixes: T tokens, k slots a token, N = T*k slots, C rows of a chunk, R experts held here, H hidden, I width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mula_ray.ops import triton_kernels as kernels
from mula_ray.ops.rows import Chunk, SlotPlan
from mula_ray.ops.triton_kernels import Kernel, next_power

_SORT_BLOCK = 128
_ROWS, _COLUMNS, _INNER = 64, 128, 32  # tile of the grouped GEMMs


class TritonRows:
    """See `rows.RowOps`."""

    def plan(self, ids_Tk: Tensor, experts: int) -> SlotPlan:
        """Count, prefix, index: a stable counting sort. The prefix sums over blocks are torch's, on the device."""
        ids, slots = ids_Tk.contiguous(), ids_Tk.numel()
        blocks, padded = -(-slots // _SORT_BLOCK), next_power(experts)
        count = torch.empty(blocks, experts, dtype=torch.int32, device=ids.device)
        slot_N = torch.zeros(slots, dtype=torch.int32, device=ids.device)
        row_Tk = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
        if slots:
            _run(kernels.count_kernel, (blocks,), ids, count, slots, experts, BLOCK=_SORT_BLOCK, EXPERTS=padded)
        before = count.cumsum(0, dtype=torch.int32)
        ends = before[-1].cumsum(0, dtype=torch.int32) if blocks else count.new_zeros(experts)
        offsets = torch.cat([ends.new_zeros(1), ends])
        base = before - count + offsets[:-1]
        if slots:
            _run(
                kernels.index_kernel, (blocks,), ids, base.contiguous(), slot_N, row_Tk, slots, experts,
                BLOCK=_SORT_BLOCK, EXPERTS=padded,
            )  # fmt: skip
        return SlotPlan(slot_N, row_Tk, offsets)

    def up(self, hidden_TH: Tensor, chunk: Chunk, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowOps`; gather and SwiGLU are fused into the GEMM."""
        width = gate_up.shape[1] // 2
        h_C2I = hidden_TH.new_empty(chunk.size, 2 * width)
        act_CI = hidden_TH.new_empty(chunk.size, width)
        _gemm(hidden_TH, chunk, gate_up.transpose(1, 2), h_C2I, width, act_CI, gather=True)
        return h_C2I, act_CI

    def down(self, act_CI: Tensor, chunk: Chunk, down: Tensor) -> Tensor:
        """See `RowOps`."""
        return _gemm(act_CI, chunk, down.transpose(1, 2), act_CI.new_empty(chunk.size, down.shape[1]), down.shape[1])

    def combine(self, y_CH: Tensor, chunk: Chunk, weights_Tk: Tensor | None, out_TH: Tensor) -> None:
        """See `RowOps`."""
        tokens, hidden = out_TH.shape
        block = min(1024, next_power(hidden))
        weights = chunk.weight_C if weights_Tk is None else weights_Tk.contiguous()
        _run(
            kernels.combine_kernel, (tokens, -(-hidden // block)), y_CH, chunk.row_Tk.contiguous(), weights, out_TH,
            chunk.size, hidden, chunk.row_Tk.shape[1], WEIGHTED=weights_Tk is not None, BLOCK_N=block,
        )  # fmt: skip

    def act_grad(self, grad_TH: Tensor, chunk: Chunk, down: Tensor) -> Tensor:
        """See `RowOps`."""
        width = down.shape[2]
        return _gemm(grad_TH, chunk, down, grad_TH.new_empty(chunk.size, width), width, gather=True)

    def swiglu_backward(self, h_C2I: Tensor, dact_CI: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """See `RowOps`."""
        rows, width = dact_CI.shape
        act, dh, dweight = torch.empty_like(dact_CI), torch.empty_like(h_C2I), torch.empty_like(chunk.weight_C)
        _run(
            kernels.swiglu_backward_kernel, (rows,), h_C2I, dact_CI, chunk.weight_C, act, dh, dweight, chunk.offsets,
            chunk.offsets.numel() - 1, width, BLOCK_N=min(1024, next_power(width)),
        )  # fmt: skip
        return act, dh, dweight

    def rows_grad(self, dh_C2I: Tensor, chunk: Chunk, gate_up: Tensor) -> Tensor:
        """See `RowOps`."""
        hidden = gate_up.shape[2]
        return _gemm(dh_C2I, chunk, gate_up, dh_C2I.new_empty(chunk.size, hidden), hidden)

    def add_weight_grad(
        self, left: Tensor, left_token: bool, right: Tensor, right_token: bool, chunk: Chunk, grad: Tensor
    ) -> None:
        """See `RowOps`; gathers on the way and adds in place."""
        experts, m_size, n_size = grad.shape
        grid = (-(-m_size // _ROWS), -(-n_size // _COLUMNS), experts)
        _run(
            kernels.weight_grad_kernel, grid, left, right, chunk.token_C, grad, chunk.offsets, m_size, n_size,
            GATHER_LEFT=left_token, GATHER_RIGHT=right_token, BLOCK_M=_ROWS, BLOCK_N=_COLUMNS, BLOCK_K=_INNER,
            WIDEN=kernels.interpreted(),
        )  # fmt: skip


def _gemm(
    rows: Tensor,
    chunk: Chunk,
    weights_Rmn: Tensor,
    out: Tensor,
    outer: int,
    act: Tensor | None = None,
    *,
    gather: bool = False,
) -> Tensor:
    """out = rows times the matrix of each row's expert; with `act`, gate and up side by side and SwiGLU."""
    experts, inner, _ = weights_Rmn.shape
    grid = (-(-chunk.size // _ROWS) + experts, -(-outer // _COLUMNS))
    _run(
        kernels.rows_kernel, grid, rows, chunk.token_C, weights_Rmn, out, out if act is None else act, chunk.offsets,
        experts, inner, outer, *weights_Rmn.stride(), GATHER=gather, SWIGLU=act is not None,
        EXPERTS=next_power(experts), BLOCK_M=_ROWS, BLOCK_N=_COLUMNS, BLOCK_K=_INNER, WIDEN=kernels.interpreted(),
    )  # fmt: skip
    return out


def _run(kernel: Kernel, grid: tuple[int, ...], *args: object, **constants: object) -> None:
    if all(grid):
        kernel[grid](*args, **constants)
