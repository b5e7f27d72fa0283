"""Weight gradients as work of their own, put off to fill the bubbles of a pipeline (zero-bubble schedules).

The backward of the linear maps and of the experts hands this work to a sink, and a W action runs it later. Autograd
never sees these weights: torch's own way of splitting a backward re-runs a custom function's whole backward,
collectives included. The gradients of norms, router, embedding and head are cheap or rare: they are computed with the
input gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mula_ray.model.moe import Experts
from mula_ray.model.transformer import DecoderLayer, Transformer
from mula_ray.ops.sink import ImmediateSink, WeightGradSink, grad_buffer


class DeferringSink:
    """A `WeightGradSink` that can keep the work of a backward for later, by (stage, micro-batch)."""

    def __init__(self, inner: WeightGradSink) -> None:
        self._inner = inner
        self._kept: dict[tuple[int, int], list[tuple[tuple[nn.Parameter, ...], Callable[[], None]]]] = {}
        self._now: tuple[int, int] | None = None

    @property
    def deferred(self) -> bool:
        """Whether work is kept at present."""
        return self._now is not None

    def keep(self, key: tuple[int, int] | None) -> None:
        """From now on keep the work under `key`; None runs it at once again."""
        self._now = key

    def submit(self, params: tuple[nn.Parameter, ...], work: Callable[[], None]) -> None:
        """Keep the work, or pass it on."""
        if self._now is None:
            self._inner.submit(params, work)
        else:
            self._kept.setdefault(self._now, []).append((params, work))

    def drain(self, key: tuple[int, int]) -> None:
        """Run what was kept under `key`."""
        with torch.no_grad():
            for params, work in self._kept.pop(key, []):
                self._inner.submit(params, work)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: DeferredLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return F.linear(x, module.weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        module: DeferredLinear = ctx.module
        weight = module.weight

        def add_weight_gradient() -> None:
            grad_buffer(weight).addmm_(grad.flatten(0, -2).t(), x.flatten(0, -2))

        module.sink.submit((weight,), add_weight_gradient)
        return grad @ weight.detach(), None


class DeferredLinear(nn.Module):
    """A linear map without bias whose weight gradient goes through a sink, hidden from autograd."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.sink: WeightGradSink = ImmediateSink()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        out: Tensor = _DeferredLinear.apply(x, self)  # type: ignore[no-untyped-call]
        return out


def hide_linear_weights(stage: Transformer) -> None:
    """Make the weight gradients of the linear maps of `stage` go through sinks. Before tensor parallelism."""
    for layer in stage.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, DeferredLinear(cast(nn.Parameter, child.weight)))


def set_sink(stages: Sequence[Transformer], sink: WeightGradSink) -> None:
    """Let every weight gradient that goes through a sink go through `sink`."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, DeferredLinear | Experts):
                module.sink = sink
