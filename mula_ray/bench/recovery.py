"""`mula-ray bench recovery`: from a failure to the next committed step, against what Ray Train and torchrun do.

The same model, engine and loop everywhere: 2 nodes x 2 tiles (and a spare node), EP 2 x DP 2. It kills (or stops)
a rank process, or a whole node, from outside and waits for the next line of `metrics.jsonl` of a newer start of the
ranks. What is reported is that time less a step's own (median of the undisturbed steps); p99 is the largest for fewer
than 100 failures. Baselines restart from checkpoints on disk, every 5 steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mula_ray.bench.timing import Row, report, row
from mula_ray.config.environment import auth_variables
from mula_ray.runtime.local import LocalCluster
from mula_ray.train.records import Tail, read_lines

CASES = ("kill-rank-32mb", "kill-rank-256mb", "freeze-rank-32mb", "kill-node-32mb")
BOUND_S = 300.0
BETWEEN_STEPS = 8
_SIZES = {"32mb": (64, 4, 16, 160), "256mb": (128, 8, 32, 192)}
_CONFIG = """
model: {{vocab_size: 4096, hidden: {hidden}, layers: {layers}, heads: 2,
        moe: {{experts: {experts}, top_k: 2, expert_width: {width}}}}}
data: {{path: stdlib, context: 64}}
parallel: {{ep: 2}}
optim: {{warmup_steps: 10}}
train: {{steps: 1000000, global_batch: 4, micro_batch: 1, dtype: fp32, eval_samples: 0}}
checkpoint: {{every: {every}}}
elastic: {{policy: wait, orphan_s: 20, snapshot_every: 1}}
metrics: {{peak_tflops: 0.1, experts: false}}
cluster: {{nodes: 2, tiles_per_node: 2, spares: 1}}
"""


@dataclass
class Side:
    """A run under test. `pids` by rank; `fresh(line)`: whether a metrics line is of ranks started after `mark()`."""

    folder: Path
    process: subprocess.Popen[bytes]
    pids: Callable[[], dict[int, int]]
    stop: Callable[[], None]
    node: Callable[[], None] | None = None
    restock: Callable[[], None] = lambda: None
    _tail: Tail = field(init=False)

    def __post_init__(self) -> None:
        self._tail = Tail(self.folder / "metrics.jsonl")

    def steps(self) -> list[dict[str, Any]]:
        """Lines of metrics."""
        return [line for line in self._tail.read() if "loss" in line]

    @staticmethod
    def start_of(line: dict[str, Any]) -> Any:
        """What changes when the ranks are started again."""
        return line.get("pid", line["generation"])


def run(cases: Sequence[str] | None = None, repeats: int = 20, baseline_kills: int = 3) -> dict[str, Any]:
    """The benchmark's JSON object; `repeats` failures a case (nodes: a quarter as many)."""
    rows: list[Row] = []
    base = Path(tempfile.mkdtemp(prefix="bench-recovery-"))
    try:
        against: dict[str, float] = {}
        for name, start in (("ray-train", _ray_train), ("torchrun", _torchrun)) if baseline_kills else ():
            side = start(base / name, "32mb")
            try:
                against[name] = statistics.median(measure(side, "kill-rank", baseline_kills))
            finally:
                side.stop()
            rows.append(row("kill-rank-32mb", f"{name}_p50_s", against[name], "s"))
        for case in cases or CASES:
            kind, _, size = case.rpartition("-")
            count = max(3, repeats // 4) if kind == "kill-node" else repeats
            side = _ours(base / case, size)
            try:
                seconds = sorted(measure(side, kind, count))
            finally:
                side.stop()
            p50, p99 = statistics.median(seconds), seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
            rows += [row(case, "p50_s", p50, "s", name, value / p50) for name, value in (against or {"": p50}).items()]
            rows += [row(case, "p99_s", p99, "s"), row(case, "failures", float(len(seconds)), "")]
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return report("recovery", rows, threads=1)


def measure(side: Side, kind: str, count: int) -> list[float]:
    """Seconds from each failure to the next committed step, less the step's own time."""
    found = []
    _wait(side, lambda: len(side.steps()) >= BETWEEN_STEPS)
    for turn in range(count):
        seen = len(side.steps())
        _wait(side, lambda seen=seen: len(side.steps()) >= seen + BETWEEN_STEPS)  # type: ignore[misc]
        old = side.start_of(side.steps()[-1])
        own = statistics.median(line["step_s"] for line in side.steps()[-BETWEEN_STEPS:])
        failed = time.monotonic()
        if kind == "kill-node":
            assert side.node is not None
            side.node()
        else:
            pids = side.pids()
            os.kill(pids[turn % len(pids)], signal.SIGKILL if kind == "kill-rank" else signal.SIGSTOP)
        _wait(side, lambda old=old: side.start_of(side.steps()[-1]) != old)  # type: ignore[misc]
        found.append(max(0.0, time.monotonic() - failed - own))
        if kind == "kill-node":  # the next loss shall find a spare again
            side.restock()
    return found


def _wait(side: Side, what: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND_S
    while not what():
        if time.monotonic() > end or side.process.poll() is not None:
            raise RuntimeError(f"{side.folder.name}: no progress within {BOUND_S:.0f} s, or it ended")
        time.sleep(0.003)


def _write_config(folder: Path, size: str, every: int) -> Path:
    hidden, layers, experts, width = _SIZES[size]
    folder.mkdir(parents=True)
    path = folder / "config.yaml"
    path.write_text(_CONFIG.format(hidden=hidden, layers=layers, experts=experts, width=width, every=every))
    return path


def _start(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"OMP_NUM_THREADS": "1"}
    with (folder / "out.txt").open("wb") as out:
        return subprocess.Popen(command, env=clean | environment, stdout=out, stderr=out, start_new_session=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ours(folder: Path, size: str) -> Side:
    config = _write_config(folder, size, 0)
    cluster = LocalCluster.start(3, 2, 20.0)
    address = cluster.wait_address()
    command = [sys.executable, "-m", "mula_ray", "train", str(config), "--run-dir", str(folder / "run")]
    process = _start([*command, "--address", address], folder, auth_variables(cluster.token_file))
    run_dir = folder / "run"

    def events(name: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(run_dir / "events.jsonl").lines if line["event"] == name]

    def pids() -> dict[int, int]:
        ready = events("rank_ready")
        last = ready[-1]["generation"]
        return {line["rank"]: line["pid"] for line in ready if line["generation"] == last}

    def node() -> None:
        cluster.kill_node(events("generation_start")[-1]["nodes"][0])

    def restock() -> None:
        def joined() -> int:
            return sum(event["change"] == "joined" for event in events("membership"))

        before, end = joined(), time.monotonic() + BOUND_S
        cluster.add_node()
        while joined() == before and time.monotonic() < end:
            time.sleep(0.1)

    def stop() -> None:
        _end(process)
        cluster.end()

    return Side(run_dir, process, pids, stop, node, restock)


def _pid_files(folder: Path) -> Callable[[], dict[int, int]]:
    return lambda: {int(path.name): int(path.read_text()) for path in (folder / "pids").iterdir()}


def _torchrun(folder: Path, size: str) -> Side:
    config = _write_config(folder, size, 5)
    run_dir = folder / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["--max-restarts", "1000", "-m", "mula_ray.runtime.ray_train", str(config), str(run_dir)]
    # Without this its workers share the agent's store, and most longer runs wedge.
    process = _start(command, folder, {"TORCH_SHARE_RDZV_TCP_STORE": "0"})
    return Side(run_dir, process, _pid_files(run_dir), lambda: _end(process))


def _ray_train(folder: Path, size: str) -> Side:
    config = _write_config(folder, size, 5)
    cluster = LocalCluster.start(2, 2, 20.0)
    run_dir = folder / "run"
    code = (
        "import sys; from pathlib import Path; from mula_ray.config.load import load; "
        "from mula_ray.runtime.ray_train import train; "
        "train(load(sys.argv[1]).config, Path(sys.argv[2]), address=sys.argv[3])"
    )
    command = [sys.executable, "-c", code, str(config), str(run_dir), cluster.wait_address()]
    process = _start(command, folder, auth_variables(cluster.token_file))

    def stop() -> None:
        _end(process)
        cluster.end()

    return Side(run_dir, process, _pid_files(run_dir), stop)


if __name__ == "__main__":
    print(json.dumps(run(tuple(sys.argv[1:]) or None), indent=1))
