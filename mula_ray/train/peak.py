"""The peak that MFU is measured against, when no vendor's figure is configured: a large matrix product."""

from __future__ import annotations

import time

import torch


def measure_peak_tflops(device: torch.device, dtype: torch.dtype, budget_s: float = 0.4) -> float:
    """Best TFLOP/s of a square GEMM on `device` with the current number of threads, within about `budget_s` seconds.

    A CPU without bf16 units multiplies bf16 slower than fp32; the peak is then the fp32 one, since no share of a
    handicap is worth reporting. Call it in one rank at a time while no other rank computes.
    """
    kinds = {dtype, torch.float32} if device.type == "cpu" else {dtype}
    return max(_best(device, kind, budget_s / len(kinds)) for kind in kinds)


def _best(device: torch.device, dtype: torch.dtype, budget_s: float) -> float:
    size = 768 if device.type == "cpu" else 8192
    left = torch.ones(size, size, device=device, dtype=dtype)
    right = torch.ones(size, size, device=device, dtype=dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + budget_s
    with torch.inference_mode():
        torch.mm(left, right, out=out)
        _wait(device)
        while True:
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            _wait(device)
            stop = time.perf_counter()
            best = min(best, stop - start)
            if stop > end:
                return 2 * size**3 / best / 1e12


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
