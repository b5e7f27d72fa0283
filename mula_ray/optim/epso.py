"""EPSO, the EP-aware sharded optimizer: AdamW whose state is sharded over *all* ranks that hold the same parameter.

Two families, from the one table (`plan/layout.py`): **dense** parameters are replicated over dp x ep ranks, an
**expert** over the dp x tp ranks of its EP slice. Each family's gradients are summed, and its state sharded, over its
own replicas.

The phases of a step:

1. `begin_step`: gradients to zero, count the micro-batches to come;
2. *backward*: gradients appear in the flat buffers; a bucket whose parameters are all there is reduced at once, behind
   the rest of backward (`reduce.py`). Sums, never means: whoever makes the loss divides it by the global number of
   tokens;
3. `reduce`: send and await the rest; returns this rank's part of the squared norm, each element of the model counted by
   exactly one rank, so one sum over the world (the engine's agreement, which carries loss and stop flag too) is exact;
4. `update`: clip and correct by one factor, fused AdamW on the owned shard in fp32, round into the working weights, and
   all-gather them bucket by bucket behind the update of the next bucket.

One rank owns everything, talks to nobody, and is plain `torch.optim.AdamW` on fp32 masters, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mula_ray.config.run import OptimConfig
from mula_ray.optim.flat import FlatFamily
from mula_ray.optim.reduce import BucketReducer, owned_grad, sum_of_squares
from mula_ray.parallel.apply import DTYPES, set_parameter
from mula_ray.parallel.collectives import all_gather_async, all_reduce
from mula_ray.parallel.groups import Group, Groups
from mula_ray.plan.layout import Family, LocalParam
from mula_ray.plan.partition import plan_family
from mula_ray.plan.pieces import Piece
from mula_ray.plan.topology import Topology

FAMILIES: tuple[Family, ...] = ("dense", "expert")


@dataclass(frozen=True)
class StepOutcome:
    """What `finish` did: the exact global gradient norm, and whether it was finite (else nothing was changed)."""

    grad_norm: float
    finite: bool


@dataclass(frozen=True)
class Sharding:
    """Over which ranks one family's state is sharded and its gradients are summed; `counted`: whether this rank's
    shard enters the norm (of equal shards on several ranks, one does)."""

    shards: int
    shard_group: Group | None
    reduce_group: Group | None
    counted: bool = True


def epso_sharding(family: Family, topology: Topology, groups: Groups) -> Sharding:
    """The point of EPSO: shards = all replicas."""
    size = topology.ddp if family == "dense" else topology.edp
    group = groups.ddp if family == "dense" else groups.edp
    return Sharding(size, group, group)


class ReadySink:
    """Runs the experts' weight-gradient work at once and reports the parameters."""

    deferred = False

    def __init__(self, ready: Callable[[nn.Parameter], None]) -> None:
        self._ready = ready

    def submit(self, params: tuple[nn.Parameter, ...], work: Callable[[], None]) -> None:
        """Run `work`; the gradients of `params` then hold this micro-batch."""
        work()
        for param in params:
            self._ready(param)


