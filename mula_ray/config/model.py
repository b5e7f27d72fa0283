"""What the model is: sizes, router, norms. Facts of the shipped models stand in `configs/`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from mula_ray.config.base import Section


class RouterConfig(Section):
    """The router: linear without bias, softmax over all experts in fp32, then top-k."""

    fur: bool = Field(False, description="forced uniform routing: token s goes to k consecutive experts from s mod E")
    balance: Literal["sequence", "hf"] = Field(
        "sequence",
        description="load-balancing loss per sequence and layer, or pooled as transformers does (parity only)",
    )
    balance_coef: float = Field(0.01, ge=0, description="weight of the load-balancing loss")
    z_coef: float = Field(0.001, ge=0, description="weight of the router z-loss")
    norm_topk_prob: bool = Field(False, description="renormalise the k routing weights to sum 1")


class MoEConfig(Section):
    """The expert block of every layer."""

    experts: PositiveInt
    top_k: PositiveInt
    expert_width: PositiveInt
    backend: Literal["auto", "classic", "reference", "cpu", "cpu_kernel", "grouped", "triton"] = "auto"
    chunk_tokens: int = Field(0, ge=0, description="memory guard: most routed rows computed at once; 0 derives it")

    @model_validator(mode="after")
    def _check(self) -> MoEConfig:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} exceeds experts {self.experts}; set top_k <= experts")
        return self


class ModelConfig(Section):
    """An OLMoE-shaped (with `moe`) or OLMo-shaped (without) decoder-only transformer."""

    vocab_size: PositiveInt = 50304
    hidden: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    ffn: PositiveInt | None = Field(None, description="width of the dense SwiGLU; exactly one of ffn and moe")
    moe: MoEConfig | None = None
    router: RouterConfig = RouterConfig()
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="layernorm is non-parametric (OLMo)")
    norm_eps: PositiveFloat = 1e-5
    qk_norm: bool = Field(True, description="RMSNorm over the whole Q and K projection, before RoPE")
    rope_theta: PositiveFloat = 10000.0
    clip_qkv: PositiveFloat | None = None
    init_std: PositiveFloat = 0.02

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if (self.ffn is None) == (self.moe is None):
            raise ValueError("exactly one of model.ffn (dense) and model.moe (experts) must be set")
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"hidden {self.hidden} must be an even multiple of heads {self.heads} (RoPE needs an even head_dim)"
            )
        if self.norm == "layernorm" and self.qk_norm:
            raise ValueError("qk_norm needs norm: rmsnorm; set qk_norm: false for a layernorm model")
        return self
