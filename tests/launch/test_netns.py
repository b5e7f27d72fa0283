"""Several real hosts on one machine: launch brings them up, trains, loses two of them, takes all down.

Needs root and iproute2: `pytest -m netns`; `.ci/run` does it where that is possible.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.netns import Hosts, hosts, site_file

pytestmark = [pytest.mark.netns, pytest.mark.timeout(600)]
STEPS = 60
SETS = {
    "parallel.ep": 2,
    "cluster.nodes": 2,
    "cluster.tiles_per_node": 2,
    "train.steps": STEPS,
    "train.micro_batch": 4,
    "train.eval_every": 0,
    "train.eval_samples": 0,
    "checkpoint.every": 0,
    "elastic.orphan_s": 10.0,
}
LOOK = (
    "import sys, json; from ray._raylet import GcsClient;"
    "nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5);"
    "print(json.dumps({key.hex(): info.node_manager_address for key, info in nodes.items()}))"
)


def sets(**more: object) -> list[str]:
    return [part for key, value in (SETS | more).items() for part in ("--set", f"{key}={value}")]


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Step → (loss, gradient norm); the last line of a step counts."""
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in lines(run_dir / "metrics.jsonl") if "loss" in row}


def wait(what: str, condition: Callable[[], bool], bound_s: float, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + bound_s
    while not condition():
        assert process.poll() is None, f"launch ended with {process.returncode} before: {what}"
        assert time.monotonic() < until, f"not within {bound_s} s: {what}"
        time.sleep(0.1)


def working(made: Hosts, run_dir: Path, address: str) -> list[int]:
    """Indices of the hosts of the newest generation, as the events name them."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(run_dir / "launch" / "token")}
    done = subprocess.run(
        made.command(0, sys.executable, "-c", LOOK, address),
        env=os.environ | token,
        capture_output=True,
        text=True,
        timeout=60,
    )
    known = json.loads(done.stdout)
    started = [event for event in lines(run_dir / "events.jsonl") if event["event"] == "generation_start"][-1]
    found = [next(at for key, at in known.items() if key.startswith(node)) for node in started["nodes"]]
    return [made.addresses.index(at) for at in found]


def generation(run_dir: Path) -> int:
    return max((row["generation"] for row in lines(run_dir / "metrics.jsonl") if "loss" in row), default=-1)


def reached(run_dir: Path, step: int, at_least: int) -> Callable[[], bool]:
    return lambda: generation(run_dir) >= at_least and max(losses(run_dir), default=0) >= step


def test_a_cut_and_a_killed_host_do_not_show(tmp_path: Path) -> None:
    plain = [sys.executable, "-m", "mula_ray", "train", "mula-tiny", *sets(**{"cluster.spares": 0})]
    subprocess.run([*plain, "--run-dir", str(tmp_path / "local")], check=True, timeout=300)
    expected = losses(tmp_path / "local")
    assert len(expected) == STEPS

    run_dir = tmp_path / "run"
    with hosts(5) as made:  # a head, two working hosts, two spares
        command = [sys.executable, "-m", "mula_ray", "launch", "mula-tiny", "--site", str(site_file(tmp_path))]
        command += ["--hosts", made.listed, "--run-dir", str(run_dir), "--job", "77", *sets()]
        process = subprocess.Popen(made.command(0, *command))
        try:
            wait("five steps", reached(run_dir, 5, 0), 180, process)
            spec = json.loads(next((run_dir / "launch").glob("*/spec.json")).read_text())
            address = f"{made.addresses[0]}:{spec['ports']['gcs']}"
            first, _ = working(made, run_dir, address)
            made.cut(first)
            cut_at = time.monotonic()
            wait("a generation without the cut host", reached(run_dir, 0, 1), 120, process)
            again = working(made, run_dir, address)
            assert first not in again
            wait("some more steps", reached(run_dir, max(losses(run_dir)) + 5, 1), 120, process)
            for pid in made.pids(again[0]):
                os.kill(pid, 9)
            wait("a generation without the killed host", reached(run_dir, 0, 2), 120, process)
            assert process.wait(timeout=240) == 0
        finally:
            process.kill()
        assert time.monotonic() - cut_at < 400
        assert [made.pids(index) for index in range(5)] == [[]] * 5
    assert losses(run_dir) == expected
    assert json.loads((run_dir / "exit.json").read_text())["code"] == 0
    killed = Path(f"/tmp/mr-{os.getuid()}-77-{again[0]}")  # a real host would have lost its /tmp with its processes
    assert set(Path("/tmp").glob(f"mr-{os.getuid()}-77-*")) <= {killed}
    shutil.rmtree(killed, ignore_errors=True)
    assert list((run_dir / "logs" / "nodes").iterdir())


def test_the_cut_off_host_ends_by_itself(tmp_path: Path) -> None:
    """Also when the launcher cannot tell it: its files are hidden from it."""
    from mula_ray.config.site import load_site
    from mula_ray.launch.agent import Agent
    from mula_ray.launch.spec import AgentSpec

    assert load_site(site_file(tmp_path)).launch.method == "each"
    spec = AgentSpec(
        folder=str(tmp_path), hosts=(), ports={}, set={}, unset=(), temp_root="/tmp", job=1, tiles=1, head_works=True,
        stagger_s=0, bring_up_s=1, orphan_s=0.5, logs=str(tmp_path), job_server=False,
    )  # fmt: skip
    (tmp_path / "agents").mkdir()
    agent = Agent.__new__(Agent)
    agent.spec, agent.folder, agent.stopping, agent._beat = spec, tmp_path, False, (None, time.monotonic())
    agent._report = lambda *_: None  # type: ignore[method-assign]
    until = time.monotonic() + 10
    while not agent._should_stop():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_missing_hosts_are_named(tmp_path: Path) -> None:
    with hosts(3) as made:
        site = site_file(tmp_path, bring_up_s=25)
        listed = f"{made.listed},gone=10.77.0.99"
        command = [sys.executable, "-m", "mula_ray", "launch", "mula-tiny", "--site", str(site), "--hosts", listed]
        command += ["--run-dir", str(tmp_path / "run"), "--set", "cluster.nodes=3", "--set", "cluster.spares=0"]
        done = subprocess.run(made.command(0, *command), capture_output=True, text=True, timeout=200)
        assert done.returncode == 30, done.stderr
        assert "missing: gone" in done.stderr
        assert "gone (10.77.0.99): its agent never started" in done.stderr
        assert [made.pids(index) for index in range(3)] == [[]] * 3
