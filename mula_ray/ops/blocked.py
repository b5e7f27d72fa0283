"""The expert computation on a CPU, cache-blocked, with its backward pass derived by hand.

Shape suffixes: T tokens, k slots a token, N routed rows, n rows of one block, R experts held here, H hidden, I width.

Block by block (the rows of an expert, cut evenly when they are many): gather -> gate/up GEMM -> SwiGLU -> down GEMM ->
weighted scatter, while the rows are in cache. Experts without rows cost nothing. Only the gate/up products (N, 2I) live
from the forward to the backward pass; those beyond the memory guard are computed again. All in fp32, whatever the dtype
of the model: on a CPU a bf16 GEMM is slower than widening the weights first. Sums run in a fixed order: same input,
same bits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from mula_ray.ops.passes import Passes
from mula_ray.ops.sink import WeightGradSink, grad_buffer
from mula_ray.ops.sorting import RowPlan
from mula_ray.ops.workspace import Workspace

_BLOCK_BYTES = 4 << 20  # of one (n, H) fp32 buffer: what stays in cache between the operations of a block


@dataclass(frozen=True)
class Blocked:
    """How a call is computed: everything that is no tensor."""

    passes: Passes
    sink: WeightGradSink
    workspace: Workspace
    keep_rows: int
    """Most routed rows whose gate/up products are kept for the backward pass."""


class Block(NamedTuple):
    """Rows [start, stop) of the plan, all of one expert."""

    expert: int
    start: int
    stop: int


def make_blocks(offsets: tuple[int, ...], hidden: int) -> list[Block]:
    """Cut each expert's rows [offsets[e], offsets[e + 1]) into blocks of nearly equal size, none over the limit."""
    most = max(256, _BLOCK_BYTES // (4 * hidden))
    blocks = []
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets)):
        parts = -(-(stop - start) // most)
        edges = [start + (stop - start) * part // parts for part in range(parts + 1)] if parts else []
        blocks += [Block(expert, *edge) for edge in itertools.pairwise(edges)]
    return blocks


def blocked_ffn(
    hidden_TH: Tensor, weights_Tk: Tensor, ids_Tk: Tensor, gate_up: nn.Parameter, down: nn.Parameter, how: Blocked
) -> Tensor:
    """The weighted sum over the experts of `gate_up` (R, 2I, H) and `down` (R, H, I); ids outside [0, R) add nothing.

    Returns (T, H); differentiable in hidden and weights, gradients of the experts go to `how.sink`.
    """
    return cast(Tensor, _BlockedFfn.apply(hidden_TH, weights_Tk, ids_Tk, gate_up, down, how))  # type: ignore[no-untyped-call]


class _BlockedFfn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, ids: Tensor, gate_up: nn.Parameter, down: nn.Parameter, how: Blocked
    ) -> Tensor:
        plan = how.passes.plan(ids, gate_up.shape[0])
        kept = how.workspace.take(min(plan.rows, how.keep_rows), gate_up.shape[1])
        ctx.save_for_backward(hidden, weights, plan.slot_N, plan.token_N, kept)
        ctx.params, ctx.how, ctx.offsets = (gate_up, down), how, plan.offsets
        return _Work(hidden, weights, plan, kept, gate_up, down, how).forward()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, slot, token, kept = ctx.saved_tensors
        gate_up, down = ctx.params
        plan = RowPlan(slot, token, ctx.offsets)
        dhidden, dweights = _Work(hidden, weights, plan, kept, gate_up, down, ctx.how).backward(grad)
        return dhidden, dweights, None, None, None, None


class _Work:
    """One pass over the blocks. Buffers hold one block and are leased for the time of the pass."""

    def __init__(
        self,
        hidden_TH: Tensor,
        weights_Tk: Tensor,
        plan: RowPlan,
        kept_N2I: Tensor,
        gate_up: nn.Parameter,
        down: nn.Parameter,
        how: Blocked,
    ) -> None:
        self.hidden_TH, self.weights_Tk, self.kept_N2I, self.how = hidden_TH.contiguous(), weights_Tk, kept_N2I, how
        self.plan, self.gate_up, self.down = plan, gate_up, down
        self.weight_N = weights_Tk.reshape(-1).index_select(0, plan.slot_N).float()
        self.blocks = make_blocks(plan.offsets, hidden_TH.shape[1])
        rows = max((block.stop - block.start for block in self.blocks), default=0)
        hidden, width = hidden_TH.shape[1], down.shape[2]
        take = how.workspace.take
        self.x_nH, self.y_nH = take(rows, hidden), take(rows, hidden)
        self.a_nI, self.h_n2I = take(rows, width), take(rows, 2 * width)
        self.wide = () if gate_up.dtype == torch.float32 else (take(2 * width, hidden), take(hidden, width))

    def forward(self) -> Tensor:
        """(T, H) of the dtype of hidden."""
        out_TH = self.how.workspace.take(*self.hidden_TH.shape).zero_()
        for block in self.blocks:
            n, token_n = block.stop - block.start, self.plan.token_N[block.start : block.stop]
            gate_up, down = self._weights(block.expert)
            h_n2I = self._products(block, token_n, gate_up)
            self.how.passes.swiglu(h_n2I, self.weight_N[block.start : block.stop], self.a_nI[:n])
            torch.mm(self.a_nI[:n], down.t(), out=self.y_nH[:n])
            self.how.passes.scatter_add(self.y_nH[:n], token_n, out_TH)
        return out_TH.to(self.hidden_TH.dtype)

    def backward(self, grad_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of hidden (T, H) and of the routing weights (T, k); those of the experts go to the sink."""
        grad_TH, passes, sink = grad_TH.contiguous(), self.how.passes, self.how.sink
        rows, width = self.plan.rows, self.down.shape[2]
        dhidden_TH = self.how.workspace.take(*self.hidden_TH.shape).zero_()
        dweight_N = torch.empty(rows)
        # Weight gradients that wait keep their operands; without room for those they are computed at once.
        later = sink.deferred and rows <= self.how.keep_rows
        size = rows if later else self.x_nH.shape[0]
        dh_2I, act_I = self.how.workspace.take(size, 2 * width), self.how.workspace.take(size, width)
        for block in self.blocks:
            at, n = slice(block.start, block.stop), block.stop - block.start
            own = at if later else slice(0, n)
            token_n, g_nH, dact_nI = self.plan.token_N[at], self.y_nH[:n], self.a_nI[:n]
            gate_up, down = self._weights(block.expert)
            if block.stop > self.kept_N2I.shape[0]:
                h_n2I = self._products(block, token_n, gate_up)
            else:
                h_n2I = self.kept_N2I[at]
            passes.gather(grad_TH, token_n, g_nH)
            torch.mm(g_nH, down, out=dact_nI)
            passes.swiglu_backward(h_n2I, self.weight_N[at], dact_nI, act_I[own], dh_2I[own], dweight_N[at])
            if not later:
                self._weight_grads(block.expert, token_n, g_nH, act_I[own], dh_2I[own])
            torch.mm(dh_2I[own], gate_up, out=g_nH)
            passes.scatter_add(g_nH, token_n, dhidden_TH)
        if self.gate_up.requires_grad:
            sink.submit((self.gate_up, self.down), lambda: self._finish(grad_TH, act_I, dh_2I, later))
        dweights = torch.zeros(self.weights_Tk.shape, dtype=self.weights_Tk.dtype)
        dweights.view(-1)[self.plan.slot_N] = dweight_N.to(dweights.dtype)
        return dhidden_TH.to(self.hidden_TH.dtype), dweights

    @torch.no_grad()
    def _finish(self, grad_TH: Tensor, act_NI: Tensor, dh_N2I: Tensor, waiting: bool) -> None:
        """The weight gradients of all blocks from kept operands, if they waited. Without rows they are zeros."""
        grad_buffer(self.gate_up), grad_buffer(self.down)
        for block in self.blocks if waiting else ():
            at, n = slice(block.start, block.stop), block.stop - block.start
            token_n = self.plan.token_N[at]
            self.how.passes.gather(grad_TH, token_n, self.y_nH[:n])
            self._weight_grads(block.expert, token_n, self.y_nH[:n], act_NI[at], dh_N2I[at])

    def _products(self, block: Block, token_n: Tensor, gate_up: Tensor) -> Tensor:
        """(n, 2I) gate and up products, in the kept rows when the block fits there."""
        n = block.stop - block.start
        fits = block.stop <= self.kept_N2I.shape[0]
        h_n2I = self.kept_N2I[block.start : block.stop] if fits else self.h_n2I[:n]
        self.how.passes.gather(self.hidden_TH, token_n, self.x_nH[:n])
        return torch.mm(self.x_nH[:n], gate_up.t(), out=h_n2I)

    def _weight_grads(self, expert: int, token_n: Tensor, g_nH: Tensor, act_nI: Tensor, dh_n2I: Tensor) -> None:
        if not self.gate_up.requires_grad:
            return
        x_nH = self.x_nH[: token_n.numel()]
        self.how.passes.gather(self.hidden_TH, token_n, x_nH)
        _add_product(grad_buffer(self.down)[expert], g_nH.t(), act_nI)
        _add_product(grad_buffer(self.gate_up)[expert], dh_n2I.t(), x_nH)

    def _weights(self, expert: int) -> tuple[Tensor, Tensor]:
        """The expert's weights in fp32."""
        gate_up, down = self.gate_up.detach()[expert], self.down.detach()[expert]
        if not self.wide:
            return gate_up, down
        return self.wide[0].copy_(gate_up), self.wide[1].copy_(down)


def _add_product(grad: Tensor, left: Tensor, right: Tensor) -> None:
    """grad += left @ right, in place; one rounding when grad is narrower than fp32."""
    if grad.dtype == torch.float32:
        grad.addmm_(left, right)
    else:
        grad.add_(torch.mm(left, right))
