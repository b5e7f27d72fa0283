"""Is the state at rest still what the update wrote? Nothing else holds a second copy of masters and moments.

`digest` is a sum of 64-bit words, modulo 2**64, in 1,024 columns that are then mixed with odd factors: one pass at
memory speed on any device (12 GB/s on one CPU core). Any change within one word is found for
certain, since an odd factor is invertible; others are missed with probability 2**-64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mula_ray.optim.epso import Epso
from mula_ray.plan.topology import Coords, Topology

_COLUMNS = 1024
_HASH_BITS = 20


def digest(flat: Tensor) -> int:
    """64-bit digest of the bytes of a contiguous tensor."""
    raw = flat.detach().view(-1).view(torch.uint8)
    row = 8 * _COLUMNS
    whole = raw.numel() // row * row
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    factors = (torch.arange(_COLUMNS, device=raw.device) * 2 + 1) * 0x9E3779B97F4A7C1 | 1
    if whole:
        total = total + (raw[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0) * factors).sum()
    rest = raw[whole:].to(torch.int64)
    if rest.numel():
        at = torch.arange(rest.numel(), device=raw.device)
        total = total + (((rest + 1) << 8 * (at % 8)) * (at // 8 * 2 + 1)).sum()
    return int(total) & (2**64 - 1)


class StateGuard:
    """Remembers the digests of the owned state after an update and compares before the next one."""

    def __init__(self, optimizer: Epso) -> None:
        self._optimizer = optimizer
        self._written: dict[str, int] = {}

    def write(self) -> None:
        """Note the state as it is now: right after an update or a load."""
        self._written = {name: digest(buffer) for name, buffer in self._buffers().items()}

    def damaged(self) -> list[str]:
        """Buffers that changed since `write`, as `family.kind`; empty when nothing was noted."""
        if not self._written:
            return []
        return [name for name, buffer in self._buffers().items() if digest(buffer) != self._written[name]]

    def forget(self) -> None:
        """The state is about to change."""
        self._written = {}

    def _buffers(self) -> dict[str, Tensor]:
        return {
            f"{family.plan.family}.{kind}": getattr(family, kind)
            for family in self._optimizer.families
            for kind in ("master", "exp_avg", "exp_avg_sq")
        }


@dataclass(frozen=True)
class ReplicaHashes:
    """Compares working weights over the replicas inside the engine's one small all-reduce.

    Each replica group has two numbers in the vector, the sums over its ranks of a 20-bit hash and of its square: exact
    integers in fp64 up to 4,096 ranks. By Cauchy-Schwarz, n * (sum of squares) equals (sum)^2 only if all are equal.
    """

    topology: Topology

    @property
    def width(self) -> int:
        """Numbers in the vector: two for each (pp, tp) of the dense and each (pp, ep) of the expert family."""
        return 2 * self.topology.pp * (self.topology.tp + self.topology.ep)

    def vector(self, optimizer: Epso, at: Coords) -> Tensor:
        """(width,) fp64: this rank's hashes in its groups' places."""
        out = torch.zeros(self.width, dtype=torch.float64)
        for family in optimizer.families:
            full = digest(family.weights)
            small = float((full ^ (full >> 23) ^ (full >> 44)) & (2**_HASH_BITS - 1))
            place = self._place(family.plan.family == "dense", at)
            out[place], out[place + 1] = small, small * small
        return out

    def unequal(self, summed: Tensor) -> list[str]:
        """Replica groups whose members' weights differ, from the vector summed over all ranks."""
        bad = []
        for dense, ranks, axis, size in (
            (True, self.topology.ddp, "tp", self.topology.tp),
            (False, self.topology.edp, "ep", self.topology.ep),
        ):
            for pp in range(self.topology.pp):
                for index in range(size):
                    place = self._place(dense, Coords(dp=0, pp=pp, ep=0 if dense else index, tp=index if dense else 0))
                    first, squares = int(summed[place]), int(summed[place + 1])
                    if ranks * squares != first * first:
                        bad.append(f"{'dense' if dense else 'expert'} weights of pp {pp}, {axis} {index}")
        return bad

    def _place(self, dense: bool, at: Coords) -> int:
        if dense:
            return 2 * (at.pp * self.topology.tp + at.tp)
        return 2 * (self.topology.pp * self.topology.tp + at.pp * self.topology.ep + at.ep)
