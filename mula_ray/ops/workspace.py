"""Memory that is used again: buffers of the CPU backends, without a page fault a page and step.

A fresh 64 MiB buffer costs the operating system's zeroing of every page each time, about as much as an elementwise
pass over it. A `Workspace` hands out leases on blocks of its own; a block comes back by itself when the last tensor on
it is gone, also when autograd held it from the forward to the backward pass.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref

import torch
from torch import Tensor

_PAGE = 2 << 20  # blocks are multiples of a huge page


class Workspace:
    """A pool of anonymous memory. Owned by a model, not by the module; keeps what the largest step needed."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self.allocated = 0
        """Bytes ever obtained from the operating system."""

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised CPU tensor of `shape`; its memory comes back when the tensor and its views are gone."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        size = _rounded(count * dtype.itemsize)
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._new(size)
        lease = (ctypes.c_char * size).from_buffer(block)
        weakref.finalize(lease, free.append, block).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=count).view(shape)

    def _new(self, size: int) -> mmap.mmap:
        self.allocated += size
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block


def _rounded(size: int) -> int:
    """`size` rounded up to eighths of a power of two, so that buffers of nearly equal steps fit each other's blocks."""
    step = max(_PAGE, 1 << max(size.bit_length() - 4, 0))
    return -(-size // step) * step
