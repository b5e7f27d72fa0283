"""FLOPs of training and model FLOPs utilisation (MFU).

Training FLOPs per token = 6 x (active parameters that take part in GEMMs: router included, input embedding excluded)
+ causal attention 6 x L x S x H, half of the full 12 x L x S x H. Recomputation never counts as useful work.
"""

from __future__ import annotations

from mula_ray.config.model import ModelConfig
from mula_ray.plan.layout import param_specs


def gemm_params(model: ModelConfig) -> int:
    """Active parameters that a token meets in a matrix product: no norms, no input embedding, k of E experts."""
    total = 0
    for spec in param_specs(model):
        if len(spec.shape) < 2 or spec.place == "embed":
            continue
        if spec.family == "expert":
            assert model.moe is not None
            total += spec.numel * model.moe.top_k // model.moe.experts
        else:
            total += spec.numel
    return total


def attention_flops_per_token(model: ModelConfig, context: int) -> int:
    """Causal score and value products of one token, forward and backward, averaged over a sequence of `context`.

    A document mask lowers the true figure; it is not taken off, so that MFU stays comparable between runs.
    """
    return 6 * model.layers * context * model.hidden


def train_flops_per_token(model: ModelConfig, context: int) -> int:
    """Forward and backward FLOPs of one token of a sequence of `context` tokens."""
    return 6 * gemm_params(model) + attention_flops_per_token(model, context)


def tflops_per_tile(model: ModelConfig, context: int, tokens_per_s: float, tiles: int) -> float:
    """Useful TFLOP/s of each of `tiles` tiles at a global rate of `tokens_per_s`."""
    return train_flops_per_token(model, context) * tokens_per_s / tiles / 1e12


def mfu(model: ModelConfig, context: int, tokens_per_s: float, tiles: int, peak_tflops: float) -> float:
    """Share of the peak (TFLOP/s of one tile, measured or the vendor's) that useful work reaches; 0 without a peak."""
    if peak_tflops <= 0:
        return 0.0
    return tflops_per_tile(model, context, tokens_per_s, tiles) / peak_tflops
