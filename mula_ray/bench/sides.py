"""The runs that `bench recovery` compares: ours, Ray Train's and torchrun's, with the same model, engine and loop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mula_ray.config.environment import auth_variables
from mula_ray.runtime.local import LocalCluster
from mula_ray.train.records import Tail, read_lines

BOUND_S = 300.0
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
    cluster: LocalCluster | None = None
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


def write_config(folder: Path, size: str, every: int) -> Path:
    """`every`: steps between checkpoints on disk, 0 none."""
    hidden, layers, experts, width = _SIZES[size]
    folder.mkdir(parents=True)
    path = folder / "config.yaml"
    path.write_text(_CONFIG.format(hidden=hidden, layers=layers, experts=experts, width=width, every=every))
    return path


def start(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a side; what it prints goes to `out.txt`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"OMP_NUM_THREADS": "1"}
    with (folder / "out.txt").open("wb") as out:
        return subprocess.Popen(command, env=clean | environment, stdout=out, stderr=out, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then end it and its process group."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ours(folder: Path, size: str, nodes: int = 3, more: Sequence[str] = ()) -> Side:
    """`mula-ray train` on a local cluster of `nodes`; `more`: further arguments."""
    config = write_config(folder, size, 0)
    cluster = LocalCluster.start(nodes, 2, 20.0)
    address = cluster.wait_address()
    command = [sys.executable, "-m", "mula_ray", "train", str(config), "--run-dir", str(folder / "run")]
    command += ["--set", f"cluster.spares={nodes - 2}", "--address", address, "--i-mean-it", *more]
    process = start(command, folder, auth_variables(cluster.token_file))
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

        before, until = joined(), time.monotonic() + BOUND_S
        cluster.add_node()
        while joined() == before and time.monotonic() < until:
            time.sleep(0.1)

    def stop() -> None:
        end(process)
        cluster.end()

    return Side(run_dir, process, pids, stop, node, restock, cluster)


def _pid_files(folder: Path) -> Callable[[], dict[int, int]]:
    return lambda: {int(path.name): int(path.read_text()) for path in (folder / "pids").iterdir()}


def torchrun(folder: Path, size: str) -> Side:
    """The same loop under torchrun, which starts all its workers again."""
    config = write_config(folder, size, 5)
    run_dir = folder / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["--max-restarts", "1000", "-m", "mula_ray.runtime.ray_train", str(config), str(run_dir)]
    # Without this its workers share the agent's store, and most longer runs wedge.
    process = start(command, folder, {"TORCH_SHARE_RDZV_TCP_STORE": "0"})
    return Side(run_dir, process, _pid_files(run_dir), lambda: end(process))


def ray_train(folder: Path, size: str) -> Side:
    """The same loop under Ray Train."""
    config = write_config(folder, size, 5)
    cluster = LocalCluster.start(2, 2, 20.0)
    run_dir = folder / "run"
    code = (
        "import sys; from pathlib import Path; from mula_ray.config.load import load; "
        "from mula_ray.runtime.ray_train import train; "
        "train(load(sys.argv[1]).config, Path(sys.argv[2]), address=sys.argv[3])"
    )
    command = [sys.executable, "-c", code, str(config), str(run_dir), cluster.wait_address()]
    process = start(command, folder, auth_variables(cluster.token_file))

    def stop() -> None:
        end(process)
        cluster.end()

    return Side(run_dir, process, _pid_files(run_dir), stop)
