"""The zygote: fresh processes that never outlive their owner, however it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from mula_ray.runtime import wire
from mula_ray.runtime.forks import Child, Forks, Job, ZygoteProcess
from mula_ray.runtime.osproc import start_ticks

OWNER = """
import sys, time
from mula_ray.runtime import wire
from mula_ray.runtime.forks import Forks, Job
forks = Forks("\\0" + sys.argv[1], lambda child: None)
child = forks.fork()
child.run(Job("runtime_job:sleep", None))
wire.receive(child.channel)
print(child.pid, flush=True)
time.sleep(60)
"""


JOBS = """
import time
from mula_ray.runtime import wire
def sleep(argument, channel):
    wire.send(channel, "asleep")
    time.sleep(60)
def answer(argument, channel):
    return argument
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "runtime_job.py").write_text(JOBS)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def zygote(environment: dict[str, str]) -> Iterator[ZygoteProcess]:
    process = ZygoteProcess.start(environment)
    yield process
    process.stop()


def gone(pid: int, ticks: int, bound_s: float = 5.0) -> bool:
    end = time.monotonic() + bound_s
    while time.monotonic() < end:
        if start_ticks(pid) != ticks:
            return True
        time.sleep(0.005)
    return False


def test_children_run_jobs_and_their_ends_are_told(zygote: ZygoteProcess) -> None:
    ended: list[Child] = []
    told = threading.Event()
    forks = Forks(zygote.address, lambda child: (ended.append(child), told.set())[0])
    child = forks.fork()
    child.run(Job("runtime_job:answer", 7))
    assert told.wait(10)
    assert (ended[0].pid, ended[0].exit) == (child.pid, 7)
    killed = forks.fork()
    os.kill(killed.pid, signal.SIGSTOP)
    killed.kill()
    assert killed.gone.wait(10)
    assert killed.exit == -signal.SIGKILL
    forks.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_dies_with_its_owner(zygote: ZygoteProcess, stopped: bool) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, zygote.address[1:]], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    ticks = start_ticks(pid)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert gone(pid, ticks)


def test_children_die_with_the_zygote_and_the_owner_hears_it(environment: dict[str, str]) -> None:
    process = ZygoteProcess.start(environment)
    lost = threading.Event()
    forks = Forks(process.address, lambda _: None, lost.set)
    child = forks.fork()
    child.run(Job("runtime_job:sleep", None))
    wire.receive(child.channel)
    ticks = start_ticks(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    process.process.kill()
    process.process.wait()
    assert gone(child.pid, ticks)
    assert lost.wait(5)
    with pytest.raises(RuntimeError, match="gone"):
        forks.fork()
