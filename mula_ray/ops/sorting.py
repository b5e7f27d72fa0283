"""From routing decisions to rows sorted by expert, and back: a stable counting sort.

Shape suffixes: T tokens, k slots a token, R experts held here, N routed rows (slots whose expert is held here).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowPlan:
    """The routed rows in the order in which the experts work on them: expert by expert, tokens ascending."""

    slot_N: Tensor
    """(N,) int64: index into the flattened (T*k) slots, of each row."""
    token_N: Tensor
    """(N,) int64: token of each row."""
    offsets: tuple[int, ...]
    """R + 1 ints: expert e owns rows offsets[e] .. offsets[e + 1] - 1."""

    @property
    def rows(self) -> int:
        """N."""
        return self.offsets[-1]


def plan_rows(ids_Tk: Tensor, experts: int) -> RowPlan:
    """Sort the slots by expert, stably; slots with ids outside [0, experts) are left out.

    Host code: on a device it would synchronise (see `triton_sort` for the one that does not).
    """
    slots, top_k = ids_Tk.numel(), max(ids_Tk.shape[1], 1)
    ids = ids_Tk.reshape(-1)
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    counts = torch.bincount(ids, minlength=experts + 1)[:experts]
    offsets = (0, *counts.cumsum(0).tolist())
    narrow = ids.to(torch.int16) if experts < 2**15 else ids  # 16-bit keys: the radix sort takes a quarter of the time
    slot = torch.sort(narrow, stable=True).indices[: offsets[-1]]
    assert offsets[-1] <= slots
    return RowPlan(slot, torch.div(slot, top_k, rounding_mode="floor"), offsets)
