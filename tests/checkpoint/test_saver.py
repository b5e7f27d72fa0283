"""Saving beside training: what it blocks, what it costs, and what happens when processes, disks or folders fail."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_files import SimulatedFileSystem
from states import MOE, facts, rank_pieces, shapes, values

from mula_ray.checkpoint.failures import StoreFailure
from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.checkpoint.saver import Saver
from mula_ray.checkpoint.scan import find_latest, scan
from mula_ray.checkpoint.snapshot import SEALED, SnapshotBuffer, SnapshotMemory
from mula_ray.checkpoint.store import part_name
from mula_ray.checkpoint.writer import Source, WriterProcess
from mula_ray.plan.pieces import Piece
from mula_ray.plan.topology import Topology

Items = list[tuple[Piece, torch.Tensor]]


def state(step: int) -> Items:
    return [(p, torch.from_numpy(values(p, step).copy())) for p in rank_pieces(MOE, Topology(), 0)]


def open_manager(tmp_path: Path) -> CheckpointManager:
    manager = CheckpointManager(tmp_path / "checkpoints", "run")
    manager.acquire(renew=False)
    return manager


def check(root: Path, step: int) -> None:
    found = find_latest(root)
    assert found is not None
    assert found.manifest.facts.step == step
    with CheckpointReader(found.path) as reader:
        for piece, _ in state(step):
            out = np.empty(piece.numel, np.float32)
            reader.read_into(piece, out)
            assert np.array_equal(out, values(piece, step))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_saves_what_was_live_at_the_call(tmp_path: Path, mode: str) -> None:
    manager = open_manager(tmp_path)
    saver = Saver(manager, shapes(MOE), mode)  # type: ignore[arg-type]
    saver.prepare(state(0))
    for step in (1, 2, 3):
        live = state(step)
        saver.save(facts(step, manager.generation), live)
        for _, tensor in live:
            tensor.zero_()
    results = saver.drain()
    assert [(r.step, r.failure, r.damages) for r in results] == [(s, None, ()) for s in (1, 2, 3)]
    assert results[-1].event()["ok"]
    assert set(results[-1].seconds) == {"wait", "write", "verify"} | ({"snapshot"} if mode == "async" else set())
    check(manager.root, 3)
    weights = [(Piece(**{**vars(p), "kind": "weight"}), t) for p, t in state(4) if p.kind == "master"]
    saver.save(facts(4, manager.generation), weights, "model")
    (result,) = saver.drain()
    assert result.path == manager.root / "model-4"
    saver.close()


def test_memory_and_descriptors_stay_flat(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    saver = Saver(manager, shapes(MOE))
    seen = set()
    for step in range(1, 31):
        saver.save(facts(step, manager.generation), state(step))
        (result,) = saver.drain()
        assert result.path is not None
        if step > 5:
            assert saver._memory is not None
            seen.add((len(os.listdir("/proc/self/fd")), saver._memory.nbytes))
    assert len(seen) == 1
    saver.close()


def test_an_asynchronous_save_takes_one_copy_of_the_state(tmp_path: Path) -> None:
    """Extra host memory at most 1.1 times the rank's state."""
    manager = open_manager(tmp_path)
    numel = 2_000_000
    items = [(Piece("w", "master", "fp32", (numel,), (0,), (numel,), 0, numel), torch.ones(numel))]
    saver = Saver(manager)
    saver.prepare(items)
    for step in (1, 2):
        saver.save(facts(step, manager.generation), items)
        assert saver.drain()[0].path is not None
    assert saver._memory is not None
    assert 4 * numel <= saver._memory.nbytes <= 1.1 * 4 * numel
    saver.close()


