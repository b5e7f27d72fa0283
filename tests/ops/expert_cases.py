"""Shared by the tests of expert backends: one case, run through a backend, compared with the reference in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mula_ray.ops.experts import expert_ffn
from mula_ray.ops.reference import reference_ffn
from mula_ray.ops.runtime import Runtime
from mula_ray.ops.sink import ImmediateSink

NAMES = ("output", "hidden", "weights", "gate_up", "down")


@dataclass
class Case:
    """Inputs of one call; `ids` may point outside the experts held here."""

    hidden: Tensor
    weights: Tensor
    ids: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        cast = (t.to(dtype) for t in (self.hidden, self.gate_up, self.down, self.grad))
        hidden, gate_up, down, grad = cast
        return Case(hidden, self.weights, self.ids, gate_up, down, grad)


def make_case(tokens: int, hidden: int, width: int, experts: int, top_k: int, seed: int = 0) -> Case:
    """Random inputs with distinct experts a token."""
    gen = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=gen)
    weights, ids = torch.softmax(3 * scores, -1).topk(top_k)
    return Case(
        torch.randn(tokens, hidden, generator=gen),
        weights.contiguous(),
        ids,
        torch.randn(experts, 2 * width, hidden, generator=gen) / hidden**0.5,
        torch.randn(experts, hidden, width, generator=gen) / width**0.5,
        torch.randn(tokens, hidden, generator=gen),
    )


def expected(case: Case) -> list[Tensor]:
    """Output and gradients by plain autograd in fp64."""
    leaves = [t.double().requires_grad_() for t in (case.hidden, case.weights, case.gate_up, case.down)]
    out = reference_ffn(leaves[0], leaves[1], case.ids, leaves[2], leaves[3])
    out.backward(case.grad.double())
    return [out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]


@dataclass
class Deferred:
    """A sink that keeps the work until asked, as a zero-bubble schedule does."""

    deferred: bool = True
    work: list[Callable[[], None]] = field(default_factory=list)

    def submit(self, params: tuple[nn.Parameter, ...], work: Callable[[], None]) -> None:  # noqa: ARG002
        self.work.append(work)


def run(
    case: Case, backend: str, runtime: Runtime | None = None, *, chunk: int = 0, first: int = 0, defer: bool = False
) -> list[Tensor]:
    """Output and gradients of `backend`, in the order of `NAMES`."""
    hidden, weights = case.hidden.detach().requires_grad_(), case.weights.detach().requires_grad_()
    gate_up, down = nn.Parameter(case.gate_up.clone()), nn.Parameter(case.down.clone())
    sink = Deferred() if defer else ImmediateSink()
    out = expert_ffn(
        hidden, weights, case.ids, gate_up, down, backend=backend, runtime=runtime, chunk_tokens=chunk,
        first_expert=first, sink=sink,
    )  # fmt: skip
    out.backward(case.grad)
    if isinstance(sink, Deferred):
        assert len(sink.work) == 1
        sink.work[0]()
    grads = (hidden.grad, weights.grad, gate_up.grad, down.grad)
    assert all(g is not None for g in grads)
    return [out.detach(), *grads]


def relative_errors(ours: list[Tensor], theirs: list[Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm of the expected value, by name."""
    return {
        name: ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
        for name, a, b in zip(NAMES, ours, theirs, strict=True)
    }


def assert_equal_to_oracle(case: Case, backend: str, tolerance: float, runtime: Runtime | None = None, **how) -> None:
    """Fail with all errors when one is over the tolerance."""
    errors = relative_errors(run(case, backend, runtime, **how), expected(case))
    assert max(errors.values()) <= tolerance, errors
