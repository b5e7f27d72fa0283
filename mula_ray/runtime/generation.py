"""One generation as the driver sees it: who sits where, who is ready, who ended how."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mula_ray.elastic import commands as cmd
from mula_ray.elastic import events as ev
from mula_ray.elastic.hang import Pulse
from mula_ray.elastic.placement import Shape
from mula_ray.runtime.links import Link
from mula_ray.runtime.messages import RunFacts, SeatSpec

_OWN = re.compile(r"optimizer state of rank (\d+) changed at rest|seen first on rank (\d+)")


_Sources = tuple[tuple[int, ...], dict[int, int], dict[int, tuple[str, ...]]]


@dataclass
class Trouble:
    """A step that all ranks agreed not to commit."""

    kind: str
    step: int
    detail: str
    ranks: set[int] = field(default_factory=set)

    def add(self, rank: int, detail: str) -> None:
        """What one rank says."""
        found = _OWN.search(detail)
        if found and int(found[1] or found[2]) == rank:
            self.ranks.add(rank)
            self.detail = detail

    def event(self, generation: int) -> ev.Event:
        """For the policy."""
        ranks = tuple(sorted(self.ranks))
        if self.kind == "damage":
            return ev.StateDamaged(generation, self.step, ranks, self.detail)
        return ev.NonFinite(generation, self.step, ranks, "loss" if self.kind == "loss" else "gradient")


class Generation:
    """See the module."""

    def __init__(
        self,
        run: RunFacts,
        command: cmd.StartGeneration,
        links: Mapping[str, Link],
        stores: Mapping[str, tuple[str, int] | None],
        now: float,
        shape: Shape,
    ) -> None:
        self.number, self.restore, self.began = command.generation, command.restore, now
        self._run, self._command, self._shape = run, command, shape
        placement = command.placement
        self.world = placement.world
        self.seats: dict[int, Link] = {s: links[n] for s, n in enumerate(placement.seats) if n in links}
        self.unstarted = {link.node for link in self.seats.values()}
        first = stores.get(placement.seats[0])
        self._store = first or ("", 0)
        self._peers = {node: link.peer for node, link in links.items()}
        self.ready: set[int] = set()
        self.phases: dict[str, float] = {}
        self._ended: dict[int, tuple[int, bool]] = {}
        self._told: dict[int, dict[str, Any]] = {}
        self._steps: dict[str, int] = {}
        self._snapshots: dict[str, int] = {}
        self._said = (command.restore.step, -1)
        self._pace: tuple[float, int] = (now, command.restore.step)
        self.stop_save: str = "disk"
        self.saved_step = -1
        self.trouble: Trouble | None = None

    def spec(self, seat: int) -> SeatSpec:
        """What the agent of a seat is told."""
        command, placement = self._command, self._command.placement
        ranks = tuple(placement.ranks(seat))
        sources, seats, holders = self._sources(ranks)
        buddy = command.buddies[seat] if self._every else None
        return SeatSpec(
            run=self._run,
            generation=self.number,
            topology=placement.topology,
            seat=seat,
            ranks=ranks,
            store=self._store,
            restore=self.restore,
            holders=holders,
            sources_of=sources,
            seats_of_snapshot=seats,
            buddy=self._peers.get(buddy) if buddy else None,
            skips=command.skips,
            rebuild=command.rebuild,
            snapshot_every=self._every,
        )

    @property
    def _every(self) -> int:
        every = self._run.config.elastic.snapshot_every
        return 1 if every == "auto" else every

    def _sources(self, ranks: tuple[int, ...]) -> _Sources:
        """Ranks of the snapshot that a seat reads, the seat that each had there, and who holds that seat's snapshot.

        In the same layout the same ranks; after a change of dp all of them, the same for every seat.
        """
        if self.restore.tier not in (ev.Tier.OWN, ev.Tier.MEMORY):
            return (), {}, {}
        return self._origin(ranks) if self.restore.dp == self._command.placement.dp else self._all_sources

    @cached_property
    def _all_sources(self) -> _Sources:
        return self._origin(tuple(range(self.restore.dp * self._shape.replica)))

    def _origin(self, ranks: tuple[int, ...]) -> _Sources:
        seats = {rank: self._shape.seat_of(rank) for rank in ranks}
        holders = self.restore.holders
        peers: dict[int, tuple[str, ...]] = {
            s: (self._peers.get(holders[s], ""),) for s in set(seats.values()) if s < len(holders)
        }
        return ranks, seats, peers

    def rank_ready(self, rank: int, phases: Mapping[str, float]) -> bool:
        """Whether now all are."""
        self.ready.add(rank)
        for name, seconds in phases.items():
            self.phases[name] = max(seconds, self.phases.get(name, 0.0))
        return len(self.ready) == self.world

    def rank_ended(self, rank: int, step: int, asked: bool) -> bool:
        """Whether now all left cleanly."""
        self._ended[rank] = (step, asked)
        return len(self._ended) == self.world

    @property
    def ended(self) -> tuple[int, bool] | None:
        """(step, asked) once all ranks left cleanly."""
        return next(iter(self._ended.values())) if len(self._ended) == self.world else None

    def died(self, kind: str, body: Mapping[str, Any]) -> ev.RankDied | None:
        """A rank's own words about its error, or its exit as the system saw it; None if it explains nothing new."""
        rank = body["rank"]
        if kind == "error":
            self._told[rank] = dict(body)
            cause = ev.Cause.PEER if body["peer"] else ev.Cause.ERROR
            return ev.RankDied(self.number, rank, cause, body["detail"])
        code = body["code"]
        if rank in self._ended or rank in self._told or (self.trouble is not None and code == 2):
            return None
        if code is not None and code < 0:
            return ev.RankDied(self.number, rank, ev.Cause.SIGNAL, signal.Signals(-code).name)
        return ev.RankDied(self.number, rank, ev.Cause.SIGNAL, f"exit code {code}")

    def pulse(self, node: str, pulse: Pulse) -> tuple[int | None, int | None]:
        """(newly committed step of all, newly published snapshot of all), None where nothing is new."""
        if (self._steps.get(node), self._snapshots.get(node)) == (pulse.step, pulse.snapshot):
            return None, None  # most pulses: the minimum over a thousand nodes is not worth taking again
        self._steps[node], self._snapshots[node] = pulse.step, pulse.snapshot
        if len(self._steps) < len(self.seats):
            return None, None
        step, snapshot = min(self._steps.values()), min(self._snapshots.values())
        old_step, old_snapshot = self._said
        self._said = (max(step, old_step), max(snapshot, old_snapshot))
        return (step if step > old_step else None), (snapshot if snapshot > old_snapshot else None)

    @property
    def committed(self) -> int:
        """Last step known to be committed by all."""
        return self._said[0]

    def save_step(self, now: float = 0.0) -> int:
        """A step far enough ahead that no rank has passed it when it hears of it: a second's worth, at least three."""
        step = self.committed
        paced = (step - self._command.restore.step) / max(1e-3, (now or self.began + 1.0) - self.began)
        return step + max(3, int(paced) + 1)

    def locate(self, rank: int) -> tuple[Link | None, int]:
        """Link and tile of a rank."""
        node, tile = self._command.placement.locate(rank)
        return next((link for link in self.seats.values() if link.node == node), None), tile
