"""Triton kernels of the expert computation: counting sort, grouped GEMMs with fused gather and SwiGLU, combine.

Shape suffixes: T tokens, k slots a token, N = T*k slots, C rows of a chunk, R experts held here, H hidden, I width.

Every kernel is a pure function of its inputs with one writer an element: no atomics, so the same input gives the same
bits. Sizes on the host are bounds; a program that finds no work of its own returns. `triton_rows.py` launches them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def count_kernel(ids, count, slots, experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """count[b, e]: how many of the BLOCK slots of program b go to expert e."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    id = tl.load(ids + slot, mask=slot < slots, other=-1)
    hit = (id[:, None] == expert[None, :]) & (expert[None, :] < experts)
    tl.store(count + block * experts + expert, tl.sum(hit.to(tl.int32), axis=0), mask=expert < experts)


@triton.jit
def index_kernel(ids, base, slot_of_row, row_of_slot, slots, experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """The row of every slot, base[b, e] (rows before this block's) plus its rank in the block, and the inverse."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    id = tl.load(ids + slot, mask=slot < slots, other=-1)
    here = (id >= 0) & (id < experts)
    hit = ((id[:, None] == expert[None, :]) & here[:, None]).to(tl.int32)
    rank = tl.cumsum(hit, axis=0) - hit
    start = tl.load(base + block * experts + expert, mask=expert < experts, other=0)
    row = tl.sum((rank + start[None, :]) * hit, axis=1)
    tl.store(row_of_slot + slot, tl.where(here, row, -1), mask=slot < slots)
    tl.store(slot_of_row + row, slot, mask=here & (slot < slots))


@triton.jit
def _find_tile(offsets, tile, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert, first row and last row + 1 of row tile number `tile`; no expert's rows share a tile."""
    expert = tl.arange(0, EXPERTS)
    start = tl.load(offsets + expert, mask=expert < experts, other=0)
    stop = tl.load(offsets + expert + 1, mask=expert < experts, other=0)
    tiles = tl.where(expert < experts, (stop - start + BLOCK_M - 1) // BLOCK_M, 0)
    ends = tl.cumsum(tiles, axis=0)
    found = tl.sum((ends <= tile).to(tl.int32), axis=0)  # = experts when there is no such tile
    mine = expert == found
    first = tl.sum(tl.where(mine, start + (tile - ends + tiles) * BLOCK_M, 0), axis=0)
    last = tl.sum(tl.where(mine, stop, 0), axis=0)
    return found, first, last


@triton.jit
def _dot(a, b, total, WIDEN: tl.constexpr):
    """total + a @ b in fp32. WIDEN: Triton's interpreter multiplies the bit patterns of bf16 operands."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def rows_kernel(
    rows, token, weights, out, act, offsets, experts, inner, outer, stride_expert, stride_inner, stride_outer,
    GATHER: tl.constexpr, SWIGLU: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out[row, n] = sum_k rows[row, k] * weights[expert of row][k, n], fp32 accumulation.

    GATHER reads rows[token[row]]. SWIGLU: `weights` holds gate columns 0..outer and up columns outer..2*outer; out
    (C, 2*outer) takes both products and act (C, outer) = silu(gate) * up.
    """
    expert, first, last = _find_tile(offsets, tl.program_id(0), experts, EXPERTS, BLOCK_M)
    if expert >= experts:
        return
    row = first + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid, inside = row < last, column < outer
    source = tl.load(token + row, mask=valid, other=0) if GATHER else row
    left = rows + source.to(tl.int64)[:, None] * inner
    right = weights + expert.to(tl.int64) * stride_expert + column[None, :] * stride_outer
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(0, inner, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        x = tl.load(left + k[None, :], mask=valid[:, None] & (k < inner)[None, :], other=0.0)
        mask = (k < inner)[:, None] & inside[None, :]
        gate = tl.load(right + k[:, None] * stride_inner, mask=mask, other=0.0)
        total = _dot(x, gate, total, WIDEN)
        if SWIGLU:
            up = tl.load(right + outer * stride_outer + k[:, None] * stride_inner, mask=mask, other=0.0)
            total_up = _dot(x, up, total_up, WIDEN)
    mask = valid[:, None] & inside[None, :]
    wide = row.to(tl.int64)[:, None]
    if SWIGLU:
        gate, up = total.to(out.dtype.element_ty), total_up.to(out.dtype.element_ty)
        tl.store(out + wide * (2 * outer) + column[None, :], gate, mask=mask)
        tl.store(out + wide * (2 * outer) + outer + column[None, :], up, mask=mask)
        gate, up = gate.to(tl.float32), up.to(tl.float32)  # as the backward pass will read them
        tl.store(
            act + wide * outer + column[None, :], (gate * tl.sigmoid(gate) * up).to(act.dtype.element_ty), mask=mask
        )
    else:
        tl.store(out + wide * outer + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(y, row_of_slot, weights, out, rows, hidden, top_k, WEIGHTED: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[t] += sum over the slots of token t of weight * y[row], slot by slot, in fp32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < hidden
    total = tl.load(out + token * hidden + column, mask=inside, other=0.0)
    for slot in range(top_k):
        row = tl.load(row_of_slot + token * top_k + slot) + tl.zeros_like(column)  # a block: masks of scalars are int32
        held = inside & (row >= 0) & (row < rows)
        part = tl.load(y + row.to(tl.int64) * hidden + column, mask=held, other=0.0).to(tl.float32)
        if WEIGHTED:
            part = part * tl.load(weights + token * top_k + slot).to(tl.float32)
        total += part
    tl.store(out + token * hidden + column, total, mask=inside)


@triton.jit
def swiglu_backward_kernel(h, dact, weight, act, dh, dweight, offsets, experts, width, BLOCK_N: tl.constexpr):
    """One row a program: act * weight, dh and dweight from h and dact. Formulas: passes.TorchPasses."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + experts):
        return
    w = tl.load(weight + row)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for at in range(0, width, BLOCK_N):
        column = at + tl.arange(0, BLOCK_N)
        inside = column < width
        gate = tl.load(h + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dact + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sig = tl.sigmoid(gate)
        silu = gate * sig
        total += d * silu * up
        tl.store(act + row * width + column, (silu * up * w).to(act.dtype.element_ty), mask=inside)
        dgate = d * w * up * (sig + silu * (1 - sig))
        tl.store(dh + row * 2 * width + column, dgate.to(dh.dtype.element_ty), mask=inside)
        tl.store(dh + row * 2 * width + width + column, (d * w * silu).to(dh.dtype.element_ty), mask=inside)
    tl.store(dweight + row, tl.sum(total, axis=0))


@triton.jit
def weight_grad_kernel(
    left, right, token, grad, offsets, m_size, n_size,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """grad[e, m, n] += sum over the rows of expert e of left[row, m] * right[row, n], in place."""
    expert = tl.program_id(2)
    start, stop = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    if start == stop:
        return
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(start, stop, BLOCK_K):
        row = at + tl.arange(0, BLOCK_K)
        valid = row < stop
        if GATHER_LEFT or GATHER_RIGHT:
            source = tl.load(token + row, mask=valid, other=0)
        row_left = (source if GATHER_LEFT else row).to(tl.int64)
        row_right = (source if GATHER_RIGHT else row).to(tl.int64)
        a = tl.load(
            left + row_left[None, :] * m_size + m[:, None], mask=valid[None, :] & (m < m_size)[:, None], other=0.0
        )
        b = tl.load(
            right + row_right[:, None] * n_size + n[None, :], mask=valid[:, None] & (n < n_size)[None, :], other=0.0
        )
        total = _dot(a, b, total, WIDEN)
    at = grad + expert.to(tl.int64) * m_size * n_size + m.to(tl.int64)[:, None] * n_size + n[None, :]
    mask = (m < m_size)[:, None] & (n < n_size)[None, :]
    old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (old + total).to(grad.dtype.element_ty), mask=mask)


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter."""
    return not isinstance(rows_kernel, triton.JITFunction)


def next_power(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


Kernel = Any
"""A jitted function: `kernel[grid](*args)`."""
