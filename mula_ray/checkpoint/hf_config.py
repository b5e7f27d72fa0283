"""`config.json` of Hugging Face's OLMoE and OLMo, to and from our model configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mula_ray.config.errors import UserError
from mula_ray.config.model import ModelConfig, MoEConfig, RouterConfig

_COMMON = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}


def hf_config(model: ModelConfig, context: int, dtype: str) -> dict[str, Any]:
    """`config.json` of an OLMoE- or OLMo-shaped model. `context`: longest sequence, tokens. `dtype`: fp32 or bf16.

    Raises:
        UserError: the model is neither (their shapes have no switch for it).
    """
    plain: dict[str, Any] = {
        **_COMMON,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "max_position_embeddings": context,
        "initializer_range": model.init_std,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "clip_qkv": model.clip_qkv,
        "dtype": "float32" if dtype == "fp32" else "bfloat16",
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model.moe is not None and model.norm == "rmsnorm" and model.qk_norm:
        return plain | {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "rms_norm_eps": model.norm_eps,
            "intermediate_size": model.moe.expert_width,
            "num_experts": model.moe.experts,
            "num_experts_per_tok": model.moe.top_k,
            "norm_topk_prob": model.router.norm_topk_prob,
            "router_aux_loss_coef": model.router.balance_coef,
            "output_router_logits": False,
        }
    if model.ffn is not None and model.norm == "layernorm" and not model.qk_norm and model.norm_eps == 1e-5:
        return plain | {
            "architectures": ["OlmoForCausalLM"],
            "model_type": "olmo",
            "intermediate_size": model.ffn,
        }
    raise UserError(
        f"a model with moe={model.moe is not None}, norm={model.norm}, norm_eps={model.norm_eps}, "
        f"qk_norm={model.qk_norm} has no Hugging Face class: "
        "OLMoE is moe + rmsnorm + qk_norm, OLMo is ffn + layernorm with norm_eps 1e-5"
    )


def model_from_hf(plain: Mapping[str, Any]) -> ModelConfig:
    """Our configuration of an OLMoE or OLMo `config.json`.

    Raises:
        UserError: another model type, or a setting that we do not have (named).
    """
    kind = plain.get("model_type")
    if kind not in ("olmoe", "olmo"):
        raise UserError(f"model_type is {kind!r}; only olmoe and olmo are imported")
    for key, wanted in (*_COMMON.items(), ("num_key_value_heads", plain.get("num_attention_heads"))):
        if plain.get(key, wanted) not in (wanted, None):
            raise UserError(f"{key} is {plain[key]!r} in config.json; only {wanted!r} is supported")
    rope = plain.get("rope_parameters") or plain.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"rope_type is {rope['rope_type']!r} in config.json; only 'default' is supported")
    moe = kind == "olmoe"
    try:
        return ModelConfig(
            vocab_size=plain["vocab_size"],
            hidden=plain["hidden_size"],
            layers=plain["num_hidden_layers"],
            heads=plain["num_attention_heads"],
            ffn=None if moe else plain["intermediate_size"],
            moe=MoEConfig(
                experts=plain["num_experts"],
                top_k=plain["num_experts_per_tok"],
                expert_width=plain["intermediate_size"],
            )
            if moe
            else None,
            router=RouterConfig(
                norm_topk_prob=bool(plain.get("norm_topk_prob", False)),
                balance_coef=float(plain.get("router_aux_loss_coef", 0.01)),
            ),
            norm="rmsnorm" if moe else "layernorm",
            norm_eps=float(plain.get("rms_norm_eps", 1e-5)),
            qk_norm=moe,
            rope_theta=float(rope.get("rope_theta", plain.get("rope_theta", 10000.0))),
            clip_qkv=plain.get("clip_qkv"),
            init_std=float(plain.get("initializer_range", 0.02)),
        )
    except KeyError as error:
        raise UserError(f"config.json lacks {error}; it is not a whole {kind} configuration") from error
    except ValueError as error:
        raise UserError(f"config.json describes a model that we do not have: {error}") from error