def resident(pid: int | str) -> int:
    """Resident memory of a process in bytes, shared memory left out."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * resource.getpagesize()


@pytest.mark.slow
def test_memory_is_flat_over_a_hundred_saves(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    numel = 4_000_000
    items = [(Piece("w", "master", "fp32", (numel,), (0,), (numel,), 0, numel), torch.ones(numel))]
    saver = Saver(manager)
    sizes = []
    for step in range(1, 101):
        saver.save(facts(step, manager.generation), items)
        assert saver.drain()[0].path is not None
        assert saver._writer.pid is not None
        sizes.append((resident("self"), resident(saver._writer.pid)))
    saver.close()
    for early, late in zip(sizes[9], sizes[-1], strict=True):
        assert late <= early + (4 << 20)
    print(f"resident after 10 and 100 saves: {sizes[9]}, {sizes[-1]}")


def test_failures_come_back_as_values_and_saving_goes_on(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    saver = Saver(manager, shapes(MOE), who="rank 3")
    saver.save(facts(1, manager.generation), state(1))
    assert saver.drain()[0].path is not None
    pid = saver._writer.pid
    assert pid is not None

    os.kill(pid, signal.SIGSTOP)  # the writer process is killed with a job in hand
    saver.save(facts(2, manager.generation), state(2))
    deadline = time.monotonic() + 30
    while not list(manager.root.glob("new-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    (result,) = saver.drain()
    if result.failure is not None:  # else it was killed before the job, and another one did it
        assert (result.failure.kind, result.event()["who"]) == ("io", "rank 3")
    check(manager.root, 1 if result.failure else 2)

    saver.timeout_s = 0.3  # a disk that hangs
    saver._writer.start()
    pid = saver._writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    saver.save(facts(3, manager.generation), state(3))
    (result,) = saver.drain()
    assert result.failure is not None
    assert result.failure.kind == "slow"
    assert "new-full" in result.failure.path
    assert not Path(f"/proc/{pid}").exists()
    saver.timeout_s = 60

    incomplete = state(4)[1:]  # a program fault: never committed
    saver.save(facts(4, manager.generation), incomplete)
    (result,) = saver.drain()
    assert result.failure is not None
    assert result.failure.kind == "coverage"

    saver.save(facts(5, manager.generation), state(5))
    assert saver.drain()[0].path is not None
    check(manager.root, 5)

    shutil.rmtree(manager.root)  # the folder
    saver.save(facts(6, manager.generation), state(6))
    (result,) = saver.drain()
    assert result.failure is not None
    assert result.failure.kind == "gone"
    saver.close()


def test_a_full_disk_costs_the_older_slot_once(tmp_path: Path) -> None:  # noqa: ARG001
    """Room for two and a half checkpoints: the third save gives up the oldest; for none at all it fails, typed."""
    fs, room = SimulatedFileSystem(), [2.5 * 12_000]

    def used(folder: Path = Path("/run")) -> int:
        names = [folder / name for name in fs.names(folder)]
        return sum(fs.size(n) if n.suffix in (".json", ".safetensors", ".tmp") else used(n) for n in names)

    def before(op: str, path: Path) -> None:
        if op == "write" and "new-" in str(path) and used() > room[0]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    fs.before = before
    piece = Piece("w", "master", "fp32", (3000,), (0,), (3000,), 0, 3000)
    manager = CheckpointManager(Path("/run/checkpoints"), "run", fs=fs)
    manager.acquire(renew=False)
    saver = Saver(manager, mode="sync")
    for step in (1, 2, 3, 4):
        saver.save(facts(step, manager.generation), [(piece, torch.full((3000,), float(step)))])
        assert saver.drain()[0].path is not None, step
    assert {m.facts.step for _, m in scan(manager.root, fs)[0]} == {3, 4}
    room[0] = 5_000
    saver.save(facts(5, manager.generation), [(piece, torch.zeros(3000))])
    (result,) = saver.drain()
    assert result.failure is not None
    assert result.failure.kind == "no-space"
    assert "No space left on device; free space" in str(result.failure)
    assert {m.facts.step for _, m in scan(manager.root, fs)[0]} == {4}


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """A file-size limit: the writer hits it in mid-file."""
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from pathlib import Path
from test_saver import open_manager, state, facts, shapes, MOE, Saver, check
manager = open_manager(Path({str(tmp_path)!r}))
for mode in ("sync", "async"):
    saver = Saver(manager, shapes(MOE), mode)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    saver._writer.start()
    saver.save(facts(1, manager.generation), state(1))
    (result,) = saver.drain()
    print(result.failure.kind if result.failure else result)
    assert not list(manager.root.glob("new-*"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saver.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["io"] * 2, done.stdout + done.stderr


def test_the_writer_takes_the_snapshots_of_a_node_and_seals_them(tmp_path: Path) -> None:
    """The split way: one file for several ranks, the snapshot that changed meanwhile is refused."""
    manager = open_manager(tmp_path)
    topology = Topology(dp=2, ep=2)
    memories = [SnapshotMemory(2) for _ in range(4)]
    buffers = [SnapshotBuffer(m.paths) for m in memories]
    infos = [
        b.write(1, 0, [(p, values(p, 1)) for p in rank_pieces(MOE, topology, rank)], pin=True)
        for rank, b in enumerate(buffers)
    ]
    writer = WriterProcess("node 0")
    pending = manager.begin(1)
    entries = []
    for node in (0, 1):
        sources = [Source(tuple(memories[r].paths), infos[r]) for r in (2 * node, 2 * node + 1)]
        entries.append(writer.write(pending.folder, part_name(node), sources, 60))
    pending.commit(facts(1, manager.generation), entries, shapes(MOE))
    assert [writer.verify(pending.folder, entry, 60) for entry in entries] == [[], []]
    assert pending.settle(verified=True) == []
    check(manager.root, 1)
    for buffer, info in zip(buffers, infos, strict=True):
        now = buffer.info(info.slot)
        assert (now.state, now.pinned, buffer.verify(now)) == (SEALED, False, [])
    buffers[0].pieces(infos[0])[0].data[0] ^= 1  # memory that went bad after it was sealed
    pending = manager.begin(2)
    source = Source(tuple(memories[0].paths), infos[0])
    with pytest.raises(StoreFailure, match="changed in memory after it was sealed"):
        writer.write(pending.folder, part_name(0), [source], 60)
    stale = Source(tuple(memories[1].paths), infos[1])
    for step in (2, 3, 4):
        buffers[1].write(step, 0, [(p, values(p, 1)) for p in rank_pieces(MOE, topology, 1)])
    with pytest.raises(StoreFailure, match=r"node 0: checkpoint write failed \(snapshot\).*overwritten"):
        writer.write(pending.folder, part_name(0), [stale], 60)
    memories[2].close()
    with pytest.raises(StoreFailure, match="its owner is gone"):
        writer.write(pending.folder, part_name(0), [Source(("/proc/1/fd/99999",), infos[2])], 60)
    assert list(pending.folder.iterdir()) == []
    writer.close()


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_saver import *
manager = open_manager(Path({root!r}))
found = manager.latest()
step = found.manifest.facts.step if found else 0
saver = Saver(manager, shapes(MOE), {mode!r})
while True:
    step += 1
    saver.save(facts(step, manager.generation), state(step))
    for result in saver.drain() if step % 2 else saver.results():
        print(result.step, saver._writer.pid, flush=True)
"""


