"""The part of reading that is the same from disk and from memory: find what overlaps, check that nothing is missing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from mula_ray.checkpoint.buffers import ELEMENT, host_array, is_device_tensor
from mula_ray.checkpoint.failures import Damage, DamagedCheckpoint
from mula_ray.plan.overlap import Array, Overlap, copy_overlap, overlaps
from mula_ray.plan.pieces import Piece

_IN_FLIGHT = 64


class HasPiece(Protocol):
    """Something that holds the elements of a piece."""

    @property
    def piece(self) -> Piece:
        """Which ones."""


SourceT = TypeVar("SourceT", bound=HasPiece)


class ReshardingReader(Generic[SourceT]):
    """A `StateReader` over any set of stored pieces that together hold what is asked for, whatever their layout.

    Subclasses say how the elements of a source come into an array (`_copy`).

    `optimizer_lost=True` reads a model-only checkpoint as full state: masters from the weights, moments zero.
    `copies=True` allows sources to overlap (memory snapshots of replicas, which hold the same bits).
    """

    def __init__(
        self, where: str, sources: Iterable[SourceT], optimizer_lost: bool = False, copies: bool = False
    ) -> None:
        self.where = where
        self.optimizer_lost, self.copies = optimizer_lost, copies
        self._index: dict[tuple[str, str], list[SourceT]] = {}
        for source in sources:
            self._index.setdefault((source.piece.name, source.piece.kind), []).append(source)

    def has(self, name: str, kind: str) -> bool:
        """Whether anything of that tensor and kind is stored."""
        return (name, kind) in self._index

    def sources(self, name: str, kind: str) -> Sequence[SourceT]:
        """Everything stored of that tensor and kind."""
        return self._index.get((name, kind), ())

    def read_into(self, piece: Piece, out: Any) -> None:
        """Fill `out` (flat tensor on any device, or writable host buffer) with the elements of `piece`.

        Reads only the blocks that overlap, with bounded memory. bf16 state is widened for an fp32 piece; nothing is
        ever rounded.

        Raises:
            KeyError: nothing of that tensor and kind is stored.
            DamagedCheckpoint: elements are missing, stored twice, or fail their checksum; `out` is then undefined.
        """
        _wait(self._start(piece, out))

    def read_many(self, items: Iterable[tuple[Piece, Any]]) -> None:
        """As `read_into` for every item, with reading, checking and copying of the next ones going on meanwhile."""
        running: deque[Future[None]] = deque()
        for piece, out in items:
            running.extend(self._start(piece, out))
            if len(running) > 2 * _IN_FLIGHT:
                _wait(running.popleft() for _ in range(_IN_FLIGHT))
        _wait(running)

    def _start(self, piece: Piece, out: Any) -> list[Future[None]]:
        """Begin filling `out`; the jobs that are still to end."""
        if piece.numel == 0:
            return []
        if is_device_tensor(out):
            host = np.empty(piece.nbytes, np.uint8)
            self.read_into(piece, host)
            import torch

            out.copy_(torch.from_numpy(host).view(out.dtype))
            return []
        target = host_array(out, piece)
        sources = self.sources(piece.name, piece.kind)
        if not sources and self.optimizer_lost and piece.kind in ("exp_avg", "exp_avg_sq"):
            target[...] = 0
            return []
        if not sources and self.optimizer_lost and piece.kind == "master":
            sources = self.sources(piece.name, "weight")
        if not sources:
            raise KeyError(f"{self.where} has no {piece.kind} of {piece.name}")
        return self._fill(piece, target, sources)

    def _fill(self, piece: Piece, target: Array, sources: Sequence[SourceT]) -> list[Future[None]]:
        found, jobs = 0, []
        for source in sources:
            if source.piece.global_shape != piece.global_shape:
                detail = f"stored with shape {source.piece.global_shape}, asked for {piece.global_shape}"
                raise DamagedCheckpoint(self.where, [Damage("coverage", self.where, piece.name, detail)])
            common = list(overlaps(source.piece, piece))
            found += sum(overlap.numel for overlap in common)
            if common:
                jobs.append((source, common))
        if self.copies and found > piece.numel:
            seen = np.zeros(piece.numel, np.uint8)
            for source, common in jobs:
                for overlap in common:
                    copy_overlap(overlap, np.ones(source.piece.numel, np.uint8), seen)
            found = int(seen.sum())
        if found != piece.numel:
            what = "missing" if found < piece.numel else "stored twice"
            detail = f"{abs(piece.numel - found)} of {piece.numel} elements of {piece.kind} are {what}"
            raise DamagedCheckpoint(self.where, [Damage("coverage", self.where, piece.name, detail)])
        return [job for source, common in jobs for job in self._copy(source, common, piece, target)]

    def _copy(self, source: SourceT, common: list[Overlap], piece: Piece, target: Array) -> list[Future[None]]:
        """Bring the common elements of `source` into the flat elements `target` of `piece`, verified; jobs to end."""
        raise NotImplementedError


def _wait(jobs: Iterable[Future[None]]) -> None:
    """Wait for all (their targets must not be left behind half-written), then raise the first error."""
    errors = [job.exception() for job in jobs]
    for error in errors:
        if error is not None:
            raise error


def copy_converted(overlap: Overlap, source: Array, source_dtype: str, target: Array, target_dtype: str) -> None:
    """Copy bit patterns of one overlap; bf16 becomes fp32 exactly (the upper half of its bits).

    Raises:
        ValueError: fp32 would have to be rounded to bf16.
    """
    if source_dtype == target_dtype:
        copy_overlap(overlap, source, target)
        return
    if (source_dtype, target_dtype) != ("bf16", "fp32"):
        raise ValueError(
            f"{source_dtype} state cannot be read as {target_dtype}; read it as {source_dtype} and convert"
        )
    copy_overlap(overlap, source.astype(ELEMENT["fp32"]) << np.uint32(16), target)
