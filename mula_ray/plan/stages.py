"""Which layers a pipeline stage holds, and which stages a pipeline rank holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mula_ray.plan.layout import ParamSpec


@dataclass(frozen=True)
class Stage:
    """A contiguous run of layers; the first stage also has the embedding, the last the final norm and the head."""

    index: int
    count: int
    first_layer: int
    stop_layer: int

    @property
    def first(self) -> bool:
        """Whether the embedding lives here."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the final norm and the head live here."""
        return self.index == self.count - 1

    def holds(self, spec: ParamSpec) -> bool:
        """Whether the parameter `spec` lives in this stage."""
        if spec.place == "embed":
            return self.first
        if spec.place == "head":
            return self.last
        assert spec.layer is not None
        return self.first_layer <= spec.layer < self.stop_layer


def split_stages(layers: int, count: int) -> tuple[Stage, ...]:
    """Cut `layers` into `count` contiguous stages; the middle ones take the remainder (ends carry embedding and head).

    Raises:
        ValueError: fewer layers than stages.
    """
    if layers < count:
        raise ValueError(f"{layers} layers cannot fill {count} pipeline stages; use at most {layers} stages")
    base, extra = divmod(layers, count)
    first_extra = (count - extra) // 2
    stages, start = [], 0
    for index in range(count):
        stop = start + base + (1 if first_extra <= index < first_extra + extra else 0)
        stages.append(Stage(index, count, start, stop))
        start = stop
    return tuple(stages)


def stage_owner(stage: int, pp: int, schedule: str) -> int:
    """Pipeline rank that holds `stage`: looped, or a V for the `zbv` schedule."""
    if schedule == "zbv" and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


def rank_stages(pp: int, virtual: int, schedule: str, pp_rank: int) -> tuple[int, ...]:
    """Indices of the stages that pipeline rank `pp_rank` holds, ascending."""
    return tuple(stage for stage in range(pp * virtual) if stage_owner(stage, pp, schedule) == pp_rank)
