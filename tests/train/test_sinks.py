"""Files of a run folder: whole lines, torn lines, full disks, replayed steps, and the line a person sees."""

from __future__ import annotations

import io
import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from mula_ray.config.errors import UserError
from mula_ray.train import services
from mula_ray.train.metrics import EvalRecord, StepRecord
from mula_ray.train.progress import Progress, human_count, human_seconds
from mula_ray.train.records import read_lines, read_metrics, tail_lines
from mula_ray.train.sinks import EventLog, JsonlSink, LineFile, Sinks, clean


def record(step: int, generation: int = 0, loss: float = 2.0) -> StepRecord:
    return StepRecord(step, generation, loss, 0.0, 0.0, 1.0, 1e-3, 64, 128.0, 0.2, 0.5, 0.0)


def test_lines_have_a_time_with_zone_and_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(record(0, loss=float("nan")))
    sink.write(EvalRecord(1, 0, 2.5, 640, 0.1))
    sink.close()
    sink.close()
    lines = [json.loads(raw, parse_constant=lambda name: pytest.fail(name)) for raw in path.read_text().splitlines()]
    assert lines[0]["loss"] is None
    assert lines[1]["eval_loss"] == 2.5
    assert all(datetime.fromisoformat(line["time"]).tzinfo is not None for line in lines)


def test_a_torn_last_line_swallows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0,"loss":1.0}\n{"step":1,"lo')
    sink = JsonlSink(path)
    sink.write(record(1, generation=1))
    sink.close()
    read = read_metrics(path)
    assert [line["step"] for line in read.steps] == [0, 1]
    assert read.bad == 1
    assert tail_lines(path, 40)[-1]["step"] == 1


def test_the_last_line_of_a_replayed_step_counts(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m")
    for step, generation in ((0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (3, 1)):
        sink.write(record(step, generation, loss=float(10 * generation + step)))
    sink.close()
    read = read_metrics(tmp_path / "m")
    assert [line["loss"] for line in read.steps] == [0.0, 11.0, 12.0, 13.0]
    assert read.replayed == 2
    assert len(read.written) == 6


def test_garbage_is_counted_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b'{"step":0}\n\xff\xfe\n[1]\n\n{"nostep":1}\n')
    read = read_metrics(tmp_path / "m")
    assert (len(read.steps), read.bad) == (1, 3)
    assert read_lines(tmp_path / "missing").lines == []


def test_a_full_disk_drops_lines_and_the_next_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(tmp_path / "m")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, body: real(fd, body[:3]))
    assert not file.write({"step": 0})
    monkeypatch.setattr(os, "write", real)
    assert file.write({"step": 1})
    file.close()
    assert file.dropped == 1
    assert [line["step"] for line in read_lines(tmp_path / "m").lines] == [1]


def test_two_writers_do_not_mix_lines(tmp_path: Path) -> None:
    first, second = LineFile(tmp_path / "m"), LineFile(tmp_path / "m")
    for index in range(20):
        first.write({"step": index, "pad": "x" * 3000})
        second.write({"step": index, "pad": "y" * 3000})
    assert len(read_lines(tmp_path / "m").lines) == 40


def test_events_have_their_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.run_start(run_id="r", steps=10, world=2, resumed_step=None, host="h")
    log.generation_start(0, step=0, world=2, nodes=("a", "b"), spares=1, reason="start")
    log.failure(0, kind="hard", reason="rank 1 died", step=4, node="b", rank=1)
    log.recovery(1, step=4, source="memory", phases={"detect": 0.01}, seconds=0.2, reason="same tile", lost_steps=1)
    log.checkpoint(1, step=5, slot="full-a", bytes=10, seconds=0.1, stall_s=0.0)
    log.membership(1, change="cordoned", node="b", reason="two failures")
    log.decision(1, reason="spares first", commands=("promote",))
    log.run_end(1, code=0, reason="done", step=10)
    log.close()
    lines = read_lines(tmp_path / "events.jsonl").lines
    assert [line["event"] for line in lines] == [
        "run_start",
        "generation_start",
        "failure",
        "recovery",
        "checkpoint",
        "membership",
        "decision",
        "run_end",
    ]
    assert all("time" in line and "generation" in line for line in lines)


def test_a_sink_that_fails_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    class Away:
        def write(self, _: object) -> None:
            raise ConnectionError("away")

        def close(self) -> None: ...

    sinks = Sinks([Away(), JsonlSink(tmp_path / "m")])
    sinks.write(record(0))
    sinks.write(record(1))
    sinks.close()
    assert len(read_metrics(tmp_path / "m").steps) == 2


def test_a_missing_extra_is_one_clear_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(UserError, match="mula-ray\\[wandb\\]"):
        services.open_sinks(tmp_path, "r", {}, wandb=True)


def test_clean_copies_what_json_has_not() -> None:
    assert clean({"a": (1, float("inf")), 2: Path("x")}) == {"a": [1, None], "2": "x"}


def test_plain_progress_lines_hold_what_a_person_asks_for() -> None:
    out = io.StringIO()
    now = [0.0]
    with Progress(100, stream=out, interval_s=10, clock=lambda: now[0]) as progress:
        progress.membership(0, active=2, spares=1)
        for step in range(1, 101):
            now[0] += 1.0
            progress.step(record(step, loss=3.0))
            if step == 50:
                progress.checkpoint(50)
        progress.evaluation(EvalRecord(100, 0, 2.5, 640, 0.1))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 13
    middle = next(line for line in lines if "step 61/100" in line)
    for part in ("61.0%", "loss 3.0000", "128 tok/s", "MFU 20.0%", "ETA 39s", "gen 0", "nodes 2+1", "ckpt 50"):
        assert part in middle, (part, middle)
    assert "100.0%" in lines[-2]
    assert "held-out loss 2.5" in lines[-1]


def test_live_progress_ends_cleanly() -> None:
    out = io.StringIO()
    progress = Progress(2, stream=out, live=True)
    progress.step(record(0))
    progress.note("a node was lost")
    progress.step(record(2))
    progress.close()
    progress.close()
    assert "a node was lost" in out.getvalue()
    assert "100.0%" in out.getvalue()


def test_numbers_for_people() -> None:
    assert [human_seconds(s) for s in (8, 185, 7620, 4 * 86400 + 3 * 3600)] == ["8s", "3m05s", "2h07m", "4d03h"]
    assert [human_count(n) for n in (950, 12345, 4.56e6, 999.9)] == ["950", "12.3k", "4.56M", "1000"]
