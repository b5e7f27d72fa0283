"""Selective activation checkpointing: which parts of which layers compute their activations again in backward.

A part is a *region* of the model (`model/layers.py`): a function and the tensors that go in. Routing lies outside the MoE
region, so it is decided once. Recomputed or not, a part runs the same kernels on the same numbers: the same bits. Its
collectives are issued again by all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mula_ray.model.moe import MoE
from mula_ray.model.transformer import DecoderLayer, Transformer
from mula_ray.plan.recompute import parse_recompute


def recomputed(fn: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """A region that keeps its inputs only. No random numbers are drawn in the model, hence no generator state."""
    return cast(Tensor, checkpoint(fn, *tensors, use_reentrant=False, preserve_rng_state=False))


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
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    total = sum(kept.values())
    del result
    return total
