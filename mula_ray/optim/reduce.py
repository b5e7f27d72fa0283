"""Gradient reduction in buckets, overlapped with backward, in one order that every rank follows.

A parameter reports each accumulation of its gradient; when all micro-batches are in, the buckets that it overlaps may
go. They go in the order of `plan.partition.launch_order`, never in the order of arrival, so that all ranks of a group
issue the same calls whatever their timing or routing is. `finish` sends what is left and waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mula_ray.optim.flat import FlatFamily
from mula_ray.parallel.collectives import (
    Pending,
    all_reduce,
    all_reduce_async,
    reduce_scatter_async,
)
from mula_ray.parallel.groups import Group
from mula_ray.plan.partition import Bucket, launch_order

_NORM_BLOCK, _SHORT = 1024, 16384


@dataclass
class InFlight:
    """A bucket on its way. `result`: the owned sum, still to be copied to the shard (None: it is where it belongs)."""

    family: FlatFamily
    bucket: Bucket
    pending: Pending
    result: Tensor | None
    launched_at: float


class BucketReducer:
    """Sums the flat gradients of all families over their groups.

    Args:
        families: in a fixed order, the same on all ranks of a stage.
        params: the parameters of each family, in slot order.
        reduce_dtype: dtype of the sums on the wire.
        tp: group over which the front of a family (`tail_front` elements) is summed first: partial sums of TP ranks.
        overlap: False sends everything at the end (a baseline).
    """

    def __init__(
        self,
        families: list[FlatFamily],
        params: list[list[nn.Parameter]],
        reduce_dtype: torch.dtype,
        *,
        tp: Group | None = None,
        tail_front: list[int] | None = None,
        overlap: bool = True,
        timed: bool = False,
    ) -> None:
        self._families, self._dtype, self._overlap, self._timed = families, reduce_dtype, overlap, timed
        self._tp, self._front = tp, tail_front or [0] * len(families)
        self._order = [
            (number, bucket)
            for number, bucket in launch_order([family.plan for family in families])
            if families[number].reduce_group is not None
        ]
        self._needs: list[list[int]] = []  # entry of the order → parameters still missing, counted below
        self._entries_of: dict[int, list[int]] = {}
        self._slots: dict[int, nn.Parameter] = {}
        for entry, (number, bucket) in enumerate(self._order):
            overlapping = [
                params[number][at]
                for at, slot in enumerate(families[number].plan.slots)
                if slot.start < bucket.stop and slot.stop > bucket.start
            ]
            self._needs.append([len(overlapping)])
            for param in overlapping:
                self._entries_of.setdefault(id(param), []).append(entry)
                self._slots[id(param)] = param
        self._missing: list[int] = []
        self._next = 0
        self._flight: list[InFlight] = []
        self.intervals: list[tuple[float, float]] = []

    @property
    def active(self) -> bool:
        """Whether there is anything to reduce in this world."""
        return bool(self._order)

    def begin(self, micro_batches: int) -> None:
        """A new step: every parameter reports `micro_batches` times."""
        self._missing = [need[0] * micro_batches for need in self._needs]
        self._next = 0
        self._flight.clear()
        self.intervals.clear()

    def ready(self, param: nn.Parameter) -> None:
        """`param` has accumulated the gradient of one micro-batch."""
        for entry in self._entries_of.get(id(param), ()):
            self._missing[entry] -= 1
        if not self._overlap:
            return
        while self._next < len(self._order):
            if self._missing[self._next] > 0 or self._order[self._next][1].ready_at < 0:
                return
            self._launch()

    def finish(self) -> None:
        """Send what is left, wait for everything; owned sums are then where `owned_grad` looks."""
        for family, front in zip(self._families, self._front, strict=True):
            if front and self._tp is not None:
                all_reduce(family.grads[:front], self._tp)
        while self._next < len(self._order):
            self._launch()
        for item in self._flight:
            item.pending.wait()
            if item.result is not None:
                item.family.shard_grad()[item.family.own(item.bucket)[1]].copy_(item.result)
            if self._timed:
                self.intervals.append((item.launched_at, item.pending.finished_at or time.perf_counter()))
        self._flight.clear()

    def _launch(self) -> None:
        number, bucket = self._order[self._next]
        self._next += 1
        family = self._families[number]
        group = family.reduce_group
        assert group is not None
        grads = family.grads[bucket.start : bucket.stop]
        flat, shard = family.own(bucket)
        buffer = grads if self._dtype == grads.dtype else grads.to(self._dtype)
        result: Tensor | None
        if sums_whole(family):
            pending = all_reduce_async(buffer, group)
            in_place = sums_in_place(family, self._dtype)
            result = None if in_place else buffer[flat.start - bucket.start : flat.stop - bucket.start]
        else:
            direct = self._dtype == torch.float32
            out = family.shard_grad()[shard] if direct else buffer.new_empty(shard.stop - shard.start)
            pending = reduce_scatter_async(out, buffer, group)
            result = None if direct else out
        if self._timed:
            pending.stamp()
        self._flight.append(InFlight(family, bucket, pending, result, time.perf_counter()))


def sums_whole(family: FlatFamily) -> bool:
    """Whether a bucket is all-reduced as a whole: that is faster here, or the sum spans more ranks than the shards."""
    group = family.reduce_group
    return group is not None and (group.whole_sums or group is not family.shard_group)


def sums_in_place(family: FlatFamily, reduce_dtype: torch.dtype) -> bool:
    """Whether the owned fp32 sums lie in the flat gradients after the reduction."""
    if family.grads.dtype != torch.float32:
        return False
    return family.reduce_group is None or (reduce_dtype == torch.float32 and sums_whole(family))


def sum_of_squares(runs: Iterable[Tensor]) -> Tensor:
    """() fp64 sum of the squares of fp32 vectors: in fp32 over 1,024 elements at a time, in fp64 over these.

    One fp32 norm of 4 M elements is 1.6e-4 off on a CPU, by how many and where they are cut; this one 1e-9, as fast.
    """
    norms = []
    for run in runs:
        whole = run.numel() // _NORM_BLOCK * _NORM_BLOCK if run.numel() > _SHORT else 0
        if whole:
            norms.append(torch.linalg.vector_norm(run[:whole].view(-1, _NORM_BLOCK), dim=1))
        if whole < run.numel():
            norms.append(torch.linalg.vector_norm(run[whole:])[None])
    return torch.cat(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)


def owned_grad(family: FlatFamily, bucket: Bucket, reduce_dtype: torch.dtype) -> Tensor:
    """Where the owned, summed fp32 gradient of `bucket` lies after `BucketReducer.finish`."""
    flat, shard = family.own(bucket)
    if sums_in_place(family, reduce_dtype):
        return family.grads[flat]
    if family.reduce_group is None:
        family.shard_grad()[shard].copy_(family.grads[flat])
    return family.shard_grad()[shard]
