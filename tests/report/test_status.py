"""`mula-ray status`: what it says about runs in every state, from their files alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mula_ray.cli.main import main
from mula_ray.train.metrics import EvalRecord, StepRecord
from mula_ray.train.sinks import EventLog, JsonlSink
from mula_ray.train.status import describe, read_status


def write(folder: Path, *, pid: int | None, steps: int = 3, host: str | None = None) -> EventLog:
    log = EventLog(folder / "events.jsonl")
    log.run_start(
        run_id="r", steps=10, world=2, resumed_step=None, pid=pid, host=host if host else socket.gethostname()
    )
    log.generation_start(0, step=0, world=2, nodes=["a", "b"], spares=1, reason="start")
    sink = JsonlSink(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        time.sleep(0.002)
        sink.write(StepRecord(step, 0, 3.0 - step / 10, 0, 0, 1.0, 1e-3, 64, 128.0, 0.2, 0.5, 0.0))
    sink.write(EvalRecord(steps, 0, 2.9, 640, 0.1))
    sink.close()
    return log


def test_a_training_run(tmp_path: Path) -> None:
    log = write(tmp_path, pid=os.getpid())
    log.checkpoint(0, step=2, slot="full-a", bytes=10, seconds=0.1, stall_s=0.0)
    found = read_status(tmp_path)
    assert (found.state, found.step, found.steps, found.generation) == ("training", 3, 10, 0)
    assert (found.nodes, found.spares, found.checkpoint_step) == (["a", "b"], 1, 2)
    assert found.eta_s is not None
    assert found.eta_s > 0
    text = describe(found)
    for part in ("3 of 10 (30.0 %)", "2.7000", "held out 2.9000", "MFU 20.0 %", "2 node(s), 1 spare", "step 2"):
        assert part in text, text


def test_starting_recovering_done_stopped_failed(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    facts: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname()}
    log.run_start(run_id="r", steps=10, world=2, resumed_step=None, **facts)
    assert read_status(tmp_path).state == "starting"
    log.failure(0, kind="hard", reason="rank 1 died", step=4, node="b", rank=1)
    found = read_status(tmp_path)
    assert (found.state, found.why, found.failures) == ("recovering", "hard: rank 1 died", 1)
    for code, state in ((0, "done"), (10, "stopped"), (30, "failed"), (1, "failed")):
        (tmp_path / "exit.json").write_text(json.dumps({"code": code, "reason": "why"}))
        found = read_status(tmp_path)
        assert (found.state, found.exit_code) == (state, code)
    os.utime(tmp_path / "exit.json", (1, 1))
    assert read_status(tmp_path).state == "recovering", "an earlier driver's exit does not count"


def test_a_dead_run_is_called_dead(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    write(tmp_path, pid=child.pid)
    found = read_status(tmp_path)
    assert found.state == "dead"
    assert "gone without an exit code" in describe(found)
    assert found.eta_s is None


def test_a_process_number_used_again_is_not_the_driver(tmp_path: Path) -> None:
    write(tmp_path, pid=os.getpid())
    path = tmp_path / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["time"] = "2020-01-01T00:00:00+00:00"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_status(tmp_path).state == "dead"


def test_a_silent_run_of_another_machine(tmp_path: Path) -> None:
    write(tmp_path, pid=1, host="elsewhere")
    assert read_status(tmp_path).state == "training"
    found = read_status(tmp_path, now=time.time() + 1000)
    assert found.state == "silent"
    assert "16m40s" in found.why


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, pid=os.getpid())
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "training"
    (tmp_path / "exit.json").write_text('{"code": 0}')
    assert main(["status", str(tmp_path), "--watch"]) == 0
    assert "done" in capsys.readouterr().out
    assert main(["status", str(tmp_path / "nowhere")]) == 20
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["status", str(empty)]) == 20
