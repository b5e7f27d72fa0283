"""How much of every source goes into the training split, and where its shards end.

Weights are shares of the training tokens. The total is the largest for which no weighted source is repeated more than
`max_repeat` times; a source without a weight is used whole, once. A share is met document by document: every document
appears `copies` times, and those with the smallest selection hashes once more, so it is exact to about one document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mula_ray.config.errors import UserError
from mula_ray.data.blocks import BINS, U64, Block, bins_of, copy_keys, select_hash
from mula_ray.data.manifest import Split

Histogram = NDArray[np.float64]


@dataclass(frozen=True)
class SourceUse:
    """How often the documents of a source appear in the training split."""

    copies: int = 1
    extra_below: int = 0
    """Documents whose selection hash is below this (in [0, 2**64]) appear once more."""

    def wanted(self, keys: U64, copy: int) -> NDArray[np.bool_]:
        """(n,) which documents have a `copy`-th appearance, from 0."""
        if copy < self.copies:
            return np.ones(len(keys), dtype=np.bool_)
        if copy > self.copies or self.extra_below == 0:
            return np.zeros(len(keys), dtype=np.bool_)
        if self.extra_below >= 1 << 64:
            return np.ones(len(keys), dtype=np.bool_)
        return select_hash(keys) < np.uint64(self.extra_below)

    @property
    def appearances(self) -> int:
        """Most appearances of a document."""
        return self.copies + (self.extra_below > 0)


@dataclass
class SourceTally:
    """Tokens of the training documents of a source, by selection hash."""

    tokens: int = 0
    by_select: Histogram = field(default_factory=lambda: np.zeros(BINS))

    def add(self, block: Block) -> None:
        """Count a block."""
        rows = block.part(False)
        lengths = block.lengths[rows]
        self.tokens += int(lengths.sum())
        self.by_select += np.bincount(bins_of(select_hash(block.keys[rows])), weights=lengths, minlength=BINS)


def plan_mixture(
    weights: Sequence[float | None], tallies: Mapping[int, SourceTally], max_repeat: float
) -> list[SourceUse]:
    """How to use every source, in source order.

    Raises:
        UserError: a weighted source has no tokens.
    """
    uses = [SourceUse() for _ in weights]
    weighted = {number: weight for number, weight in enumerate(weights) if weight is not None}
    if not weighted:
        return uses
    for number in weighted:
        if not tallies.get(number, SourceTally()).tokens:
            raise UserError(f"source {number} has a weight but no training tokens; leave it out or add documents to it")
    total = min(tallies[number].tokens * max_repeat / weight for number, weight in weighted.items())
    for number, weight in weighted.items():
        times = total * weight / tallies[number].tokens
        copies = int(times)
        uses[number] = SourceUse(copies, _threshold(tallies[number], (times - copies) * tallies[number].tokens))
    return uses


def _threshold(tally: SourceTally, tokens: float) -> int:
    """Selection hash below which documents hold about `tokens` tokens, to a bin."""
    if tokens < 0.5:
        return 0
    cumulated = np.cumsum(tally.by_select)
    return (int(np.searchsorted(cumulated, tokens - 0.5)) + 1) << 48


@dataclass(frozen=True)
class ShardPlan:
    """One shard to write: keys in the bins [low, high)."""

    split: Split
    number: int
    low: int
    high: int

    @property
    def file(self) -> str:
        """Its name."""
        return f"{self.split}-{self.number:05d}.arrow"


def tally_bins(block: Block, held_out: bool, use: SourceUse, into: Histogram) -> None:
    """Add the tokens of a block, by shuffle key, to the (BINS,) histogram `into`."""
    rows = block.part(held_out)
    keys, lengths = block.keys[rows], block.lengths[rows]
    for copy in range(1 if held_out else use.appearances):
        chosen = slice(None) if held_out else use.wanted(keys, copy)
        into += np.bincount(bins_of(copy_keys(keys[chosen], copy)), weights=lengths[chosen], minlength=BINS)


def plan_shards(split: Split, by_bin: Histogram, shard_tokens: int) -> list[ShardPlan]:
    """Cut the keys into shards of at most `shard_tokens` tokens (more only if a single bin has more)."""
    plans: list[ShardPlan] = []
    low, held = 0, 0.0
    for number, tokens in enumerate(by_bin.tolist()):
        if held and held + tokens > shard_tokens:
            plans.append(ShardPlan(split, len(plans), low, number))
            low, held = number, 0.0
        held += tokens
    if held:
        plans.append(ShardPlan(split, len(plans), low, BINS))
    return plans
