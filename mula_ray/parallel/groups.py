"""Topology → the groups of ranks that talk, built from a store, passed as an argument, closed by their owner.

Store keys live under the prefix that the caller gives, `{run}/{generation}`: no generation ever meets another's. Only
groups of more than one rank exist. Kinds with the same members share a group object within these classes, since their
calls never overlap: reductions (world, ddp, edp, dp), ep, tp, pp. EP keeps a group of its own even where it equals
ddp, so that its small calls in backward do not queue behind asynchronous gradient reductions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mula_ray.config.errors import CannotContinue
from mula_ray.parallel.backend import (
    BackendName,
    PrefixStore,
    Store,
    TCPStore,
    gloo_device,
    make_gloo,
    make_group,
)
from mula_ray.plan.topology import GroupKind, Topology

_SHARED_CLASS: dict[GroupKind, str] = {
    "world": "sum", "ddp": "sum", "edp": "sum", "dp": "sum", "ep": "ep", "tp": "tp", "pp": "pp", "replica": "sum",
}  # fmt: skip
_BUILT: tuple[GroupKind, ...] = ("ddp", "edp", "dp", "ep", "tp", "pp")
CONNECT_S = 5.0


class NoGroups(CannotContinue):
    """The ranks did not come together: one is missing, or died on the way. Under a driver, a failure like any other."""


@dataclass(frozen=True)
class Call:
    """One collective as an observer sees it. `numel` and `dtype` are those of the larger tensor."""

    kind: str
    group: str
    ranks: tuple[int, ...]
    dtype: torch.dtype
    numel: int


class Observer(Protocol):
    """Sees every collective before it is issued; may refuse it by raising."""

    def call(self, call: Call) -> None:
        """Called on the issuing thread."""


@dataclass
class Meter:
    """Host seconds spent waiting for a group's calls: what communication cost a rank beyond what it hid."""

    waited_s: float = 0.0


@dataclass(frozen=True)
class Group:
    """A handle: who is in it, where this rank stands, and the object that carries the calls (`pg`)."""

    name: str
    ranks: tuple[int, ...]
    index: int
    pg: Any
    timeout_s: float
    backend: str = "gloo"
    whole_sums: bool = False
    """a sum of which each rank wants a slice is all-reduced as a whole: faster with gloo, same bits"""
    observers: tuple[Observer, ...] = field(default=(), compare=False)
    meter: Meter = field(default_factory=Meter, compare=False)

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def observe(self, kind: str, tensor: torch.Tensor) -> None:
        """Tell the observers about a call."""
        if self.observers:
            call = Call(kind, self.name, self.ranks, tensor.dtype, tensor.numel())
            for observer in self.observers:
                observer.call(call)


