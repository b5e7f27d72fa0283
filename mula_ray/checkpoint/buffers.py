"""Flat tensors and buffers as bytes. Nothing here imports torch: writer processes do without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from mula_ray.plan.overlap import Array
from mula_ray.plan.pieces import Piece

ELEMENT: dict[str, np.dtype[Any]] = {"fp32": np.dtype(np.uint32), "bf16": np.dtype(np.uint16)}
"""Elements are copied as bit patterns: no conversion, no change of a NaN."""


def host_bytes(buffer: Any, nbytes: int) -> memoryview:
    """The `nbytes` bytes of a flat, contiguous tensor (a device tensor is copied to the host) or buffer."""
    if hasattr(buffer, "detach"):  # a tensor, of whatever torch
        import torch

        tensor = buffer.detach().reshape(-1).contiguous().cpu()
        buffer = tensor.view(torch.uint8).numpy()
    view = memoryview(buffer).cast("B")
    assert view.nbytes == nbytes, f"buffer of {view.nbytes} bytes for a piece of {nbytes}"
    return view


def host_array(buffer: Any, piece: Piece) -> Array:
    """The elements of a *host* tensor or writable buffer as bit patterns, sharing memory."""
    if hasattr(buffer, "detach"):
        import torch

        assert buffer.is_contiguous(), "a piece is read into a contiguous flat tensor"
        buffer = buffer.detach().view(-1).view(torch.uint8).numpy()
    array: Array = np.frombuffer(buffer, dtype=np.uint8).view(ELEMENT[piece.dtype])
    assert array.size == piece.numel, f"buffer of {array.size} elements for a piece of {piece.numel}"
    return array


def is_device_tensor(buffer: Any) -> bool:
    """Whether `buffer` is a tensor that does not lie in host memory."""
    return hasattr(buffer, "detach") and buffer.device.type != "cpu"


def select(items: Iterable[tuple[Piece, Any]], wanted: Iterable[Piece]) -> list[tuple[Piece, Any]]:
    """Views of `items` (pieces and flat tensors) that make up the pieces of `wanted`, in as many parts as held.

    Raises:
        KeyError: a wanted piece is not all in the items.
    """
    held: dict[tuple[str, str, tuple[int, ...], tuple[int, ...]], list[tuple[Piece, Any]]] = {}
    for piece, buffer in items:
        held.setdefault((piece.name, piece.kind, piece.offset, piece.shape), []).append((piece, buffer))
    chosen = []
    for piece in wanted:
        at = piece.start
        for whole, buffer in sorted(
            held.get((piece.name, piece.kind, piece.offset, piece.shape), ()), key=lambda item: item[0].start
        ):
            if whole.start <= at < min(whole.stop, piece.stop):
                stop = min(whole.stop, piece.stop)
                part = dataclasses.replace(piece, start=at, stop=stop)
                chosen.append((part, buffer[at - whole.start : stop - whole.start]))
                at = stop
        if at < piece.stop:
            raise KeyError(f"this rank does not hold {piece}")
    return chosen
