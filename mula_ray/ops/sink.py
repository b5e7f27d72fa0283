"""Where the gradients of expert weights go: straight into the persistent gradient buffers, now or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn


class WeightGradSink(Protocol):
    """Takes the weight-gradient work of a backward pass.

    `work()` adds to `.grad` of `params` in place. `deferred` tells the operator that `submit` may run it later (zero
    bubble schedules), so that input and weight gradients must be separate; otherwise they are computed together.
    """

    @property
    def deferred(self) -> bool:
        """Whether `submit` may return before `work` has run."""
        ...

    def submit(self, params: tuple[nn.Parameter, ...], work: Callable[[], None]) -> None:
        """Run `work` now or later, exactly once."""
        ...


class ImmediateSink:
    """Runs the work at once."""

    deferred = False

    def submit(self, params: tuple[nn.Parameter, ...], work: Callable[[], None]) -> None:  # noqa: ARG002
        """Run `work`."""
        work()


def grad_buffer(param: nn.Parameter) -> Tensor:
    """The persistent gradient of `param`, made with zeros if there is none yet."""
    if param.grad is None:
        param.grad = torch.zeros_like(param, memory_format=torch.contiguous_format)
    return param.grad
