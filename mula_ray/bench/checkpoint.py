"""`mula-ray bench checkpoint`: saving and loading a rank's state against the plain operation it cannot beat.

- `stall`: how long the loop waits for an asynchronous save, against the same state saved synchronously and against
  `torch.distributed.checkpoint.async_save` (the faster of its default and a reused shared-memory stager); and how much
  slower the steps are while the save is finished beside them.
- `write`: payload, checksums, fsync and manifest against `write` + `fsync` of the same bytes.
- `load-cold`: reading with every block checked against `read` of the same bytes, both from the device (the files are
  dropped from the page cache); warm loading and verification beside it.

In a process as a rank is one (`config/environment.py`). Sides alternate; a figure is the median over the repetitions
(twice as many for reading, which varies most).
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mula_ray.bench.ranks import run_ranks
from mula_ray.bench.timing import Row, chosen, report, row
from mula_ray.checkpoint.buffers import host_bytes
from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.checkpoint.saver import Saver
from mula_ray.checkpoint.store import part_name, write_part
from mula_ray.plan.format import FULL_KINDS, Facts
from mula_ray.plan.pieces import Piece

NBYTES = 256 << 20
TENSORS = 20
REPEATS = 7
Items = list[tuple[Piece, torch.Tensor]]


def run(
    cases: Sequence[str] | None = None, folder: Path | None = None, nbytes: int = NBYTES, repeats: int = REPEATS
) -> dict[str, Any]:
    """The benchmark's JSON object. `folder`: where to write (default: the current folder, as a run would)."""
    wanted = chosen("checkpoint", cases, ("stall", "write", "load-cold"))
    base = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=folder or Path.cwd()))
    try:
        (rows,) = run_ranks(_measure, 1, wanted, base, nbytes, repeats, timeout=900.0, allocator=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return report("checkpoint", rows, threads=1)


def _measure(
    _rank: int, _world: int, _port: int, wanted: list[str], base: Path, nbytes: int, repeats: int
) -> list[Row]:
    items = _state(nbytes)
    rows: list[Row] = []
    if "stall" in wanted:
        rows += _stall(base / "stall", items, repeats)
    if "write" in wanted:
        rows += _write(base, items, repeats)
    if "load-cold" in wanted:
        rows += _load(base, items, repeats)
    return rows


def _state(nbytes: int) -> Items:
    """Masters and moments of a rank, `nbytes` in all: flat fp32 tensors of different lengths."""
    per_kind = nbytes // 4 // len(FULL_KINDS)
    edges = [per_kind * i * i // TENSORS**2 for i in range(TENSORS + 1)]
    items = []
    for kind in FULL_KINDS:
        for i, (a, b) in enumerate(itertools.pairwise(edges)):
            piece = Piece(f"layer.{i}.weight", kind, "fp32", (b - a,), (0,), (b - a,), 0, b - a)
            items.append((piece, torch.randn(b - a)))
    return items


def _stall(folder: Path, items: Items, repeats: int) -> list[Row]:
    folder.mkdir()
    manager = CheckpointManager(folder / "ours", "bench")
    manager.acquire(renew=False)
    savers = {"async": Saver(manager, mode="async"), "sync": Saver(manager, mode="sync")}
    savers["async"].prepare(items)
    dcp = _DcpAsync(folder / "dcp", items)
    blocked: dict[str, list[float]] = {"async": [], "sync": [], "dcp-default": [], "dcp-cached": []}
    quiet, beside, step = [], [], 0
    for _ in range(repeats):
        for mode, saver in savers.items():
            step += 1
            began = time.perf_counter()
            saver.save(Facts(step, 0, 0, manager.generation, "bench"), items)
            blocked[mode].append(time.perf_counter() - began)
            if mode == "async":
                beside += _steps_until(_idle(saver))
            (result,) = saver.drain()
            assert result.path is not None, result
            if mode == "sync":  # the re-reading is not part of a plain synchronous save
                blocked[mode][-1] = result.seconds["write"]
        for name in ("default", "cached"):
            blocked[f"dcp-{name}"].append(dcp.save(name))
        quiet += _steps_until(_passed(time.perf_counter() + 0.5))
    for saver in savers.values():
        saver.close()
    manager.close()
    median = {name: statistics.median(values[1:]) for name, values in blocked.items()}
    slower = statistics.median(beside) / statistics.median(quiet)
    return [
        row("stall", "blocked_s", median["async"], "s", "sync", median["sync"] / median["async"]),
        row("stall", "blocked_s", median["async"], "s", "dcp-async",
             min(median["dcp-default"], median["dcp-cached"]) / median["async"]),
        row("stall", "share_of_sync", median["async"] / median["sync"], "", "sync", None),
        row("stall", "step_beside_save", slower, "x", "step", 1 / slower),
    ]  # fmt: skip


class _DcpAsync:
    """torch's asynchronous save of the same tensors, in its default way and with a reused stager."""

    def __init__(self, folder: Path, items: Items) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.folder = folder
        self.state = {f"{piece.kind}.{piece.name}": tensor for piece, tensor in items}
        self.stagers: dict[str, Any] = {
            "default": None,
            "cached": DefaultStager(StagingOptions(False, True, False, False)),
        }

    def save(self, name: str) -> float:
        """Seconds that the call blocks; waits for the rest outside of it."""
        import warnings

        from torch.distributed.checkpoint.state_dict_saver import async_save

        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            future = async_save(self.state, checkpoint_id=target, no_dist=True, async_stager=self.stagers[name])
            blocked = time.perf_counter() - began
            future.result() if hasattr(future, "result") else future.upload_completion.result()
        return blocked


def _steps_until(done: Callable[[], bool]) -> list[float]:
    """Times of small training-like steps (a matmul) until `done`."""
    a, b, times = torch.randn(512, 512), torch.randn(512, 512), []
    while not done():
        began = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - began)
    return times


def _idle(saver: Saver) -> Callable[[], bool]:
    return lambda: not saver.busy


def _passed(until: float) -> Callable[[], bool]:
    return lambda: time.perf_counter() > until


def _write(folder: Path, items: Items, repeats: int) -> list[Row]:
    data = host_bytes(torch.cat([tensor for _, tensor in items]), sum(piece.nbytes for piece, _ in items))
    raw, ours = [], []
    for i in range(repeats):
        path = folder / f"raw-{i}"
        os.sync()
        began = time.perf_counter()
        handle = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
        rest = data
        while rest.nbytes:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
        os.close(handle)
        raw.append(time.perf_counter() - began)
        path.unlink()
        os.sync()
        began = time.perf_counter()
        entry = write_part(folder, part_name(0), items)
        ours.append(time.perf_counter() - began)
        (folder / entry.name).unlink()
    seconds = statistics.median(ours)
    ratio = statistics.median(raw) / seconds
    return [row("write", "gb_per_s", data.nbytes / 1e9 / seconds, "GB/s", "raw-write", ratio)]


def _load(folder: Path, items: Items, repeats: int) -> list[Row]:
    manager = CheckpointManager(folder / "load", "bench")
    manager.acquire(renew=False)
    manager.save(Facts(1, 0, 0, manager.generation, "bench"), items)
    path = manager.root / "full-a"
    out = [(piece, torch.zeros(piece.numel)) for piece, _ in items]
    total = sum(piece.nbytes for piece, _ in items)
    plain = memoryview(bytearray(total + (1 << 20)))

    def load() -> None:
        with CheckpointReader(path) as reader:
            reader.read_many(out)

    def read() -> None:
        handle = os.open(path / part_name(0), os.O_RDONLY)
        at = 0
        while count := os.preadv(handle, [plain[at:]], at):
            at += count
        os.close(handle)

    def verify() -> None:
        with CheckpointReader(path) as reader:
            assert reader.verify() == []

    cold_read: list[float] = []
    cold_load: list[float] = []
    warm_read: list[float] = []
    warm_load: list[float] = []
    verified: list[float] = []
    for _ in range(2 * repeats):
        for times, action, dropped in (
            (cold_read, read, True), (cold_load, load, True), (warm_read, read, False), (warm_load, load, False),
            (verified, verify, False),
        ):  # fmt: skip
            if dropped:
                _drop(path / part_name(0))
            began = time.perf_counter()
            action()
            times.append(time.perf_counter() - began)
    manager.close()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(items, out, strict=True))
    speed = {name: total / 1e9 / statistics.median(times) for name, times in
             (("cold", cold_load), ("warm", warm_load), ("verify", verified))}  # fmt: skip
    cold, warm = statistics.median(cold_read), statistics.median(warm_read)
    return [
        row("load-cold", "gb_per_s", speed["cold"], "GB/s", "raw-read", cold / statistics.median(cold_load)),
        row("load-warm", "gb_per_s", speed["warm"], "GB/s", "raw-read-warm", warm / statistics.median(warm_load)),
        row("verify", "gb_per_s", speed["verify"], "GB/s", "raw-read-warm", warm / statistics.median(verified)),
    ]


def _drop(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
