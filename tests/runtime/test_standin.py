"""The stand-ins for Ray's helper processes of a local node."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mula_ray.runtime import standin
from mula_ray.runtime.local import LocalCluster
from mula_ray.runtime.osproc import descendants

pytestmark = pytest.mark.timeout(60)


@contextlib.contextmanager
def standing_in(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """The script as a raylet starts it: with one end of a pipe as its standard input."""
    command = [sys.executable, "-I", "-S", standin.__file__, str(folder), *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def announced(path: Path) -> int:
    """The port in a file that appears."""
    while not path.exists():
        time.sleep(0.01)
    return int(path.read_text())


def test_unused_ports_are_announced_and_the_process_ends_with_the_raylet(tmp_path: Path) -> None:
    with standing_in(tmp_path, "metrics_x=-1", "listen_x=-1", "--appended-by-the-raylet") as process:
        assert announced(tmp_path / "metrics_x") == announced(tmp_path / "listen_x") == -1
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0
    assert sorted(os.listdir(tmp_path)) == ["listen_x", "metrics_x"]


def test_becomes_the_real_helper_at_the_first_connection(tmp_path: Path) -> None:
    real = (sys.executable, "-c", "import os, sys; print(os.getpid(), *sys.argv[1:])", "--given=1")
    with standing_in(tmp_path, "env_x=?", "127.0.0.1", *real, "--appended") as process:
        port = announced(tmp_path / "env_x")
        with contextlib.suppress(ConnectionResetError):  # nobody accepts: the listener is gone with the first
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
        assert process.stdout is not None
        told = process.stdout.readline().decode().split()
        assert told == [str(process.pid), "--given=1", "--appended", f"--runtime-env-agent-port={port}"]


def test_an_unasked_helper_ends_with_the_raylet(tmp_path: Path) -> None:
    with standing_in(tmp_path, "env_x=?", "127.0.0.1", sys.executable, "-c", "print('woken')") as process:
        announced(tmp_path / "env_x")
        out, _ = process.communicate(timeout=10)
        assert (process.returncode, out) == (0, b"")


_TASK = """
import sys
from mula_ray.runtime.seam import prepare_environment
prepare_environment(sys.argv[1])
import ray
ray.init(sys.argv[2], log_to_driver=False)

@ray.remote(num_cpus=0, resources={"tile": 1})
def told():
    import os
    return os.environ.get("TOLD")

print("without", ray.get(told.remote()))
print("with", ray.get(told.options(runtime_env={"env_vars": {"TOLD": "seven"}}).remote(), timeout=50))
"""


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_a_local_cluster_starts_no_helpers_of_ray_until_a_task_asks_for_an_environment() -> None:
    cluster = LocalCluster.start(1, 1, 20.0)
    try:
        address = cluster.wait_address()
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in descendants(cluster.keeper_pid)]
        helpers = [words for words in lines if b"agent.py" in b" ".join(words) or standin.__file__.encode() in words]
        helpers = [words for words in helpers if not words[0].endswith(b"raylet")]
        assert len(helpers) == 4  # two for the head, two for the node
        assert all(words[3] == standin.__file__.encode() for words in helpers)
        command = [sys.executable, "-c", _TASK, cluster.token_file, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert done.stdout.split("\n")[:2] == ["without None", "with seven"], done.stderr
    finally:
        cluster.end()
