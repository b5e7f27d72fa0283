"""`mula-ray bench moe`: the expert block, forward and backward, side by side.

Ours: backends `cpu` (torch operations) and `cpu_kernel` (C++ passes). Against, in the same process:
- `classic`: the eager block with a one-hot mask and a Python loop, one set of weights an expert;
- `transformers-grouped_mm`, `transformers-eager`: the experts of transformers' OLMoE (needs the extra `hf`). Its eager
  path allocates gradients of all experts for each expert: shown, but nothing to boast of, so it runs once;
- `bare-gemm`: the six GEMMs an expert, its own weights, rows ready, outputs preallocated: the physical limit. Its own
  row says how fast this machine multiplies and how much faster than `classic` anything could be on it, which differs
  from one kind of processor to the next.

fp32, random routing outside the timed region, weights and persistent gradient buffers shared by all. Outputs and
gradients are compared first. A row `memory` is the peak above weights and gradients in a fresh process.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mula_ray.bench.timing import (
    Row,
    bench_threads,
    chosen,
    fresh_processes,
    interleaved,
    median_ratio,
    peak_bytes,
    report,
    row,
)
from mula_ray.ops.experts import expert_ffn
from mula_ray.ops.reference import classic_ffn
from mula_ray.ops.runtime import Runtime


@dataclass(frozen=True)
class Shape:
    """Sizes of an expert block."""

    hidden: int
    width: int
    experts: int
    top_k: int
    tokens: int

    @property
    def gemm_flops(self) -> int:
        """FLOPs of forward and backward: three times two for each of the three matrices, per row."""
        return 3 * 2 * 3 * self.tokens * self.top_k * self.hidden * self.width


CASES = {
    "h512-i256-e64-k8-t4096": Shape(512, 256, 64, 8, 4096),
    "h1024-i512-e16-k2-t4096": Shape(1024, 512, 16, 2, 4096),
    "h256-i128-e16-k4-t4096": Shape(256, 128, 16, 4, 4096),
    "h2048-i1024-e64-k8-t1024": Shape(2048, 1024, 64, 8, 1024),
}
OURS = ("cpu", "cpu_kernel")
TOLERANCE = 1e-4
PROCESSES, ROUNDS = 5, 5

Step = Callable[[], tuple[Tensor, Tensor, Tensor]]
"""Forward and backward: output and gradients of hidden and routing weights; weight gradients go to the buffers."""


def run(cases: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Measure the named cases, or all."""
    rows: list[Row] = []
    for case in chosen("moe", cases, tuple(CASES)):
        times = fresh_processes(PROCESSES, measure, case)
        rows += _time_rows(case, times, fresh_processes(1, measure_eager, case)[0])
        rows += _memory_rows(case)
    return report("moe", rows, threads=bench_threads())


def _time_rows(case: str, times: list[dict[str, float]], eager: dict[str, float]) -> list[Row]:
    rows = []
    for ours in OURS:
        milliseconds = 1e3 * statistics.median(t[ours] for t in times)
        for peer in (name for name in times[0] if name not in OURS):
            rows.append(row(case, ours, milliseconds, "ms", peer, median_ratio(times, peer, ours)))
    seconds = statistics.median(t["bare-gemm"] for t in times)
    limit = median_ratio(times, "classic", "bare-gemm")
    rows.append(row(case, "bare-gemm", CASES[case].gemm_flops / seconds / 1e9, "GFLOP/s", "classic", limit))
    if eager:
        seconds, peer = eager["cpu"], "transformers-eager"
        rows.append(row(case, "cpu", 1e3 * seconds, "ms", peer, eager[peer] / seconds))
    return rows


def _memory_rows(case: str) -> list[Row]:
    peaks = {name: fresh_processes(1, measure_memory, case, name)[0] for name in (*OURS, "transformers-grouped_mm")}
    theirs = peaks.pop("transformers-grouped_mm")
    return [
        row(case, f"memory-{ours}", peak / 2**20, "MiB", "transformers-grouped_mm", theirs / peak if theirs else None)
        for ours, peak in peaks.items()
    ]


