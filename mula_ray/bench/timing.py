"""What all benchmarks share: interleaved medians, fresh processes, peak memory, and the JSON object that is printed.

Variants are timed in turns within one process (A B C, A B C, ...), so that a machine that slows down slows all of them;
a figure is the median over rounds, then over fresh processes (memory layout differs from one process to the next).
"""

from __future__ import annotations

import gc
import importlib.metadata
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from mula_ray.config.errors import UserError

PROCESS_S = 900.0
"""Longest that one fresh process may take, seconds."""


def chosen(bench: str, cases: Sequence[str] | None, known: Sequence[str], default: Sequence[str] = ()) -> list[str]:
    """The cases asked for, else `default`, else all.

    Raises:
        UserError: one that does not exist.
    """
    for case in cases or ():
        if case not in known:
            raise UserError(f"bench {bench} has no case {case!r}; choose among {', '.join(known)}")
    return list(cases or default or known)


class Row(TypedDict):
    """One figure. `speedup` is the time (or memory) of `against` divided by ours, or None."""

    case: str
    metric: str
    value: float
    unit: str
    against: str
    speedup: float | None


def row(case: str, metric: str, value: float, unit: str, against: str = "", speedup: float | None = None) -> Row:
    """One figure as a row of the report."""
    return Row(case=case, metric=metric, value=value, unit=unit, against=against, speedup=speedup)


def report(bench: str, rows: Sequence[Mapping[str, Any]], *, device: str = "cpu", threads: int) -> dict[str, Any]:
    """The object that `mula-ray bench NAME --json` prints."""
    versions = {"torch": str(torch.__version__)}
    for package in ("transformers", "ray", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "bench": bench,
        "device": device,
        "processor": _processor(),
        "threads": threads,
        "versions": versions,
        "rows": rows,
    }


def _processor() -> str:
    """Name, family and model of this machine's processor: names alone do not tell generations apart on rented ones."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    if "model name" not in found:
        return platform.machine()
    return f"{found['model name']}, family {found.get('cpu family', '?')}, model {found.get('model', '?')}"


def interleaved(variants: dict[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, float]:
    """Median seconds of each variant over `rounds` turns, after `warmup` turns that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(warmup + rounds):
        for name, run in variants.items():
            gc.collect()
            start = time.perf_counter()
            run()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def fresh_processes(count: int, fn: Callable[..., Any], *args: object) -> list[Any]:
    """Results of `fn(*args)`, picklable, in `count` new processes, one after the other.

    Raises:
        RuntimeError: a process failed or took longer than `PROCESS_S`.
    """
    context = multiprocessing.get_context("spawn")
    results = []
    for _ in range(count):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, fn, args), daemon=True)
        process.start()
        theirs.close()
        try:
            if not ours.poll(PROCESS_S):
                raise RuntimeError(f"{fn.__name__}{args} took longer than {PROCESS_S:.0f} s")
            results.append(ours.recv())
        except EOFError:
            process.join()
            raise RuntimeError(f"{fn.__name__}{args} failed with exit code {process.exitcode}") from None
        finally:
            process.kill()
            process.join()
    return results


def _child(pipe: Any, fn: Callable[..., Any], args: tuple[object, ...]) -> None:
    pipe.send(fn(*args))


def median_ratio(results: list[dict[str, float]], over: str, under: str) -> float:
    """Median over processes of time `over` ÷ time `under`, both of the same process."""
    return statistics.median(result[over] / result[under] for result in results)


def peak_bytes(run: Callable[[], object]) -> int:
    """Bytes by which `run` raises the peak of this process' resident memory above what is resident before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the old peak
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def bench_threads() -> int:
    """Threads of the benchmarks: two, or one where there is one core."""
    return min(2, len(os.sched_getaffinity(0)))
