"""The run's figures among Ray's Prometheus metrics (`ray_mula_ray_...`), for those who scrape a cluster.

    sinks = Sinks([JsonlSink(...), RayMetrics(run_id)])       # it is a metric sink like any other
    metrics.failure("hard"); metrics.recovery(0.21); metrics.nodes(active=2, spares=1)

Only in a process that is connected to Ray. A local cluster that we start has Ray's collection switched off
(`runtime/seam.py`); one that is already running decides for itself, and without collection this costs nothing.
"""

from __future__ import annotations

import math
from typing import Any

from mula_ray.train.metrics import EvalRecord, StepRecord

GAUGES = {
    "loss": "cross-entropy, nats per token",
    "eval_loss": "held-out cross-entropy, nats per token",
    "grad_norm": "gradient norm before clipping",
    "lr": "learning rate",
    "tokens_per_s": "tokens per second, all tiles",
    "mfu": "model FLOPs utilisation, 0 to 1",
    "step_s": "seconds of a step",
    "data_wait_s": "seconds a step waited for data",
    "expert_imbalance": "busiest expert against the mean, worst layer",
    "router_entropy": "router entropy, mean over layers, nats",
    "dead_experts": "experts without a token in the last step",
}
RECOVERY_S = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0]


class RayMetrics:
    """Gauges of the last step, counters of tokens and failures, a histogram of recoveries; tagged by run."""

    def __init__(self, run_id: str) -> None:
        from ray.util import metrics

        tags: Any = {"run": run_id}
        self._gauges: dict[str, Any] = {
            name: metrics.Gauge(f"mula_ray_{name}", description=text, tag_keys=("run",))
            for name, text in GAUGES.items()
        }
        self._gauges["step"] = metrics.Gauge("mula_ray_step", description="committed steps", tag_keys=("run",))
        self._nodes: Any = metrics.Gauge("mula_ray_nodes", description="nodes by role", tag_keys=("run", "role"))
        self._tokens: Any = metrics.Counter("mula_ray_tokens", description="tokens trained on", tag_keys=("run",))
        self._failures: Any = metrics.Counter("mula_ray_failures", description="by kind", tag_keys=("run", "kind"))
        self._recovery: Any = metrics.Histogram(
            "mula_ray_recovery_s", description="failure to next step", boundaries=RECOVERY_S, tag_keys=("run",)
        )
        for metric in (*self._gauges.values(), self._nodes, self._tokens, self._failures, self._recovery):
            metric.set_default_tags(tags)

    def write(self, record: StepRecord | EvalRecord) -> None:
        """The figures of a step or an evaluation; a value that is not finite is left as it was."""
        line = record.to_json()
        for name, gauge in self._gauges.items():
            value = line.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                gauge.set(float(value))
        if isinstance(record, StepRecord) and record.tokens > 0:
            self._tokens.inc(float(record.tokens))

    def failure(self, kind: str) -> None:
        """Something broke."""
        self._failures.inc(1.0, tags={"kind": kind})

    def recovery(self, seconds: float) -> None:
        """Training goes on, so many seconds after a failure."""
        self._recovery.observe(seconds)

    def nodes(self, *, active: int, spares: int) -> None:
        """Nodes that train and nodes that wait."""
        self._nodes.set(float(active), tags={"role": "active"})
        self._nodes.set(float(spares), tags={"role": "spare"})

    def close(self) -> None:
        """Nothing to flush: Ray exports on its own clock."""
