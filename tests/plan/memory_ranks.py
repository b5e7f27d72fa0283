"""What test_plan_memory.py runs on each rank: a few steps of a model with at least 500 MB of state; its peak."""

from __future__ import annotations

from pathlib import Path

import torch

from mula_ray.config.load import load
from mula_ray.parallel.backend import TCPStore
from mula_ray.parallel.executor import MicroBatch
from mula_ray.parallel.groups import Groups
from mula_ray.plan.legal import legal_topology, micro_batches
from mula_ray.plan.memory import rank_memory
from mula_ray.plan.shape import RankShape
from mula_ray.train.engine import Engine


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def peak_of_steps(rank: int, world: int, port: int, sets: list[str]) -> tuple[int, dict[str, int]]:
    """(peak above what was resident before the model was built, estimate by kind) in bytes."""
    config = load("mula-tiny", sets).config
    topology = legal_topology(config)
    assert topology.world == world
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    groups = Groups(topology, rank, store, prefix="run/1")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    engine = Engine(config, topology, rank, groups, "cpu")
    size, seq = config.train.micro_batch, config.data.context
    tokens = torch.randint(0, config.model.vocab_size, (size, seq + 1), generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        engine.step(step, [MicroBatch(tokens, torch.ones(size))] * micro_batches(config, topology))
    peak = _status("VmHWM") - before
    memory = rank_memory(RankShape(config, topology, topology.coords(rank).pp))
    return peak, memory.kinds() | {"total": memory.total, "state": memory.state}
