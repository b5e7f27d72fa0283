"""Calls between processes without Ray: results, what a raised exception becomes, and a callee that dies."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest

from mula_ray.runtime import wire
from mula_ray.runtime.lines import CallFailed, Lanes, Line, Listener, answer
from mula_ray.runtime.links import AgentDied, AgentUnreachable, loss_of
from mula_ray.runtime.peers import PeerServer, open_peer

SECRET = b"s" * 32


class Callee:
    """What is called."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def add(self, a: int, b: int) -> int:
        """A sum."""
        return a + b

    def fail(self) -> None:
        """A mistake."""
        raise ValueError("no good")

    def wait(self) -> str:
        """Until the gate opens."""
        assert self.gate.wait(20)
        return "open"

    def secret(self) -> str:
        """Not among the methods that may be called."""
        return "secret"


METHODS = frozenset({"add", "fail", "wait"})


@pytest.fixture
def callee() -> Callee:
    return Callee()


@pytest.fixture(params=["one machine", "network"])
def line(request: pytest.FixtureRequest, callee: Callee) -> Line:
    if request.param == "one machine":
        return Line(partial(wire.connect, Listener("test", callee, METHODS).address))
    respond = partial(answer, callee, METHODS)
    server = PeerServer("127.0.0.1", SECRET, lambda *_: None, lambda *_: None, respond)
    return Line(partial(open_peer, server.address, SECRET), "call")


def test_results_and_failures(line: Line) -> None:
    assert line.call("add", 2, 3) == 5
    with pytest.raises(CallFailed, match="ValueError: no good"):
        line.call("fail")
    with pytest.raises(CallFailed, match="TypeError"):
        line.call("add", 1)
    with pytest.raises(CallFailed, match="no such call: 'secret'"):
        line.call("secret")
    assert line.call("add", "a", "b") == "ab"


def test_one_call_does_not_wait_for_another(line: Line, callee: Callee) -> None:
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    lanes = Lanes(line.call, "test")
    lanes.ask("wait", (), lambda *got: answers.put(got))
    lanes.ask("add", (1, 1), lambda *got: answers.put(got))
    assert answers.get(timeout=10) == (2, None)
    lanes.ask("fail", (), lambda *got: answers.put(got))
    assert isinstance(answers.get(timeout=10)[1], CallFailed)
    callee.gate.set()
    assert answers.get(timeout=10) == ("open", None)
    lanes.close()


def test_a_bound_that_passes_is_an_error_and_the_line_goes_on(line: Line, callee: Callee) -> None:
    with pytest.raises(TimeoutError):
        line.call("wait", bound_s=0.05)
    callee.gate.set()
    assert line.call("add", 4, 4) == 8


def test_a_callee_that_dies_ends_the_call_under_way() -> None:
    code = "import time\nfrom mula_ray.runtime.lines import Listener\n"
    code += "listener = Listener('dies', time, frozenset({'sleep'}))\n"
    code += "print(listener.address[1:], flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = Line(partial(wire.connect, "\0" + process.stdout.readline().strip()))
    killer = threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL))
    killer.start()
    began = time.monotonic()
    with pytest.raises((EOFError, OSError)):
        line.call("sleep", 50, bound_s=None)
    assert time.monotonic() - began < 20
    process.wait()
    process.stdout.close()
    with pytest.raises(OSError):  # noqa: PT011 (refused: nothing listens)
        line.call("sleep", 0)


def test_what_a_failed_call_says_about_the_agent() -> None:
    assert [loss_of(error) for error in (AgentDied(), AgentUnreachable(), CallFailed("x"))] == [
        "dead",
        "unreachable",
        "error",
    ]