class Groups:
    """All groups of one rank: `.ddp .edp .dp .ep .tp .pp` (None when of size 1) and `.control`, gloo over all ranks.

    `.channels[a, b]` carries transfers from rank a to rank b of this pipeline.

    Args:
        store: reachable by all ranks; None only in a world of one.
        prefix: `{run}/{generation}`, put before every key.
        timeout_s: bound of building and of every collective.
        interface: network interface for gloo; None lets it resolve the host's name.
        strict: refuse what oneCCL and xccl lack, on any backend.
        whole_sums: see `Group`; None takes the faster way of the backend.

    Raises:
        NoGroups: some ranks did not come within the bound; they are named.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        store: Store | None,
        backend: BackendName = "gloo",
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        *,
        prefix: str = "",
        interface: str | None = None,
        strict: bool = False,
        whole_sums: bool | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self.topology, self.rank, self.device, self.timeout_s = topology, rank, torch.device(device), timeout_s
        self._backend, self._strict, self._observers = backend, strict, observers
        self._whole_sums = backend == "gloo" if whole_sums is None else whole_sums
        self._store = PrefixStore(prefix, store) if store is not None and prefix else store
        self._made: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._transport: Any = None
        self.control: Group | None = None
        self._kinds: dict[GroupKind, Group | None] = dict.fromkeys(_BUILT)
        self.channels: dict[tuple[int, int], Group] = {}
        if topology.world > 1:
            assert self._store is not None, "a world of several ranks needs a store"
            self._build(interface)

    @classmethod
    def connect(
        cls,
        topology: Topology,
        rank: int,
        *,
        host: str,
        port: int,
        prefix: str,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> Groups:
        """Connect to the store at `host:port` (it must listen already: a retry costs 0.4 s) and build the groups."""
        if topology.world == 1:
            return cls(topology, rank, None, timeout_s=timeout_s, **options)
        connect_s = min(CONNECT_S, timeout_s)
        try:
            store = TCPStore(host, port, None, False, timedelta(seconds=connect_s), wait_for_workers=False)
        except (RuntimeError, dist.DistError) as error:
            where = f"{host}:{port} within {connect_s:.0f} s"
            raise NoGroups(f"rank {rank} cannot reach the store at {where}") from error
        store.set_timeout(timedelta(seconds=timeout_s))
        return cls(topology, rank, store, timeout_s=timeout_s, prefix=prefix, **options)

    @property
    def ddp(self) -> Group | None:
        """Replicas of the dense parameters: dp x ep ranks."""
        return self._kinds["ddp"]

    @property
    def edp(self) -> Group | None:
        """Replicas of this rank's experts: dp x tp ranks."""
        return self._kinds["edp"]

    @property
    def dp(self) -> Group | None:
        """Ranks that differ in dp alone (the classic zero1 scheme)."""
        return self._kinds["dp"]

    @property
    def ep(self) -> Group | None:
        """Ranks that split the experts of a layer."""
        return self._kinds["ep"]

    @property
    def tp(self) -> Group | None:
        """Ranks that split the dense matrices; they hold the same sequences."""
        return self._kinds["tp"]

    @property
    def pp(self) -> Group | None:
        """Ranks of one pipeline."""
        return self._kinds["pp"]

    @property
    def store(self) -> Store | None:
        """The prefixed store of this generation; None in a world of one."""
        return self._store

    def all(self) -> Iterator[Group]:
        """Every group object that exists, the control group last."""
        yield from self._made.values()
        if self.control is not None:
            yield self.control

    def close(self) -> None:
        """Drop the group objects. The process should end soon after: no group is made again in its place."""
        for group in self.all():
            shutdown = getattr(group.pg, "shutdown", None)
            if shutdown is not None and group.backend != "gloo":
                shutdown()
        self._made.clear()
        self._kinds = dict.fromkeys(_BUILT)
        self.channels = {}
        self.control = None
        self._transport = None

    def _build(self, interface: str | None) -> None:
        assert self._store is not None
        self._store.set(f"arrived/{self.rank}", "1")
        started = time.monotonic()
        try:
            self._transport = gloo_device(interface)
            world = tuple(range(self.topology.world))
            store = PrefixStore("control", self._store)
            pg = make_gloo(store, self.rank, len(world), self._timeout, self._transport)
            self.control = Group("control", world, self.rank, pg, self.timeout_s, observers=self._observers)
            for kind in _BUILT:
                self._kinds[kind] = self._make(kind)
            self.channels = self._make_channels()
        except (RuntimeError, dist.DistError) as error:
            missing = self._missing()
            who = f"ranks {missing} did not come" if missing else "all ranks came, but could not connect"
            waited = time.monotonic() - started
            raise NoGroups(f"rank {self.rank}: no groups after {waited:.1f} s: {who} ({error})") from error

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def _make(self, kind: GroupKind) -> Group | None:
        ranks = self.topology.group_of(kind, self.rank)
        return self._join(kind, _SHARED_CLASS[kind], ranks) if len(ranks) > 1 else None

    def _make_channels(self) -> dict[tuple[int, int], Group]:
        """Two-rank groups to and from the neighbours in the pipeline, all ranks in the same order: no deadlock."""
        pp = self.topology.pp
        pipeline = self.topology.group_of("pp", self.rank)
        me = pipeline.index(self.rank)
        ends = sorted({(a, b) for i in range(pp) for a, b in ((i, (i + 1) % pp), ((i + 1) % pp, i)) if a != b})
        return {
            (a, b): self._join(f"channel{a}>{b}", "channel", (pipeline[a], pipeline[b]))
            for a, b in ends
            if me in (a, b)
        }

    def _join(self, kind: str, shared: str, ranks: tuple[int, ...]) -> Group:
        key = (shared, ranks)
        if key not in self._made:
            assert self._store is not None
            name = f"{kind}/{'-'.join(map(str, ranks)) if len(ranks) <= 8 else f'{ranks[0]}+{len(ranks)}'}"
            store = PrefixStore(name, self._store)
            index = ranks.index(self.rank)
            pg = make_group(self._backend, store, index, len(ranks), self._timeout, self._transport)
            if self._strict:
                from mula_ray.parallel.strict import StrictGroup

                pg = StrictGroup(pg, self._store, index, len(ranks), name)
            self._made[key] = Group(
                kind, ranks, index, pg, self.timeout_s, self._backend, self._whole_sums, self._observers
            )
        return self._made[key]

    def _missing(self) -> list[int]:
        assert self._store is not None
        try:
            return [rank for rank in range(self.topology.world) if not self._store.check([f"arrived/{rank}"])]
        except (RuntimeError, dist.DistError):
            return []
