"""The run folder, as its driver sees it: opened by one job at a time, checked against what is in it already."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from mula_ray.checkpoint.failures import StoreFailure
from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.scan import Found, scan
from mula_ray.config.errors import NoCheckpoint, UserError
from mula_ray.config.load import write_resolved
from mula_ray.config.request import TrainRequest
from mula_ray.config.run import RunConfig
from mula_ray.data.source import RunData
from mula_ray.elastic.events import DiskCopy
from mula_ray.parallel.legacy import BINDINGS, EXTENSION
from mula_ray.plan.format import Facts
from mula_ray.plan.topology import Topology
from mula_ray.train.records import read_lines
from mula_ray.train.sinks import now_text

STATE = "state.json"
_FIXED = ("model", "data.context", "data.document_mask", "train.seed", "train.global_batch", "train.dtype")
"""What must not change between two starts of a run: the same losses would not come out."""


@dataclass
class RunFolder:
    """An open run folder. `found`: where to resume from; `last_generation`: highest ever used, -1 for none."""

    path: Path
    run_id: str
    manager: CheckpointManager
    found: Found | None
    disk: tuple[DiskCopy, ...]
    ever_saved: bool
    last_generation: int
    committed: int
    skips: tuple[int, ...]
    cordoned: tuple[str, ...]
    state: dict[str, Any]

    def remember(self, **facts: Any) -> None:
        """Keep facts for a driver that takes over (mode 0600: it has the run's secret)."""
        self.state.update(facts)
        write_atomically(self.path / STATE, json.dumps(self.state), 0o600)

    def close(self) -> None:
        """Give the folder back."""
        self.manager.close()


def open_folder(request: TrainRequest, data: RunData) -> RunFolder:
    """Open or make the folder of a run, take its lease, find its newest sound checkpoint.

    Raises:
        UserError: another job writes it, another configuration or other data wrote it, `never` and it is not empty,
            no space, not writable.
        NoCheckpoint: `must`, or a folder with commits of which none is sound.
    """
    path, config = request.run_dir, request.loaded.config
    used = path.exists() and any(path.iterdir())
    if request.resume == "never" and used:
        raise UserError(
            f"--resume never, but run folder {path} is not empty; choose another --run-dir, or --resume auto"
        )
    if used:
        _refuse_other(path, config)
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        if not used:
            path.chmod(0o700)  # data, weights and the run's secret are its owner's
    except OSError as error:
        raise UserError(f"run folder {path} cannot be made ({error.strerror}); choose a writable --run-dir") from None
    state = _read_json(path / STATE)
    # Unique even where folders of two runs bear the same name: agents are found by it in a shared cluster.
    run_id = str(state.get("run_id") or f"{path.resolve().name}-{secrets.token_hex(4)}")
    manager = CheckpointManager(path / "checkpoints", run_id, int(state.get("generation", -1)) + 1)
    try:
        manager.acquire()
    except StoreFailure as error:
        raise UserError(f"run folder {path} cannot be used: {error}") from None
    try:
        return _look(request, data, path, run_id, manager, state)
    except BaseException:
        manager.close()
        raise


def _look(
    request: TrainRequest, data: RunData, path: Path, run_id: str, manager: CheckpointManager, state: dict[str, Any]
) -> RunFolder:
    found, ever = manager.latest(), manager.ever_committed()
    if found is None and (request.resume == "must" or ever):
        raise NoCheckpoint(_why_none(path, manager, ever))
    if found is not None:
        _refuse_data(path, found.manifest.facts, data)
    disk = tuple(
        DiskCopy(m.facts.step, p.name, m.kind == "full")
        for p, m in scan(manager.root, manager.fs)[0]
        if found is not None and (m.order <= found.manifest.order or m.kind == "model")
    )
    write_resolved(request.loaded, path / "config.yaml")
    if "run_id" not in state:
        state = {**state, "run_id": run_id}
        write_atomically(path / STATE, json.dumps(state), 0o600)
    committed = max([line["step"] for line in read_lines(path / "metrics.jsonl").lines if "loss" in line], default=0)
    return RunFolder(
        path,
        run_id,
        manager,
        found,
        disk,
        ever,
        max(int(state.get("generation", -1)), manager.generation - 1),
        max(committed, found.manifest.facts.step if found else 0),
        tuple(state.get("skips", ())),
        tuple(state.get("cordoned", ())),
        {"run_id": run_id, **state},
    )


def _why_none(path: Path, manager: CheckpointManager, ever: bool) -> str:
    if not ever:
        return (
            f"--resume must, but nothing was ever committed in {path / 'checkpoints'}; "
            "give the folder of a run that saved, or --resume auto to start fresh"
        )
    bad = "; ".join(str(error) for error in scan(manager.root, manager.fs)[1][:2])
    return (
        f"no checkpoint in {path / 'checkpoints'} is sound{': ' + bad if bad else ''}; restore one from a copy "
        "(mula-ray ckpt verify says what is wrong), or choose another --run-dir to start fresh"
    )


def _refuse_other(path: Path, config: RunConfig) -> None:
    old_file = path / "config.yaml"
    if not old_file.exists():
        return
    try:
        old = yaml.safe_load(old_file.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{old_file} cannot be read ({error}); choose another --run-dir") from None
    new = config.model_dump(mode="json")
    for key in _FIXED:
        was, now = _at(old, key), _at(new, key)
        if was is not None and was != now:
            raise UserError(
                f"run folder {path} belongs to another configuration: {_difference(key, was, now)}; "
                "choose another --run-dir, or use the configuration in its config.yaml"
            )


def _difference(key: str, was: Any, now: Any) -> str:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for name in sorted(was.keys() | now.keys()):
            if was.get(name) != now.get(name):
                return _difference(f"{key}.{name}", was.get(name), now.get(name))
    return f"{key} is {was!r} there and {now!r} here"


def _refuse_data(path: Path, facts: Facts, data: RunData) -> None:
    if facts.data_hash and facts.data_hash != data.content_hash:
        raise UserError(
            f"run folder {path} was trained on other data: content hash {facts.data_hash[:12]}… there, "
            f"{data.content_hash[:12]}… in {data.path}; give data.path of the data it was trained on"
        )


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(part)
    return tree


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Temp + fsync + rename."""
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp, path)


def write_exit(path: Path, code: int, reason: str, step: int) -> None:
    """`exit.json`: the true exit code, whatever wraps us."""
    body = {"code": code, "reason": reason, "step": step, "time": now_text(), "pid": os.getpid()}
    with contextlib.suppress(OSError):
        write_atomically(path / "exit.json", json.dumps(body) + "\n")


def facts_of(config: RunConfig, data: RunData, run_id: str, step: int, generation: int, topology: Topology) -> Facts:
    """What a checkpoint of `step` says about its run."""
    batch = config.train.global_batch
    layout = {axis: getattr(topology, axis) for axis in ("world", "dp", "ep", "tp", "pp")}
    return Facts(
        step=step,
        cursor=step * batch,
        tokens=step * batch * config.data.context,
        generation=generation,
        run_id=run_id,
        data_hash=data.content_hash,
        config=config.model_dump(mode="json"),
        layout={**layout, "optimizer": config.optim.kind},
        rng={"seed": config.train.seed},
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Versions of what matters for the numbers."""
    found = {}
    for name in ("mula-ray", "torch", "ray", "numpy", "oneccl", EXTENSION, BINDINGS):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
