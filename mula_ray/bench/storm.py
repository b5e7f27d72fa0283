"""`mula-ray bench recovery --case storm`: how much of a run is left when something fails every ten seconds.

2 nodes x 2 tiles and two spares, EP 2 x DP 2, 32 MB of state; ten minutes of random faults (exponential gaps of mean
10 s; half of them killed ranks), a fresh node 20 s after each that was lost or cordoned. The figure: committed steps x
the fault-free median step / wall time, the fault-free step from runs of the same configuration just before and just
after (a machine's speed drifts within minutes; the mean of the two). Every step that the storm shares with a calm run
must have the same loss and gradient norm, bit for bit.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mula_ray.bench.sides import BOUND_S, Side, ours
from mula_ray.bench.timing import Row, row
from mula_ray.runtime.inject import Kind
from mula_ray.runtime.local import LocalCluster
from mula_ray.train.records import Tail

MIX: dict[Kind, int] = {
    "kill-rank": 10, "freeze-rank": 3, "hang-collective": 3, "nan-loss": 2, "kill-actor": 1, "kill-node": 1,
}  # fmt: skip
EVERY_S, STORM_S, CALM_S = 10.0, 600.0, 60.0
NODES, TILES = 4, 2
RESTOCK_S = 20.0


class Restocker:
    """Adds a fresh node 20 s after each that was lost or cordoned, as an operator's pool would."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._full = len(cluster.nodes())
        self._due: list[float] = []
        self.added = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._over.wait(0.5):
            now = time.monotonic()
            have = len(set(self._cluster.nodes()) - self._cordoned()) + len(self._due)
            self._due += [now + RESTOCK_S] * (self._full - have)
            for due in [due for due in self._due if due <= now]:
                self._due.remove(due)
                self._cluster.add_node()
                self.added += 1

    def _cordoned(self) -> set[str]:
        try:
            return set(json.loads((self._folder / "state.json").read_text()).get("cordoned", ()))
        except (OSError, ValueError):
            return set()

    def close(self) -> None:
        """No more nodes."""
        self._over.set()
        self._thread.join()


@dataclass(frozen=True)
class Stretch:
    """A run for a while: committed steps, seconds, median step, what happened in it, what came out of every step."""

    steps: int
    wall_s: float
    step_s: float
    faults: int
    recoveries: int
    added: int
    results: dict[int, tuple[float, float]]


def storm(base: Path) -> list[Row]:
    """Rows of the case."""
    before = _stretch(base / "before", CALM_S, ())
    kinds = "+".join(kind for kind, share in MIX.items() for _ in range(share))
    rough = _stretch(base / "storm", STORM_S, ("--inject", f"random@every={EVERY_S},seed=1,kinds={kinds}"))
    after = _stretch(base / "after", CALM_S, ())
    common = 0
    for calm in (before, after):
        shared = calm.results.keys() & rough.results.keys()
        differing = sorted(step for step in shared if calm.results[step] != rough.results[step])
        if differing or not shared:
            raise RuntimeError(f"the storm changed the results of steps {differing[:5]}, of {len(shared)} in both runs")
        common = max(common, len(shared))
    share = rough.steps * (before.step_s + after.step_s) / 2 / rough.wall_s
    return [
        row("storm", "share_of_calm", share, "", "calm", share),
        row("storm", "faults", float(rough.faults), ""),
        row("storm", "recoveries", float(rough.recoveries), ""),
        row("storm", "calm_step_before_s", before.step_s, "s"),
        row("storm", "calm_step_after_s", after.step_s, "s"),
        row("storm", "own_step_s", rough.step_s, "s"),
        row("storm", "nodes_added", float(rough.added), ""),
        row("storm", "steps_compared", float(common), ""),
    ]


def _stretch(folder: Path, seconds: float, more: Sequence[str]) -> Stretch:
    """From the eighth step on, when everything is warm."""
    side = ours(folder, "32mb", NODES, more)
    assert side.cluster is not None
    events = Tail(side.folder / "events.jsonl")
    try:
        _wait_for_step(side, 8)
        restocker = Restocker(side.cluster, side.folder)
        first, began = _last(side), time.monotonic()
        while time.monotonic() - began < seconds:
            if side.process.poll() is not None:
                raise RuntimeError(f"{folder}: the run ended by itself")
            time.sleep(0.05)
        last, wall = _last(side), time.monotonic() - began
        restocker.close()
    finally:
        side.stop()
    own = statistics.median(line["step_s"] for line in side.steps() if line["step"] > first)
    kinds = Counter(line["event"] for line in events.read())
    results = {line["step"]: (line["loss"], line["grad_norm"]) for line in side.steps()}
    return Stretch(last - first, wall, own, kinds["injected"], kinds["recovery"], restocker.added, results)


def _last(side: Side) -> int:
    return int(side.steps()[-1]["step"])


def _wait_for_step(side: Side, step: int) -> None:
    end = time.monotonic() + BOUND_S
    while not side.steps() or _last(side) < step:
        if time.monotonic() > end or side.process.poll() is not None:
            raise RuntimeError(f"{side.folder}: step {step} did not come within {BOUND_S:.0f} s")
        time.sleep(0.05)
