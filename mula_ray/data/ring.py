"""A shared-memory ring of training samples: a node agent writes steps ahead, the ranks of its node read.

    writer = RingWriter.create(...)            # node agent; writer.spec travels to the ranks (picklable)
    source = RingSource(data, part, spec, cell, generation)          # rank: ring first, direct reads when behind
    for batch in source.micro_batches(step): ...
    source.counters                            # how many steps came from where, and how long they took

The memory is anonymous (memfd): nothing is left behind when its holders die, however they die. A rank opens it through
`/proc/<agent>/fd/<n>`, so no descriptor has to be passed down.

A slot holds one step: its number, the global sample numbers, their tokens, and a CRC-32 over all of it. A reader copies
the slot and checks the CRC and that the samples are the ones that it wants; anything else (not there yet, overwritten
meanwhile, another layout's) counts as "behind", and the rank reads the same windows from the shards. So a wrong or torn
slot costs time, never a sample. Each rank has a cell in which it says what step it wants next, tagged with its
generation; cells of other generations are ignored by the writer, so a zombie cannot steer it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mula_ray.data.batches import Batch, BatchSource, Share, as_batches
from mula_ray.data.source import RunData
from mula_ray.plan.crc import crc32

I64 = NDArray[np.int64]

_STEP_BITS = 40
_HEADER_WORDS = 8
_NONCE, _CLOSED, _ASK_STEP, _ASK_NUMBER = 0, 1, 2, 3


@dataclass(frozen=True)
class RingSpec:
    """Where a ring is and what it looks like."""

    pid: int
    fd: int
    nonce: int
    """Tells this ring from whatever else may stand behind a re-used process id."""
    samples: int
    """Samples a step on this node, at most."""
    context: int
    depth: int
    """Slots: steps ahead plus steps kept for a rewind."""
    cells: int
    """Ranks that read."""
    dtype: str
    """Stored type of a token."""
    starts: bool
    """Whether document starts are carried along."""

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample: tokens, then document starts."""
        return (self.context + 1) * np.dtype(self.dtype).itemsize + (4 * self.context if self.starts else 0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: step, sample count, CRC, sample numbers, samples; a multiple of 64."""
        return -(-(24 + self.samples * (8 + self.sample_bytes)) // 64) * 64

    @property
    def slots_at(self) -> int:
        """Offset of the first slot."""
        return -(-8 * (_HEADER_WORDS + self.cells) // 64) * 64

    @property
    def size(self) -> int:
        """Bytes of the whole ring."""
        return self.slots_at + self.depth * self.slot_bytes


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step."""

    numbers: I64
    """(n,) global sample numbers"""
    tokens: NDArray[Any]
    """(n, S + 1)"""
    starts: NDArray[np.int32] | None
    """(n, S), when documents are masked"""


class _Ring:
    """The mapped memory; what writer and reader share."""

    def __init__(self, spec: RingSpec, memory: mmap.mmap) -> None:
        self.spec = spec
        self._memory = memory
        self._words: I64 = np.frombuffer(memory, dtype=np.int64, count=_HEADER_WORDS + spec.cells)

    def _slot(self, step: int) -> memoryview:
        begin = self.spec.slots_at + (step % self.spec.depth) * self.spec.slot_bytes
        return memoryview(self._memory)[begin : begin + self.spec.slot_bytes]

    def _close(self) -> None:
        self._words = np.zeros(0, dtype=np.int64)
        with contextlib.suppress(BufferError):  # somebody still looks at a slot: it goes with them
            self._memory.close()


def _words(view: memoryview | bytes, count: int, at: int = 0) -> I64:
    return np.frombuffer(view, dtype=np.int64, count=count, offset=at)


class RingWriter(_Ring):
    """The node agent's end."""

    def __init__(self, spec: RingSpec, memory: mmap.mmap) -> None:
        super().__init__(spec, memory)
        self._words[_NONCE] = spec.nonce
        self._words[_HEADER_WORDS:] = -1
        for step in range(spec.depth):
            _words(self._slot(step), 1)[0] = -1

    @classmethod
    def create(
        cls, *, samples: int, context: int, depth: int, cells: int, dtype: np.dtype[Any], starts: bool = False
    ) -> RingWriter:
        """A new, empty ring in anonymous shared memory."""
        fd = os.memfd_create("mula-ring")
        nonce = secrets.randbits(62)
        spec = RingSpec(os.getpid(), fd, nonce, samples, context, depth, cells, dtype.name, starts)
        os.ftruncate(fd, spec.size)
        return cls(spec, mmap.mmap(fd, spec.size))

    def wanted(self, generation: int) -> int | None:
        """The earliest step that a rank of `generation` wants next; None before all of them have said so."""
        cells = self._words[_HEADER_WORDS:].copy()
        if not cells.size or (cells < 0).any() or (cells >> _STEP_BITS != generation).any():
            return None
        return int((cells & ((1 << _STEP_BITS) - 1)).min())

    def holds(self, step: int) -> bool:
        """Whether the slot of `step` has it."""
        return int(_words(self._slot(step), 1)[0]) == step

    def put(self, step: int, content: StepSamples) -> None:
        """Write a step into its slot, over whatever was there."""
        slot, spec, count = self._slot(step), self.spec, len(content.numbers)
        assert count <= spec.samples, f"{count} samples in a ring of {spec.samples}"
        head = _words(slot, 3)
        head[0] = -1
        parts = [np.ascontiguousarray(content.numbers), np.ascontiguousarray(content.tokens, dtype=spec.dtype)]
        if spec.starts:
            assert content.starts is not None
            parts.append(np.ascontiguousarray(content.starts))
        at, crc = 24, crc32(np.array([step, count], dtype=np.int64).data)
        for part in parts:
            raw = part.reshape(-1).view(np.uint8).data
            slot[at : at + len(raw)] = raw
            at, crc = at + len(raw), crc32(raw, crc)
        head[1], head[2] = count, crc
        head[0] = step

    def ask(self, step: int) -> None:
        """Tell the stream's reading task that the chunk from `step` on is wanted."""
        self._words[_ASK_STEP] = step
        self._words[_ASK_NUMBER] += 1

    def mark_closed(self) -> None:
        """Tell all who have it mapped that nothing comes any more."""
        if self._words.size:
            self._words[_CLOSED] = 1

    def close(self) -> None:
        """Let go of the memory; readers keep theirs until they exit."""
        self.mark_closed()
        self._close()
        os.close(self.spec.fd)


class RingReader(_Ring):
    """The end of a rank, or of the stream's reading task."""

    @classmethod
    def attach(cls, spec: RingSpec) -> RingReader | None:
        """Map the ring; None if it is gone (its agent died) or cannot be reached from here."""
        try:
            fd = os.open(f"/proc/{spec.pid}/fd/{spec.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if os.fstat(fd).st_size != spec.size:
                return None
            ring = cls(spec, mmap.mmap(fd, spec.size))
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)
        return ring if ring._words[_NONCE] == spec.nonce else None

    @property
    def closed(self) -> bool:
        """Whether the agent has closed it, or died."""
        return bool(self._words[_CLOSED]) or not os.path.exists(f"/proc/{self.spec.pid}")

    def asked(self) -> tuple[int, int]:
        """(request number, first step) of the latest request to the reading task."""
        number = int(self._words[_ASK_NUMBER])
        return number, int(self._words[_ASK_STEP])

    def want(self, cell: int, generation: int, step: int) -> None:
        """Say that the rank of `cell` wants `step` next."""
        self._words[_HEADER_WORDS + cell] = (generation << _STEP_BITS) | step

    def take(self, step: int, wanted: I64) -> StepSamples | None:
        """The samples numbered `wanted` of `step`, copied out; None if they are not there."""
        slot, spec = self._slot(step), self.spec
        stamp, count, crc = (int(word) for word in _words(slot, 3))
        if stamp != step or not 0 <= count <= spec.samples:
            return None
        raw = bytes(slot[24 : 24 + count * (8 + spec.sample_bytes)])
        if crc32(raw, crc32(np.array([step, count], dtype=np.int64).data)) != crc:
            return None
        numbers = _words(raw, count)
        rows = np.searchsorted(numbers, wanted)
        if (rows >= count).any() or (numbers[np.minimum(rows, count - 1)] != wanted).any():
            return None
        dtype, width = np.dtype(spec.dtype), spec.context + 1
        tokens = np.frombuffer(raw, dtype, count * width, 8 * count).reshape(count, width)[rows]
        starts = None
        if spec.starts:
            at = 8 * count + count * width * dtype.itemsize
            starts = np.frombuffer(raw, np.int32, count * spec.context, at).reshape(count, spec.context)[rows]
        return StepSamples(wanted, tokens, starts)


@dataclass
class Counters:
    """How a rank got its data."""

    ring_steps: int = 0
    direct_steps: int = 0
    wait_s: float = 0.0
    """Total time in `micro_batches`."""


class RingSource(BatchSource):
    """A rank's batches: from the ring when it has them, else read directly. The same bytes either way."""

    def __init__(self, data: RunData, part: Share, spec: RingSpec | None, cell: int, generation: int) -> None:
        super().__init__(data, part)
        self._ring = RingReader.attach(spec) if spec is not None else None
        self._cell = cell
        self._generation = generation
        self.counters = Counters()

    def micro_batches(self, step: int) -> list[Batch]:
        """The micro-batches of a step; asks the agent for the next one."""
        begin = time.perf_counter()
        found = self._from_ring(step)
        if found is None:
            found = super().micro_batches(step)
            self.counters.direct_steps += 1
        else:
            self.counters.ring_steps += 1
        self.counters.wait_s += time.perf_counter() - begin
        return found

    def _from_ring(self, step: int) -> list[Batch] | None:
        if self._ring is None:
            return None
        numbers = self.part.samples(step)
        flat = numbers.reshape(-1)
        real = flat >= 0
        got = self._ring.take(step, flat[real])
        self._ring.want(self._cell, self._generation, step + 1)
        if got is None:
            return None
        ids = np.zeros((flat.size, self.data.context + 1), dtype=np.int64)
        ids[real] = got.tokens
        starts = None
        if self.part.document_mask:
            if got.starts is None:
                return None
            starts = np.zeros((flat.size, self.data.context), dtype=np.int32)
            starts[real] = got.starts
        return as_batches(ids, real, starts, numbers.shape[1])
