"""The pure plan of the sharded optimizer: flat buffers, buckets, and which elements each rank owns.

Words: a *family* is a set of parameters that share a replica group. Its parameters lie one after the other in one
*flat* buffer, padded at its end to a multiple of (shards x alignment). The flat buffer is cut into *buckets* from its
end, since backward finishes the last layers first; a bucket is reduced as soon as the gradients of all parameters that
overlap it are there. Every bucket is split evenly over the shards, so a rank's *shard* is one slice of every bucket,
laid one after the other: the slice of the bucket that starts at flat element `s` starts at shard element
`s / shards`. Bucket borders need not be parameter borders, hence padding stays below 512 elements a family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mula_ray.config.model import ModelConfig
from mula_ray.plan.layout import Family, LocalParam, narrow, param_specs
from mula_ray.plan.pieces import Kind, Piece
from mula_ray.plan.stages import Stage
from mula_ray.plan.topology import Coords, Topology

MAX_PADDING = 512


@dataclass(frozen=True)
class Slot:
    """A local parameter's place in the flat buffer of its family: elements [start, stop).

    `position` orders all parameters of a rank as the model does, over both families: backward visits it downwards.
    """

    param: LocalParam
    position: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Flat elements [start, stop) that are reduced together; `ready_at` is the lowest position among its parameters."""

    index: int
    start: int
    stop: int
    ready_at: int

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return self.stop - self.start


@dataclass(frozen=True)
class Segment:
    """A run of one parameter inside a rank's shard.

    `flat`: its first element in the flat buffer; `shard`: in the shard; `local`: in the (row-major) local parameter.
    """

    slot: Slot
    bucket: int
    flat: int
    shard: int
    local: int
    numel: int

    def piece(self, kind: Kind, dtype: str) -> Piece:
        """The same elements as a piece of the global tensor."""
        param = self.slot.param
        assert dtype in ("fp32", "bf16")
        return Piece(
            name=param.spec.name,
            kind=kind,
            dtype="fp32" if dtype == "fp32" else "bf16",
            global_shape=param.spec.shape,
            offset=param.offset,
            shape=param.shape,
            start=self.local,
            stop=self.local + self.numel,
        )


@dataclass(frozen=True)
class FamilyPlan:
    """Flat layout of one family on one rank. `numel` includes the padding."""

    family: Family
    shards: int
    numel: int
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]

    @property
    def local_numel(self) -> int:
        """Elements without padding."""
        return self.slots[-1].stop if self.slots else 0

    @property
    def shard_numel(self) -> int:
        """Elements that each rank of the group owns, padding included."""
        return self.numel // self.shards

    def slice_of(self, bucket: Bucket, index: int) -> tuple[int, int, int]:
        """(flat start, shard start, elements) of what the rank at `index` of the group owns of `bucket`."""
        size = bucket.numel // self.shards
        return bucket.start + index * size, bucket.start // self.shards, size

    def owned(self, index: int) -> Iterator[Segment]:
        """The runs of parameters that the rank at `index` of the group owns, in shard order."""
        at = 0
        for bucket in self.buckets:
            flat, shard, size = self.slice_of(bucket, index)
            while at < len(self.slots) and self.slots[at].stop <= bucket.start:
                at += 1
            for slot in self.slots[at:]:
                if slot.start >= flat + size:
                    break
                first, last = max(slot.start, flat), min(slot.stop, flat + size)
                if first < last:
                    yield Segment(slot, bucket.index, first, shard + first - flat, first - slot.start, last - first)


def local_params(model: ModelConfig, topology: Topology, at: Coords, stage: Stage) -> list[LocalParam]:
    """What the rank at `at` holds of the parameters of `stage`, in model order."""
    return [narrow(spec, topology, at) for spec in param_specs(model) if stage.holds(spec)]


def plan_family(
    family: Family, params: Sequence[tuple[int, LocalParam]], shards: int, bucket_numel: int, *, first: frozenset[str]
) -> FamilyPlan:
    """Lay out `params`, (position, parameter) in model order, for a replica group of `shards` ranks.

    `bucket_numel` is the wished size of a bucket, in elements. Parameters named in `first` are placed at the front,
    where the buckets that are reduced last lie: their gradients need another reduction before.
    """
    ordered = [item for item in params if item[1].spec.name in first]
    ordered += [item for item in params if item[1].spec.name not in first]
    slots, at = [], 0
    for position, param in ordered:
        slots.append(Slot(param, position, at, at + param.numel))
        at += param.numel
    unit = shards * max(1, min(16, MAX_PADDING // shards))
    total = -(-at // unit) * unit
    size = max(unit, -(-bucket_numel // unit) * unit)
    starts = [max(0, stop - size) for stop in range(total, 0, -size)][::-1]
    stops = [*starts[1:], total]
    buckets = []
    for index, (start, stop) in enumerate(zip(starts, stops, strict=False)):
        inside = [slot.position for slot in slots if slot.start < stop and slot.stop > start]
        late = any(slot.param.spec.name in first for slot in slots if slot.start < stop and slot.stop > start)
        buckets.append(Bucket(index, start, stop, -1 if late or not inside else min(inside)))
    return FamilyPlan(family, shards, total, tuple(slots), tuple(buckets))


def launch_order(plans: Sequence[FamilyPlan]) -> list[tuple[int, Bucket]]:
    """(family number, bucket) in the one order in which every rank of a stage reduces them: last layers first."""
    entries = [(number, bucket) for number, plan in enumerate(plans) for bucket in plan.buckets]
    return sorted(entries, key=lambda entry: (-entry[1].ready_at, entry[0], -entry[1].index))
