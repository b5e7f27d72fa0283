"""Runs of `mula-ray train` in processes of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mula_ray.config.environment import auth_variables
from mula_ray.config.load import load
from mula_ray.data.ledger import SampleSum, expected
from mula_ray.data.source import open_run_data
from mula_ray.runtime.local import LocalCluster
from mula_ray.train.records import read_lines

CONFIG = """
model: {vocab_size: 4096, hidden: 32, layers: 2, heads: 2, moe: {experts: 4, top_k: 2, expert_width: 32}}
data: {path: stdlib, context: 32}
optim: {lr: 1.0e-3, min_lr: 1.0e-4, warmup_steps: 4}
train: {steps: 20, global_batch: 4, micro_batch: 2, dtype: fp32, eval_samples: 0}
checkpoint: {every: 0}
elastic: {snapshot_every: 1}
metrics: {peak_tflops: 0.1}
cluster: {nodes: 2, tiles_per_node: 1}
"""


class Run:
    """One invocation; `folder` is its run folder."""

    def __init__(
        self,
        folder: Path,
        cluster: LocalCluster | None,
        *sets: str,
        inject: tuple[str, ...] = (),
        more: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        config = folder.parent / "small.yaml"
        config.write_text(CONFIG)
        command = [sys.executable, "-m", "mula_ray", "train", str(config), "--run-dir", str(folder), *more]
        command += [part for item in sets for part in ("--set", item)]
        command += [part for item in inject for part in ("--inject", item)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        if cluster is not None:
            command += ["--address", cluster.wait_address(), "--i-mean-it"]
            environment |= auth_variables(cluster.token_file)
        self._screen = folder.parent / f"{folder.name}.out"  # a pipe that nobody reads would stop a long run
        with self._screen.open("ab") as screen:
            self.process = subprocess.Popen(command, env=environment, stdout=screen, stderr=subprocess.STDOUT)

    @property
    def out(self) -> str:
        """What it has printed."""
        return self._screen.read_text(errors="replace")

    def wait(self, bound_s: float = 200.0) -> int:
        """Exit code."""
        try:
            self.process.wait(timeout=bound_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"run {self.folder.name} did not end:\n{self.report()}") from None
        return self.process.returncode

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the driver a signal."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def until(self, step: int, bound_s: float = 120.0) -> None:
        """Wait for a step's line."""
        wait_for(lambda: max(self.losses(), default=0) >= step, bound_s, self.report)

    def losses(self) -> dict[int, tuple[float, float]]:
        """step -> (loss, grad_norm), the last line of a step counts."""
        lines = read_lines(self.folder / "metrics.jsonl").lines
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        return [line for line in read_lines(self.folder / "events.jsonl").lines if line["event"] == name]

    def ledger_holds(self) -> bool:
        """Whether every step read exactly the samples that the order gives it, each once: bytes, not claims."""
        config = load(str(self.folder / "config.yaml")).config
        data = open_run_data(config)
        lines = [line for line in read_lines(self.folder / "metrics.jsonl").lines if "loss" in line]
        wanted = {
            step: expected(data, step - 1, config.train.global_batch) for step in {line["step"] for line in lines}
        }
        return bool(lines) and all(
            SampleSum(line["samples"], line["samples_crc"]) == wanted[line["step"]] for line in lines
        )

    def exit_code(self) -> int:
        """As `exit.json` has it."""
        return int(json.loads((self.folder / "exit.json").read_text())["code"])

    def report(self) -> str:
        """For messages of failed tests."""
        lines = [json.dumps(line)[:300] for line in read_lines(self.folder / "events.jsonl").lines[-12:]]
        logs = [path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("logs/*"))]
        return "\n".join([self.out[-2000:], *lines, *logs])


def wait_for(what: Callable[[], bool], bound_s: float, describe: Callable[[], str] = str) -> float:
    """Seconds until `what` became true."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < bound_s, describe()
        time.sleep(0.02)
    return time.monotonic() - began


def processes_with(text: str) -> list[str]:
    """Command lines (or working memory names) of processes that have `text` in command line or environment."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = Path(f"/proc/{name}/environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in command or text in environment:
            found.append(f"{name} {command[:120]}")
    return found
