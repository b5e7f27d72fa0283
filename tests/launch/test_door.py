"""A real cluster that `launch` would start on this machine, with the door locked: tokens, jobs, dashboard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch_helper import spec_of, with_launch

from mula_ray.config.site import load_site
from mula_ray.launch.bring_up import Cluster
from mula_ray.launch.hosts import Host, own_address

LOOK = "from mula_ray.launch.probe import alive_nodes; import sys; print(len(alive_nodes(sys.argv[1])))"


def python(code: str, *args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, timeout=60)


def http_status(url: str, token: str | None) -> int:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@dataclass(frozen=True)
class Door:
    """A cluster of one host with job server and token, and the ways to knock."""

    cluster: Cluster
    run_dir: Path
    jobs: str
    token: str


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("door")
    site = with_launch(load_site("local"), head="works", bring_up_s=90, shutdown_s=30)
    here = (Host("here", own_address()),)
    spec = spec_of(folder, site, hosts=here, nodes=1, spares=0, job=os.getpid(), job_server=True)
    token = (folder / "run" / "launch" / "token").read_text()
    with Cluster(spec, site.launch) as cluster:
        assert cluster.wait(1) == []
        yield Door(cluster, folder / "run", f"http://127.0.0.1:{spec.ports['dashboard']}", token)
    (archive,) = (folder / "run" / "logs" / "nodes").iterdir()
    with tarfile.open(archive) as logs:
        assert any("gcs_server" in name for name in logs.getnames())
        for member in logs.getmembers():
            file = logs.extractfile(member)
            assert file is None or token.encode() not in file.read(), f"the token stands in {member.name}"
    assert not Path(spec.temp_dir(0)).exists()
    assert json.loads((Path(spec.folder) / "agents" / "here.ended").read_text()) == {"left": []}


@pytest.mark.ray
def test_only_those_with_the_token_get_in(door: Door, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    submit = (
        "import sys; from ray.job_submission import JobSubmissionClient as C; C(sys.argv[1]).submit_job(entrypoint=':')"
    )
    address, good = door.cluster.spec.address, door.cluster.environment()
    hasty = {"RAY_gcs_server_request_timeout_seconds": "3"}
    assert python(LOOK, address, env=good).stdout.strip() == "1"
    assert http_status(f"{door.jobs}/api/jobs/", door.token) == 200
    assert python(submit, door.jobs, env=good).returncode == 0
    for env in ({**good, "RAY_AUTH_MODE": "disabled"} | hasty, {**good, "RAY_AUTH_TOKEN_PATH": str(wrong)} | hasty):
        assert python(LOOK, address, env=env).returncode != 0
        assert python(submit, door.jobs, env=env).returncode != 0
    assert http_status(f"{door.jobs}/api/jobs/", None) == 401
    assert http_status(f"{door.jobs}/api/jobs/", "0" * 64) == 403


@pytest.mark.slow
@pytest.mark.ray
def test_ray_init_without_the_token_is_refused(door: Door) -> None:
    code = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False)"
    env = {**door.cluster.environment(), "RAY_AUTH_MODE": "disabled"}
    assert python(code, door.cluster.spec.address, env=env).returncode != 0


SMALL = """
model: {vocab_size: 4096, hidden: 32, layers: 2, heads: 2, moe: {experts: 4, top_k: 2, expert_width: 32}}
data: {path: stdlib, context: 32}
optim: {warmup_steps: 4}
train: {steps: 100000, global_batch: 4, micro_batch: 2, dtype: fp32, eval_samples: 0}
checkpoint: {every: 0}
metrics: {peak_tflops: 0.1}
cluster: {kind: ray, nodes: 1, tiles_per_node: 2}
"""
JOB = "import sys; from ray.job_submission import JobSubmissionClient as C; c = C(sys.argv[1]); "


@pytest.mark.ray
def test_ray_job_submit_and_stop(door: Door, tmp_path: Path) -> None:
    """`ray job stop` leads to one agreed save; the true code stands in exit.json."""
    (tmp_path / "small.yaml").write_text(SMALL)
    run_dir, env = tmp_path / "run", door.cluster.environment()
    entry = f"{sys.executable} -m mula_ray train {tmp_path / 'small.yaml'} --address auto --run-dir {run_dir}"
    submitted = python(JOB + "print(c.submit_job(entrypoint=sys.argv[2]))", door.jobs, entry, env=env)
    job = submitted.stdout.strip().splitlines()[-1]
    metrics = run_dir / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, 90)
    stopped = python(JOB + "print(c.stop_job(sys.argv[2]))", door.jobs, job, env=env)
    assert stopped.returncode == 0, stopped.stderr
    wait_for(lambda: (run_dir / "exit.json").exists(), 60)
    assert json.loads((run_dir / "exit.json").read_text())["code"] == 10
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    saved = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines() if '"checkpoint"' in line]
    assert [event["step"] for event in saved if event["event"] == "checkpoint"] == [max(steps)]


def wait_for(condition: Callable[[], bool], bound_s: float) -> None:
    until = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < until, f"not within {bound_s} s"
        time.sleep(0.1)
