"""What one rank of a layout holds and runs, in numbers: the common ground of the estimates. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mula_ray.config.run import RunConfig
from mula_ray.plan.layout import Family, LocalParam
from mula_ray.plan.legal import micro_batches
from mula_ray.plan.partition import FamilyPlan, local_params, plan_family
from mula_ray.plan.recompute import Part, parse_recompute
from mula_ray.plan.schedule import Schedule, build_schedule
from mula_ray.plan.stages import Stage, rank_stages, split_stages
from mula_ray.plan.topology import Coords, Topology

ITEM = {"fp32": 4, "bf16": 2}
FAMILIES: tuple[Family, ...] = ("dense", "expert")


@dataclass(frozen=True)
class RankShape:
    """One rank of a run; ranks that differ only in dp, ep or tp are alike, so `pp` tells them apart."""

    config: RunConfig
    topology: Topology
    pp: int = 0

    @property
    def item(self) -> int:
        """Bytes of a weight, gradient or activation."""
        return ITEM[self.config.train.dtype]

    @property
    def batches(self) -> int:
        """Micro-batches of a step."""
        return micro_batches(self.config, self.topology)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.config.train.micro_batch * self.config.data.context

    @property
    def virtual(self) -> int:
        """Stages that this rank holds."""
        return self.config.parallel.virtual_stages if self.topology.pp > 1 else 1

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of this rank."""
        every = split_stages(self.config.model.layers, self.topology.pp * self.virtual)
        return [every[i] for i in rank_stages(self.topology.pp, self.virtual, self.config.parallel.schedule, self.pp)]

    @cached_property
    def schedule(self) -> Schedule | None:
        """The pipeline's table, None without one."""
        if self.topology.pp == 1:
            return None
        return build_schedule(self.config.parallel.schedule, self.topology.pp, self.virtual, self.batches)

    @cached_property
    def recomputed(self) -> dict[Part, range]:
        """Layers whose parts are recomputed."""
        return parse_recompute(self.config.parallel.recompute, self.config.model.layers)

    @cached_property
    def params(self) -> list[LocalParam]:
        """Everything this rank holds."""
        at = Coords(dp=0, pp=self.pp, ep=0, tp=0)
        return [param for stage in self.stages for param in local_params(self.config.model, self.topology, at, stage)]

    @cached_property
    def plans(self) -> dict[Family, FamilyPlan]:
        """Flat layout of each family, as the optimizer makes it."""
        optim = self.config.optim
        bucket = int(optim.bucket_mb * 2**20) // ITEM[optim.reduce_dtype]
        first = (
            frozenset(p.spec.name for p in self.params if p.spec.tp_partial) if self.topology.tp > 1 else frozenset()
        )
        result: dict[Family, FamilyPlan] = {}
        for family in FAMILIES:
            mine = [(at, param) for at, param in enumerate(self.params) if param.spec.family == family]
            if mine:
                result[family] = plan_family(family, mine, self.shards(family), bucket, first=first)
        return result

    def replicas(self, family: Family) -> int:
        """Ranks over which a family's gradients are summed."""
        return self.topology.ddp if family == "dense" else self.topology.edp

    def shards(self, family: Family) -> int:
        """Ranks over which a family's optimizer state is split."""
        zero1 = self.config.optim.kind == "zero1" and family == "dense"
        return self.topology.dp if zero1 else self.replicas(family)

    def layers(self) -> int:
        """Layers that this rank holds."""
        return sum(stage.stop_layer - stage.first_layer for stage in self.stages)

    def moe_layers(self, part: Part | None = None) -> int:
        """MoE layers of this rank; with `part`, those in which that part is recomputed."""
        if self.config.model.moe is None:
            return 0
        return self.part_layers(part) if part else self.layers()

    def part_layers(self, part: Part) -> int:
        """Layers of this rank in which `part` is recomputed."""
        chosen = self.recomputed.get(part, range(0))
        return sum(1 for stage in self.stages for n in range(stage.first_layer, stage.stop_layer) if n in chosen)

    @property
    def all_to_all(self) -> bool:
        """Whether experts' tokens travel by all-to-all."""
        choice = self.config.parallel.dispatcher
        return choice == "alltoall" or (choice == "auto" and self.topology.ep > self.config.cluster.tiles_per_node)


def rank_shapes(config: RunConfig, topology: Topology) -> list[RankShape]:
    """One shape for each pipeline rank."""
    return [RankShape(config, topology, pp) for pp in range(topology.pp)]
