"""Crash consistency: photograph a simulated disk after every operation of several saves, recover from each picture."""

# ruff: noqa: ARG005, PT017
from __future__ import annotations

import errno
import itertools
from pathlib import Path

import numpy as np
import pytest
from simulated_files import SimulatedFileSystem
from states import facts

from mula_ray.checkpoint import lease
from mula_ray.checkpoint.failures import StoreFailure
from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.checkpoint.scan import find_latest
from mula_ray.checkpoint.store import part_name, write_part
from mula_ray.plan.format import FULL_KINDS
from mula_ray.plan.pieces import Piece

ROOT = Path("/run/checkpoints")
SHAPE = (6, 40)


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every manager is another process: its predecessor counts as dead."""
    count = itertools.count(1)
    monkeypatch.setattr(lease, "_started", lambda pid: next(count))


def value(kind: str, step: int) -> np.ndarray:
    return np.random.default_rng(step * 7 + len(kind)).standard_normal(SHAPE, np.float32)


def parts(step: int) -> list[list[tuple[Piece, np.ndarray]]]:
    """Two nodes, each with half of every tensor."""
    numel = SHAPE[0] * SHAPE[1]
    return [
        [
            (Piece("w", kind, "fp32", SHAPE, (0, 0), SHAPE, a, b), value(kind, step).reshape(-1)[a:b])
            for kind in FULL_KINDS
        ]
        for a, b in ((0, 100), (100, numel))
    ]


def open_manager(fs: SimulatedFileSystem) -> CheckpointManager:
    manager = CheckpointManager(ROOT, "run", fs=fs, sleep=lambda s: None)
    manager.acquire(renew=False)
    return manager


def save(manager: CheckpointManager, step: int, log: dict | None = None) -> None:
    pending = manager.begin(step)
    if log is not None:
        log["begun"] = step
    try:
        entries = [write_part(pending.folder, part_name(i), p, manager.fs) for i, p in enumerate(parts(step))]
        pending.commit(facts(step, manager.generation), entries, {"w": SHAPE})
    except StoreFailure:
        pending.abandon()
        raise
    if log is not None:
        log["acked"] = step
    assert pending.settle() == []


def check_state(fs: SimulatedFileSystem, allowed: set[int]) -> int:
    """The newest checkpoint is one of the allowed steps, and its bytes are right."""
    found = find_latest(ROOT, fs)
    step = found.manifest.facts.step if found else 0
    assert step in allowed, f"found {step}, allowed {allowed}"
    if found:
        with CheckpointReader(found.path, fs) as reader:
            for kind in FULL_KINDS:
                out = np.empty(SHAPE, np.float32)
                reader.read_into(Piece("w", kind, "fp32", SHAPE, (0, 0), SHAPE, 0, out.size), out.reshape(-1))
                np.testing.assert_array_equal(out, value(kind, step))
    return step


def photograph(saves: int, modes: list[tuple[str, int]]) -> list[tuple[SimulatedFileSystem, set[int], str]]:
    """Images after each operation of `saves` saves, with the steps that may be found in them."""
    fs, log, images = SimulatedFileSystem(), {"begun": 0, "acked": 0}, []

    def after(op: str) -> None:
        allowed = {log["acked"], log["begun"]}
        images.extend((fs.crash(mode, seed + fs.operations), allowed, f"{op} {mode}") for mode, seed in modes)

    fs.after = after
    manager = open_manager(fs)
    for step in range(1, saves + 1):
        save(manager, step, log)
    manager.close()
    return images


def recover(image: SimulatedFileSystem, allowed: set[int], saves: int = 1) -> None:
    """What was found before is found after tidying up, and saving goes on."""
    step = check_state(image, allowed)
    manager = open_manager(image)
    assert check_state(image, {step}) == step
    leftover = [name for name in image.names(ROOT) if name.startswith("new-")]
    assert leftover == []
    for more in range(1, saves + 1):
        save(manager, step + more)
        assert check_state(image, {step + more}) == step + more
    manager.close()


def test_every_operation_of_every_save() -> None:
    images = photograph(4, [("lost", 0), ("kept", 0), ("torn", 1)])
    assert len(images) > 300
    for image, allowed, where in images:
        try:
            recover(image, allowed, saves=0)
        except BaseException as error:
            raise AssertionError(f"after {where}") from error


def test_saving_goes_on_after_a_crash() -> None:
    for image, allowed, where in photograph(3, [("torn", 5)])[::3]:
        try:
            recover(image, allowed, saves=3)
        except BaseException as error:
            raise AssertionError(f"after {where}") from error


@pytest.mark.slow
def test_every_operation_many_tears_and_crashes_of_the_recovery() -> None:
    modes = [("lost", 0), ("kept", 0), *(("torn", 1000 * i) for i in range(1, 13))]
    count = 0
    for image, allowed, where in photograph(5, modes):
        nested: list[SimulatedFileSystem] = []
        image.after = lambda op, image=image, nested=nested: nested.append(image.crash("torn", image.operations))
        try:
            recover(image, allowed, saves=2 if count % 50 == 0 else 0)
        except BaseException as error:
            raise AssertionError(f"after {where}") from error
        count += 1
        if count % 10 == 0 and count % 50:
            for again in nested:
                recover(again, allowed, saves=0)
    print(f"{count} crash images")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_every_operation_refused(code: int) -> None:
    """Each operation of the third save fails once: a typed failure, an old checkpoint intact, the next save works."""
    for k in itertools.count():
        fs = SimulatedFileSystem()
        manager = open_manager(fs)
        save(manager, 1)
        save(manager, 2)
        refuse_at = fs.operations + k
        refused = []

        def before(op: str, path: Path, fs=fs, refuse_at=refuse_at, refused=refused) -> None:
            if fs.operations == refuse_at and not refused:
                refused.append(op)
                raise OSError(code, "injected", str(path))

        fs.before = before
        try:
            save(manager, 3)
        except StoreFailure as failure:
            assert failure.kind in ("no-space", "io", "read-only", "quota")
            assert "injected" in failure.event()["detail"]
        fs.before = lambda op, path: None
        check_state(fs, {2, 3})
        save(manager, 4)
        check_state(fs, {4})
        manager.close()
        if not refused:
            assert k > 20
            break
