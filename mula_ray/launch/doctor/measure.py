"""What doctor measures in processes of its own, each bounded: bare collectives between ranks, matrix products a tile.

python -m mula_ray.launch.doctor.measure rank HOST PORT RANK WORLD TIMEOUT
python -m mula_ray.launch.doctor.measure gemm DEVICE
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
NUMBERS = 1 << 16


def start_rank(
    host: str, port: int, rank: int, world: int, bound_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start one rank of the bare collectives; `finish_rank` reads its answer."""
    command = [sys.executable, "-m", "mula_ray.launch.doctor.measure", "rank", host, str(port), str(rank), str(world)]
    return subprocess.Popen(
        [*command, str(bound_s)],
        env=dict(environment or os.environ) | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_rank(process: subprocess.Popen[str], bound_s: float) -> dict[str, float | str]:
    """Seconds of each collective, or what went wrong with the first that failed; never waits longer than the bound."""
    try:
        out, err = process.communicate(timeout=bound_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        done = _lines(out)
        stuck = next((name for name in ("connect", *COLLECTIVES) if name not in done), "exit")
        return done | {stuck: f"no end within {bound_s:.0f} s"}
    done = _lines(out)
    if process.returncode != 0:
        stuck = next((name for name in ("connect", *COLLECTIVES) if name not in done), "exit")
        done[stuck] = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:300]
    return done


def local_collectives(world: int = 2, bound_s: float = 60.0) -> dict[str, float | str]:
    """Bare collectives between `world` ranks on this machine (gloo); the slowest rank's seconds."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [start_rank("127.0.0.1", port, rank, world, bound_s) for rank in range(world)]
    until = time.monotonic() + bound_s
    answers = [finish_rank(rank, max(0.1, until - time.monotonic())) for rank in ranks]
    return merge(answers)


def merge(answers: list[dict[str, float | str]]) -> dict[str, float | str]:
    """The worst of several ranks' answers: a failure, else the longest time."""
    result: dict[str, float | str] = {}
    for answer in answers:
        for name, value in answer.items():
            before = result.get(name)
            if isinstance(before, str):
                continue
            result[name] = value if isinstance(value, str) or before is None else max(before, value)
    return result


def gemm_of_tiles(device: str, tiles: int, mask: str, bound_s: float = 120.0) -> tuple[dict[str, float], str]:
    """(TFLOP/s of each tile, one after the other in a process that sees only it; what went wrong)."""
    speeds: dict[str, float] = {}
    for tile in range(tiles):
        environment = dict(os.environ) | ({mask: str(tile)} if mask else {"OMP_NUM_THREADS": "1"})
        command = [sys.executable, "-m", "mula_ray.launch.doctor.measure", "gemm", device]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=bound_s)
        except subprocess.TimeoutExpired:
            return speeds, f"tile {tile}: no end within {bound_s:.0f} s"
        if done.returncode != 0:
            return speeds, f"tile {tile}: {(done.stderr.strip().splitlines() or ['?'])[-1][:300]}"
        speeds[str(tile)] = float(done.stdout)
    return speeds, ""


def _lines(out: str) -> dict[str, float | str]:
    result: dict[str, float | str] = {}
    for line in out.splitlines():
        if line.startswith("{"):
            result |= json.loads(line)
    return result


def _rank(host: str, port: int, rank: int, world: int, bound_s: float) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    bound = timedelta(seconds=bound_s)
    started = time.perf_counter()
    store = dist.TCPStore(  # type: ignore[attr-defined,unused-ignore]
        host, port, world, rank == 0, bound
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=bound)
    print(json.dumps({"connect": time.perf_counter() - started}), flush=True)
    mine, whole = torch.ones(NUMBERS), torch.empty(NUMBERS * world)
    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(mine),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, mine),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(mine, whole),
        "broadcast": lambda: dist.broadcast(mine, 0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "barrier": dist.barrier,
    }
    for name in COLLECTIVES:
        started = time.perf_counter()
        calls[name]()
        print(json.dumps({name: time.perf_counter() - started}), flush=True)
    os._exit(0)  # a store that goes away under others is not our concern


def _gemm(device: str) -> None:
    import torch

    size, repeats = (8192, 20) if device != "cpu" else (768, 5)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    left = torch.randn(size, size, dtype=dtype, device=device)
    right = torch.randn(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        product = left @ right
        if device != "cpu":
            getattr(torch, device).synchronize()
        best = min(best, time.perf_counter() - started)
    assert bool(torch.isfinite(product.float().sum()))
    print(2 * size**3 / best / 1e12)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        _rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6]))
    else:
        _gemm(sys.argv[2])
