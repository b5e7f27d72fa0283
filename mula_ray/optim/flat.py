"""One family's memory: flat weights and gradients whose views are the parameters, and the owned shard of the state.

Bytes a rank, P local elements, g ranks in the shard group: weights and gradients in the working dtype (2P + 2P in
bf16), masters and both moments in fp32 for the owned shard (12·P/g).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mula_ray.parallel.groups import Group
from mula_ray.plan.layout import LocalParam
from mula_ray.plan.partition import Bucket, FamilyPlan, Segment
from mula_ray.plan.pieces import Piece


@dataclass(frozen=True)
class Run:
    """Neighbouring segments of one bucket's slice that are updated alike: shard elements [start, stop)."""

    start: int
    stop: int
    decay: bool


class FlatFamily:
    """Buffers of one family on one rank.

    Args:
        plan: where everything lies.
        shard_group: ranks over which the state is sharded (None: this rank owns everything).
        reduce_group: ranks over which gradients are summed; the shard group, or a larger one that holds it (zero1).
        decays: whether weight decay applies to a parameter.
        counts: whether this rank counts a parameter in the global norm (a replica over TP is counted by one of them).
    """

    def __init__(
        self,
        plan: FamilyPlan,
        shard_group: Group | None,
        reduce_group: Group | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        decays: Callable[[LocalParam], bool],
        counts: Callable[[LocalParam], bool],
    ) -> None:
        self.plan, self.shard_group, self.reduce_group = plan, shard_group, reduce_group
        self.index = 0 if shard_group is None else shard_group.index
        self.weights = torch.zeros(plan.numel, dtype=dtype, device=device)
        self.grads = torch.zeros(plan.numel, dtype=dtype, device=device)
        self.master = torch.zeros(plan.shard_numel, dtype=torch.float32, device=device)
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.segments: tuple[Segment, ...] = tuple(plan.owned(self.index))
        self.runs = _join(self.segments, lambda param: (decays(param), counts(param)))
        self._shard_grad: Tensor | None = None

    def attach(self, names: dict[str, Callable[[nn.Parameter], None]]) -> list[nn.Parameter]:
        """Make the parameters views of the flat buffers, gradients included; returned in slot order.

        `names` maps a parameter's global name to what puts it into its module.
        """
        params = []
        for slot in self.plan.slots:
            view = self.weights[slot.start : slot.stop].view(slot.param.shape)
            param = nn.Parameter(view)
            param.grad = self.grads[slot.start : slot.stop].view(slot.param.shape)
            names[slot.param.spec.name](param)
            params.append(param)
        return params

    def own(self, bucket: Bucket) -> tuple[slice, slice]:
        """(flat slice, shard slice) of what this rank owns of `bucket`."""
        flat, shard, size = self.plan.slice_of(bucket, self.index)
        return slice(flat, flat + size), slice(shard, shard + size)

    def shard_grad(self) -> Tensor:
        """The owned fp32 gradients; made at first use where they cannot lie in the flat gradients themselves."""
        if self._shard_grad is None:
            self._shard_grad = torch.zeros_like(self.master)
        return self._shard_grad

    def set_initial(self, values: Callable[[LocalParam], Tensor]) -> None:
        """Fill weights and masters. `values` gives a parameter's local value, fp32; masters keep what bf16 drops."""
        owned: dict[str, list[Segment]] = {}
        for segment in self.segments:
            owned.setdefault(segment.slot.param.spec.name, []).append(segment)
        for slot in self.plan.slots:
            value = values(slot.param).reshape(-1)
            self.weights[slot.start : slot.stop].copy_(value)
            for part in owned.get(slot.param.spec.name, []):
                self.master[part.shard : part.shard + part.numel].copy_(value[part.local : part.local + part.numel])

    def pieces(self) -> list[tuple[Piece, Tensor]]:
        """Owned state, live flat views: master, exp_avg, exp_avg_sq."""
        result = []
        for part in self.segments:
            where = slice(part.shard, part.shard + part.numel)
            result.append((part.piece("master", "fp32"), self.master[where]))
            result.append((part.piece("exp_avg", "fp32"), self.exp_avg[where]))
            result.append((part.piece("exp_avg_sq", "fp32"), self.exp_avg_sq[where]))
        return result

    def weight_pieces(self) -> list[tuple[Piece, Tensor]]:
        """Working weights that this rank owns, live flat views."""
        dtype = "bf16" if self.weights.dtype == torch.bfloat16 else "fp32"
        return [
            (part.piece("weight", dtype), self.weights[part.flat : part.flat + part.numel]) for part in self.segments
        ]

    def state_bytes(self) -> int:
        """Bytes of the optimizer state on this rank."""
        return sum(buffer.nbytes for buffer in (self.master, self.exp_avg, self.exp_avg_sq))


def _join(
    segments: Sequence[Segment], kind: Callable[[LocalParam], tuple[bool, bool]]
) -> dict[int, list[tuple[Run, bool]]]:
    """Bucket index → runs of neighbouring segments of the same kind, each with whether the norm counts it."""
    result: dict[int, list[tuple[Run, bool]]] = {}
    for part in segments:
        decay, counted = kind(part.slot.param)
        runs = result.setdefault(part.bucket, [])
        if runs and runs[-1][0].stop == part.shard and (runs[-1][0].decay, runs[-1][1]) == (decay, counted):
            runs[-1] = (Run(runs[-1][0].start, part.shard + part.numel, decay), counted)
        else:
            runs.append((Run(part.shard, part.shard + part.numel, decay), counted))
    return result
