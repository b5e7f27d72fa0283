"""Selective activation checkpointing: which parts of which layers compute their activations again in backward.

A part is a *region* of the model (`model/layers.py`): a function and the tensors that go in. Routing lies outside the
MoE region, so it is decided once. Recomputed or not, a part runs the same kernels on the same numbers: the same bits.
Its collectives are issued again by all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mula_ray.model.moe import MoE
from mula_ray.model.transformer import DecoderLayer, Transformer
from mula_ray.plan.recompute import parse_recompute


class _Enough(Exception):
    """All that backward needs was computed again; the rest of the region is not run."""


class _Region:
    """One run of a region in forward: keeps the inputs, and numbers what autograd would have kept.

    torch.utils.checkpoint does the same, but imports torch's compiler: 0.7 s of every rank's first step.
    """

    def __init__(self, fn: Callable[..., Tensor], inputs: tuple[Tensor | None, ...]) -> None:
        self._fn = fn
        self._inputs = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs]
        self._count = 0
        self._again: list[Tensor] = []

    def pack(self, _: Tensor) -> int:
        """In place of a tensor, autograd keeps its number."""
        self._count += 1
        return self._count - 1

    def unpack(self, number: int) -> Tensor:
        """The tensor of that number; the first call runs the region again."""
        if not self._again:
            self._recompute()
        return self._again[number]

    def _recompute(self) -> None:
        def keep(tensor: Tensor) -> int:
            # A number, never the tensor: an operation that keeps its own output would hold itself alive for ever.
            self._again.append(tensor.detach())
            if len(self._again) == self._count:
                raise _Enough
            return len(self._again)

        try:
            with saved_tensors_hooks(keep, self._again.__getitem__), torch.enable_grad():
                self._fn(*self._inputs)
        except _Enough:
            return
        raise AssertionError(f"a recomputed region kept {len(self._again)} tensors, not {self._count} as in forward")


def recomputed(fn: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """A region that keeps its inputs only. The model draws no random numbers, hence no generator state."""
    if not torch.is_grad_enabled():
        return fn(*tensors)
    region = _Region(fn, tensors)
    with saved_tensors_hooks(region.pack, region.unpack):
        return fn(*tensors)


def apply_recompute(stage: Transformer, text: str, layers: int) -> None:
    """Set the regions of `stage` as `parallel.recompute` asks; `layers` of the whole model.

    Raises:
        UserError: `text` cannot be read.
    """
    parts = parse_recompute(text, layers)
    for name, module in stage.model.layers.items():
        assert isinstance(module, DecoderLayer)
        number = int(name)
        if number in parts.get("norms", ()):
            module.norm_region = recomputed
        if number in parts.get("attention", ()):
            module.attention_region = recomputed
        if number in parts.get("moe", ()) and isinstance(module.mlp, MoE):
            module.mlp.region = recomputed


def saved_bytes(run: Callable[[], object], parameters: Iterable[nn.Parameter]) -> int:
    """Bytes that autograd keeps for backward while `run` builds its graph, parameters left out, storages once."""
    own = {param.untyped_storage().data_ptr() for param in parameters}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an operation that keeps its own output must not hold itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    total = sum(kept.values())
    del result
    return total
