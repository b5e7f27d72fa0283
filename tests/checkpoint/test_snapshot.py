"""Snapshots in shared memory: they outlive their writer, are checked, pinned, copied to a buddy, and leave nothing."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from states import MOE, rank_pieces, values

from mula_ray.checkpoint.failures import DamagedCheckpoint, StoreFailure
from mula_ray.checkpoint.snapshot import EMPTY, FILLED, SEALED, WRITING, SnapshotBuffer, SnapshotMemory, SnapshotReader
from mula_ray.plan.pieces import Piece
from mula_ray.plan.topology import Topology

TOPOLOGY = Topology(dp=2, ep=2)


def state(rank: int, step: int) -> list[tuple[Piece, torch.Tensor]]:
    return [(p, torch.from_numpy(values(p, step))) for p in rank_pieces(MOE, TOPOLOGY, rank)]


@pytest.fixture
def memory() -> SnapshotMemory:
    memory = SnapshotMemory(2)
    yield memory
    memory.close()


def test_two_slots_take_turns_and_another_mapping_reads_them(memory: SnapshotMemory) -> None:
    rank, agent = SnapshotBuffer(memory.paths), SnapshotBuffer(memory.paths)
    assert agent.latest_valid() is None
    for step in range(1, 6):
        live = state(0, step)
        rank.write(step, 7, live, {"cursor": step})
        for _, tensor in live:
            tensor.fill_(9)  # what was copied is a copy
        info = agent.latest_valid()
        assert info is not None
        assert (info.step, info.generation, info.state, agent.meta(info)) == (step, 7, SEALED, {"cursor": step})
        reader = SnapshotReader(agent.pieces(info))
        for piece in rank_pieces(MOE, TOPOLOGY, 0):
            out = torch.empty(piece.numel)
            reader.read_into(piece, out)
            assert np.array_equal(out.numpy(), values(piece, step))
    assert {i.step for i in agent.infos()} == {4, 5}
    assert agent.find(4) is not None
    assert agent.find(4, generation=6) is None


def test_memory_stays_flat_and_grows_with_the_state(memory: SnapshotMemory) -> None:
    rank = SnapshotBuffer(memory.paths)
    small = [(Piece("w", "master", "fp32", (1000,), (0,), (1000,), 0, 1000), torch.zeros(1000))]
    large = [(Piece("w", "master", "fp32", (500_000,), (0,), (500_000,), 0, 500_000), torch.ones(500_000))]
    rank.reserve(0, large)
    reserved = memory.nbytes
    assert 2_000_000 <= reserved <= 2_100_000
    sizes, files = set(), set()
    for step in range(100):
        rank.write(step, 0, small if step < 50 else large, seal=True)
        if step >= 52:
            sizes.add(memory.nbytes)
            files.add(len(os.listdir("/proc/self/fd")))
    assert len(sizes) == len(files) == 1
    assert sizes.pop() <= 2 * 2_000_000 * 1.05
    assert not list(Path("/dev/shm").glob("*mula*"))


def test_a_damaged_snapshot_falls_back_to_the_other(memory: SnapshotMemory) -> None:
    rank, agent = SnapshotBuffer(memory.paths), SnapshotBuffer(memory.paths)
    rank.write(1, 0, state(0, 1), seal=True)
    info = rank.write(2, 0, state(0, 2), seal=True)
    source = agent.pieces(info)[3]
    source.data[5] ^= 16
    damage = agent.verify(info)[0]
    assert (damage.kind, damage.tensor) == ("checksum", source.piece.name)
    with pytest.raises(DamagedCheckpoint, match="checksum"):
        SnapshotReader(agent.pieces(info)).read_into(source.piece, torch.empty(source.piece.numel))
    valid = agent.latest_valid()
    assert valid is not None
    assert valid.step == 1
    agent._map(0)[4100] ^= 1  # its table
    assert agent.latest_valid() is None
    agent._map(0)[9] ^= 1  # its header
    assert agent.info(0).state == EMPTY


def test_pinned_slots_are_not_written_over(memory: SnapshotMemory) -> None:
    rank, agent = SnapshotBuffer(memory.paths), SnapshotBuffer(memory.paths)
    first = rank.write(1, 0, state(0, 1), pin=True)
    for step in (2, 3, 4):
        rank.write(step, 0, state(0, step))
    assert {i.step for i in agent.infos()} == {1, 4}
    rank.write(5, 0, state(0, 5), pin=True)
    with pytest.raises(StoreFailure, match="busy"):
        rank.write(6, 0, state(0, 6))
    assert agent.unchanged(first)
    agent.unpin(agent.seal(first))
    assert rank.write(6, 0, state(0, 6)).slot == first.slot
    assert not agent.unchanged(first)


def test_a_buddy_s_copy_is_as_good(memory: SnapshotMemory) -> None:
    """Byte for byte, also of a pinned slot; a half-copied one is not valid."""
    rank = SnapshotBuffer(memory.paths)
    info = rank.write(3, 1, state(1, 3), {"x": 1}, pin=True, seal=True)
    data = bytes(rank.copy_out(info))
    other = SnapshotMemory(2)
    buddy = SnapshotBuffer(other.paths)
    copied = buddy.copy_in(data)
    assert (copied.step, copied.pinned, buddy.verify(copied), buddy.meta(copied)) == (3, False, [], {"x": 1})
    buddy._put(dataclasses.replace(copied, state=WRITING))
    assert buddy.latest_valid() is None
    other.close()


def test_copies_take_turns_also_when_another_node_goes_on(memory: SnapshotMemory) -> None:
    """A replaced node counts from 1 again: its copies must not take each other's only place."""
    buddy = SnapshotBuffer(memory.paths)
    for first, generation in ((0, 1), (10, 2), (20, 3)):
        source_memory = SnapshotMemory(2, "source")
        source = SnapshotBuffer(source_memory.paths)
        for step in range(first, first + 9 - 3 * generation):
            newest = buddy.infos()
            buddy.copy_in(bytes(source.copy_out(source.write(step, generation, state(0, step), {}, seal=True))))
            kept = max((info for info in newest if info.complete), key=lambda info: info.step, default=None)
            assert buddy.find(step, generation) is not None
            assert kept is None or buddy.unchanged(kept), "the copy before this one is still there"
        source.close()
        source_memory.close()
    buddy.close()


