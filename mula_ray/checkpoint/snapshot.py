"""Snapshots of a rank's state in anonymous shared memory that outlives the rank process.

The node agent makes the memory (`SnapshotMemory`, a memfd a slot: nothing named is ever left behind) and hands its
paths (`/proc/<pid>/fd/<n>`) to the rank, which copies its state in (`SnapshotBuffer.write`) and trains on. Whoever has
the paths can open the same memory: the rank, the agent, the process that writes a checkpoint from it. After the rank's
death the agent still has the last complete snapshot; `copy_out` / `copy_in` carry one to a buddy node, byte for byte.

A slot: a header page (state, step, checksums of header and table), a JSON table of pieces, a CRC-32 for every block of
every piece, the data. States: empty -> writing -> filled (complete) -> sealed (block checksums are there). Sealing
reads the slot again and may be done later and by another process; what is used afterwards is checked against it.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mula_ray.checkpoint.buffers import ELEMENT, host_bytes, is_device_tensor
from mula_ray.checkpoint.failures import Damage, DamagedCheckpoint, StoreFailure
from mula_ray.checkpoint.resharding import ReshardingReader, copy_converted
from mula_ray.plan.crc import crc32
from mula_ray.plan.format import BLOCK_BYTES, FileEntry, block_lengths
from mula_ray.plan.overlap import Array, Overlap
from mula_ray.plan.pieces import Piece

EMPTY, WRITING, FILLED, SEALED = range(4)
_PAGE = mmap.PAGESIZE
_COPY_THREADS = 2
_HEADER = struct.Struct("<8sIIQQQQQQI")  # magic state pinned step generation serial table sums data, CRC of table
_MAGIC = b"mulasnp1"


@dataclass(frozen=True)
class SlotInfo:
    """What a slot says about itself. `serial` grows with every write into the buffer; byte counts."""

    slot: int
    state: int
    pinned: bool
    step: int
    generation: int
    serial: int
    table_bytes: int
    sums_bytes: int
    data_bytes: int
    table_crc: int

    @property
    def complete(self) -> bool:
        """Whether every byte of a snapshot is there."""
        return self.state in (FILLED, SEALED)


class SnapshotMemory:
    """Owner of the memory of one rank's snapshots; lives in the node agent. `paths` open it in other processes."""

    def __init__(self, slots: int = 2, label: str = "snapshot") -> None:
        self._fds = [os.memfd_create(f"mula-{label}-{slot}", os.MFD_CLOEXEC) for slot in range(slots)]
        for fd in self._fds:
            os.ftruncate(fd, _PAGE)

    @property
    def paths(self) -> list[str]:
        """One path a slot, valid while this process lives and `close` was not called."""
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._fds)

    def close(self) -> None:
        """Give the memory back (when nobody else has it mapped)."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class SnapshotBuffer:
    """The slots of one rank, mapped. One process writes; `pin` keeps a slot from being overwritten while it is read."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        self._fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
        self._maps: list[mmap.mmap | None] = [None] * len(self._fds)

    def close(self) -> None:
        """Unmap (a view still in use keeps its mapping alive)."""
        self._maps = []
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def info(self, slot: int) -> SlotInfo:
        """State of a slot; an unreadable header is an empty slot."""
        raw = bytes(self._map(slot)[: _HEADER.size + 4])
        magic, state, pinned, step, generation, serial, table, sums, data, table_crc = _HEADER.unpack_from(raw)
        if magic != _MAGIC or crc32(raw[: _HEADER.size]) != int.from_bytes(raw[_HEADER.size :], "little"):
            return SlotInfo(slot, EMPTY, False, 0, 0, 0, 0, 0, 0, 0)
        return SlotInfo(slot, state, bool(pinned), step, generation, serial, table, sums, data, table_crc)

    def infos(self) -> list[SlotInfo]:
        """All slots."""
        return [self.info(slot) for slot in range(len(self._fds))]

    def free_slot(self) -> int | None:
        """The slot to write next: never a pinned one, the oldest otherwise; None while all are pinned."""
        free = [info for info in self.infos() if not info.pinned]
        return min(free, key=lambda info: (info.complete, info.serial, info.slot)).slot if free else None

    def reserve(self, slot: int, items: Sequence[tuple[Piece, Any]], meta: Mapping[str, Any] | None = None) -> None:
        """Make the slot large enough for `items` and touch its pages, so that the first write is a plain copy."""
        table = _table([piece for piece, _ in items], meta or {})
        total = _extent(len(table), _sum_count(items) * 4, sum(piece.nbytes for piece, _ in items))
        self._grow(slot, total)
        np.frombuffer(self._map(slot), np.uint8)[_PAGE::_PAGE] = 0

    def write(
        self,
        step: int,
        generation: int,
        items: Iterable[tuple[Piece, Any]],
        meta: Mapping[str, Any] | None = None,
        *,
        pin: bool = False,
        seal: bool = False,
    ) -> SlotInfo:
        """Copy the state into a free slot; when this returns the live tensors may change.

        `meta`: JSON-able facts that go with it. `pin`: keep the slot until `unpin`. `seal`: compute the checksums now,
        of each piece right after it was copied.

        Raises:
            StoreFailure: kind `busy` when every slot is pinned, `no-space` when there is no memory for it.
        """
        kept = [(piece, buffer) for piece, buffer in items if piece.numel]
        slot = self.free_slot()
        if slot is None:
            raise StoreFailure("busy", self.paths[0], "all snapshot slots are being read")
        table = _table([piece for piece, _ in kept], meta or {})
        sums, data = _sum_count(kept) * 4, sum(piece.nbytes for piece, _ in kept)
        serial = 1 + max(info.serial for info in self.infos())
        info = SlotInfo(slot, WRITING, pin, step, generation, serial, len(table), sums, data, crc32(table))
        self._put(info)
        self._grow(slot, _extent(len(table), sums, data))
        memory = memoryview(self._map(slot))
        memory[_PAGE : _PAGE + len(table)] = table
        at, jobs = _data_begin(info), []
        with ThreadPoolExecutor(_COPY_THREADS, "snapshot") as pool:
            for piece, buffer in kept:
                jobs.append(pool.submit(_copy_piece, memory[at : at + piece.nbytes], buffer, piece, seal))
                at += piece.nbytes
            found = [crc for job in jobs for crc in job.result()]
        info = dataclasses.replace(info, state=FILLED)
        self._put(info)
        return self._put_sums(info, found) if seal else info

    def seal(self, info: SlotInfo) -> SlotInfo:
        """Compute the checksums of a complete slot (once)."""
        if info.state != FILLED:
            return info
        sums = [crc32(block) for source in self.pieces(info) for block in source.blocks()]
        return self._put_sums(info, sums)

    def seal_as_written(self, info: SlotInfo, entry: FileEntry) -> SlotInfo:
        """Take the checksums that a checkpoint writer computed while writing this very slot to `entry`."""
        if info.state != FILLED:
            return info
        known = {stored.piece: stored.blocks for stored in entry.pieces}
        return self._put_sums(info, [crc for source in self.pieces(info) for crc in known[source.piece]])

    def unpin(self, info: SlotInfo) -> None:
        """Let the slot be overwritten again (nothing happens when it was already)."""
        now = self.info(info.slot)
        if now.serial == info.serial and now.pinned:
            self._put(dataclasses.replace(now, pinned=False))

    def unchanged(self, info: SlotInfo) -> bool:
        """Whether the slot still holds the snapshot that `info` is about."""
        now = self.info(info.slot)
        return now.complete and now.serial == info.serial

    def find(self, step: int, generation: int | None = None) -> SlotInfo | None:
        """The complete snapshot of a step, if there is one."""
        wanted = [i for i in self.infos() if i.complete and i.step == step and generation in (None, i.generation)]
        return max(wanted, key=lambda info: info.serial, default=None)

    def latest_valid(self) -> SlotInfo | None:
        """The newest snapshot all of whose bytes are those that were sealed; an unsealed one is sealed now."""
        for info in sorted(self.infos(), key=lambda info: info.serial, reverse=True):
            if info.complete and not self.verify(info):
                return self.seal(info)
        return None

    def verify(self, info: SlotInfo) -> list[Damage]:
        """What is wrong with a complete snapshot: table and (sealed) every block."""
        try:
            sources = self.pieces(info)
        except DamagedCheckpoint as error:
            return error.damages
        return [damage for source in sources for damage in source.damages()] if info.state == SEALED else []

    def meta(self, info: SlotInfo) -> dict[str, Any]:
        """The facts that were written with the snapshot; raises DamagedCheckpoint."""
        meta: dict[str, Any] = self._read_table(info)["meta"]
        return meta

    def pieces(self, info: SlotInfo) -> list[MemoryPiece]:
        """What lies in the slot, as sources of a SnapshotReader; raises DamagedCheckpoint."""
        table = self._read_table(info)
        memory = memoryview(self._map(info.slot))
        sums = np.frombuffer(memory, np.uint32, info.sums_bytes // 4, _sums_begin(info))
        at, block, found = _data_begin(info), 0, []
        for row in table["pieces"]:
            piece = Piece(*row[:3], *(tuple(dims) for dims in row[3:6]), *row[6:])
            count = len(block_lengths(piece.nbytes))
            known = sums[block : block + count].tolist() if info.state == SEALED else None
            where = f"{self.paths[info.slot]} step {info.step}"
            found.append(MemoryPiece(piece, memory[at : at + piece.nbytes], known, where))
            at, block = at + piece.nbytes, block + count
        return found

    def copy_out(self, info: SlotInfo) -> memoryview:
        """The slot's bytes, header to data, for a buddy node."""
        return memoryview(self._map(info.slot))[: _data_begin(info) + info.data_bytes]

    def copy_in(self, data: memoryview | bytes) -> SlotInfo:
        """Put the bytes of a `copy_out` elsewhere into a free slot here; from now on the newest one of this buffer.

        Raises:
            StoreFailure: kind `busy` when every slot is pinned.
        """
        slot = self.free_slot()
        if slot is None:
            raise StoreFailure("busy", self.paths[0], "all snapshot slots are being read")
        serial = 1 + max(info.serial for info in self.infos())
        self._put(SlotInfo(slot, WRITING, False, 0, 0, 0, 0, 0, 0, 0))
        self._grow(slot, len(data))
        memory = memoryview(self._map(slot))
        memory[_PAGE : len(data)] = data[_PAGE:]  # the header last: it makes the slot valid
        memory[:_PAGE] = data[:_PAGE]
        # Serials count what was written here: another node's counter may be ahead of this one's, or behind it.
        info = self.info(slot)
        if info.state != EMPTY:
            self._put(dataclasses.replace(info, pinned=False, serial=serial))
        return self.info(slot)

    def _read_table(self, info: SlotInfo) -> dict[str, Any]:
        raw = bytes(memoryview(self._map(info.slot))[_PAGE : _PAGE + info.table_bytes])
        if not info.complete or crc32(raw) != info.table_crc:
            where = self.paths[info.slot]
            raise DamagedCheckpoint(where, [Damage("header", where, "", "snapshot table is damaged or incomplete")])
        table: dict[str, Any] = json.loads(raw)
        return table

    def _put_sums(self, info: SlotInfo, sums: Sequence[int]) -> SlotInfo:
        array = np.asarray(sums, np.uint32)
        assert array.nbytes == info.sums_bytes, "a checksum for every block"
        np.frombuffer(self._map(info.slot), np.uint32, array.size, _sums_begin(info))[:] = array
        sealed = dataclasses.replace(info, state=SEALED, pinned=self.info(info.slot).pinned)
        self._put(sealed)
        return sealed

    def _put(self, info: SlotInfo) -> None:
        raw = _HEADER.pack(
            _MAGIC, info.state, info.pinned, info.step, info.generation, info.serial, info.table_bytes,
            info.sums_bytes, info.data_bytes, info.table_crc,
        )  # fmt: skip
        self._map(info.slot)[: _HEADER.size + 4] = raw + crc32(raw).to_bytes(4, "little")

    def _grow(self, slot: int, nbytes: int) -> None:
        if os.fstat(self._fds[slot]).st_size < nbytes:
            try:
                os.posix_fallocate(self._fds[slot], 0, -(-nbytes // _PAGE) * _PAGE)
            except OSError as error:
                raise StoreFailure.of(error, self.paths[slot]) from error

    def _map(self, slot: int) -> mmap.mmap:
        mapped = self._maps[slot]
        size = os.fstat(self._fds[slot]).st_size
        if mapped is None or len(mapped) < size:
            mapped = mmap.mmap(self._fds[slot], size)
            self._maps[slot] = mapped
        return mapped


@dataclass(frozen=True)
class MemoryPiece:
    """A piece in memory: of a snapshot, or fetched from another node (`sums` None: not sealed)."""

    piece: Piece
    data: memoryview
    sums: list[int] | None
    where: str

    def blocks(self) -> list[memoryview]:
        """The bytes in blocks."""
        return _blocks(self.data)

    def damages(self) -> list[Damage]:
        """The first block that is not the one that was sealed."""
        for block, (data, crc) in enumerate(zip(self.blocks(), self.sums or (), strict=False)):
            if crc32(data) != crc:
                detail = f"{self.piece.kind}: block {block} is not the one that was written"
                return [Damage("checksum", self.where, self.piece.name, detail)]
        return []


class SnapshotReader(ReshardingReader[MemoryPiece]):
    """State out of snapshots of any number of ranks, as a `StateReader`; every piece is checked before its first use.

    `common_pieces` (plan/overlap.py) says what to fetch from other nodes; a fetched piece is a `MemoryPiece` too.
    """

    def __init__(self, sources: Iterable[MemoryPiece]) -> None:
        super().__init__("memory snapshot", sources, copies=True)
        self._checked: set[int] = set()

    def _copy(self, source: MemoryPiece, common: list[Overlap], piece: Piece, target: Array) -> list[Future[None]]:
        if id(source) not in self._checked:
            damages = source.damages()
            if damages:
                raise DamagedCheckpoint(source.where, damages)
            self._checked.add(id(source))
        elements = np.frombuffer(source.data, ELEMENT[source.piece.dtype])
        for overlap in common:
            copy_converted(overlap, elements, source.piece.dtype, target, piece.dtype)
        return []


def _blocks(data: memoryview) -> list[memoryview]:
    return [data[at : at + BLOCK_BYTES] for at in range(0, data.nbytes, BLOCK_BYTES)]


def _copy_piece(out: memoryview, buffer: Any, piece: Piece, seal: bool) -> list[int]:
    """Copy a piece; the CRC-32 of its blocks if wanted."""
    _copy_bytes(out, buffer, piece)
    return [crc32(block) for block in _blocks(out)] if seal else []


def _copy_bytes(out: memoryview, buffer: Any, piece: Piece) -> None:
    """Copy a flat tensor (straight from its device) or buffer."""
    if is_device_tensor(buffer):
        import torch

        source = buffer.detach().reshape(-1)
        torch.frombuffer(out, dtype=source.dtype).copy_(source)
    else:  # numpy copies without the interpreter lock, and large pieces past the cache
        source = host_bytes(buffer, piece.nbytes)
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))


def _table(pieces: Sequence[Piece], meta: Mapping[str, Any]) -> bytes:
    rows = [[getattr(piece, field.name) for field in dataclasses.fields(Piece)] for piece in pieces]
    text = json.dumps({"meta": meta, "pieces": rows}, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _sum_count(items: Sequence[tuple[Piece, Any]]) -> int:
    return sum(len(block_lengths(piece.nbytes)) for piece, _ in items)


def _sums_begin(info: SlotInfo) -> int:
    return _PAGE + info.table_bytes


def _data_begin(info: SlotInfo) -> int:
    return -(-(_sums_begin(info) + info.sums_bytes) // _PAGE) * _PAGE


def _extent(table: int, sums: int, data: int) -> int:
    return -(-(_PAGE + table + sums) // _PAGE) * _PAGE + data
