"""What driver, agents, workers and ranks tell each other. Frozen, picklable, every one carries its generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mula_ray.config.run import RunConfig
from mula_ray.data.ring import RingSpec
from mula_ray.data.source import RunData
from mula_ray.elastic.commands import Restore
from mula_ray.elastic.hang import Pulse
from mula_ray.elastic.memory import Holding
from mula_ray.plan.topology import Topology
from mula_ray.runtime.inject import Fault


@dataclass(frozen=True)
class RunFacts:
    """What does not change in a run's life; sent to an agent once."""

    run_id: str
    run_dir: str
    config: RunConfig
    data: RunData
    peak_tflops: float = 0.0
    faults: tuple[Fault, ...] = ()
    profile: tuple[int, int] | None = None


@dataclass(frozen=True)
class Source:
    """A snapshot of one seat's rank in some node's memory: `paths` open it on that node."""

    generation: int
    step: int
    rank: int
    paths: tuple[str, ...]


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank process needs; `run` travels with it."""

    run: RunFacts
    generation: int
    topology: Topology
    rank: int
    tile: int
    node: str
    store: tuple[str, int]
    restore: Restore
    sources: tuple[Source, ...]
    skips: tuple[int, ...]
    rebuild: bool
    board: str
    """path of the board"""
    memory: tuple[str, ...]
    """paths of the snapshot slots"""
    model_memory: tuple[str, ...]
    hub: str
    """address of the agent's socket for reports"""
    snapshot_every: int
    buddy: bool = False
    """whether the copy of a snapshot must be acknowledged before the next step commits"""
    interface: str | None = None
    cores: frozenset[int] = frozenset()
    """cores that the rank is bound to; empty: not bound"""
    ring: RingSpec | None = None
    cell: int = 0


@dataclass(frozen=True)
class SeatSpec:
    """One agent's part of a generation: its seat's ranks are on tiles 0, 1, …"""

    run: RunFacts
    generation: int
    topology: Topology
    seat: int
    ranks: tuple[int, ...]
    store: tuple[str, int]
    restore: Restore
    holders: Mapping[int, tuple[str, ...]]
    """seat of the snapshot -> peer addresses of the nodes that hold it, best first"""
    sources_of: tuple[int, ...]
    """ranks of the snapshot whose pieces this seat's ranks need"""
    buddy: str | None
    """peer address (host:port) of the node that keeps the copies"""
    skips: tuple[int, ...] = ()
    rebuild: bool = False
    snapshot_every: int = 1
    seats_of_snapshot: Mapping[int, int] = field(default_factory=dict)
    """rank of the snapshot -> its seat there"""


@dataclass(frozen=True)
class NodeFacts:
    """What an agent says about its node. `peer`: host:port of its copy service."""

    node: str
    host: str
    tiles: int
    peer: str
    pid: int
    ready_s: float = 0.0


@dataclass(frozen=True)
class FenceAnswer:
    """No rank of `generation` or earlier lives on this node."""

    node: str
    generation: int
    holdings: tuple[Holding, ...]
    store: tuple[str, int] | None
    """where a fresh store listens, for the next generation"""
    survivors: tuple[int, ...] = ()
    """pids that could not be ended"""


@dataclass(frozen=True)
class News:
    """One thing that happened on a node. `kind` and what it carries:

    exit (rank, code, detail…) · worker-lost (tile) · ready (rank, step) · step (rank, record) · eval · snapshot (seat,
    step) · save-ready (step, kind) · ended (rank, step) · nonfinite · damaged · restore-failed · fatal · fault ·
    cadence (every).
    """

    kind: str
    generation: int
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Answer to a poll: news after the cursor that the driver sent, and its ranks' pulse."""

    node: str
    cursor: int
    news: tuple[News, ...]
    pulse: Pulse | None
