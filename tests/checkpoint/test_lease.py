"""One writer a folder: the second one is refused, a dead one is succeeded, a stale one changes nothing."""

# ruff: noqa: ARG005
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from states import facts

from mula_ray.checkpoint import lease as lease_module
from mula_ray.checkpoint.failures import StoreFailure
from mula_ray.checkpoint.lease import LEASE, Lease
from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.store import part_name, write_part
from mula_ray.plan.pieces import Piece

PIECE = Piece("w", "master", "fp32", (4,), (0,), (4,), 0, 4)
ZEROS = np.zeros(4, np.float32)


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_second_job_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path, "one")
    first.acquire()
    first.save(facts(1, first.generation), [(PIECE, ZEROS)])
    before = listing(tmp_path)
    with pytest.raises(StoreFailure, match=r"held by run one generation 0 \(process \d+ on .*\), which is alive"):
        CheckpointManager(tmp_path, "two").acquire()
    assert listing(tmp_path) == before
    first.close()
    second = CheckpointManager(tmp_path, "two")
    second.acquire()
    assert second.generation == 1
    with pytest.raises(StoreFailure, match="never acquired"):
        first.begin(2)
    second.close()


def test_a_dead_job_on_this_machine_is_succeeded_at_once(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from mula_ray.checkpoint.lease import Lease
import os
Lease(Path({str(tmp_path)!r}), "dead").acquire(4)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    waits: list[float] = []
    assert Lease(tmp_path, "next", sleep=waits.append).acquire(renew=False) == 5
    assert sum(waits) < 1


def test_a_stale_generation_waking_up_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = CheckpointManager(tmp_path, "run")
    old.acquire(renew=False)
    pending = old.begin(1)
    entry = write_part(pending.folder, part_name(0), [(PIECE, ZEROS)])
    monkeypatch.setattr(lease_module, "_started", lambda pid: 1)  # the old job counts as dead
    new = CheckpointManager(tmp_path, "run")
    new.acquire(renew=False)
    assert not pending.folder.exists()
    new.save(facts(2, new.generation), [(PIECE, ZEROS)])
    before = listing(tmp_path)
    for act in (
        lambda: pending.commit(facts(1, old.generation), [entry]),
        lambda: pending.settle(),
        lambda: old.begin(3),
        lambda: old.tidy(),
        lambda: old.advance(7),
        lambda: old.make_room(),
    ):
        with pytest.raises(StoreFailure, match="taken over by run run generation 1"):
            act()
    pending.abandon()
    old.close()
    with pytest.raises(StoreFailure, match="write failed"):
        write_part(pending.folder, part_name(1), [(PIECE, ZEROS)])
    assert listing(tmp_path) == before


def test_a_save_of_an_earlier_generation_of_the_same_job_is_refused(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, "run")
    manager.acquire(renew=False)
    pending = manager.begin(1)
    entry = write_part(pending.folder, part_name(0), [(PIECE, ZEROS)])
    manager.advance(3)
    with pytest.raises(StoreFailure, match="save of generation 0, now is generation 3"):
        pending.commit(facts(1, 0), [entry])
    pending.abandon()
    manager.save(facts(1, 3), [(PIECE, ZEROS)])
    assert json.loads((tmp_path / LEASE).read_text())["generation"] == 3


def test_another_machine_is_watched_not_believed(tmp_path: Path) -> None:
    """Its counter decides: still moving means alive, standing still for `patience_s` means dead."""
    holder = Lease(tmp_path, "far")
    holder.acquire(renew=False)
    path = tmp_path / LEASE
    away = {**json.loads(path.read_text()), "host": "elsewhere"}
    path.write_text(json.dumps(away))

    def renewing(_: float) -> None:
        away["renewed"] += 1
        path.write_text(json.dumps(away))

    with pytest.raises(StoreFailure, match="which is alive"):
        Lease(tmp_path, "near", sleep=renewing).acquire()
    waits: list[float] = []
    assert Lease(tmp_path, "near", patience_s=20, renew_s=4, sleep=waits.append).acquire(renew=False) == 1
    assert sum(waits) >= 20


def test_a_released_or_unreadable_lease(tmp_path: Path) -> None:
    holder = Lease(tmp_path, "a")
    holder.acquire(2, renew=False)
    holder.release()
    assert Lease(tmp_path, "b").acquire(renew=False) == 3
    (tmp_path / LEASE).write_text("{")
    with pytest.raises(StoreFailure, match="is not readable"):
        Lease(tmp_path, "c").acquire()


def test_renewal_counts_up_and_never_takes_a_lost_lease_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Lease(tmp_path, "a", renew_s=0.01)
    holder.acquire()
    assert holder._thread is not None
    while json.loads((tmp_path / LEASE).read_text())["renewed"] < 2:
        pass
    monkeypatch.setattr(lease_module, "_started", lambda pid: 1)
    thief = Lease(tmp_path, "b", sleep=lambda s: None)
    while True:
        try:
            thief.acquire(renew=False)
            break
        except StoreFailure:
            continue
    monkeypatch.undo()
    holder.release()
    assert json.loads((tmp_path / LEASE).read_text())["run_id"] == "b"
    assert os.getpid() == json.loads((tmp_path / LEASE).read_text())["pid"]