def kill_at_random(tmp_path: Path, mode: str, times: int, seed: int) -> None:
    """SIGKILL the saving process again and again: what was acknowledged is there, and saving goes on from it."""
    rng, acknowledged = random.Random(seed), 0
    code = KILLED.format(tests=str(Path(__file__).parent), root=str(tmp_path), mode=mode)
    for _ in range(times):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        line = child.stdout.readline()
        time.sleep(rng.random() * 0.15)
        child.send_signal(signal.SIGKILL)
        lines = [line, *child.stdout.read().splitlines()]
        child.wait()
        child.stdout.close()
        acknowledged = max(acknowledged, *(int(text.split()[0]) for text in lines))
        found = find_latest(tmp_path / "checkpoints")
        assert found is not None
        assert acknowledged <= found.manifest.facts.step <= acknowledged + 2
        check(tmp_path / "checkpoints", found.manifest.facts.step)
        writer = lines[-1].split()[1]
        deadline = time.monotonic() + 5
        while writer != "None" and Path(f"/proc/{writer}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert writer == "None" or not Path(f"/proc/{writer}").exists(), "the writer outlived its parent"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_killed_in_mid_save(tmp_path: Path, mode: str) -> None:
    kill_at_random(tmp_path, mode, 1, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_killed_in_mid_save_many_times(tmp_path: Path, mode: str) -> None:
    kill_at_random(tmp_path, mode, 50, seed=2)


def test_limits_of_this_process_are_untouched() -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
