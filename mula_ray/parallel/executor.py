"""Running the micro-batches of a step through this rank's stages: the seam at which a pipeline schedule comes in.

Shape suffixes: B sequences of a micro-batch, S tokens of a sequence, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mula_ray.config.model import ModelConfig
from mula_ray.model.aux import AuxSink
from mula_ray.model.transformer import Transformer


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass. `doc_starts`: index at which each token's document starts, for document_mask."""

    tokens: Tensor
    """(B, S+1) int64: S inputs, and the same shifted by one as targets."""
    weight: Tensor
    """(B,) fp32: 1.0 real sample, 0.0 empty one."""
    doc_starts: Tensor | None = None
    """(B, S) int32"""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        starts = None if self.doc_starts is None else self.doc_starts.to(device)
        return MicroBatch(self.tokens.to(device), self.weight.to(device), starts)

    def empty(self) -> MicroBatch:
        """One of the same shape that counts for nothing."""
        return MicroBatch(self.tokens, torch.zeros_like(self.weight), self.doc_starts)


@dataclass(frozen=True)
class Divisors:
    """What the sums of a step are divided by before backward: real sequences and tokens of the *global* batch."""

    sequences: float
    tokens: float


class Sums:
    """Sums over this rank's micro-batches and stages; adding up all ranks' gives the step's. Lives on the device."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        experts = 0 if model.moe is None else model.moe.experts
        self.scalars = torch.zeros(5, dtype=torch.float64, device=device)
        """sums of: cross-entropy over tokens; tokens; sequences; balance over sequences; z over tokens. The last two
        are means over the layers."""
        self.counts_LE = torch.zeros((model.layers, experts), dtype=torch.float64, device=device)
        self.entropy_L = torch.zeros(model.layers, dtype=torch.float64, device=device)

    def add_loss(self, loss: Tensor, weight_B: Tensor, seq: int) -> None:
        """Where the head is: cross-entropy sum of a micro-batch of sequences of `seq` tokens."""
        sequences = weight_B.sum().double()
        self.scalars[:3] += torch.stack([loss.detach().double(), sequences * seq, sequences])

    def add_aux(self, aux: AuxSink) -> None:
        """What the routers of a stage reported."""
        if not aux.layers:
            return
        self.scalars[3:] += torch.stack([aux.balance_sum().detach(), aux.z_sum().detach()]).double()
        rows = torch.tensor([record.layer for record in aux.layers], device=self.counts_LE.device)
        self.counts_LE.index_add_(0, rows, aux.counts().double())
        self.entropy_L.index_add_(0, rows, aux.entropy_sum().double())


class Executor(Protocol):
    """Runs forward, and backward when training, of all micro-batches, in the order of its schedule."""

    def complete(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """`batches`, with empty ones added where the schedule needs more."""
        ...

    def run(self, batches: Sequence[MicroBatch], divisors: Divisors | None, sums: Sums) -> None:
        """Add to `sums`; with `divisors`, accumulate gradients of (sum of losses) / divisors into `.grad`."""
        ...


class SingleStage:
    """One stage holds the whole model: forward and backward of one micro-batch after the other."""

    def __init__(self, stage: Transformer, model: ModelConfig) -> None:
        self._stage, self._model = stage, model

    def complete(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Any number will do."""
        return list(batches)

    def run(self, batches: Sequence[MicroBatch], divisors: Divisors | None, sums: Sums) -> None:
        """See `Executor`."""
        for batch in batches:
            with torch.set_grad_enabled(divisors is not None):
                aux = AuxSink(self._model)
                hidden = self._stage(batch.tokens[:, :-1], aux, weight=batch.weight, doc_starts=batch.doc_starts)
                loss = self._stage.loss(hidden, batch.tokens[:, 1:], batch.weight)
                sums.add_loss(loss, batch.weight, batch.tokens.shape[1] - 1)
                sums.add_aux(aux)
                if divisors is not None:
                    total = loss / divisors.tokens
                    if aux.layers:
                        total = total + aux.loss(divisors.sequences, divisors.tokens)
                    total.backward()  # type: ignore[no-untyped-call]