class Epso:
    """The optimizer of one rank. Lays the stages' parameters into flat buffers; weights start at zero until filled
    by `initialise` or, for a restored run, through `pieces` and `load_done`.

    Args:
        stages: this rank's stages (meta or real); their parameters are replaced by views of the flat buffers.
        layout: what the rank holds of each parameter, a list a stage.
        sharding: how a family is sharded; `epso_sharding`, or the classic scheme of `zero1.py`.
        overlap: reduce during backward. timed: keep the intervals of reductions (`reducer.intervals`).
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        layout: Sequence[Sequence[LocalParam]],
        topology: Topology,
        rank: int,
        groups: Groups,
        cfg: OptimConfig,
        *,
        dtype: torch.dtype = torch.float32,
        sharding: Callable[[Family, Topology, Groups], Sharding] = epso_sharding,
        overlap: bool = True,
        timed: bool = False,
    ) -> None:
        self.cfg, self.groups = cfg, groups
        self.reduce_dtype = DTYPES[cfg.reduce_dtype]
        tp_first = topology.coords(rank).tp == 0
        table = [(stage, param) for stage, params in zip(stages, layout, strict=True) for param in params]
        partial = frozenset(p.spec.name for _, p in table if p.spec.tp_partial) if topology.tp > 1 else frozenset()
        put = {p.spec.name: _putter(stage, p.spec.name) for stage, p in table}
        self.families: list[FlatFamily] = []
        params: list[list[nn.Parameter]] = []
        for family in FAMILIES:
            mine = [(at, param) for at, (_, param) in enumerate(table) if param.spec.family == family]
            if not mine:
                continue
            scheme = sharding(family, topology, groups)
            bucket = int(cfg.bucket_mb * 2**20) // self.reduce_dtype.itemsize
            flat = FlatFamily(
                plan_family(family, mine, scheme.shards, bucket, first=partial),
                scheme.shard_group,
                scheme.reduce_group,
                dtype,
                groups.device,
                decays=lambda param: param.spec.decay or cfg.decay_norms,
                counts=_counter(scheme.counted, tp_first),
            )
            self.families.append(flat)
            params.append(flat.attach(put))
        fronts = [_front(flat, partial) for flat in self.families]
        self.reducer = BucketReducer(
            self.families,
            params,
            self.reduce_dtype,
            tp=groups.tp,
            tail_front=fronts,
            overlap=overlap,
            timed=timed,
        )
        self.sink = ReadySink(self.reducer.ready)
        self._listen(stages, params)

    def begin_step(self, micro_batches: int = 1) -> None:
        """Zero the gradients; every parameter will accumulate `micro_batches` times."""
        for family in self.families:
            family.grads.zero_()
        self.reducer.begin(micro_batches)

    def reduce(self) -> Tensor:
        """Sum the gradients over their groups. Returns () fp64 on the CPU: this rank's part of the squared norm."""
        self.reducer.finish()
        return self.squared_norm()

    def squared_norm(self) -> Tensor:
        """() fp64 on the CPU: squared norm of the owned, reduced gradients that this rank counts."""
        total = torch.zeros((), dtype=torch.float64)
        for family in self.families:
            runs = []
            for bucket in family.plan.buckets:
                grad = owned_grad(family, bucket, self.reduce_dtype)
                base = family.own(bucket)[1].start
                for run, counted in family.runs.get(bucket.index, ()):
                    if counted:
                        runs.append(grad[run.start - base : run.stop - base])
            total += sum_of_squares(runs).cpu()
        return total

    def update(self, step: int, lr: float, factor: float = 1.0, *, gather: bool = True) -> None:
        """AdamW on the owned shards with gradients times `factor`, then everybody's weights (`gather`).

        `step` counts from 0; Adam's bias correction uses step + 1, so a resumed run needs no counter of its own.
        """
        pending = []
        count = torch.tensor(float(step + 1))
        for family in self.families:
            for bucket in reversed(family.plan.buckets):
                flat, shard = family.own(bucket)
                grad = owned_grad(family, bucket, self.reduce_dtype)
                if factor != 1.0:
                    grad.mul_(factor)
                for decay in (True, False):
                    runs = [run for run, _ in family.runs.get(bucket.index, ()) if run.decay == decay]
                    spans = [slice(run.start, run.stop) for run in runs]
                    if spans:
                        self._adamw(family, grad, shard.start, spans, count, lr, self.cfg.weight_decay * decay)
                family.weights[flat].copy_(family.master[shard])
                if gather and family.shard_group is not None:
                    whole = family.weights[bucket.start : bucket.stop]
                    pending.append(all_gather_async(whole, family.weights[flat], family.shard_group))
        for item in pending:
            item.wait()

    def finish(self, step: int, lr: float, scale: float = 1.0) -> StepOutcome:
        """`reduce`, agree on the norm, clip and `update`, for use without an engine. `scale` multiplies gradients."""
        squared = all_reduce(self.reduce().reshape(1), self.groups.control)
        norm = math.sqrt(float(squared)) * scale
        if not math.isfinite(norm):
            return StepOutcome(norm, False)
        self.update(step, lr, scale * clip_factor(norm, self.cfg.clip))
        return StepOutcome(norm, True)

    def initialise(self, values: Callable[[LocalParam], Tensor]) -> None:
        """Fill weights and masters with initial values (local shape, fp32)."""
        for family in self.families:
            family.set_initial(values)

    def pieces(self) -> list[tuple[Piece, Tensor]]:
        """The owned state, live and flat: master, exp_avg, exp_avg_sq. TP replicas own equal pieces twice."""
        return [item for family in self.families for item in family.pieces()]

    def weights(self) -> list[tuple[Piece, Tensor]]:
        """The owned part of the working weights, live and flat."""
        return [item for family in self.families for item in family.weight_pieces()]

    def load_done(self) -> None:
        """After the pieces were overwritten: working weights from the masters, then everybody's."""
        pending = []
        for family in self.families:
            for bucket in family.plan.buckets:
                flat, shard = family.own(bucket)
                family.weights[flat].copy_(family.master[shard])
                if family.shard_group is not None:
                    whole = family.weights[bucket.start : bucket.stop]
                    pending.append(all_gather_async(whole, family.weights[flat], family.shard_group))
        for item in pending:
            item.wait()

    def _adamw(
        self,
        family: FlatFamily,
        grad: Tensor,
        base: int,
        spans: list[slice],
        count: Tensor,
        lr: float,
        weight_decay: float,
    ) -> None:
        device = family.master.device
        torch._fused_adamw_(
            [family.master[span] for span in spans],
            [grad[span.start - base : span.stop - base] for span in spans],
            [family.exp_avg[span] for span in spans],
            [family.exp_avg_sq[span] for span in spans],
            [],
            [count.to(device) for _ in spans],
            lr=lr,
            beta1=self.cfg.beta1,
            beta2=self.cfg.beta2,
            weight_decay=weight_decay,
            eps=self.cfg.eps,
            amsgrad=False,
            maximize=False,
        )

    def _listen(self, stages: Sequence[nn.Module], params: list[list[nn.Parameter]]) -> None:
        for family, group in zip(self.families, params, strict=True):
            if family.plan.family == "dense" and self.reducer.active:
                for param in group:
                    param.register_post_accumulate_grad_hook(self.reducer.ready)  # type: ignore[no-untyped-call]
        for stage in stages:
            for module in stage.modules():
                if hasattr(module, "sink"):
                    module.sink = self.sink  # type: ignore[assignment]


def clip_factor(norm: float, bound: float) -> float:
    """Factor that brings a gradient of norm `norm` down to `bound`: 1 below it (torch's clip_grad_norm_ formula)."""
    return min(1.0, bound / (norm + 1e-6))


def _putter(stage: nn.Module, name: str) -> Callable[[nn.Parameter], None]:
    return lambda param: set_parameter(stage, name, param)


def _counter(counted: bool, tp_first: bool) -> Callable[[LocalParam], bool]:
    """Whether this rank counts a parameter in the norm: what all TP ranks hold is counted by the first of them."""

    def counts(param: LocalParam) -> bool:
        return counted and (param.spec.family == "expert" or param.spec.tp_axis is not None or tp_first)

    return counts


def _front(flat: FlatFamily, partial: frozenset[str]) -> int:
    """Elements at the front of the family whose gradients are partial sums over TP."""
    return sum(slot.param.numel for slot in flat.plan.slots if slot.param.spec.name in partial)
