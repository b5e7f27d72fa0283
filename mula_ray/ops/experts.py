"""`expert_ffn`: the weighted sum over the experts held here, in the backend that fits the device.

Shape suffixes: T tokens, k slots a token, R experts held here, H hidden, I expert width.

All backends are the same function with the same gradients (`reference.py` is its definition). Gradients of the weights
do not travel through autograd: the backward pass adds them to `param.grad` in place, through a `WeightGradSink`.

| backend | where | how |
|---|---|---|
| reference, classic | anywhere | plain autograd: the definition, and the eager loop to be measured against |
| cpu, cpu_kernel | CPU | blocked by expert (`blocked.py`), passes between the GEMMs in torch or in C++ |
| grouped, triton | CUDA, XPU | sorted rows, no host synchronisation (`rows.py`); torch's grouped GEMM or own kernels |
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from mula_ray.config.errors import UserError
from mula_ray.ops.blocked import Blocked, blocked_ffn
from mula_ray.ops.eager import eager_ffn
from mula_ray.ops.rows import Rows, rows_ffn
from mula_ray.ops.runtime import Runtime
from mula_ray.ops.sink import ImmediateSink, WeightGradSink

BACKENDS = ("auto", "classic", "reference", "cpu", "cpu_kernel", "grouped", "triton")


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
        ids_Tk: (T, k) integer, expert of each slot; those outside [first_expert, first_expert + R) contribute nothing.
        gate_up: (R, 2I, H), the gate's rows first. down: (R, H, I).
        first_expert: id of the first expert held here.
        backend: one of `BACKENDS`; `auto` picks by device.
        sink: takes the weight-gradient work; by default it runs at once.
        chunk_tokens: memory guard: most routed rows whose activations are kept; 0 is no bound. Same result.
        where: layer and rank, for error messages.
        runtime: pooled memory and the built kernel, shared by the calls of a model.

    Returns:
        (T, H) of the dtype of `hidden_TH`. Differentiable in hidden_TH and weights_Tk.

    Raises:
        UserError: shapes, dtypes or a backend that do not fit, naming `where`.
    """
    _check(hidden_TH, weights_Tk, ids_Tk, gate_up, down, where)
    if chunk_tokens < 0:
        raise UserError(f"{where}: chunk_tokens is {chunk_tokens}; it must be a number of rows, or 0 for no bound")
    sink, runtime = sink or ImmediateSink(), runtime or Runtime()
    ids_Tk = ids_Tk.to(torch.int64) - first_expert if first_expert else ids_Tk.to(torch.int64)
    if torch.is_grad_enabled() and gate_up.requires_grad and not hidden_TH.requires_grad:
        # The weights are hidden from autograd: without an input that asks for a gradient nobody would call backward.
        hidden_TH = hidden_TH.detach().requires_grad_()
    name = choose_backend(hidden_TH.device) if backend == "auto" else backend
    keep_rows = chunk_tokens or ids_Tk.numel()
    if name in ("reference", "classic"):
        return eager_ffn(hidden_TH, weights_Tk, ids_Tk, gate_up, down, name == "classic", sink)
    if name in ("cpu", "cpu_kernel") and hidden_TH.device.type == "cpu":
        how = Blocked(runtime.passes(name), sink, runtime.workspace, keep_rows)
        return blocked_ffn(hidden_TH, weights_Tk, ids_Tk, gate_up, down, how)
    if name in ("grouped", "triton"):
        if name == "grouped":
            _check_alignment(hidden_TH, down, where)
        return rows_ffn(hidden_TH, weights_Tk, ids_Tk, gate_up, down, Rows(runtime.row_ops(name), sink, keep_rows))
    raise UserError(
        f"{where}: expert backend {backend!r} cannot run on {hidden_TH.device.type}; set model.moe.backend to auto"
    )


def choose_backend(device: torch.device) -> str:
    """The backend that `auto` means on `device`."""
    if device.type == "cpu":
        return "cpu_kernel"
    return "triton" if importlib.util.find_spec("triton") else "grouped"


def _check(hidden: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, where: str) -> None:
    """Raise a `UserError` for anything that would make a wrong number or an obscure failure further on."""
    experts, width2, size = gate_up.shape if gate_up.dim() == 3 else (-1, -1, -1)
    tests: tuple[tuple[bool, str], ...] = (
        (hidden.dim() == 2, f"hidden has shape {tuple(hidden.shape)}; it must be (tokens, hidden)"),
        (ids.dim() == 2, f"ids have shape {tuple(ids.shape)}; they must be (tokens, slots)"),
        (
            weights.shape == ids.shape and hidden.shape[:1] == ids.shape[:1],
            f"routing weights {tuple(weights.shape)} and ids {tuple(ids.shape)} must both be (tokens, slots) "
            f"for hidden {tuple(hidden.shape)}",
        ),
        (
            down.shape == (experts, size, width2 // 2) and width2 % 2 == 0 and (size,) == hidden.shape[-1:],
            f"gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} must be (R, 2I, H) and (R, H, I) "
            f"for hidden {tuple(hidden.shape)}",
        ),
        (hidden.dtype in (torch.float32, torch.bfloat16), f"hidden is {hidden.dtype}; it must be float32 or bfloat16"),
        (
            gate_up.dtype == down.dtype == hidden.dtype,
            f"expert weights are {gate_up.dtype} and {down.dtype}; they must have the dtype of hidden, {hidden.dtype}",
        ),
        (
            gate_up.requires_grad == down.requires_grad,
            f"gate_up {'has' if gate_up.requires_grad else 'has no'} requires_grad, down is the other way round; both "
            "are trained or neither",
        ),
        (weights.is_floating_point(), f"routing weights are {weights.dtype}; they must be floating"),
        (
            not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool,
            f"expert ids are {ids.dtype}; they must be integers",
        ),
    )
    for holds, message in tests:
        if not holds:
            raise UserError(f"{where}: {message}")


def _check_alignment(hidden: Tensor, down: Tensor, where: str) -> None:
    bad = [size for size in down.shape[1:] if size * hidden.element_size() % 16]
    if bad:
        raise UserError(
            f"{where}: rows of {bad[0]} elements are no multiples of 16 bytes, which torch's grouped GEMM needs; "
            "set model.moe.backend to triton or reference"
        )
