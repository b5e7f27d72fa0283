"""The Mixture-of-Experts layer: route, dispatch, experts, combine.

Shape suffixes: B sequences, S tokens of a sequence, T = B*S tokens, R experts held here, E experts of the model,
H hidden, I expert width, k slots a token.

The layer is plain single-device PyTorch. Expert parallelism is another `Dispatcher`, put in from outside; narrowing
replaces the stacked weights by the R experts that this rank holds.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mula_ray.config.errors import UserError
from mula_ray.config.model import ModelConfig
from mula_ray.model.aux import AuxSink
from mula_ray.model.layers import Region, run_once
from mula_ray.model.router import Router
from mula_ray.ops.experts import expert_ffn
from mula_ray.ops.runtime import Runtime
from mula_ray.ops.sink import ImmediateSink, WeightGradSink


class Routed(NamedTuple):
    """What the experts of this rank work on. T' is T on one rank, and all tokens of the EP group under all-gather."""

    hidden: Tensor
    """(T', H)"""
    weights: Tensor
    """(T', k) routing weights"""
    ids: Tensor
    """(T', k) index of the expert among those held here, or a value outside [0, R): computed elsewhere"""


class Dispatcher(Protocol):
    """Brings tokens to the ranks that hold their experts and the results back. Not a module: it has no parameters."""

    def dispatch(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Routed:
        """hidden (T, H), weights (T, k), ids (T, k) of the whole model -> what this rank computes."""
        ...

    def combine(self, out: Tensor) -> Tensor:
        """Weighted sums over this rank's experts (T', H) -> the layer's output for this rank's own tokens (T, H)."""
        ...


class LocalDispatcher:
    """All experts are here: nothing moves."""

    def dispatch(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Routed:
        """Return the arguments."""
        return Routed(hidden, weights, ids)

    def combine(self, out: Tensor) -> Tensor:
        """Return the argument."""
        return out


class Experts(nn.Module):
    """The stacked weights of the experts held here, and how they are computed."""

    def __init__(
        self,
        cfg: ModelConfig,
        layer: int,
        rank: int,
        device: torch.device | None,
        dtype: torch.dtype,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__()
        assert cfg.moe is not None
        self.moe, self.where = cfg.moe, f"experts of layer {layer} on rank {rank}"
        experts, width = cfg.moe.experts, cfg.moe.expert_width
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, cfg.hidden, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, cfg.hidden, width, device=device, dtype=dtype))
        self.sink: WeightGradSink = ImmediateSink()
        self.runtime = runtime or Runtime()

    def forward(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Weighted sum over the experts held here: (T', H), (T', k), local ids (T', k) -> (T', H)."""
        return expert_ffn(
            hidden,
            weights,
            ids,
            self.gate_up_proj,
            self.down_proj,
            first_expert=0,
            backend=self.moe.backend,
            sink=self.sink,
            chunk_tokens=self.moe.chunk_tokens or self._fair_share(ids),
            where=self.where,
            runtime=self.runtime,
        )

    def check(self, ids: Tensor) -> None:
        """Ids as the router gives them, before they travel.

        Raises:
            UserError: an id that is no expert of the model (checked where that costs no device synchronisation).
        """
        if ids.device.type != "cpu" or ids.numel() == 0:
            return
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= self.moe.experts:
            raise UserError(
                f"{self.where}: expert ids reach from {low} to {high}; they must lie in 0..{self.moe.experts - 1} of "
                "the model. The router is damaged"
            )

    def _fair_share(self, ids: Tensor) -> int:
        """Memory guard by default: keep activations for up to twice the routed rows of a perfectly balanced rank."""
        share = ids.numel() * self.gate_up_proj.shape[0] / self.moe.experts
        return max(1024, 2 * math.ceil(share))


class MoE(nn.Module):
    """One Mixture-of-Experts layer.

    `dispatcher` and `region` are set from outside (parallel/): how tokens travel, and whether everything after the
    routing decision is computed again in the backward pass. Routing itself never is.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        layer: int,
        rank: int,
        device: torch.device | None,
        dtype: torch.dtype,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__()
        self.gate = Router(cfg, layer, rank, device, dtype)
        self.experts = Experts(cfg, layer, rank, device, dtype, runtime)
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.region: Region = run_once

    def forward(self, hidden_BSH: Tensor, weight_B: Tensor | None, aux: AuxSink | None) -> Tensor:
        """(B, S, H) -> (B, S, H); weight_B and aux as in `Router`."""
        weights_Tk, ids_Tk = self.gate(hidden_BSH, weight_B, aux)
        out_TH = self.region(self.after_routing, hidden_BSH.flatten(0, 1), weights_Tk, ids_Tk)
        return out_TH.view_as(hidden_BSH)

    def after_routing(self, hidden_TH: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
        """Dispatch, compute, combine: (T, H) -> (T, H)."""
        self.experts.check(ids_Tk)
        routed = self.dispatcher.dispatch(hidden_TH, weights_Tk, ids_Tk)
        out = self.experts(*routed)
        return self.dispatcher.combine(out)
