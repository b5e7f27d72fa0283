"""Bringing tokens to the ranks that hold their experts, and the results back: expert-parallel dispatchers.

Shape suffixes: T own tokens, P ranks of the EP group, H hidden, k slots a token, C capacity of an all-to-all slice.

Both move sums, never means: a rank's experts see the tokens of the whole EP group, so their gradients already are sums
over its samples, and nothing is divided by EP anywhere. Every rank issues the same calls whatever the routing is, in
forward and in backward, also with no token for its experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mula_ray.model.moe import Routed
from mula_ray.parallel.collectives import (
    all_gather,
    all_gather_async,
    all_to_all_async,
    reduce_rows,
    reduce_scatter,
)
from mula_ray.parallel.groups import Group


class AllGatherDispatcher:
    """Gather all tokens of the EP group, compute the local experts' part of each, reduce-scatter the sums.

    The default: regular patterns are what oneCCL is best at. Ids travel as 16 bits (as bytes: gloo has no int16),
    packed with the routing weights into one call.
    """

    def __init__(self, group: Group, experts: int, combine_dtype: torch.dtype) -> None:
        """`experts` of the whole layer; both reduce-scatters (results, input gradients) sum in `combine_dtype`."""
        self._group, self._dtype = group, combine_dtype
        self._first = group.index * (experts // group.size)

    def dispatch(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Routed:
        """hidden (T, H), weights (T, k), ids (T, k) → those of all P·T tokens, ids relative to this rank's experts."""
        gathered: tuple[Tensor, Tensor, Tensor]
        gathered = _Gather.apply(hidden, weights, ids, self._group, self._dtype)  # type: ignore[no-untyped-call]
        hidden_all, weights_all, ids_all = gathered
        return Routed(hidden_all, weights_all, ids_all - self._first)

    def combine(self, out: Tensor) -> Tensor:
        """(P·T, H) partial sums → (T, H)."""
        return reduce_rows(out.to(self._dtype), self._group).to(out.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, ids: Tensor, group: Group, sum_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.group, ctx.sum_dtype = group, sum_dtype
        hidden_all = hidden.new_empty((group.size * hidden.shape[0], hidden.shape[1]))
        pending = all_gather_async(hidden_all, hidden.contiguous(), group)
        small = torch.cat([_bytes(weights), _bytes(ids.to(torch.int16))], dim=1)
        small_all = all_gather(small, group)
        cut = weights.shape[1] * weights.element_size()
        weights_all = small_all[:, :cut].contiguous().view(weights.dtype)
        ids_all = small_all[:, cut:].contiguous().view(torch.int16).to(ids.dtype)
        pending.wait()
        ctx.mark_non_differentiable(ids_all)
        return hidden_all, weights_all, ids_all

    @staticmethod
    def backward(ctx: Any, hidden: Tensor, weights: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dhidden = reduce_scatter(hidden.to(ctx.sum_dtype), ctx.group).to(hidden.dtype)
        return dhidden, reduce_scatter(weights, ctx.group), None, None, None


def _bytes(tensor: Tensor) -> Tensor:
    """(T, n) → (T, n · element size) uint8."""
    return tensor.detach().contiguous().view(torch.uint8)


class AllToAllDispatcher:
    """Send each token only to the ranks that hold its experts; for EP groups larger than a node.

    Slices are equal and never empty (their size is agreed: the largest number of tokens any rank sends to any other),
    since unequal and zero-sized all-to-all fails on several oneCCL versions. A token goes once to a rank, with all its
    slots.
    """

    def __init__(self, group: Group, experts: int) -> None:
        """`experts` of the whole layer."""
        self._group, self._held = group, experts // group.size
        self._back: tuple[Tensor, int] | None = None

    def dispatch(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Routed:
        """hidden (T, H), weights (T, k), ids (T, k) → (P·C, …): the tokens that the others sent here, and padding."""
        group, tokens = self._group, hidden.shape[0]
        goes = torch.zeros(group.size, tokens, dtype=torch.bool, device=hidden.device)
        goes[ids.t() // self._held, torch.arange(tokens, device=hidden.device)] = True
        counts = all_gather(goes.sum(dim=1, dtype=torch.int32), group)
        capacity = max(1, int(counts.max()))
        # Row tokens of a padded copy is all zero: the padding of every slice points there.
        rank_of, token_of = goes.nonzero(as_tuple=True)
        place = goes.cumsum(dim=1)[rank_of, token_of] - 1 + rank_of * capacity
        source = torch.full((group.size * capacity,), tokens, device=hidden.device)
        source[place] = token_of
        self._back = (source, tokens)
        local_ids = torch.cat([ids, ids.new_full((1, ids.shape[1]), -1)])[source]
        target = torch.arange(group.size, device=ids.device).repeat_interleave(capacity)[:, None]
        local_ids = torch.where(local_ids < 0, -1, local_ids - target * self._held).to(torch.int32)
        ids_here = torch.empty_like(local_ids)
        all_to_all_async(ids_here, local_ids, group).wait()
        return Routed(
            _exchange(_take(hidden, source), group), _exchange(_take(weights, source), group), ids_here.to(ids.dtype)
        )

    def combine(self, out: Tensor) -> Tensor:
        """(P·C, H) → (T, H): the parts come back and are summed in the order of the ranks, in fp32."""
        assert self._back is not None, "combine follows dispatch"
        (source, tokens), self._back = self._back, None
        back = _exchange(out, self._group)
        summed = back.new_zeros((tokens + 1, out.shape[1]), dtype=torch.float32).index_add(0, source, back.float())
        return summed[:tokens].to(out.dtype)


def _take(rows: Tensor, source: Tensor) -> Tensor:
    """Rows `source` of (T, n), index T meaning zeros."""
    return torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])[source]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: Group) -> Tensor:
        ctx.group = group
        out = torch.empty_like(inp, memory_format=torch.contiguous_format)
        all_to_all_async(out, inp.contiguous(), group).wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        all_to_all_async(out, grad.contiguous(), ctx.group).wait()
        return out, None


def _exchange(inp: Tensor, group: Group) -> Tensor:
    """All-to-all of equal slices; its own inverse, and so its own backward."""
    out: Tensor = _Exchange.apply(inp, group)  # type: ignore[no-untyped-call]
    return out
