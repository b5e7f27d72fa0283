"""The snapshots that a node agent keeps: of its own tiles' ranks, and copies of a buddy's. All in anonymous memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from mula_ray.checkpoint.failures import DamagedCheckpoint, StoreFailure
from mula_ray.checkpoint.snapshot import SlotInfo, SnapshotBuffer, SnapshotMemory
from mula_ray.elastic.memory import Holding
from mula_ray.elastic.placement import Shape
from mula_ray.runtime.messages import Source
from mula_ray.runtime.peers import Parcel, PeerLink

OWN_SLOTS, COPY_SLOTS = 3, 2


class Shelf:
    """One rank's slots and who owns them here."""

    def __init__(self, label: str, slots: int) -> None:
        self.memory = SnapshotMemory(slots, label)
        self.buffer = SnapshotBuffer(self.memory.paths)
        self.lock = threading.Lock()

    def close(self) -> None:
        """Give the memory back."""
        self.buffer.close()
        self.memory.close()


def _meta(shelf: Shelf, info: SlotInfo) -> dict[str, Any]:
    """Facts of a complete snapshot; empty for one that is not, or is just being overwritten."""
    if not info.complete:
        return {}
    try:
        return shelf.buffer.meta(info)
    except DamagedCheckpoint:
        return {}


class NodeMemory:
    """What can be restored from this node. `shape`, for seats; thread-safe."""

    def __init__(self, tiles: int, shape: Shape) -> None:
        self._shape = shape
        self.own = [Shelf(f"own{tile}", OWN_SLOTS) for tile in range(tiles)]
        self.models = [Shelf(f"save{tile}", 2) for tile in range(tiles)]
        self._copies: dict[int, Shelf] = {}
        self._fetched: dict[int, Shelf] = {}
        self._lock = threading.Lock()

    def take(self, parcel: Parcel, data: memoryview) -> None:
        """Keep a copy of another node's snapshot."""
        with self._lock:
            shelf = self._copies.get(parcel.rank)
            if shelf is None:
                shelf = self._copies[parcel.rank] = Shelf(f"copy{parcel.rank}", COPY_SLOTS)
        with shelf.lock:
            shelf.buffer.copy_in(data)

    def give(self, rank: int, generation: int, step: int) -> tuple[SnapshotBuffer, SlotInfo] | None:
        """A snapshot of a rank that is here, own or copy."""
        for shelf in (*self.own, *self._copies.values()):
            for info in shelf.buffer.infos():
                if (info.step, info.generation) == (step, generation) and _meta(shelf, info).get("rank") == rank:
                    return shelf.buffer, info
        return None

    def holdings(self) -> tuple[Holding, ...]:
        """Every seat's snapshot all of whose ranks are here and complete (checksums are checked when it is read)."""
        found: dict[tuple[int, int, int, int, bool], set[int]] = {}
        for own, shelves in ((True, self.own), (False, list(self._copies.values()))):
            for shelf in shelves:
                for info in shelf.buffer.infos():
                    meta = _meta(shelf, info)
                    if meta:
                        key = (info.generation, info.step, meta["dp"], self._shape.seat_of(meta["rank"]), own)
                        found.setdefault(key, set()).add(meta["rank"])
        holdings = []
        for (generation, step, dp, seat, own), ranks in sorted(found.items()):
            if ranks >= set(range(*self._shape.span(seat, dp))):
                holdings.append(Holding(generation, step, dp, seat, own))
        return tuple(holdings)

    def sources(
        self, ranks: Iterable[int], generation: int, step: int, holders: dict[int, str], secret: bytes
    ) -> tuple[Source, ...]:
        """Where the snapshots of `ranks` can be opened on this node; what is not here is fetched from its holder.

        Raises:
            StoreFailure: a holder is unreachable or has it no more; `who` is its address.
        """
        found = []
        for rank in ranks:
            here = self.give(rank, generation, step)
            paths = tuple(here[0].paths) if here else self._fetch(rank, generation, step, holders.get(rank, ""), secret)
            found.append(Source(generation, step, rank, paths))
        return tuple(found)

    def _fetch(self, rank: int, generation: int, step: int, holder: str, secret: bytes) -> tuple[str, ...]:
        if not holder:
            raise StoreFailure("snapshot", "memory", f"no node holds rank {rank} of step {step}")
        try:
            link = PeerLink(holder, secret)
            try:
                got = link.fetch(rank, generation, step)
                if got is None:
                    raise StoreFailure("snapshot", holder, f"rank {rank} of step {step} is not there", holder)
                parcel, data = got
                if data is None:
                    return parcel.paths
                shelf = self._fetched.setdefault(rank, Shelf(f"fetched{rank}", 1))
                shelf.buffer.copy_in(data)
                return tuple(shelf.buffer.paths)
            finally:
                link.close()
        except (OSError, EOFError) as error:
            raise StoreFailure("snapshot", holder, f"unreachable: {error}", holder) from error

    def drop_fetched(self) -> None:
        """After a generation has restored."""
        for shelf in self._fetched.values():
            shelf.close()
        self._fetched = {}

    def drop_copies(self, keep_generation: int) -> None:
        """Copies of generations before `keep_generation` (their seats have newer ones elsewhere)."""
        with self._lock:
            for rank, shelf in list(self._copies.items()):
                if all(i.generation < keep_generation for i in shelf.buffer.infos() if i.complete):
                    del self._copies[rank]
                    shelf.close()

    def saved(self, tile: int, step: int, kind: str, generation: int | None = None) -> tuple[Shelf, SlotInfo] | None:
        """What the rank of a tile put aside for a save: its share where ranks hold the same state, else a snapshot."""
        for shelf in (self.models[tile], self.own[tile]):
            info = shelf.buffer.find(step, generation)
            if info is not None and _meta(shelf, info).get("what", "full") == kind:
                return shelf, info
        return None

    def unpin_all(self) -> None:
        """No save is under way any more."""
        for shelf in (*self.own, *self.models):
            for info in shelf.buffer.infos():
                if info.pinned:
                    shelf.buffer.unpin(info)
