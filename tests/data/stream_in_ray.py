"""A node's data stream in a cluster without processors, as ours are: an agent actor, its stream, ranks outside of Ray.

Run by `test_ring.py`: python stream_in_ray.py DATA_FOLDER; prints a JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from mula_ray.config.model import ModelConfig
from mula_ray.config.run import DataConfig, RunConfig, TrainConfig
from mula_ray.data.batches import BatchSource, Share
from mula_ray.data.ring import RingSource, RingSpec
from mula_ray.data.source import RunData, open_run_data
from mula_ray.runtime.local import LocalCluster
from mula_ray.runtime.seam import actor, connect, prepare_environment


class Agent:
    """What `runtime/node.py` does with a stream."""

    def __init__(self, data: RunData, config: RunConfig) -> None:
        from mula_ray.runtime.stream import NodeStream

        self.stream = NodeStream(data, config)

    def begin(self, *args: Any) -> RingSpec | None:
        """A generation."""
        return self.stream.begin(*args)

    def stats(self) -> Any:
        """Counters."""
        return self.stream.stats()

    def close(self) -> None:
        """The end."""
        self.stream.close()


def ranks(data: RunData, spec: RingSpec, shares: list[Share], generation: int, steps: range) -> tuple[int, bool]:
    """Steps from the ring, and whether all bytes were those of direct reads."""
    sources = [RingSource(data, part, spec, cell, generation) for cell, part in enumerate(shares)]
    direct = [BatchSource(data, part) for part in shares]
    same = True
    for step in steps:
        for source, other in zip(sources, direct, strict=True):
            got, want = source.micro_batches(step), other.micro_batches(step)
            same = same and all(np.array_equal(a.tokens, b.tokens) for a, b in zip(got, want, strict=True))
        time.sleep(0.03)
    return sum(source.counters.ring_steps for source in sources), same


def main(folder: str) -> None:
    """Start, fill, rewind, end."""
    config = RunConfig(
        model=ModelConfig(hidden=8, layers=1, heads=1, ffn=8, vocab_size=1000),
        train=TrainConfig(steps=1000, global_batch=10, micro_batch=2),
        data=DataConfig(path=folder, context=16),
    )
    data = open_run_data(config)
    shares = [Share(10, 2, 4, index) for index in (1, 2)]
    cluster = LocalCluster.start(1, 1, 10.0)
    try:
        prepare_environment(cluster.token_file)
        import ray

        connect(cluster.wait_address())
        agent = actor(Agent, num_cpus=0, max_concurrency=3).remote(data, config)
        spec = ray.get(agent.begin.remote(1, 0, 1000, shares))
        ranks(data, spec, shares, 1, range(5))
        end = time.monotonic() + 60
        while ray.get(agent.stats.remote()).steps < 4 and time.monotonic() < end:
            time.sleep(0.1)
        first, same = ranks(data, spec, shares, 1, range(5, 60))
        ray.get(agent.begin.remote(2, 57, 1000, shares))
        rewound, again = ranks(data, spec, shares, 2, range(57, 80))
        stats = ray.get(agent.stats.remote())
        ray.get(agent.close.remote(), timeout=20)
        ray.shutdown()
    finally:
        cluster.end()
    told = {"streams": stats.streams, "error": stats.error, "first": first, "rewound": rewound, "same": same and again}
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
