"""Seeded damage to the newest checkpoint: never loaded in silence, the other slot takes over, the event says what."""

# ruff: noqa: PT017
from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
from simulated_files import SimulatedFileSystem
from states import facts, rank_pieces, shapes, values

from mula_ray.checkpoint.failures import DamagedCheckpoint
from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.checkpoint.scan import find_latest
from mula_ray.checkpoint.store import part_name, write_part
from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.plan.format import MANIFEST
from mula_ray.plan.topology import Topology

ROOT = Path("/run/checkpoints")
TOPOLOGY = Topology(dp=1, ep=3)
MODEL = ModelConfig(vocab_size=24, hidden=8, layers=1, heads=2, moe=MoEConfig(experts=3, top_k=1, expert_width=6))
KINDS = ("flip", "zero-page", "truncate", "extend", "swap", "missing", "other-slot", "manifest", "stale", "edited")


@pytest.fixture(scope="module")
def disk() -> SimulatedFileSystem:
    """Steps 1 (full-a) and 2 (full-b), a file a rank."""
    fs = SimulatedFileSystem()
    manager = CheckpointManager(ROOT, "run", fs=fs)
    manager.acquire(renew=False)
    for step in (1, 2):
        pending = manager.begin(step)
        entries = [
            write_part(
                pending.folder, part_name(rank), [(p, values(p, step)) for p in rank_pieces(MODEL, TOPOLOGY, rank)], fs
            )
            for rank in range(TOPOLOGY.world)
        ]
        pending.commit(facts(step, manager.generation), entries, shapes(MODEL))
        assert pending.settle() == []
    return fs


def inject(fs: SimulatedFileSystem, kind: str, rng: random.Random) -> tuple[str, str]:
    """Damage full-b; returns (file, tensor or "") that an event has to name."""
    folder = ROOT / "full-b"
    with CheckpointReader(folder, fs) as reader:
        entries = reader.manifest.files
    entry = rng.choice(entries)
    path = folder / entry.name
    at = rng.randrange(entry.size)
    tensor = next((s.piece.name for s in entry.pieces if s.begin <= at < s.end), "")
    if kind == "flip":
        fs.damage(path, lambda d: d[:at] + bytes([d[at] ^ 1 << rng.randrange(8)]) + d[at + 1 :])
    elif kind == "zero-page":
        page = at // 4096 * 4096
        tensor = ""
        fs.damage(path, lambda d: d[:page] + bytes(min(4096, len(d) - page)) + d[page + 4096 :])
    elif kind == "truncate":
        tensor = ""
        fs.damage(path, lambda d: d[:at])
    elif kind == "extend":
        tensor = ""
        fs.damage(path, lambda d: d + bytes(rng.randrange(1, 9)))
    elif kind == "swap":
        tensor = ""
        other = rng.choice([e for e in entries if e is not entry])
        a, b = fs._file(path), fs._file(folder / other.name)
        a.now, b.now = b.now, a.now
    elif kind == "missing":
        tensor = ""
        fs.unlink(path)
    elif kind == "other-slot":
        tensor = ""
        stale = bytes(fs._file(ROOT / "full-a" / entry.name).now)
        fs.damage(path, lambda d: stale)  # noqa: ARG005
    else:
        tensor = ""
        entry = dataclasses.replace(entry, name=MANIFEST if kind != "stale" else "")
        damage_manifest(fs, kind, rng)
    return entry.name, tensor


def damage_manifest(fs: SimulatedFileSystem, kind: str, rng: random.Random) -> None:
    """A flipped bit, the other slot's manifest, or an edit that stays JSON."""
    path = ROOT / "full-b" / MANIFEST
    if kind == "stale":
        stale = bytes(fs._file(ROOT / "full-a" / MANIFEST).now)
        fs.damage(path, lambda d: stale)  # noqa: ARG005
    elif kind == "manifest":
        at = rng.randrange(fs.size(path))
        fs.damage(path, lambda d: d[:at] + bytes([d[at] ^ 1 << rng.randrange(8)]) + d[at + 1 :])
    else:
        body = json.loads(bytes(fs._file(path).now))
        piece = rng.choice(rng.choice(body["files"])["pieces"])
        key = rng.choice(["crc32", "begin", "start", "stop"])
        piece[key] += rng.choice([-4, 4]) if key != "crc32" else 1
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        fs.damage(path, lambda d: text)  # noqa: ARG005


def read_all(fs: SimulatedFileSystem, path: Path) -> int | None:
    """The step whose bytes come out, or None when reading is refused. Bytes of no step at all fail the test."""
    try:
        with CheckpointReader(path, fs) as reader:
            step = reader.manifest.facts.step
            for rank in range(TOPOLOGY.world):
                for piece in rank_pieces(MODEL, TOPOLOGY, rank):
                    out = np.empty(piece.numel, np.float32)
                    reader.read_into(piece, out)
                    assert np.array_equal(out, values(piece, step)), f"silently loaded: {piece}"
            return step
    except DamagedCheckpoint as error:
        assert error.damages
        return None


def one(disk: SimulatedFileSystem, seed: int) -> None:
    """One injection."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    fs = disk.crash("kept")
    file, tensor = inject(fs, kind, rng)
    found = find_latest(ROOT, fs)
    assert found is not None, kind
    assert found.manifest.facts.step == 1, f"{kind} was not noticed"
    assert read_all(fs, ROOT / "full-b") in (None, 2 if kind in ("flip", "zero-page") else None)
    if seed % 10 == 0 or tensor:
        assert read_all(fs, found.path) == 1
    events = [damage.event() for rejected in found.rejected for damage in rejected.damages]
    assert any(event["file"] == file or not file for event in events), (kind, events)
    assert all(event["damage"] for event in events)
    if tensor:
        assert any(event["tensor"] == tensor and event["damage"] == "checksum" for event in events)


def test_no_silent_load(disk: SimulatedFileSystem) -> None:
    for seed in range(60):
        one(disk, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_silent_load_thousands(disk: SimulatedFileSystem) -> None:
    for seed in range(2500):
        one(disk, seed)
    print("2500 injections")
