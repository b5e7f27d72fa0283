"""A piece of state: where the elements of a flat tensor on a rank lie in a global tensor.

The one type in which the optimizer, checkpoints and snapshots meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Kind = Literal["weight", "master", "exp_avg", "exp_avg_sq"]


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) in row-major order of the box (`offset`, `shape`) of the global tensor `name`.

    `kind` says which tensor of that name: the working weight, its fp32 master, or one of Adam's moments.
    A piece is always stored and copied as a flat, contiguous run of `stop - start` elements of `dtype`.
    """

    name: str
    kind: Kind
    dtype: Literal["fp32", "bf16"]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.numel * (4 if self.dtype == "fp32" else 2)


class StateReader(Protocol):
    """Where state comes from: a checkpoint, or a memory snapshot."""

    def read_into(self, piece: Piece, out: Any) -> None:
        """Fill `out`, a flat tensor (or writable buffer) of `piece.numel` elements of `piece.dtype`, with the piece.

        Raises:
            KeyError: the state does not have it.
        """

    def read_many(self, items: Iterable[tuple[Piece, Any]]) -> None:
        """As `read_into` for every (piece, out), overlapped where that is faster."""
