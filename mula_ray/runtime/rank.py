"""What runs in a rank process: groups, engine, state, loop; everything that happens is told to the node agent.

Forked from the zygote, where this module is imported already: nothing here may run a tensor operation at import.
The process ends by `os._exit` at its end: no destructor of a communication library may hold it up.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mula_ray.checkpoint.failures import DamagedCheckpoint, StoreFailure
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.checkpoint.snapshot import MemoryPiece, SnapshotBuffer, SnapshotReader
from mula_ray.config.errors import MulaError
from mula_ray.data.batches import Share
from mula_ray.data.ring import RingSource
from mula_ray.elastic.events import Tier
from mula_ray.parallel.backend import TCPStore, choose_backend, choose_device
from mula_ray.parallel.executor import MicroBatch
from mula_ray.parallel.groups import Groups, NoGroups
from mula_ray.runtime import wire
from mula_ray.runtime.board import COMMITTED, GENERATION, INJECT, STOP, Board
from mula_ray.runtime.faults import RankFaults
from mula_ray.runtime.messages import RankSpec
from mula_ray.runtime.snapshots import RankSnapshots
from mula_ray.train import loop
from mula_ray.train.engine import Engine
from mula_ray.train.metrics import EvalRecord, StepRecord
from mula_ray.train.peak import measure_peak_tflops
from mula_ray.train.profile import StepProfiler

GROUP_TIMEOUT_S = 600.0
_PEER_SIGNS = (
    "closed by peer",
    "Connection reset",
    "Broken pipe",
    "Connection closed",
    "gloo",
    "Timed out waiting",
    "store",
)


class Reports:
    """The connection to the agent's hub. Thread-safe; an agent that is gone makes it silent (the kernel ends us)."""

    def __init__(self, spec: RankSpec) -> None:
        self._sock = wire.connect(spec.hub)
        self._lock = threading.Lock()
        wire.send(self._sock, (spec.generation, spec.rank, spec.tile))

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message."""
        with self._lock, contextlib.suppress(OSError):
            wire.send(self._sock, message)


class RankControl:
    """`Control` of the loop and `EngineHooks` of the engine: the board, the faults, the gate before an agreement."""

    def __init__(self, board: Board, start: int) -> None:
        self._board = board
        self._words = board.words
        self.faults: RankFaults | None = None
        self.snapshots: RankSnapshots | None = None
        self.profiler: StepProfiler | None = None
        self._step = start

    def phase(self, name: str, step: int) -> None:
        """Mark it; a step's agreement waits for the copy of the last snapshot."""
        if self.profiler is not None:  # it counts from 0, as the engine that calls here does
            self.profiler.phase(name, step)
        if name == "data":
            self._step = step
            if self.faults is not None and (code := self._words[INJECT]):
                self._words[INJECT] = 0
                self.faults.now(code, step)
        if self.faults is not None:  # before the mark: a rank that does not get past it is seen to be behind
            self.faults.phase(name, self._step)
        self._board.enter(name, self._step)
        if name == "agree" and self.snapshots is not None:
            self.snapshots.wait_copied()

    def committed(self, step: int) -> None:
        """Mark it."""
        self._words[COMMITTED] = step
        self._board.enter("done", step)

    def stop_wanted(self) -> bool:
        """Whether the agent's flag is up."""
        return self._words[STOP] != 0

    def prepare(self, step: int, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Fault rehearsal."""
        return batches if self.faults is None else self.faults.batches(step, batches)


@dataclass
class RankReporter:
    """Rank 0 reports steps and evaluations for all."""

    tell: Any
    active: bool

    def step(self, record: StepRecord) -> None:
        """To the driver."""
        if self.active:
            self.tell({"kind": "step", "record": record})

    def evaluation(self, record: EvalRecord) -> None:
        """To the driver."""
        if self.active:
            self.tell({"kind": "eval", "record": record})


def main(spec: RankSpec, _channel: socket.socket) -> int:
    """Entry of the job. Exit codes: 0 clean, 2 told why, 1 not told."""
    reports = Reports(spec)
    try:
        end = _run(spec, reports)
        reports.tell({"kind": "ended", "step": end.step, "asked": end.asked})
        code = 0
    except BaseException as error:
        reports.tell(explain(error))
        traceback.print_exc()
        code = 2
    os._exit(code)


def _run(spec: RankSpec, reports: Reports) -> loop.End:
    config, began = spec.run.config, time.monotonic()
    if spec.cores & os.sched_getaffinity(0):
        os.sched_setaffinity(0, spec.cores & os.sched_getaffinity(0))
    torch.set_num_threads(config.cluster.threads_per_rank)
    board = Board(spec.board)
    board.words[GENERATION] = spec.generation
    board.words[COMMITTED] = spec.restore.step
    control = RankControl(board, spec.restore.step)
    board.enter("groups", spec.restore.step)
    device = choose_device(config.cluster.device, spec.tile)
    prefix = f"{spec.run.run_id}/{spec.generation}"
    groups = Groups.connect(
        spec.topology,
        spec.rank,
        host=spec.store[0],
        port=spec.store[1],
        prefix=prefix,
        timeout_s=GROUP_TIMEOUT_S,
        backend=choose_backend(config.parallel.backend, device),
        device=device,
        interface=spec.interface,
        strict=config.parallel.strict,
    )
    grouped = time.monotonic()
    board.enter("build", spec.restore.step)
    fresh = spec.restore.tier is Tier.FRESH
    engine = Engine(config, spec.topology, spec.rank, groups, device, control, init=fresh)
    if spec.run.profile is not None and spec.restore.step + 1 < spec.run.profile[1]:
        folder = Path(spec.run.run_dir) / "profile"
        control.profiler = StepProfiler(folder, spec.rank, spec.run.profile, device, spec.generation)
        control.profiler.attach(engine.stages)
    built = time.monotonic()
    records = [] if fresh else _restore(spec, engine)
    loaded = time.monotonic()
    snapshots = RankSnapshots(spec, engine, board, reports.tell, _Exchange(spec, prefix))
    snapshots.records.extend(records)
    for text in records:
        reports.tell({"kind": "step", "record": pickle.loads(bytes.fromhex(text)), "again": True})
    control.faults = RankFaults(spec.run.faults, spec.rank, engine, reports.tell)
    control.snapshots = snapshots
    if spec.rebuild and spec.snapshot_every:
        snapshots.rebuild(spec.restore.step)
    peak = _peak(spec, device, reports)
    phases = {"groups": grouped - began, "build": built - grouped, "load": loaded - built}
    reports.tell({"kind": "ready", "step": spec.restore.step, "phases": phases, "pid": os.getpid()})
    board.enter("ready", spec.restore.step)
    share = Share.of(config, spec.topology, spec.rank)
    batches = RingSource(spec.run.data, share, spec.ring, spec.cell, spec.generation)
    reporter = RankReporter(reports.tell, spec.rank == 0)
    plan = loop.Plan(config, spec.restore.step, spec.generation, spec.topology.world, peak, spec.skips)
    if spec.restore.step >= config.train.steps:
        snapshots.after_step(spec.restore.step, last=True, stop=False)
    end = loop.run(engine, batches, snapshots, control, reporter, plan)
    snapshots.wait_copied()
    if control.profiler is not None:
        control.profiler.close()
    board.enter("end", end.step)
    return end


def _peak(spec: RankSpec, device: torch.device, reports: Reports) -> float:
    """Peak of a tile for MFU: configured, known from an earlier generation, or measured once by rank 0."""
    known = spec.run.config.metrics.peak_tflops or spec.run.peak_tflops
    if known or spec.rank != 0:
        return known
    dtype = torch.bfloat16 if spec.run.config.train.dtype == "bf16" else torch.float32
    measured = measure_peak_tflops(device, dtype, 0.2)
    reports.tell({"kind": "peak", "tflops": measured})
    return measured


def _restore(spec: RankSpec, engine: Engine) -> list[str]:
    """Load the state; returns the records that came with it (rank 0)."""
    records: list[str] = []
    restore = spec.restore
    if restore.tier in (Tier.OWN, Tier.MEMORY):
        pieces: list[MemoryPiece] = []
        for source in spec.sources:
            buffer = SnapshotBuffer(source.paths)
            info = buffer.find(source.step, source.generation)
            if info is None:
                raise StoreFailure("snapshot", source.paths, f"rank {source.rank} of step {source.step} is gone")
            pieces += buffer.pieces(info)
            if spec.rank == 0 and source.rank == 0:
                records = list(buffer.meta(info).get("records", ()))
        engine.load(SnapshotReader(pieces))
        return records
    folder = Path(spec.run.run_dir) / "checkpoints" / restore.slot
    with CheckpointReader(folder) as reader:
        engine.load(reader)
    return records


class _Exchange:
    """Every rank's value of a key, by way of the generation's store."""

    def __init__(self, spec: RankSpec, prefix: str) -> None:
        self._spec, self._prefix = spec, prefix

    def __call__(self, key: str, mine: bytes) -> list[bytes]:
        if self._spec.topology.world == 1:
            return [mine]
        host, port = self._spec.store
        store = TCPStore(host, port, None, False, timedelta(seconds=60), wait_for_workers=False)
        store.set(f"{self._prefix}/exchange/{key}/{self._spec.rank}", mine.hex())
        return [
            bytes.fromhex(store.get(f"{self._prefix}/exchange/{key}/{r}").decode())
            for r in range(self._spec.topology.world)
        ]


def explain(error: BaseException) -> dict[str, Any]:
    """What the driver is told about an exception."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:500] if str(error) else type(error).__name__
    if isinstance(error, loop.StepFailed):
        return {"kind": "failed-step", "what": error.kind, "step": error.step, "detail": error.detail}
    if isinstance(error, DamagedCheckpoint | StoreFailure):
        return {"kind": "restore-failed", "why": text, "peer": ""}
    if isinstance(error, MulaError) and not isinstance(error, NoGroups):
        return {"kind": "fatal", "code": type(error).exit_code, "message": str(error)}
    lost = isinstance(error, NoGroups | dist.DistError | ConnectionError)
    peer = lost or any(sign in str(error) for sign in _PEER_SIGNS)
    where = "".join(traceback.format_exception(error)[-3:])
    return {"kind": "error", "peer": peer, "detail": text, "where": where if not peer else ""}
