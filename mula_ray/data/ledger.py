"""What was really read, in two numbers that add up over ranks: the sample ledger of `metrics.jsonl`.

Each rank sums the CRC-32 of the tokens of its real samples; the step's all-reduce adds the ranks up. The result does
not depend on the layout, and `expected` says from the sample order alone what it must be: a sample that was left out,
read twice, or read wrongly shows, whatever happened to the run in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mula_ray.data.source import RunData
from mula_ray.plan.crc import crc32


@dataclass(frozen=True)
class SampleSum:
    """`count` samples, and the sum of the CRC-32 of each one's tokens (int32, little-endian). The sum is exact in fp64
    up to 2^21 samples a step."""

    count: int = 0
    crc_sum: int = 0


NOTHING = SampleSum()


def sample_sum(parts: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> SampleSum:
    """Of micro-batches (tokens (B, S + 1), weight (B,)); samples of weight 0 are empty ones and do not count."""
    count = total = 0
    for tokens, weight in parts:
        for row in np.asarray(tokens)[np.asarray(weight) > 0].astype("<i4"):
            count, total = count + 1, total + crc32(row.tobytes())
    return SampleSum(count, total)


def expected(data: RunData, step: int, global_batch: int) -> SampleSum:
    """What step number `step` (from 0) must have read: samples [step * global_batch, (step + 1) * global_batch)."""
    numbers = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    tokens = data.open("train").windows(data.order.windows(numbers), data.context)
    return sample_sum([(tokens, np.ones(len(tokens), np.float32))])
