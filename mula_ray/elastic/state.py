"""What the policy knows. Immutable; an event makes a new one, sharing everything that it does not change.

The one table with an entry a node (`nodes`) is copied only when a node comes or goes; everything that happens step by
step or rank by rank replaces a few small fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from mula_ray.config.errors import UserError
from mula_ray.config.run import RunConfig
from mula_ray.elastic.commands import Command
from mula_ray.elastic.events import DiskCopy
from mula_ray.elastic.placement import Node, Placement, Shape


class Phase(StrEnum):
    """What the policy is waiting for."""

    GATHERING = "gathering"
    """Nothing runs: waits for nodes."""
    FENCING = "fencing"
    """A generation is being ended: waits for Fenced."""
    STARTING = "starting"
    """Waits for GenerationReady."""
    RUNNING = "running"
    STOPPING = "stopping"
    """Asked to end at a step boundary: waits for GenerationEnded."""
    DONE = "done"


@dataclass(frozen=True)
class PolicyConfig:
    """The rules of a run. `dp`: wanted replicas. All times in seconds.

    `stop_s`, `fence_s`, `start_s` are outermost bounds on the driver's answers, far above what they take; the driver
    notices ordinary failures long before.
    """

    shape: Shape
    dp: int
    policy: Literal["shrink", "wait", "stop"] = "shrink"
    min_dp: int = 1
    wait_s: float = 600.0
    max_recoveries: int = 5
    same_failure: int = 2
    skip_bad_data: bool = False
    storage_error: Literal["continue", "stop"] = "continue"
    must_resume: bool = False
    model_only: bool = False
    settle_s: float = 1.0
    retry_save_s: float = 30.0
    stop_s: float = 120.0
    fence_s: float = 120.0
    start_s: float = 900.0

    def __post_init__(self) -> None:
        if self.min_dp > self.dp:
            raise UserError(
                f"elastic.min_dp is {self.min_dp}, but the run has only {self.dp} replicas; lower elastic.min_dp"
            )


def policy_config(run: RunConfig, *, must_resume: bool = False, model_only: bool = False) -> PolicyConfig:
    """The rules that `run` asks for. `parallel.dp: auto` becomes what the working nodes have room for.

    Raises UserError when the working nodes have no room for the replicas.
    """
    layout, cluster = run.parallel, run.cluster
    shape = Shape(ep=layout.ep, tp=layout.tp, pp=layout.pp, tiles_per_node=cluster.tiles_per_node)
    room = shape.capacity(cluster.nodes)
    dp = room if layout.dp == "auto" else layout.dp
    if dp < 1 or dp > room:
        need = shape.seats(max(1, dp))
        raise UserError(
            f"parallel.dp {dp or 1} x ep {layout.ep} x tp {layout.tp} x pp {layout.pp} takes {need} nodes of "
            f"{cluster.tiles_per_node} tiles, but cluster.nodes is {cluster.nodes}; "
            "raise cluster.nodes or shrink the layout"
        )
    return PolicyConfig(
        shape=shape,
        dp=dp,
        policy=run.elastic.policy,
        min_dp=run.elastic.min_dp,
        wait_s=run.elastic.wait_s,
        max_recoveries=run.elastic.max_recoveries,
        skip_bad_data=run.elastic.skip_bad_data,
        storage_error=run.checkpoint.on_error,
        must_resume=must_resume,
        model_only=model_only,
    )


@dataclass(frozen=True)
class Failure:
    """One failure of the incident at hand. `weight`: how well it explains the others (see `judge.py`).

    `nodes`: who is to blame, as far as it says; `mark`: what makes two failures the same one.
    """

    kind: Literal["died", "hung", "lost", "numeric", "damaged", "restore", "overdue"]
    weight: int
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    step: int
    mark: str
    text: str


@dataclass(frozen=True)
class Trial:
    """A step that failed numerically is made again elsewhere, to tell hardware from data (`numeric.py`).

    ranks: which failed last. candidates: nodes that took part every time. suspects: those that are moved away from
    `ranks`; empty: nobody could be named. struck: nodes that got a strike in it. moved: whether the suspects are off.
    """

    step: int
    kind: Literal["numeric", "damaged"]
    ranks: frozenset[int]
    candidates: frozenset[str]
    suspects: frozenset[str]
    struck: frozenset[str] = frozenset()
    moved: bool = False
    attempts: int = 1


@dataclass(frozen=True)
class Stop:
    """The run is to end early. `end`: when it must be over (clock of `now`)."""

    why: str
    end: float


@dataclass(frozen=True)
class State:
    """Everything `decide` knows; made by `initial`, read by the driver only through `phase` and `wake_at`.

    nodes: usable ones. cordoned: node -> why; lingering: cordoned ones whose agent still holds snapshots.
    strikes: suspicions a node; suspects are the last spares to be used. avoid: nodes to be left out of the next
    placement if there are others. placement: the last one started. fresh: nodes of it that were new to their seat.
    holed: nodes left since then, so that seats may be empty. patient: at the start all wanted nodes are waited for.
    committed: highest step ever committed. base: step that the generation started from; source: generation that wrote
    the snapshot it started from. mark: `committed` at the last recovery; idle: recoveries since then. last_mark,
    repeats: the same failure in a row; streak: last node to blame. bad: copies that could not be used: ("disk" or
    "memory <generation>", step, node or ""); distrust: memory of generations up to this one is not used. incident:
    failures since the fence. purged: step at which all that had run failing ranks was cordoned at last. until: bound
    of the present phase; wait_until: bound of all waiting for nodes since something last ran. grow_at, retry_at: when
    to look at growing and at the failed save again. start_s: how long the last start took.
    """

    config: PolicyConfig
    phase: Phase = Phase.GATHERING
    generation: int = -1
    nodes: Mapping[str, Node] = field(default_factory=dict)
    serial: int = 0
    cordoned: Mapping[str, str] = field(default_factory=dict)
    lingering: frozenset[str] = frozenset()
    strikes: Mapping[str, int] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()
    placement: Placement | None = None
    fresh: frozenset[str] = frozenset()
    holed: bool = False
    patient: bool = True
    takeover: bool = False
    committed: int = 0
    base: int = 0
    source: int = -1
    mark: int = 0
    idle: int = 0
    last_mark: str = ""
    repeats: int = 0
    streak: str = ""
    disk: tuple[DiskCopy, ...] = ()
    ever_saved: bool = False
    bad: frozenset[tuple[str, int, str]] = frozenset()
    distrust: int = -1
    skips: tuple[int, ...] = ()
    incident: tuple[Failure, ...] = ()
    trial: Trial | None = None
    purged: int = -1000
    stop: Stop | None = None
    until: float | None = None
    wait_until: float | None = None
    grow_at: float | None = None
    retry_at: float | None = None
    save_failures: int = 0
    started_at: float = 0.0
    start_s: float = 0.0

    @property
    def wake_at(self) -> float | None:
        """When a `Tick` is due if nothing else happens; None: never."""
        times = [t for t in (self.until, self.grow_at, self.retry_at) if t is not None]
        if self.stop is not None and self.stop.end != float("inf"):
            times.append(self.stop.end)
        return min(times, default=None)

    @property
    def alive(self) -> bool:
        """Whether ranks of the present generation may live."""
        return (
            self.phase in (Phase.FENCING, Phase.STARTING, Phase.RUNNING, Phase.STOPPING) and self.placement is not None
        )

    def placed(self, node: str) -> bool:
        """Whether `node` has a seat in the last placement."""
        return self.placement is not None and node in self.placement.nodes

    @property
    def capacity(self) -> int:
        """Replicas that the usable nodes have room for, at most the wanted number."""
        return min(self.config.dp, self.config.shape.capacity(len(self.nodes)))


if TYPE_CHECKING:
    but = replace
else:

    def but(state: State, **changes: Any) -> State:
        """`dataclasses.replace` for State at a fifth of its price (some forty fields, several copies a decision)."""
        assert changes.keys() <= state.__dict__.keys(), changes.keys()
        new = object.__new__(State)
        new.__dict__.update(state.__dict__, **changes)
        return new


Decision = tuple[State, tuple[Command, ...], str]


def initial(config: PolicyConfig) -> State:
    """The state before `DriverStarted`."""
    return State(config)
