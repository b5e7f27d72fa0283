"""What a rank process that is kept ready does while it waits: everything that is slow only the first time.

One step of a very small model on the CPU: libraries set themselves up, the kernel library is loaded, pages are touched.
It leaves nothing behind that a later step could see: initial values and data order are functions of the seed alone.
"""

from __future__ import annotations

import torch

from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.config.run import RunConfig, TrainConfig
from mula_ray.parallel.executor import MicroBatch
from mula_ray.parallel.groups import Groups
from mula_ray.plan.topology import Topology
from mula_ray.train.engine import Engine


def warm_up() -> None:
    """Take one step."""
    torch.set_num_threads(1)
    model = ModelConfig(vocab_size=64, hidden=32, layers=1, heads=2, moe=MoEConfig(experts=4, top_k=2, expert_width=32))
    config = RunConfig(model=model, train=TrainConfig(steps=1, global_batch=1, dtype="fp32"))
    world = Topology()
    engine = Engine(config, world, 0, Groups(world, 0, None), "cpu", init=False)
    tokens = torch.zeros(1, config.data.context + 1, dtype=torch.int64)[:, :65]
    engine.step(0, [MicroBatch(tokens, torch.ones(1))])
    engine.close()
