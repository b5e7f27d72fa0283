"""The backends `reference` and `classic`: plain autograd inside, weight gradients through the sink."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mula_ray.ops.reference import classic_ffn, reference_ffn
from mula_ray.ops.sink import WeightGradSink, grad_buffer


def eager_ffn(
    hidden: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: nn.Parameter,
    down: nn.Parameter,
    classic: bool,
    sink: WeightGradSink,
) -> Tensor:
    """`reference_ffn`, or `classic_ffn` on one set of weights an expert."""
    return cast(Tensor, _EagerFfn.apply(hidden, weights, ids, gate_up, down, classic, sink))  # type: ignore[no-untyped-call]


class _EagerFfn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: nn.Parameter,
        down: nn.Parameter,
        classic: bool,
        sink: WeightGradSink,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weights, ids)
        ctx.params, ctx.classic, ctx.sink = (gate_up, down), classic, sink
        return _run(hidden, weights, ids, gate_up, down, classic)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, ids = ctx.saved_tensors
        gate_up, down = ctx.params
        with torch.enable_grad():
            hidden, weights = hidden.detach().requires_grad_(), weights.detach().requires_grad_()
            out, leaves = _run(hidden, weights, ids, gate_up, down, ctx.classic)
            inputs = [hidden, weights, *leaves]
            found = torch.autograd.grad(out, inputs, grad, allow_unused=True)
        grads = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found, strict=True)]
        if gate_up.requires_grad:
            targets = _leaves(grad_buffer(gate_up), grad_buffer(down), ctx.classic)
            ctx.sink.submit((gate_up, down), lambda: torch._foreach_add_(targets, grads[2:]))
        return grads[0], grads[1], None, None, None, None, None


def _leaves(gate_up: Tensor, down: Tensor, classic: bool) -> list[Tensor]:
    """The stacks themselves, or views of gate, up and down of each expert, one after the other."""
    if not classic:
        return [gate_up, down]
    width = down.shape[2]
    return [part for e in range(len(gate_up)) for part in (gate_up[e, :width], gate_up[e, width:], down[e])]


def _run(
    hidden: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, classic: bool
) -> tuple[Tensor, list[Tensor]]:
    """The output and the leaves its graph hangs on."""
    leaves = [leaf.requires_grad_() for leaf in _leaves(gate_up.detach(), down.detach(), classic)]
    if not classic:
        return reference_ffn(hidden, weights, ids, *leaves), leaves
    sets = [(leaves[i], leaves[i + 1], leaves[i + 2]) for i in range(0, len(leaves), 3)]
    return classic_ffn(hidden, weights, ids, sets), leaves
