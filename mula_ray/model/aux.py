"""What the routers of one forward pass report: auxiliary losses and load statistics, with no state in the model.

Shape suffixes: B sequences, S tokens of a sequence, T = B*S tokens, L layers, E experts, k slots a token.

Sums, not means: a sum over the sequences of this micro-batch divided by the *global* count gives the same loss in
every split of the batch over ranks and micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mula_ray.config.model import ModelConfig


@dataclass(frozen=True)
class LayerAux:
    """The report of one layer's router for one forward pass. Empty samples (weight 0) are left out of everything."""

    layer: int
    balance_sum: Tensor
    """() fp32, differentiable: sum over sequences of E * sum_e f_e * p_e (SYSTEM.md 1)."""
    z_sum: Tensor
    """() fp32, differentiable: sum over tokens of logsumexp(logits)^2."""
    prob_sum_E: Tensor
    """(E,) fp32, differentiable: sum over tokens of the router's probabilities."""
    count_E: Tensor
    """(E,) fp32, exact integers: routed slots of each expert."""
    entropy_sum: Tensor
    """() fp32: sum over tokens of the entropy of the router's distribution, nats."""


class AuxSink:
    """Collects the `LayerAux` of the MoE layers during one forward pass of one micro-batch.

    One object a forward pass; the model only adds to it. With no MoE layer every sum is zero.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        self.cfg = cfg
        self.layers: list[LayerAux] = []

    def add(self, record: LayerAux) -> None:
        """Take the report of one layer."""
        self.layers.append(record)

    def balance_sum(self) -> Tensor:
        """() fp32: balance loss summed over sequences, averaged over *all* layers of the model.

        Divide by the global number of sequences. Stages of a pipeline add up to the whole.
        """
        return self._sum([record.balance_sum for record in self.layers]) / self.cfg.layers

    def z_sum(self) -> Tensor:
        """() fp32: z-loss summed over tokens, averaged over all layers. Divide by the global number of tokens."""
        return self._sum([record.z_sum for record in self.layers]) / self.cfg.layers

    def hf_balance(self, tokens: float | Tensor) -> Tensor:
        """() fp32: the balance loss as transformers defines it, counts and probabilities pooled over the layers.

        Not a sum over sequences: right only for a batch that one rank computes in one micro-batch of `tokens` tokens.
        """
        rows = tokens * len(self.layers)
        fraction_E = self._sum([record.count_E for record in self.layers]) / rows
        prob_E = self._sum([record.prob_sum_E for record in self.layers]) / rows
        return prob_E.numel() * (fraction_E * prob_E).sum()

    def loss(self, sequences: float | Tensor, tokens: float | Tensor) -> Tensor:
        """() fp32: this micro-batch's share of the auxiliary loss, coefficients applied.

        Args:
            sequences: real sequences of the global batch.
            tokens: real tokens of the global batch.
        """
        router = self.cfg.router
        pooled = router.balance == "hf" and bool(self.layers)
        balance = self.hf_balance(tokens) if pooled else self.balance_sum() / sequences
        return router.balance_coef * balance + router.z_coef * self.z_sum() / tokens

    def counts(self) -> Tensor:
        """(layers recorded, E) fp32: routed slots of each expert, no gradient; (0, 0) without MoE layers."""
        if not self.layers:
            return torch.zeros(0, 0)
        return torch.stack([record.count_E for record in self.layers]).detach()

    def entropy_sum(self) -> Tensor:
        """(layers recorded,) fp32: router entropy summed over tokens, nats, no gradient."""
        if not self.layers:
            return torch.zeros(0)
        return torch.stack([record.entropy_sum for record in self.layers]).detach()

    @staticmethod
    def _sum(terms: list[Tensor]) -> Tensor:
        return torch.stack(terms).sum(0) if terms else torch.zeros(())
