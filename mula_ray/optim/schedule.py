"""Learning rate: linear warm-up, cosine to `min_lr`, clamped there. A function of the step alone."""

from __future__ import annotations

import math

from mula_ray.config.run import OptimConfig


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Rate of step `step` (from 0): step 0 of a warm-up of n steps has lr/n, step n-1 has lr.

    Unit: optimizer steps. `optim.decay_steps` (0: `total_steps`) is where `min_lr` is reached; it stays there.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    end = optim.decay_steps or total_steps
    if step >= end or end <= optim.warmup_steps:
        return optim.min_lr if step >= end else optim.lr
    progress = (step - optim.warmup_steps) / (end - optim.warmup_steps)
    return optim.min_lr + 0.5 * (optim.lr - optim.min_lr) * (1.0 + math.cos(math.pi * progress))
