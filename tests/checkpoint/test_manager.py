"""Slots, retention, refusals and fall-back on real files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from states import MOE, facts, rank_pieces, shapes, values

from mula_ray.checkpoint.failures import DamagedCheckpoint, StoreFailure
from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.checkpoint.scan import find_latest, scan
from mula_ray.checkpoint.store import part_name, write_part
from mula_ray.plan.pieces import Piece
from mula_ray.plan.topology import Topology

GOLDEN = Path(__file__).parent / "golden"
PIECE = Piece("w", "master", "fp32", (4,), (0,), (4,), 0, 4)


def items(step: int, kind: str = "master") -> list[tuple[Piece, np.ndarray]]:
    return [(Piece("w", kind, "fp32", (4,), (0,), (4,), 0, 4), np.full(4, step, np.float32))]  # type: ignore[arg-type]


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    manager = CheckpointManager(tmp_path / "run" / "checkpoints", "run")
    manager.acquire(renew=False)
    return manager


def names(manager: CheckpointManager) -> list[str]:
    return sorted(p.name for p in manager.root.iterdir() if p.is_dir())


def test_full_slots_alternate_and_two_are_kept(manager: CheckpointManager) -> None:
    slots = []
    for step in range(1, 6):
        assert manager.save(facts(step, manager.generation), items(step)) == []
        found = manager.latest()
        assert found is not None
        assert found.manifest.facts.step == step
        slots.append(found.path.name)
    assert slots == ["full-a", "full-b", "full-a", "full-b", "full-a"]
    assert names(manager) == ["full-a", "full-b"]
    assert {m.facts.step for _, m in scan(manager.root)[0]} == {4, 5}


def test_a_committed_step_is_not_written_over(manager: CheckpointManager) -> None:
    manager.save(facts(1, manager.generation), items(1))
    with pytest.raises(StoreFailure, match="a full checkpoint of step 1 is there already"):
        manager.begin(1)
    manager.save(facts(1, manager.generation), items(1), replace=True)
    manager.save(facts(1, manager.generation), items(1, "weight"), "model")
    assert manager.has_model(1)
    with pytest.raises(StoreFailure, match="already"):
        manager.begin(1, "model")
    pending = manager.begin(2)
    write_part(pending.folder, part_name(0), items(2))
    with pytest.raises(StoreFailure, match="was written already"):
        write_part(pending.folder, part_name(0), items(2))
    with pytest.raises(StoreFailure, match="still under way"):
        manager.begin(3)


def test_models_are_kept_by_number(manager: CheckpointManager) -> None:
    for step in (2, 9, 10, 100):
        manager.save(facts(step, manager.generation), items(step, "weight"), "model")
    assert manager.retain_models(0) == []
    assert manager.retain_models(2) == ["model-9", "model-2"]
    assert names(manager) == ["model-10", "model-100"]
    assert manager.latest() is None  # a model alone is no full state


def test_a_commit_is_found_before_it_settles_and_settles_after_a_restart(manager: CheckpointManager) -> None:
    for step in (1, 2, 3):
        manager.save(facts(step, manager.generation), items(step))
    pending = manager.begin(4)
    pending.commit(facts(4, manager.generation), [write_part(pending.folder, part_name(0), items(4))])
    found = find_latest(manager.root)
    assert found is not None
    assert found.path == pending.folder
    assert {m.facts.step for _, m in scan(manager.root)[0]} == {2, 3, 4}  # nothing is given up before it is re-read
    manager.close()
    again = CheckpointManager(manager.root, "run")
    again.acquire(renew=False)
    assert {(p.name, m.facts.step) for p, m in scan(manager.root)[0]} == {("full-a", 3), ("full-b", 4)}


def test_a_save_that_reads_back_wrong_replaces_nothing(manager: CheckpointManager) -> None:
    manager.save(facts(1, manager.generation), items(1))
    manager.save(facts(2, manager.generation), items(2))
    pending = manager.begin(3)
    entry = write_part(pending.folder, part_name(0), items(3))
    pending.commit(facts(3, manager.generation), [entry])
    path = pending.folder / part_name(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    damages = pending.settle()
    assert [(d.kind, d.file, d.tensor) for d in damages] == [("checksum", part_name(0), "w")]
    assert {m.facts.step for _, m in scan(manager.root)[0]} == {1, 2}
    manager.save(facts(4, manager.generation), items(4))
    assert {m.facts.step for _, m in scan(manager.root)[0]} == {2, 4}


def test_fall_back_says_what_is_wrong(manager: CheckpointManager) -> None:
    manager.save(facts(1, manager.generation), items(1))
    manager.save(facts(2, manager.generation), items(2))
    found = manager.latest()
    assert found is not None
    (found.path / part_name(0)).unlink()
    fallen = manager.latest()
    assert fallen is not None
    assert fallen.manifest.facts.step == 1
    assert [d.kind for error in fallen.rejected for d in error.damages] == ["missing"]
    assert "node-00000-0.safetensors: missing" in str(fallen.rejected[0])
    with pytest.raises(DamagedCheckpoint, match="missing"):
        CheckpointReader(found.path)
    manager.reject(fallen)
    assert manager.latest() is None
    assert manager.ever_committed()


def test_a_later_generation_outranks_a_later_step(manager: CheckpointManager) -> None:
    """After going back on purpose, the old branch must not win."""
    manager.save(facts(1, manager.generation), items(1))
    manager.save(facts(5, manager.generation), items(5))
    manager.advance(manager.generation + 1)
    manager.save(facts(3, manager.generation), items(3))
    found = manager.latest()
    assert found is not None
    assert found.manifest.facts.step == 3


def test_make_room_gives_up_the_older_one_only(manager: CheckpointManager) -> None:
    assert manager.make_room() is False
    manager.save(facts(1, manager.generation), items(1))
    assert manager.make_room() is False
    manager.save(facts(2, manager.generation), items(2))
    assert manager.make_room() is True
    assert {m.facts.step for _, m in scan(manager.root)[0]} == {2}


def test_folder_removed_under_the_run(manager: CheckpointManager) -> None:
    manager.save(facts(1, manager.generation), items(1))
    shutil.rmtree(manager.root)
    with pytest.raises(StoreFailure) as caught:
        manager.begin(2)
    assert caught.value.kind == "gone"
    assert caught.value.as_stop().exit_code == 30
    assert caught.value.as_stop(at_start=True).exit_code == 20


def test_save_load_save_load_gives_the_same_bytes(manager: CheckpointManager) -> None:
    state = [(p, values(p)) for p in rank_pieces(MOE, Topology(), 0)]
    manager.save(facts(1, manager.generation), state, shapes=shapes(MOE))
    loaded = []
    with CheckpointReader(manager.root / "full-a") as reader:
        for piece, _ in state:
            out = np.empty(piece.numel, np.float32)
            reader.read_into(piece, out)
            loaded.append((piece, out))
    manager.save(facts(2, manager.generation), loaded, shapes=shapes(MOE))
    a, b = ((manager.root / slot / part_name(0)).read_bytes() for slot in ("full-a", "full-b"))
    assert a == b


def test_golden_checkpoint_of_version_1_stays_readable() -> None:
    found = find_latest(GOLDEN / "v1")
    assert found is not None
    assert (found.path.name, found.manifest.facts.step, found.manifest.facts.cursor) == ("full-a", 2, 16)
    with CheckpointReader(found.path) as reader:
        reader.expect(MOE)
        for piece in rank_pieces(MOE, Topology(dp=2, tp=2), 3):
            out = np.empty(piece.numel, np.float32)
            reader.read_into(piece, out)
            assert np.array_equal(out, values(piece, 2))
    with CheckpointReader(GOLDEN / "v1" / "model-2") as reader:
        assert reader.verify() == []
        reader.expect(MOE)


def test_a_damaged_step_may_be_saved_again(manager: CheckpointManager) -> None:
    for step in (1, 2):
        manager.save(facts(step, manager.generation), items(step))
    file = manager.root / "full-b" / part_name(0)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    fallen = manager.latest()
    assert fallen is not None
    assert fallen.manifest.facts.step == 1
    assert manager.save(facts(2, manager.generation), items(2)) == []
    assert {(p.name, m.facts.step) for p, m in scan(manager.root)[0]} == {("full-a", 1), ("full-b", 2)}
    found = manager.latest()
    assert found is not None
    assert (found.manifest.facts.step, found.rejected) == (2, ())