def test_a_rank_killed_while_it_writes_leaves_the_snapshot_before(memory: SnapshotMemory) -> None:
    code = f"""
import numpy as np, itertools
from mula_ray.checkpoint.snapshot import SnapshotBuffer
from mula_ray.plan.pieces import Piece
piece = Piece("w", "master", "fp32", (1 << 20,), (0,), (1 << 20,), 0, 1 << 20)
buffer = SnapshotBuffer({memory.paths!r})
for step in itertools.count(1):
    buffer.write(step, 0, [(piece, np.full(1 << 20, step, np.float32))])
    print(step, flush=True)
"""
    agent = SnapshotBuffer(memory.paths)
    for kill_after in (3, 4, 7, 8):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        while int(child.stdout.readline()) < kill_after:
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
        info = agent.latest_valid()
        assert info is not None
        assert info.step >= kill_after
        (source,) = agent.pieces(info)
        assert set(np.frombuffer(source.data, np.float32)) == {info.step}
        child.stdout.close()


def test_state_of_an_unsealed_snapshot_is_told(memory: SnapshotMemory) -> None:
    rank = SnapshotBuffer(memory.paths)
    info = rank.write(1, 0, state(0, 1))
    assert info.state == FILLED
    assert rank.pieces(info)[0].sums is None
    assert rank.seal(info).state == SEALED
    assert rank.seal(rank.info(info.slot)).state == SEALED
