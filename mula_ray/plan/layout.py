"""The one table that holds every sharding fact: name, global shape, family, narrowed dimension, stage.

It drives narrowing at init, EPSO's families, norm counting and checkpoint slices. Names are those of Hugging Face's
OLMoE (experts stacked, as in transformers 5), so a new parameter lands in the right family by construction: its row
says so here, and nothing else lists names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mula_ray.config.model import ModelConfig
from mula_ray.plan.topology import Coords, Topology

Family = Literal["dense", "expert"]
Place = Literal["embed", "layer", "head"]
Init = Literal["normal", "ones"]


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the whole model.

    `tp_axis`: dim narrowed over TP, or None when TP ranks hold all of it. `ep_axis`: dim narrowed over EP.
    `tp_partial`: each TP rank sees only 1/tp of the tokens, so its gradient is a partial sum over the TP group.
    """

    name: str
    shape: tuple[int, ...]
    family: Family
    place: Place
    layer: int | None
    tp_axis: int | None = None
    ep_axis: int | None = None
    tp_partial: bool = False
    decay: bool = True
    init: Init = "normal"

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class LocalParam:
    """The box of a parameter that one rank holds: `offset` and `shape` in the global tensor, one entry a dim."""

    spec: ParamSpec
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return math.prod(self.shape)


def param_specs(model: ModelConfig) -> Iterator[ParamSpec]:
    """Every parameter of `model`, in model order.

    Stacked experts: gate_up_proj (E, 2I, H) with the gate rows first, down_proj (E, H, I). gate_up of the dense FFN
    stays two tensors, as in OLMo.
    """
    hidden, vocab = model.hidden, model.vocab_size
    yield ParamSpec("model.embed_tokens.weight", (vocab, hidden), "dense", "embed", None, tp_axis=0)
    for layer in range(model.layers):
        yield from _layer_specs(model, layer)
    if model.norm == "rmsnorm":
        yield ParamSpec("model.norm.weight", (hidden,), "dense", "head", None, decay=False, init="ones")
    yield ParamSpec("lm_head.weight", (vocab, hidden), "dense", "head", None, tp_axis=0)


def _layer_specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
    hidden, prefix = model.hidden, f"model.layers.{layer}"

    def norm(name: str, tp_axis: int | None = None) -> ParamSpec:
        return ParamSpec(
            f"{prefix}.{name}.weight", (hidden,), "dense", "layer", layer, tp_axis=tp_axis, decay=False, init="ones"
        )

    def linear(name: str, rows: int, cols: int, tp_axis: int | None) -> ParamSpec:
        return ParamSpec(f"{prefix}.{name}.weight", (rows, cols), "dense", "layer", layer, tp_axis=tp_axis)

    if model.norm == "rmsnorm":
        yield norm("input_layernorm")
    for proj in ("q_proj", "k_proj", "v_proj"):
        yield linear(f"self_attn.{proj}", hidden, hidden, 0)
    yield linear("self_attn.o_proj", hidden, hidden, 1)
    if model.qk_norm:
        yield norm("self_attn.q_norm", 0)
        yield norm("self_attn.k_norm", 0)
    if model.norm == "rmsnorm":
        yield norm("post_attention_layernorm")
    if model.moe is None:
        assert model.ffn is not None
        yield linear("mlp.gate_proj", model.ffn, hidden, 0)
        yield linear("mlp.up_proj", model.ffn, hidden, 0)
        yield linear("mlp.down_proj", hidden, model.ffn, 1)
        return
    experts, width = model.moe.experts, model.moe.expert_width
    yield linear("mlp.gate", experts, hidden, None)
    yield ParamSpec(
        f"{prefix}.mlp.experts.gate_up_proj", (experts, 2 * width, hidden), "expert", "layer", layer, ep_axis=0
    )
    yield ParamSpec(f"{prefix}.mlp.experts.down_proj", (experts, hidden, width), "expert", "layer", layer, ep_axis=0)


def narrow(spec: ParamSpec, topology: Topology, at: Coords) -> LocalParam:
    """The box of `spec` that the rank at `at` holds (if it holds its stage).

    Raises:
        ValueError: the narrowed dim is not divisible by the axis.
    """
    offset, shape = [0] * len(spec.shape), list(spec.shape)
    for dim, size, index, axis in (
        (spec.tp_axis, topology.tp, at.tp, "tp"),
        (spec.ep_axis, topology.ep, at.ep, "ep"),
    ):
        if dim is None or size == 1:
            continue
        if shape[dim] % size:
            raise ValueError(f"{spec.name}: dim {dim} of size {shape[dim]} is not divisible by parallel.{axis} {size}")
        shape[dim] //= size
        offset[dim] = index * shape[dim]
    return LocalParam(spec, tuple(offset), tuple(shape))


def total_params(model: ModelConfig) -> int:
    """Parameters of the whole model."""
    return sum(spec.numel for spec in param_specs(model))


def active_params(model: ModelConfig) -> int:
    """Parameters a token passes through: k of E experts, everything else whole."""
    if model.moe is None:
        return total_params(model)
    return sum(
        spec.numel * model.moe.top_k // model.moe.experts if spec.family == "expert" else spec.numel
        for spec in param_specs(model)
    )
