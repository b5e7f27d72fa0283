"""The head: logits of the vocabulary and the cross-entropy of the next token.

Shape suffixes: B sequences, S tokens of a sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mula_ray.config.model import ModelConfig


class LossHead(nn.Module):
    """The untied output projection with its loss. Tensor parallelism replaces it by a vocabulary-parallel one."""

    def __init__(self, cfg: ModelConfig, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cfg.vocab_size, cfg.hidden, device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of final-normed hidden states (..., H)."""
        return F.linear(hidden, self.weight)

    def loss(self, hidden_BSH: Tensor, targets_BS: Tensor, weight_B: Tensor | None = None) -> Tensor:
        """() fp32: cross-entropy summed over tokens, each times its sample's weight, nats.

        Divide by the number of real tokens of the global batch.
        """
        logits_BSV = self(hidden_BSH).float()
        loss_BS = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="none").view_as(targets_BS)
        per_sample_B = loss_BS.sum(dim=1)
        return per_sample_B.sum() if weight_B is None else (per_sample_B * weight_B).sum()
