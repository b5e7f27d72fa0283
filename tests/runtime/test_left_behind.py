"""The whole of a local cluster goes with its driver, or with its keeper: no process, no shared memory, no folder."""

import json
import os
import signal
from pathlib import Path

import pytest
from run_helper import Run, processes_with, wait_for

from mula_ray.runtime.local import LocalCluster
from mula_ray.runtime.osproc import descendants

# Bounds for a crowded machine: on a quiet one a run takes some ten seconds.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


@pytest.mark.parametrize("victim", ["driver", "keeper"])
def test_everything_ends_with(victim: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    run = Run(tmp_path / "run", None, "elastic.orphan_s=2", "train.steps=100000", "cluster.nodes=1")
    run.until(2, 90.0)
    folder = Path(json.loads((run.folder / "state.json").read_text())["cluster"])
    cluster = LocalCluster.find(folder)
    assert cluster is not None
    keeper = cluster.keeper_pid
    below = descendants(keeper)
    assert len(below) > 6
    assert cluster._sock is not None
    cluster._sock.close()
    if victim == "driver":
        run.kill()
    else:
        os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: not any(map(_alive, below)), 20.0, lambda: f"left: {[pid for pid in below if _alive(pid)]}")
    if victim == "keeper":
        assert run.wait(60.0) == 30, run.report()
        assert "head of the Ray cluster" in run.out
    wait_for(lambda: not folder.exists() and not processes_with(str(folder)), 10.0)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "mula" in name}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
