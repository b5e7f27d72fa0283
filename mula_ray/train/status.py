"""How a run is doing, read from its folder alone: also after its death, and from another machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from mula_ray.config.errors import UserError
from mula_ray.train.progress import human_count, human_seconds
from mula_ray.train.records import Line, read_lines, tail_lines

State = Literal["starting", "training", "recovering", "done", "stopped", "failed", "dead", "silent"]
ENDED: tuple[State, ...] = ("done", "stopped", "failed", "dead")
SILENT_S = 120.0


@dataclass(frozen=True)
class Status:
    """What a person wants to know. `age_s`: seconds since the run's last sign of life."""

    run: str
    state: State
    why: str
    step: int
    steps: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    eta_s: float | None
    generation: int
    nodes: list[str]
    spares: int | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    failures: int
    recoveries: int
    last_failure: str | None
    age_s: float | None
    exit_code: int | None

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def read_status(folder: Path, now: float | None = None) -> Status:
    """Reads config.yaml, exit.json, events.jsonl and the end of metrics.jsonl.

    Raises:
        UserError: the folder is not there, or no run ever wrote to it.
    """
    now = time.time() if now is None else now
    if not folder.is_dir():
        raise UserError(f"run folder {folder} does not exist; give the folder that `mula-ray train` printed")
    events = read_lines(folder / "events.jsonl").lines
    lines = tail_lines(folder / "metrics.jsonl")
    if not events and not lines and not (folder / "config.yaml").exists():
        raise UserError(f"{folder} is no run folder: no config.yaml, events.jsonl or metrics.jsonl in it")
    steps = [line for line in lines if isinstance(line.get("step"), int) and "eval_loss" not in line]
    evals = [line for line in lines if "eval_loss" in line]
    last = steps[-1] if steps else {}
    start, placed = _last(events, "run_start"), _last(events, "generation_start")
    saved = _last(events, "checkpoint")
    failures = [line for line in events if line.get("event") == "failure" and line.get("kind") != "deadline"]
    broken = failures[-1] if failures else {}
    stamps = [stamp for line in (*events[-50:], *lines[-5:]) if (stamp := _time(line)) is not None]
    age = now - max(stamps) if stamps else None
    state, why, code = _state(folder, events, steps, age)
    total = int(start.get("steps") or _configured(folder) or 0)
    return Status(
        run=folder.resolve().name,
        state=state,
        why=why,
        step=int(last.get("step") or start.get("resumed_step") or 0),
        steps=total,
        loss=last.get("loss"),
        eval_loss=evals[-1]["eval_loss"] if evals else None,
        tokens_per_s=last.get("tokens_per_s"),
        mfu=last.get("mfu"),
        eta_s=None if state in ENDED else _eta(steps, total),
        generation=int(max(last.get("generation", 0), placed.get("generation", 0))),
        nodes=[str(node) for node in placed.get("nodes") or []],
        spares=placed.get("spares"),
        checkpoint_step=saved.get("step"),
        checkpoint_age_s=_age(saved, now),
        failures=len(failures),
        recoveries=_count(events, "recovery"),
        last_failure=f"{broken.get('kind')}: {broken.get('reason')}" if broken else None,
        age_s=age,
        exit_code=code,
    )


def _last(events: list[Line], event: str) -> Line:
    return next((line for line in reversed(events) if line.get("event") == event), {})


def _count(events: list[Line], event: str) -> int:
    return sum(line.get("event") == event for line in events)


