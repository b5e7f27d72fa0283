"""`expert_ffn`: the weighted sum over the experts held here, in the backend that fits the device.

Shape suffixes: T tokens, k slots a token, R experts held here, H hidden, I expert width.

All backends are the same function with the same gradients (`reference.py` is its definition). Gradients of the weights
do not travel through autograd: the backward pass adds them to `param.grad` in place, through a `WeightGradSink`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mula_ray.config.errors import UserError
from mula_ray.ops.blocked import Blocked, blocked_ffn
from mula_ray.ops.reference import classic_ffn, reference_ffn
from mula_ray.ops.sink import ImmediateSink, WeightGradSink, grad_buffer
from mula_ray.ops.runtime import Runtime


def expert_ffn(
    hidden_TH: Tensor,
    weights_Tk: Tensor,
    ids_Tk: Tensor,
    gate_up: nn.Parameter,
    down: nn.Parameter,
    *,
    first_expert: int = 0,
    backend: str = "auto",
    sink: WeightGradSink | None = None,
    chunk_tokens: int = 0,
    where: str = "expert_ffn",
    runtime: Runtime | None = None,
) -> Tensor:
    """y_t = sum over the slots of token t whose expert is held here of weight * expert(x_t).

    Args:
        hidden_TH: (T, H) fp32 or bf16.
        weights_Tk: (T, k) routing weights, floating.
        ids_Tk: (T, k) expert of each slot; those outside [first_expert, first_expert + R) contribute nothing.
        gate_up: (R, 2I, H), the gate's rows first. down: (R, H, I).
        first_expert: id of the first expert held here.
        backend: auto, classic, reference, cpu, cpu_kernel, grouped or triton.
        sink: takes the weight-gradient work; by default it runs at once.
        chunk_tokens: memory guard: most routed rows whose activations are kept; 0 is no bound.
        where: layer and rank, for error messages.

    Returns:
        (T, H) of the dtype of `hidden_TH`. Differentiable in hidden_TH and weights_Tk.

    Raises:
        UserError: shapes or dtypes that do not fit, naming `where`.
    """
    sink = sink or ImmediateSink()
    if first_expert:
        ids_Tk = ids_Tk - first_expert
    if torch.is_grad_enabled() and gate_up.requires_grad and not hidden_TH.requires_grad:
        # The weights are hidden from autograd: without an input that asks for a gradient nobody would call backward.
        hidden_TH = hidden_TH.detach().requires_grad_()
    if backend in ("auto", "cpu", "cpu_kernel"):
        runtime = runtime or Runtime()
        how = Blocked(runtime.passes(backend), sink, runtime.workspace, chunk_tokens or ids_Tk.numel())
        return blocked_ffn(hidden_TH, weights_Tk, ids_Tk, gate_up, down, how)
    return cast(Tensor, _Eager.apply(hidden_TH, weights_Tk, ids_Tk, gate_up, down, backend == "classic", sink))  # type: ignore[no-untyped-call]


class _Eager(torch.autograd.Function):
    """`reference` and `classic`: plain autograd inside, weight gradients through the sink."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, ids: Tensor, gate_up: nn.Parameter, down: nn.Parameter, classic: bool, sink: WeightGradSink) -> Tensor:
        ctx.save_for_backward(hidden, weights, ids)
        ctx.params, ctx.classic, ctx.sink = (gate_up, down), classic, sink
        return _eager(hidden, weights, ids, gate_up, down, classic)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, ids = (t.detach() for t in ctx.saved_tensors)
        gate_up, down = ctx.params
        with torch.enable_grad():
            hidden.requires_grad_(), weights.requires_grad_()
            out, leaves = _eager(hidden, weights, ids, gate_up, down, ctx.classic)
            inputs = [hidden, weights, *leaves]
            grads = torch.autograd.grad(out, inputs, grad, allow_unused=True)
        grads = tuple(torch.zeros_like(i) if g is None else g for i, g in zip(inputs, grads, strict=True))

        def work() -> None:
            if not ctx.classic:
                grad_buffer(gate_up).add_(grads[2])
                grad_buffer(down).add_(grads[3])
                return
            width = down.shape[2]
            for expert in range(gate_up.shape[0]):
                g, u, d = grads[2 + 3 * expert : 5 + 3 * expert]
                grad_buffer(gate_up)[expert, :width].add_(g)
                grad_buffer(gate_up)[expert, width:].add_(u)
                grad_buffer(down)[expert].add_(d)

        if gate_up.requires_grad:
            ctx.sink.submit((gate_up, down), work)
        return grads[0], grads[1], None, None, None, None, None


def _eager(hidden: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, classic: bool) -> tuple[Tensor, list[Tensor]]:
    if not classic:
        leaves = [gate_up.detach().requires_grad_(), down.detach().requires_grad_()]
        return reference_ffn(hidden, weights, ids, *leaves), leaves
    width = down.shape[2]
    sets = [
        (gate_up[e, :width].detach().requires_grad_(), gate_up[e, width:].detach().requires_grad_(), down[e].detach().requires_grad_())
        for e in range(gate_up.shape[0])
    ]
    return classic_ffn(hidden, weights, ids, sets), [leaf for one in sets for leaf in one]
