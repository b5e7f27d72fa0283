"""A group object that refuses what oneCCL and xccl lack, on any backend: what passes here does not fail there for that.

Refused: abort, a second group in the same place, reductions other than sum, max, min, product (no AVG), empty
all-to-all and unequal splits, send and receive (they crash on CPU), dtypes that oneCCL does not know, and everything
that is not listed here (so objects and strings too: those belong on the control group).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from mula_ray.parallel.backend import Store

KNOWN_DTYPES = frozenset(
    {torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
_OTHER_OPS = ("AVG", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_KNOWN_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


class NotInOneCCL(RuntimeError):
    """A call that oneCCL or xccl does not have."""


class StrictGroup:
    """Wraps `inner`, the group object of any backend.

    Args:
        store: of this generation; notes who made which group, so that a second one in its place is seen.
        where: name of the group.

    Raises:
        NotInOneCCL: this process made this group before.
    """

    def __init__(self, inner: Any, store: Store, index: int, size: int, where: str) -> None:
        self._inner, self._size, self._where = inner, size, where
        key = f"strict/{where}/{index}/{socket.gethostname()}/{os.getpid()}"
        if store.add(key, 1) > 1:
            self._refuse("making the group again in its place", "end the process and start a fresh one")

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """All-reduce in place."""
        self._check("all-reduce", *tensors)
        self._check_op("all-reduce", opts)
        return self._inner.allreduce(list(tensors)) if opts is None else self._inner.allreduce(list(tensors), opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        """Broadcast in place."""
        self._check("broadcast", *tensors)
        return self._inner.broadcast(list(tensors), opts)

    def all_gather_single(self, out: Tensor, inp: Tensor) -> Any:
        """(n) → (size·n)."""
        self._check("all-gather", out, inp)
        call = getattr(self._inner, "all_gather_single", None) or self._inner._allgather_base
        return call(out, inp)

    def reduce_scatter_single(self, out: Tensor, inp: Tensor, opts: Any) -> Any:
        """(size·n) → (n)."""
        self._check("reduce-scatter", out, inp)
        self._check_op("reduce-scatter", opts)
        call = getattr(self._inner, "reduce_scatter_single", None) or self._inner._reduce_scatter_base
        return call(out, inp, opts)

    def all_to_all_single(self, out: Tensor, inp: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Any:
        """Equal, non-empty slices."""
        self._check("all-to-all", out, inp)
        if inp.numel() == 0 or out.numel() == 0:
            self._refuse("an empty all-to-all", "pad every slice to at least one element")
        if len(set(out_sizes) | set(in_sizes)) > 1:
            self._refuse(f"all-to-all with unequal splits {in_sizes} → {out_sizes}", "pad them to equal ones")
        call = getattr(self._inner, "all_to_all_single", None) or self._inner.alltoall_base
        return call(out, inp, out_sizes, in_sizes)

    def abort(self) -> None:
        """Neither xccl nor ccl can."""
        self._refuse("abort", "end the process")

    def send(self, *_: Any) -> None:
        """Crashes oneCCL's CPU plugin."""
        self._refuse("send", "use a broadcast in a two-rank group")

    def recv(self, *_: Any) -> None:
        """Crashes oneCCL's CPU plugin."""
        self._refuse("receive", "use a broadcast in a two-rank group")

    def __getattr__(self, name: str) -> Any:
        if name == "shutdown":
            raise AttributeError(name)
        self._refuse(name, "use a call of parallel/collectives.py")

    def _check(self, kind: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.dtype not in KNOWN_DTYPES:
                self._refuse(f"{kind} of {tensor.dtype}", "view it as bytes, or convert it")
            if not tensor.is_contiguous():
                self._refuse(f"{kind} of a tensor that is not contiguous", "call contiguous()")

    def _check_op(self, kind: str, opts: Any) -> None:
        op = None if opts is None else opts.reduceOp
        if op is not None and all(op != known for known in _KNOWN_OPS):
            name = next((n for n in _OTHER_OPS if op == getattr(dist.ReduceOp, n)), "this reduction")
            self._refuse(f"{kind} with {name}", "sum, then divide")

    def _refuse(self, what: str, fix: str) -> NoReturn:
        raise NotInOneCCL(f"group {self._where}: oneCCL and xccl have no {what}; {fix}")
