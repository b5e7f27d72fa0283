"""The expert computation on a device: rows sorted by expert, no host synchronisation anywhere.

Shape suffixes: T tokens, k slots a token, N = T*k slots, C rows of a chunk, R experts held here, H hidden, I width.

The host never learns how many rows an expert has: sizes are bounds (N slots), offsets stay on the device, and rows past
the last expert's are computed by nobody and read by nobody. Under expert parallelism N is as large as if all tokens of
the group were routed here, so the rows go through in chunks of `keep_rows`: only the first chunk's gate/up products are
kept, later ones (nearly always empty) are computed again. Every sum has a fixed order; there are no atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from mula_ray.ops.sink import WeightGradSink, grad_buffer


class SlotPlan(NamedTuple):
    """A stable counting sort of the slots by expert, on the device."""

    slot_N: Tensor
    """(N,) int32: slot (index into T*k) of each row; rows past the experts' hold slots that go elsewhere."""
    row_Tk: Tensor
    """(T, k) int32: row of each slot, -1 for a slot whose expert is not here."""
    offsets: Tensor
    """(R + 1,) int32: expert e owns rows offsets[e] .. offsets[e + 1] - 1."""


class Chunk(NamedTuple):
    """`size` rows of the plan; offsets and rows count from the chunk's first."""

    size: int
    token_C: Tensor
    weight_C: Tensor
    row_Tk: Tensor
    offsets: Tensor


class RowOps(Protocol):
    """What the algorithm needs of a device: `grouped.py` in torch operations, `triton_rows.py` in own kernels."""

    def plan(self, ids_Tk: Tensor, experts: int) -> SlotPlan:
        """Sort the slots; ids outside [0, experts) go nowhere."""
        ...

    def up(self, hidden_TH: Tensor, chunk: Chunk, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Gather, gate/up GEMM, SwiGLU: h (C, 2I) and act = silu(gate) * up (C, I)."""
        ...

    def down(self, act_CI: Tensor, chunk: Chunk, down: Tensor) -> Tensor:
        """(C, H) = act @ down^T of each row's expert."""
        ...

    def combine(self, y_CH: Tensor, chunk: Chunk, weights_Tk: Tensor | None, out_TH: Tensor) -> None:
        """out[t] += sum over the slots of t in this chunk of weight (1 without weights) * y[row], in slot order."""
        ...

    def act_grad(self, grad_TH: Tensor, chunk: Chunk, down: Tensor) -> Tensor:
        """(C, I) = grad[token] @ down of each row's expert: the gradient of act, routing weight left out."""
        ...

    def swiglu_backward(self, h_C2I: Tensor, dact_CI: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """act * weight (C, I), dh (C, 2I), dweight (C,) fp32; see `passes.TorchPasses.swiglu_backward`."""
        ...

    def rows_grad(self, dh_C2I: Tensor, chunk: Chunk, gate_up: Tensor) -> Tensor:
        """(C, H) = dh @ gate_up of each row's expert."""
        ...

    def add_weight_grad(
        self, left: Tensor, left_token: bool, right: Tensor, right_token: bool, chunk: Chunk, grad: Tensor
    ) -> None:
        """grad[e] += left[rows of e]^T @ right[rows of e]; a side marked `token` is (T, ...), gathered by token."""
        ...


@dataclass(frozen=True)
class Rows:
    """How a call is computed: everything that is no tensor."""

    ops: RowOps
    sink: WeightGradSink
    keep_rows: int


def rows_ffn(
    hidden: Tensor, weights: Tensor, ids: Tensor, gate_up: nn.Parameter, down: nn.Parameter, how: Rows
) -> Tensor:
    """The weighted sum over the experts of gate_up (R, 2I, H) and down (R, H, I); ids outside [0, R) add nothing."""
    return cast(Tensor, _RowsFfn.apply(hidden, weights, ids, gate_up, down, how))  # type: ignore[no-untyped-call]


class _RowsFfn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, ids: Tensor, gate_up: nn.Parameter, down: nn.Parameter, how: Rows
    ) -> Tensor:
        hidden, plan = hidden.contiguous(), how.ops.plan(ids, gate_up.shape[0])
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        kept = hidden.new_empty((0, gate_up.shape[1]))
        for index, chunk in enumerate(_chunks(plan, weights, how.keep_rows)):
            h, act = how.ops.up(hidden, chunk, gate_up.detach())
            how.ops.combine(how.ops.down(act, chunk, down.detach()), chunk, weights, out)
            if index == 0:
                kept = h
        ctx.save_for_backward(hidden, weights, *plan, kept)
        ctx.params, ctx.how = (gate_up, down), how
        return out.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, slot, row, offsets, kept = ctx.saved_tensors
        (gate_up, down), how = ctx.params, ctx.how
        grad = grad.contiguous()
        dhidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        dweights = torch.zeros(weights.shape, dtype=torch.float32, device=hidden.device)
        waiting: list[tuple[Chunk, Tensor, Tensor]] = []

        @torch.no_grad()
        def add(chunk: Chunk, act: Tensor, dh: Tensor) -> None:
            how.ops.add_weight_grad(grad, True, act, False, chunk, grad_buffer(down))
            how.ops.add_weight_grad(dh, False, hidden, True, chunk, grad_buffer(gate_up))

        for index, chunk in enumerate(_chunks(SlotPlan(slot, row, offsets), weights, how.keep_rows)):
            h = kept if index == 0 else how.ops.up(hidden, chunk, gate_up.detach())[0]
            dact = how.ops.act_grad(grad, chunk, down.detach())
            act, dh, dweight = how.ops.swiglu_backward(h, dact, chunk)
            how.ops.combine(how.ops.rows_grad(dh, chunk, gate_up.detach()), chunk, None, dhidden)
            held = (chunk.row_Tk >= 0) & (chunk.row_Tk < chunk.size)
            at = chunk.row_Tk.clamp(0, chunk.size - 1).long()
            dweights += torch.where(held, dweight[at], 0.0)
            if how.sink.deferred and index == 0:  # operands of one chunk may wait: that is the memory guard's bound
                waiting.append((chunk, act, dh))
            elif gate_up.requires_grad:
                add(chunk, act, dh)

        def finish() -> None:
            grad_buffer(gate_up), grad_buffer(down)
            for operands in waiting:
                add(*operands)

        if gate_up.requires_grad:
            how.sink.submit((gate_up, down), finish)
        return dhidden.to(hidden.dtype), dweights.to(weights.dtype), None, None, None, None


def _chunks(plan: SlotPlan, weights_Tk: Tensor, most: int) -> Iterator[Chunk]:
    """Cut the rows into chunks of `most`; how many are empty is known to the device alone."""
    slots, top_k = plan.slot_N.numel(), max(weights_Tk.shape[1], 1)
    for first in range(0, slots, max(most, 1)):
        size = min(most, slots - first)
        slot_C = plan.slot_N[first : first + size]
        yield Chunk(
            size,
            torch.div(slot_C, top_k, rounding_mode="floor"),
            weights_Tk.reshape(-1)[slot_C].float(),
            torch.where(plan.row_Tk < 0, -1, plan.row_Tk - first),
            (plan.offsets - first).clamp(0, size),
        )
