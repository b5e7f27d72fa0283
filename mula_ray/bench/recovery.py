"""`mula-ray bench recovery`: from a failure to the next committed step, against what Ray Train and torchrun do.

The same model, engine and loop everywhere: 2 nodes x 2 tiles (and a spare node), EP 2 x DP 2. It kills (or stops)
a rank process, or a whole node, from outside and waits for the next line of `metrics.jsonl` of a newer start of the
ranks. What is reported is that time less a step's own (median of the undisturbed steps); p99 is the largest for fewer
than 100 failures. Baselines restart from checkpoints on disk, every 5 steps. `--case storm`: see `storm.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mula_ray.bench.sides import BOUND_S, Side, ours, ray_train, torchrun
from mula_ray.bench.storm import storm
from mula_ray.bench.timing import Row, chosen, report, row

CASES = ("kill-rank-32mb", "kill-rank-256mb", "freeze-rank-32mb", "kill-node-32mb")
BETWEEN_STEPS = 8


class Wedged(Exception):
    """A side made no progress within the bound, or ended."""


def run(cases: Sequence[str] | None = None, repeats: int = 20, baseline_kills: int = 3) -> dict[str, Any]:
    """The benchmark's JSON object; `repeats` failures a case (nodes: a quarter as many); `storm` only if asked."""
    rows: list[Row] = []
    wanted = chosen("recovery", cases, (*CASES, "storm"), CASES)
    base = Path(tempfile.mkdtemp(prefix="bench-recovery-"))
    try:
        if "storm" in wanted:
            wanted.remove("storm")
            rows += storm(base)
        against: dict[str, float] = {}
        for name, start in (("ray-train", ray_train), ("torchrun", torchrun)) if baseline_kills and wanted else ():
            side = start(base / name, "32mb")
            try:
                against[name] = statistics.median(measure(side, "kill-rank", baseline_kills))
                rows.append(row("kill-rank-32mb", f"{name}_p50_s", against[name], "s"))
            except Wedged:  # which is a result, too
                rows.append(row("kill-rank-32mb", f"{name}_wedged", 1.0, ""))
            finally:
                side.stop()
        for case in wanted:
            kind, _, size = case.rpartition("-")
            count = max(3, repeats // 4) if kind == "kill-node" else repeats
            side = ours(base / case, size)
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
            raise Wedged(f"{side.folder.name}: no progress within {BOUND_S:.0f} s, or it ended")
        time.sleep(0.003)


if __name__ == "__main__":
    print(json.dumps(run(tuple(sys.argv[1:]) or None), indent=1))
