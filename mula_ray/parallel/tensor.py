"""Tensor parallelism, applied from outside to a model whose parameters are already narrowed.

Shape suffixes: B sequences, S tokens of a sequence, T = B*S, H hidden, V vocabulary, P ranks of the TP group.

- attention and dense FFN: columns, then rows (Shoeybi et al. 2019): the input is copied in (its gradient summed), the
  output projection's partial results are summed;
- QK-norm is over the *whole* projection: one scalar a token, the sum of squares, is summed over the group, in forward
  and in backward, since every rank's part depends on every other's;
- embedding and head hold V/P rows each. The loss works on local logits (T, V/P): maximum, sum of exponentials and the
  target's logit travel, one number a token each; full logits exist nowhere;
- the MoE layer: routing is the same on all TP ranks (same tokens, same weights); each then takes 1/P of the tokens
  through dispatch and experts, and the results are joined. Experts are not sliced by TP.

Norms, router and everything else held by all TP ranks get the whole gradient on each of them: none is a partial sum.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mula_ray.model.layers import Attention, DenseFfn, RMSNorm
from mula_ray.model.loss import LossHead
from mula_ray.model.moe import Dispatcher, MoE, Routed
from mula_ray.model.transformer import DecoderLayer, Transformer
from mula_ray.parallel.collectives import all_gather, all_reduce, copy_in, join_rows, split_rows, sum_out
from mula_ray.parallel.groups import Group


def apply_tensor(stage: Transformer, group: Group) -> None:
    """Make the modules of `stage` talk over the TP `group`. Parameters must be narrowed already."""
    for layer in stage.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        _split_block(layer.self_attn, layer.self_attn.o_proj, group)
        _widen_qk_norms(layer.self_attn, group)
        if isinstance(layer.mlp, DenseFfn):
            _split_block(layer.mlp, layer.mlp.down_proj, group)
    if stage.model.embed_tokens is not None:
        weight = cast(nn.Parameter, stage.model.embed_tokens.weight)
        stage.model.embed_tokens = VocabEmbedding(weight, group)  # type: ignore[assignment]
    if stage.lm_head is not None:
        stage.lm_head = VocabLossHead(stage.lm_head, group)


def split_tokens(stage: Transformer, group: Group) -> None:
    """Give each rank of the TP `group` 1/P of the tokens of every MoE layer; after EP has set its dispatchers."""
    for layer in stage.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        if isinstance(layer.mlp, MoE):
            layer.mlp.dispatcher = TokenSplitDispatcher(layer.mlp.dispatcher, group)


def _split_block(block: Attention | DenseFfn, last: nn.Module, group: Group) -> None:
    """Copy the block's input in, sum the partial results of its `last` projection."""
    block.register_forward_pre_hook(lambda _module, args: (copy_in(args[0], group), *args[1:]))
    last.register_forward_hook(lambda _module, _args, out: sum_out(out, group))


def _widen_qk_norms(attention: Attention, group: Group) -> None:
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name)
        if isinstance(norm, RMSNorm):
            setattr(attention, name, WideRMSNorm(norm, group))


class WideRMSNorm(nn.Module):
    """`RMSNorm` over a width that is split over the group: each rank holds 1/P of input and weight."""

    def __init__(self, norm: RMSNorm, group: Group) -> None:
        super().__init__()
        self.eps, self.weight, self._group = norm.eps, norm.weight, group

    def forward(self, x: Tensor) -> Tensor:
        """(..., width / P) -> (..., width / P), statistics in fp32 over the whole width."""
        wide = x.float()
        squares = copy_in(sum_out(wide.square().sum(-1, keepdim=True), self._group), self._group)
        scale = torch.rsqrt(squares / (x.shape[-1] * self._group.size) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class VocabEmbedding(nn.Module):
    """Embedding of which this rank holds rows [index * V/P, (index+1) * V/P)."""

    def __init__(self, weight: nn.Parameter, group: Group) -> None:
        super().__init__()
        self.weight, self._group = weight, group

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """(B, S) -> (B, S, H), the same on all ranks."""
        local_BS, elsewhere_BS = _local_ids(tokens_BS, self.weight.shape[0], self._group)
        rows_BSH = F.embedding(local_BS, self.weight).masked_fill(elsewhere_BS[..., None], 0)
        return sum_out(rows_BSH, self._group)


class VocabLossHead(LossHead):
    """Output projection of V/P rows, with a cross-entropy that never sees the other ranks' logits."""

    def __init__(self, head: LossHead, group: Group) -> None:
        nn.Module.__init__(self)
        self.weight, self._group = head.weight, group

    def forward(self, hidden: Tensor) -> Tensor:
        """This rank's logits (..., V/P) of hidden states (..., H)."""
        return super().forward(copy_in(hidden, self._group))

    def loss(self, hidden_BSH: Tensor, targets_BS: Tensor, weight_B: Tensor | None = None) -> Tensor:
        """() fp32: as `LossHead.loss`; the same value on all ranks."""
        logits_TV = self(hidden_BSH).flatten(0, 1)
        loss_T: Tensor = _VocabCrossEntropy.apply(logits_TV, targets_BS.flatten(), self._group)  # type: ignore[no-untyped-call]
        per_sample_B = loss_T.view_as(targets_BS).sum(dim=1)
        return per_sample_B.sum() if weight_B is None else (per_sample_B * weight_B).sum()


class _VocabCrossEntropy(torch.autograd.Function):
    """log(sum exp(logits)) - logit of the target, over logits that are split over the group's ranks."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, group: Group) -> Tensor:
        local_T, elsewhere_T = _local_ids(targets_T, logits_TV.shape[1], group)
        scores_TV = logits_TV.float()
        top_T = all_gather(scores_TV.amax(dim=1), group).view(group.size, -1).amax(dim=0)
        scores_TV = scores_TV - top_T[:, None]
        target_T = scores_TV.gather(1, local_T[:, None]).squeeze(1).masked_fill(elsewhere_T, 0)
        scores_TV.exp_()
        sums_2T = all_reduce(torch.stack([scores_TV.sum(dim=1), target_T]), group)
        scores_TV.div_(sums_2T[0][:, None])
        ctx.save_for_backward(scores_TV, local_T, elsewhere_T)
        ctx.dtype = logits_TV.dtype
        return sums_2T[0].log() - sums_2T[1]

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        probs_TV, local_T, elsewhere_T = ctx.saved_tensors
        grad_TV = probs_TV * grad_T[:, None]
        grad_TV.scatter_add_(1, local_T[:, None], (-grad_T).masked_fill(elsewhere_T, 0)[:, None])
        return grad_TV.to(ctx.dtype), None, None


def _local_ids(ids: Tensor, rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """(ids among this rank's `rows`, 0 where they are another rank's; where they are another rank's)."""
    local = ids - group.index * rows
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill(elsewhere, 0), elsewhere


class TokenSplitDispatcher:
    """Takes this rank's 1/P of the tokens into another dispatcher and joins the results."""

    def __init__(self, inner: Dispatcher, group: Group) -> None:
        self._inner, self._group = inner, group

    def dispatch(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Routed:
        """hidden (T, H), weights (T, k), ids (T, k), the same on all TP ranks; T is a multiple of P."""
        own_ids = ids.chunk(self._group.size)[self._group.index].contiguous()
        return self._inner.dispatch(split_rows(hidden, self._group), split_rows(weights, self._group), own_ids)

    def combine(self, out: Tensor) -> Tensor:
        """-> (T, H), the same on all TP ranks."""
        return join_rows(self._inner.combine(out), self._group)
