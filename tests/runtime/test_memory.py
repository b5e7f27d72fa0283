"""Snapshots in node agents' memory: copies at a buddy, over shared memory and over TCP, and who holds what."""

import numpy as np
import pytest

from mula_ray.checkpoint.failures import StoreFailure
from mula_ray.checkpoint.snapshot import SnapshotBuffer, SnapshotReader
from mula_ray.elastic.memory import usable_memory
from mula_ray.elastic.placement import Shape
from mula_ray.plan.pieces import Piece
from mula_ray.runtime import peers
from mula_ray.runtime.memory import NodeMemory
from mula_ray.runtime.peers import PeerLink, PeerServer

SHAPE = Shape(ep=1, tp=1, pp=1, tiles_per_node=1)
SECRET = b"s" * 32


def piece(rank: int) -> Piece:
    return Piece("w", "master", "fp32", (2000,), (0,), (2000,), rank * 1000, rank * 1000 + 1000)


def write(memory: NodeMemory, rank: int, step: int) -> None:
    values = np.arange(1000, dtype=np.float32) + 10_000 * rank + step
    memory.own[0].buffer.write(step, 0, [(piece(rank), values)], {"rank": rank, "dp": 2, "step": step}, seal=True)


@pytest.mark.parametrize("far", [False, True], ids=["one machine", "two machines"])
def test_a_lost_nodes_snapshot_comes_back_from_its_buddy(monkeypatch: pytest.MonkeyPatch, far: bool) -> None:
    if far:  # what two machines are to the protocol: different boots, different addresses
        boots = iter(f"boot {n}" for n in range(1000))
        monkeypatch.setattr(peers, "boot_id", lambda: next(boots))
    a, b = NodeMemory(1, SHAPE), NodeMemory(1, SHAPE)
    server = PeerServer("127.0.0.1", SECRET, b.take, b.give)
    link = PeerLink(server.address, SECRET)
    link._local = not far
    for step in (4, 5):
        write(a, 0, step)
        write(b, 1, step)
        info = a.own[0].buffer.find(step)
        assert info is not None
        assert link.copy(0, a.own[0].buffer, info) == ""
    copies = usable_memory(SHAPE, {"b": b.holdings()})
    assert [(c.step, c.holders) for c in copies] == [(5, ("b", "b")), (4, ("b", "b"))]
    own = usable_memory(SHAPE, {"a": a.holdings(), "b": b.holdings()})
    assert own[0].holders == ("a", "b")

    fresh = NodeMemory(1, SHAPE)
    (source,) = fresh.sources([0], 0, 5, {0: server.address}, SECRET)
    buffer = SnapshotBuffer(source.paths)
    found = buffer.find(5, 0)
    assert found is not None
    out = np.zeros(1000, dtype=np.float32)
    SnapshotReader(buffer.pieces(found)).read_into(piece(0), out)
    assert out.tolist() == (np.arange(1000, dtype=np.float32) + 5).tolist()
    with pytest.raises(StoreFailure, match="not there"):
        fresh.sources([0], 0, 3, {0: server.address}, SECRET)
    link.close()


def test_a_stranger_gets_nothing() -> None:
    memory = NodeMemory(1, SHAPE)
    server = PeerServer("127.0.0.1", SECRET, memory.take, memory.give)
    with pytest.raises((ConnectionError, EOFError)):
        PeerLink(server.address, b"x" * 32)
