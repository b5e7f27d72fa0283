"""Where two pieces of one tensor overlap, and whether a set of pieces covers a tensor exactly. Pure (numpy only).

A piece is a flat range of a box, which is at most 2 * dims - 1 boxes: the rest of a first row, whole rows, the start of
a last row, in every dim. Two pieces overlap where their boxes do, and every overlap is a strided view of both flat
buffers, so resharding is a few array copies and no loop over elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mula_ray.plan.pieces import Piece

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Box:
    """A box of the global tensor that is contiguous in a piece, from element `flat` of the piece on."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: int


@dataclass(frozen=True)
class Overlap:
    """The common box of a box of `src` and a box of `dst`, `shape` in size, `src_at`/`dst_at` within each."""

    src: Box
    dst: Box
    src_at: tuple[int, ...]
    dst_at: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in common."""
        return math.prod(self.shape)

    def run(self) -> tuple[int, int] | None:
        """First elements (in src, in dst) when the overlap is one contiguous run in both pieces, else None."""
        starts = [_run_start(box, at, self.shape) for box, at in ((self.src, self.src_at), (self.dst, self.dst_at))]
        return None if starts[0] is None or starts[1] is None else (starts[0], starts[1])

    def src_range(self) -> tuple[int, int]:
        """Elements [first, stop) of the src piece between which the overlap lies."""
        first = last = 0
        for size, at, width in zip(self.src.shape, self.src_at, self.shape, strict=True):
            first, last = first * size + at, last * size + at + width - 1
        return self.src.flat + first, self.src.flat + last + 1


def boxes(piece: Piece) -> list[Box]:
    """The boxes (global coordinates) of which `piece` consists, in flat order."""
    found: list[Box] = []

    def cut(offset: tuple[int, ...], shape: tuple[int, ...], lead: int, start: int, stop: int) -> None:
        """Add elements [start, stop) of the box, whose first `lead` dims are of size 1 already."""
        if start >= stop:
            return
        if start == 0 and stop == math.prod(shape):
            found.append(Box(offset, shape, sum(math.prod(box.shape) for box in found)))
            return
        inner = math.prod(shape[lead + 1 :])
        first, last = -(-start // inner), stop // inner
        if first > last:  # within one row
            row = start // inner
            cut(_at(offset, lead, row), _one(shape, lead), lead + 1, start - row * inner, stop - row * inner)
            return
        if start < first * inner:
            cut(_at(offset, lead, first - 1), _one(shape, lead), lead + 1, start - (first - 1) * inner, inner)
        if first < last:
            found.append(
                Box(
                    _at(offset, lead, first),
                    (*shape[:lead], last - first, *shape[lead + 1 :]),
                    sum(math.prod(box.shape) for box in found),
                )
            )
        if last * inner < stop:
            cut(_at(offset, lead, last), _one(shape, lead), lead + 1, 0, stop - last * inner)

    cut(piece.offset, piece.shape, 0, piece.start, piece.stop)
    return found


def overlaps(src: Piece, dst: Piece) -> Iterator[Overlap]:
    """Every overlap of two pieces of the same global tensor (kind and dtype may differ)."""
    assert (src.name, src.global_shape) == (dst.name, dst.global_shape), (src, dst)
    if not _boxes_meet(src.offset, src.shape, dst.offset, dst.shape):
        return
    dst_boxes = boxes(dst)
    for a in boxes(src):
        for b in dst_boxes:
            low = tuple(map(max, a.offset, b.offset))
            high = tuple(
                min(ao + asz, bo + bsz) for ao, asz, bo, bsz in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
            )
            shape = tuple(h - lo for lo, h in zip(low, high, strict=True))
            if all(size > 0 for size in shape):
                yield Overlap(a, b, _minus(low, a.offset), _minus(low, b.offset), shape)


def common_pieces(src: Piece, dst: Piece) -> list[Piece]:
    """What `dst` can take from `src`, as pieces that are whole boxes (kind and dtype of `src`)."""
    return [
        dataclasses.replace(
            src,
            offset=tuple(a + b for a, b in zip(overlap.src.offset, overlap.src_at, strict=True)),
            shape=overlap.shape,
            start=0,
            stop=overlap.numel,
        )
        for overlap in overlaps(src, dst)
    ]


def copy_overlap(overlap: Overlap, src: Array, dst: Array) -> None:
    """Copy the overlap from the flat elements `src` of the one piece to the flat elements `dst` of the other."""
    _view(dst, overlap.dst, overlap.dst_at, overlap.shape)[...] = _view(src, overlap.src, overlap.src_at, overlap.shape)


def missing_elements(wanted: Piece, have: Iterable[Piece]) -> int:
    """Elements of `wanted` that no piece of `have` (pairwise disjoint, same name) holds."""
    return wanted.numel - sum(o.numel for piece in have for o in overlaps(piece, wanted))


def coverage_problems(name: str, global_shape: tuple[int, ...], pieces: Sequence[Piece]) -> list[str]:
    """Why `pieces` (one name, one kind) are no exact cover of the tensor: overlapping, outside, missing, by name."""
    problems = []
    for piece in pieces:
        if piece.global_shape != global_shape:
            problems.append(f"{name}: a piece says the tensor is {piece.global_shape}, the model says {global_shape}")
        elif not _legal(piece):
            problems.append(f"{name}: {describe(piece)} lies outside the tensor {global_shape}")
    if problems:
        return problems
    for a, b in _overlapping_pairs([piece for piece in pieces if piece.numel]):
        problems.append(f"{name}: {describe(a)} and {describe(b)} overlap")
    if not problems:
        lacking = math.prod(global_shape) - sum(piece.numel for piece in pieces)
        if lacking:
            problems.append(f"{name}: {lacking} of {math.prod(global_shape)} elements are missing")
    return problems


def describe(piece: Piece) -> str:
    """A piece in words of a message: kind, box and flat range."""
    box = ", ".join(f"{o}:{o + s}" for o, s in zip(piece.offset, piece.shape, strict=True))
    return f"{piece.kind} [{box}] elements {piece.start}:{piece.stop}"


def _overlapping_pairs(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Piece]]:
    """Pairs that overlap: a sweep inside each box, then box against box (few of these)."""
    by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Piece]] = {}
    for piece in pieces:
        by_box.setdefault((piece.offset, piece.shape), []).append(piece)
    for members in by_box.values():
        members.sort(key=lambda piece: (piece.start, piece.stop))
        furthest = members[0]
        for piece in members[1:]:
            if piece.start < furthest.stop:
                yield furthest, piece
            if piece.stop > furthest.stop:
                furthest = piece
    keys = sorted(by_box)
    for i, (offset, shape) in enumerate(keys):
        for other in keys[i + 1 :]:
            if offset and other[0][0] >= offset[0] + shape[0]:
                break  # sorted by first offset: nothing further on can meet this box
            if _boxes_meet(offset, shape, *other):
                yield from (
                    (a, b)
                    for a in by_box[offset, shape]
                    for b in by_box[other]
                    if next(iter(overlaps(a, b)), None) is not None
                )


def _legal(piece: Piece) -> bool:
    inside = all(
        o >= 0 and s >= 0 and o + s <= g for o, s, g in zip(piece.offset, piece.shape, piece.global_shape, strict=True)
    )
    return inside and 0 <= piece.start <= piece.stop <= math.prod(piece.shape)


def _boxes_meet(a: tuple[int, ...], a_shape: tuple[int, ...], b: tuple[int, ...], b_shape: tuple[int, ...]) -> bool:
    return all(ao < bo + bs and bo < ao + asz for ao, asz, bo, bs in zip(a, a_shape, b, b_shape, strict=True))


def _run_start(box: Box, at: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """First element of a sub-box that is one contiguous run of `box`, else None."""
    start, partial = box.flat, False
    strides = [math.prod(box.shape[dim + 1 :]) for dim in range(len(shape))]
    for dim in range(len(shape) - 1, -1, -1):
        if partial and shape[dim] != 1:
            return None
        partial = partial or shape[dim] != box.shape[dim]
        start += at[dim] * strides[dim]
    return start


def _view(flat: Array, box: Box, at: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    whole = flat[box.flat : box.flat + math.prod(box.shape)].reshape(box.shape)
    view: Array = whole[tuple(slice(a, a + s) for a, s in zip(at, shape, strict=True))]
    return view


def _at(offset: tuple[int, ...], dim: int, step: int) -> tuple[int, ...]:
    return (*offset[:dim], offset[dim] + step, *offset[dim + 1 :])


def _one(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], 1, *shape[dim + 1 :])


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
