"""A seat's part of a checkpoint: written from snapshots in memory by the node's writer process, then re-read."""

from __future__ import annotations

import time
from pathlib import Path

from mula_ray.checkpoint.failures import Damage, StoreFailure
from mula_ray.checkpoint.store import part_name
from mula_ray.checkpoint.writer import Source, WriterProcess
from mula_ray.plan.format import FileEntry
from mula_ray.runtime.memory import NodeMemory
from mula_ray.runtime.messages import SeatSpec

WRITE_BOUND_S = 600.0
Part = tuple[FileEntry, float, list[Damage]]


def write_part_of(
    seat: SeatSpec | None,
    memory: NodeMemory,
    writer: WriterProcess,
    folder: Path,
    what: tuple[int, int, str],
    fault: str,
    node: str,
) -> Part:
    """(file entry, seconds, what re-reading found wrong). `what`: step, generation, kind of the save.

    Raises:
        StoreFailure: the generation or a snapshot is gone, or what the writer met.
    """
    began, (step, generation, kind) = time.monotonic(), what
    if fault == "disk-full":
        raise StoreFailure("no-space", folder, "no space left (rehearsed)", node)
    if seat is None or seat.generation != generation:
        raise StoreFailure("snapshot", folder, "the generation has ended", node)
    sources = []
    for tile in range(len(seat.ranks)):
        found = memory.saved(tile, step, kind, generation)
        if found is None:
            raise StoreFailure("snapshot", folder, f"tile {tile} has no snapshot of step {step}", node)
        sources.append(Source(tuple(found[0].memory.paths), found[1]))
    entry = writer.write(folder, part_name(seat.seat), sources, WRITE_BOUND_S)
    damages = writer.verify(folder, entry, WRITE_BOUND_S)
    return entry, time.monotonic() - began, damages