class Block:
    """Weights, gradient buffers, inputs, and every way to compute them."""

    def __init__(self, shape: Shape) -> None:
        torch.set_num_threads(bench_threads())
        torch.manual_seed(0)
        self.shape, self.runtime = shape, Runtime()
        self.gate_up = nn.Parameter(torch.randn(shape.experts, 2 * shape.width, shape.hidden).mul_(0.02))
        self.down = nn.Parameter(torch.randn(shape.experts, shape.hidden, shape.width).mul_(0.02))
        self.gate_up.grad, self.down.grad = torch.zeros_like(self.gate_up), torch.zeros_like(self.down)
        self.hidden, self.grad = torch.randn(shape.tokens, shape.hidden), torch.randn(shape.tokens, shape.hidden)
        scores = torch.softmax(torch.randn(shape.tokens, shape.experts), -1)
        self.weights, self.ids = scores.topk(shape.top_k)

    def ours(self, backend: str) -> Step:
        """`expert_ffn` in `backend`."""
        return self._step(
            lambda x, w: expert_ffn(x, w, self.ids, self.gate_up, self.down, backend=backend, runtime=self.runtime)
        )

    def classic(self) -> Step:
        """The eager loop over experts, each with its own weights (views of the same memory) and gradients."""
        width, experts = self.shape.width, []
        assert self.gate_up.grad is not None
        assert self.down.grad is not None
        for e in range(self.shape.experts):
            own = []
            for stack, grads, part in (
                (self.gate_up, self.gate_up.grad, slice(None, width)),
                (self.gate_up, self.gate_up.grad, slice(width, None)),
                (self.down, self.down.grad, slice(None)),
            ):
                param = nn.Parameter(stack.detach()[e, part])
                param.grad = grads[e, part]
                own.append(param)
            experts.append((own[0], own[1], own[2]))
        return self._step(lambda x, w: classic_ffn(x, w, self.ids, list(experts)))

    def transformers(self, implementation: str) -> Step | None:
        """The experts of transformers' OLMoE on the same parameters; None where it is not installed."""
        try:
            from transformers import OlmoeConfig
            from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
        except ImportError:
            return None
        shape = self.shape
        with torch.device("meta"):
            config = OlmoeConfig(
                hidden_size=shape.hidden, intermediate_size=shape.width, num_experts=shape.experts,
                num_experts_per_tok=shape.top_k,
            )  # fmt: skip
            config._experts_implementation = implementation
            module = OlmoeExperts(config)
        module.gate_up_proj, module.down_proj = self.gate_up, self.down
        return self._step(lambda x, w: module(x, self.ids, w))

    def bare_gemm(self) -> Callable[[], None]:
        """The six GEMMs of each expert, on rows that are ready, into outputs that are there."""
        shape, slots = self.shape, self.shape.tokens * self.shape.top_k
        x, h = torch.randn(slots, shape.hidden), torch.empty(slots, 2 * shape.width)
        y, a = torch.empty(slots, shape.hidden), torch.empty(slots, shape.width)

        @torch.no_grad()
        def run() -> None:
            rows = slots // shape.experts
            assert self.gate_up.grad is not None
            assert self.down.grad is not None
            for e in range(shape.experts):
                at = slice(e * rows, (e + 1) * rows)
                torch.mm(x[at], self.gate_up[e].t(), out=h[at])
                act = h[at, : shape.width]
                torch.mm(act, self.down[e].t(), out=y[at])
                torch.mm(y[at], self.down[e], out=a[at])
                self.down.grad[e].addmm_(y[at].t(), act)
                torch.mm(h[at], self.gate_up[e], out=y[at])
                self.gate_up.grad[e].addmm_(h[at].t(), x[at])

        return run

    def results(self, step: Step) -> list[Tensor]:
        """Output and all four gradients of one step from zeroed buffers."""
        assert self.gate_up.grad is not None
        assert self.down.grad is not None
        self.gate_up.grad.zero_()
        self.down.grad.zero_()
        return [*step(), self.gate_up.grad.clone(), self.down.grad.clone()]

    def _step(self, block: Callable[[Tensor, Tensor], Tensor]) -> Step:
        def step() -> tuple[Tensor, Tensor, Tensor]:
            x, w = self.hidden.clone().requires_grad_(), self.weights.clone().requires_grad_()
            out = block(x, w)
            torch.autograd.backward(out, self.grad)
            assert x.grad is not None
            assert w.grad is not None
            return out.detach(), x.grad, w.grad

        return step


def measure(case: str) -> dict[str, float]:
    """Seconds of every variant but transformers' eager one, in this process."""
    block = Block(CASES[case])
    variants: dict[str, Step] = {name: block.ours(name) for name in OURS}
    variants["classic"] = block.classic()
    grouped = block.transformers("grouped_mm")
    if grouped is not None:
        variants["transformers-grouped_mm"] = grouped
    _check_equal(block, variants)
    runs: dict[str, Callable[[], object]] = {**variants, "bare-gemm": block.bare_gemm()}
    return interleaved(runs, ROUNDS)


def measure_eager(case: str) -> dict[str, float]:
    """Seconds of transformers' eager experts and of ours, once each; empty without transformers."""
    block = Block(CASES[case])
    eager = block.transformers("eager")
    if eager is None:
        return {}
    return interleaved({"cpu": block.ours("cpu"), "transformers-eager": eager}, rounds=1, warmup=0)


def measure_memory(case: str, variant: str) -> int:
    """Peak bytes of one forward and backward above weights, gradients and inputs; 0 without transformers."""
    block = Block(CASES[case])
    grouped = variant.removeprefix("transformers-")
    step = block.transformers(grouped) if variant != grouped else block.ours(variant)
    return 0 if step is None else peak_bytes(functools.partial(_drop, step))


def _drop(step: Step) -> None:
    step()


def _check_equal(block: Block, variants: dict[str, Step]) -> None:
    """Refuse to time what does not compute the same."""
    expected = block.results(variants["classic"])
    for name, step in variants.items():
        for ours, theirs in zip(block.results(step), expected, strict=True):
            error = ((ours - theirs).norm() / theirs.norm()).item()
            assert error <= TOLERANCE, f"{name} differs from classic by {error:.1e}"
