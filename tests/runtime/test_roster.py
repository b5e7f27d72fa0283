"""Which nodes get an agent: as many as are wanted, those with an earlier driver's first, none that it cordoned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_helper import CONFIG

from mula_ray.config.load import load
from mula_ray.runtime import seam
from mula_ray.runtime.messages import RunFacts
from mula_ray.runtime.roster import Roster

NODES = ("n0", "n1", "n2", "n3", "n4")


def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: set[str], **more: Any) -> list[set[str]]:
    """Nodes held after the first and the second look at a cluster; `there`: those with an agent of the run."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    config = load(str(tmp_path / "config.yaml")).config
    run = RunFacts(run_id="run", run_dir=str(tmp_path), config=config, data=None)  # type: ignore[arg-type]
    monkeypatch.setattr(seam, "tile_nodes", lambda: {f"id-{name}": (1, "127.0.0.1", name) for name in NODES})
    monkeypatch.setattr(seam, "free_tiles", lambda: {f"id-{name}": int(name not in there) for name in NODES})
    monkeypatch.setattr(seam, "find_actor", lambda actor: actor if actor.rpartition("id-")[2] in there else None)
    monkeypatch.setattr(Roster, "_make", lambda _self, _id, name, _address: name)
    monkeypatch.setattr(Roster, "_greet", lambda *_: None)
    roster = Roster(run, b"", 2, {}, lambda _: None, lambda: None, **more)
    found = []
    for first in (True, False):
        roster._round(first)
        found.append({name for name, _ in roster._held.values()})
    return found


def test_as_many_nodes_as_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = rounds(tmp_path, monkeypatch, set())
    assert len(first) == 2
    assert second == first


def test_cordoned_nodes_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = rounds(tmp_path, monkeypatch, set(), shunned=frozenset(("n0", "n1", "n2")))
    assert first == second == {"n3", "n4"}


def test_an_agent_on_a_cordoned_node_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = rounds(tmp_path, monkeypatch, {"n0"}, shunned=frozenset(("n0", "n1", "n2")))
    assert first == second == {"n0", "n3", "n4"}


def test_agents_of_an_earlier_driver_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for there in ({"n1", "n3"}, {"n0", "n4"}, {"n1", "n2", "n4"}):
        first, second = rounds(tmp_path, monkeypatch, there)
        assert first == second == there
