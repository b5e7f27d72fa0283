"""The router: which k experts each token goes to, with which weights, and what that says about the load.

Shape suffixes: B sequences, S tokens of a sequence, T = B*S tokens, H hidden, E experts, k slots a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mula_ray.config.errors import CannotContinue, UserError
from mula_ray.config.model import ModelConfig
from mula_ray.model.aux import AuxSink, LayerAux


class NonFiniteRouter(CannotContinue):
    """A router's output is not finite: the weights or the activations before it are damaged."""


class Router(nn.Module):
    """Linear without bias, softmax over all experts in fp32, then top-k (SYSTEM.md 1).

    Runs once a step and layer, outside any recomputed region. `raises`: stop at logits that are not finite; switched
    off among ranks that meet in collectives, where the step's agreed finite flag finds them instead.
    """

    def __init__(
        self, cfg: ModelConfig, layer: int, rank: int, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert cfg.moe is not None
        self.cfg, self.moe, self.layer, self.rank = cfg.router, cfg.moe, layer, rank
        self.weight = nn.Parameter(torch.empty(cfg.moe.experts, cfg.hidden, device=device, dtype=dtype))
        self.raises = True
        """False where ranks must go on together: a step's agreed finite flag then finds what is not finite."""

    def forward(self, hidden_BSH: Tensor, weight_B: Tensor | None, aux: AuxSink | None) -> tuple[Tensor, Tensor]:
        """Route every token.

        Args:
            hidden_BSH: normed hidden states.
            weight_B: 1.0 for a real sample, 0.0 for an empty one (routed all the same, but counted nowhere).
            aux: takes this layer's losses and statistics.

        Returns:
            weights (T, k) fp32 and expert ids (T, k) int64.

        Raises:
            UserError: hidden states of another width.
            NonFiniteRouter: NaN or infinity in the logits (checked where that costs no device synchronisation).
        """
        if hidden_BSH.shape[-1] != self.weight.shape[1]:
            raise UserError(
                f"router of layer {self.layer} on rank {self.rank}: hidden states {tuple(hidden_BSH.shape)} must have "
                f"{self.weight.shape[1]} elements a token, the router's weight is {tuple(self.weight.shape)}"
            )
        logits_BSE = F.linear(hidden_BSH, self.weight).float()
        probs_BSE = torch.softmax(logits_BSE, dim=-1)
        if self.cfg.fur:
            ids_BSk = self._forced(logits_BSE)
            weights_BSk = probs_BSE.gather(-1, ids_BSk)
        else:
            weights_BSk, ids_BSk = probs_BSE.topk(self.moe.top_k, dim=-1)
        if self.cfg.norm_topk_prob:
            weights_BSk = weights_BSk / weights_BSk.sum(dim=-1, keepdim=True)
        z_BS = torch.logsumexp(logits_BSE, dim=-1)
        self._check(z_BS)
        if aux is not None:
            aux.add(self._report(logits_BSE, probs_BSE, z_BS, ids_BSk, weight_B))
        return weights_BSk.flatten(0, 1), ids_BSk.flatten(0, 1)

    def _forced(self, logits_BSE: Tensor) -> Tensor:
        """(B, S, k) ids of forced uniform routing: token s goes to k consecutive experts from s mod E."""
        batch, seq, experts = logits_BSE.shape
        start_S1 = torch.arange(seq, device=logits_BSE.device)[:, None]
        ids_Sk = (start_S1 + torch.arange(self.moe.top_k, device=logits_BSE.device)) % experts
        return ids_Sk.expand(batch, -1, -1)

    def _report(
        self, logits_BSE: Tensor, probs_BSE: Tensor, z_BS: Tensor, ids_BSk: Tensor, weight_B: Tensor | None
    ) -> LayerAux:
        batch, seq, experts = logits_BSE.shape
        if weight_B is None:
            weight_B = torch.ones(batch, device=logits_BSE.device)
        slots_Bn = ids_BSk.flatten(1)
        ones_Bn = torch.ones(slots_Bn.shape, device=slots_Bn.device)
        count_BE = torch.zeros(batch, experts, device=slots_Bn.device).scatter_add_(1, slots_Bn, ones_Bn)
        prob_sum_BE = probs_BSE.sum(dim=1)
        balance_B = experts * (count_BE / seq * (prob_sum_BE / seq)).sum(dim=-1)
        entropy_BS = z_BS.detach() - (probs_BSE.detach() * logits_BSE.detach()).sum(dim=-1)
        return LayerAux(
            layer=self.layer,
            balance_sum=(balance_B * weight_B).sum(),
            z_sum=(z_BS.square().sum(dim=1) * weight_B).sum(),
            prob_sum_E=weight_B @ prob_sum_BE,
            count_E=weight_B @ count_BE,
            entropy_sum=(entropy_BS.sum(dim=1) * weight_B).sum(),
        )

    def _check(self, z_BS: Tensor) -> None:
        # On a device the question would cost a synchronisation a layer; there the loss turns NaN and the step's
        # agreed finite flag catches it.
        if self.raises and z_BS.device.type == "cpu" and not bool(torch.isfinite(z_BS).all()):
            raise NonFiniteRouter(
                f"router of layer {self.layer} on rank {self.rank}: {int((~torch.isfinite(z_BS)).sum())} of "
                f"{z_BS.numel()} tokens have non-finite logits; they must be finite. Weights or activations before "
                "this layer are damaged: restore a checkpoint, or lower optim.lr if this comes back"
            )