def _time(line: Line) -> float | None:
    try:
        return datetime.fromisoformat(line["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None


def _age(line: Line, now: float) -> float | None:
    stamp = _time(line)
    return None if stamp is None else now - stamp


def _configured(folder: Path) -> int | None:
    try:
        value = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return int(value["train"]["steps"])
    except (OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        return None


def _eta(steps: list[Line], total: int) -> float | None:
    """Seconds left at the pace of the last lines, by their times: what a recovery cost is in it."""
    if len(steps) < 2:
        return None
    first, last = steps[max(0, len(steps) - 64)], steps[-1]
    begin, end = _time(first), _time(last)
    done = last["step"] - first["step"]
    if begin is None or end is None or done <= 0 or end <= begin:
        return None
    return float((end - begin) / done * max(0, total - last["step"]))


def _state(folder: Path, events: list[Line], steps: list[Line], age: float | None) -> tuple[State, str, int | None]:
    start = _last(events, "run_start")
    ended = _exit(folder, _time(start))
    if ended is not None:
        code = ended.get("code")
        reason = str(ended.get("reason") or "")
        if code == 0:
            return "done", reason or "all steps done", 0
        state: State = "stopped" if code in (10, 130) else "failed"
        return state, reason or f"exit {code}", code if isinstance(code, int) else None
    alive = _alive(start)
    if alive is False:
        return (
            "dead",
            f"its driver (process {start.get('pid')} on {start.get('host')}) is gone without an exit code",
            None,
        )
    typical = statistics.median([float(line.get("step_s") or 0.0) for line in steps[-64:]]) if steps else 0.0
    if alive is None and age is not None and age > max(SILENT_S, 20 * typical):
        return "silent", f"no sign of life for {human_seconds(age)}: probably dead", None
    return (*_working(events, steps), None)


def _working(events: list[Line], steps: list[Line]) -> tuple[State, str]:
    last = next((line for line in reversed(events) if line.get("event") in ("failure", "recovery", "run_start")), {})
    if last.get("event") == "failure" and last.get("kind") == "deadline":
        return "training", f"stopping: {last.get('reason')}"
    if last.get("event") == "failure":
        return "recovering", f"{last.get('kind')}: {last.get('reason')}"
    since, newest = _time(_last(events, "run_start")), _time(steps[-1]) if steps else None
    if newest is None or (since is not None and newest < since):
        return "starting", "no step yet"
    return "training", ""


def _exit(folder: Path, started: float | None) -> dict[str, Any] | None:
    """exit.json, unless it is an earlier driver's."""
    path = folder / "exit.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        written = _time(value) or path.stat().st_mtime
    except (OSError, ValueError, AttributeError):
        return None
    return value if started is None or written >= started - 0.002 else None


def _alive(start: Line) -> bool | None:
    """Whether the driver's process lives; None where that cannot be told (another machine, no process id on file)."""
    pid, host, since = start.get("pid"), start.get("host"), _time(start)
    if not isinstance(pid, int) or host != socket.gethostname():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    born = _born(pid)
    # a process younger than the run has only inherited its number
    return not (born is not None and since is not None and born > since + 1.0)


def _born(pid: int) -> float | None:
    """When a process started, seconds since the epoch (Linux)."""
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    return None


def describe(status: Status) -> str:
    """The status as lines for a person."""
    share = f" ({100 * status.step / status.steps:.1f} %)" if status.steps else ""
    eta = f", {human_seconds(status.eta_s)} to go" if status.eta_s is not None else ""
    held_out = f", held out {_text(status.eval_loss)}" if status.eval_loss is not None else ""
    rows = [
        ("state", status.state + (f": {status.why}" if status.why else "")),
        ("step", f"{status.step} of {status.steps}{share}{eta}"),
        ("loss", _text(status.loss) + held_out),
    ]
    if status.tokens_per_s is not None:
        mfu = f", MFU {100 * status.mfu:.1f} %" if status.mfu else ""
        rows.append(("speed", f"{human_count(status.tokens_per_s)} tokens/s{mfu}"))
    spares = "" if status.spares is None else f", {status.spares} spare"
    rows.append(("generation", f"{status.generation} on {len(status.nodes)} node(s){spares}"))
    saved = "none yet"
    if status.checkpoint_step is not None:
        ago = "" if status.checkpoint_age_s is None else f", {human_seconds(status.checkpoint_age_s)} ago"
        saved = f"step {status.checkpoint_step}{ago}"
    rows.append(("checkpoint", saved))
    broken = str(status.failures) + (f", {status.recoveries} recovered" if status.failures else "")
    rows.append(("failures", broken + (f"; last {status.last_failure}" if status.last_failure else "")))
    if status.age_s is not None:
        rows.append(("last sign", f"{human_seconds(status.age_s)} ago"))
    return "\n".join([status.run, *(f"  {name:11} {text}" for name, text in rows)])


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
