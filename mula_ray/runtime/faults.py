"""Faults that a rank plays on itself at a given step, so that rehearsals are exact: `--inject …@step=N`."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mula_ray.parallel.executor import MicroBatch
from mula_ray.runtime.inject import KINDS, Fault

_SELF = {"kill-rank", "freeze-rank", "spin-rank", "hang-collective", "nan-loss", "nan-grad", "flip-state", "slow-rank"}


class RankFaults:
    """The faults of this rank. `tell` says so before it happens; what others must do, they do when they hear it."""

    def __init__(self, faults: Sequence[Fault], rank: int, engine: Any, tell: Callable[[dict[str, Any]], None]) -> None:
        self._faults = [fault for fault in faults if fault.index == rank and fault.at == "step"]
        self._engine, self._tell = engine, tell
        self._slow: Fault | None = None
        self._began = 0.0
        self._rank = rank

    def now(self, code: int, step: int) -> None:
        """A storm's fault came over the board: play it in `step`, the one that begins."""
        self._faults.append(Fault(KINDS[code - 1], self._rank, "step", step, serial=-1))

    def phase(self, name: str, step: int) -> None:
        """A phase of `step` begins."""
        if self._slow is not None:
            self._drag(name)
        wanted = {"forward_backward": ("kill-rank", "freeze-rank", "spin-rank", "slow-rank"), "reduce": ("nan-grad",)}
        for fault in list(self._faults):
            if fault.number != step:
                continue
            if (
                fault.kind in wanted.get(name, ())
                or (fault.kind == "hang-collective" and name == "agree")
                or (name == "data" and (fault.kind == "flip-state" or fault.kind not in _SELF))
            ):
                self._play(fault)

    def batches(self, step: int, batches: list[MicroBatch]) -> list[MicroBatch]:
        """`nan-loss` spoils the weights of the first sample."""
        for fault in list(self._faults):
            if fault.number == step and fault.kind == "nan-loss":
                self._done(fault)
                first = batches[0]
                weight = first.weight.clone()
                weight[0] = float("nan")
                return [MicroBatch(first.tokens, weight, first.doc_starts), *batches[1:]]
        return batches

    def _done(self, fault: Fault) -> None:
        self._faults.remove(fault)
        self._tell({"kind": "fault", "fault": fault, "at": time.time()})

    def _play(self, fault: Fault) -> None:
        self._done(fault)
        kind = fault.kind
        if kind == "kill-rank":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "freeze-rank":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "spin-rank":
            re.match("(a|a)+$", "a" * 64 + "b")  # exponential, in C, never lets go of the interpreter lock
        elif kind == "hang-collective":
            time.sleep(1e6)
        elif kind == "nan-grad":
            next(p for stage in self._engine.stages for p in stage.parameters()).grad.view(-1)[0] = float("nan")
        elif kind == "flip-state":
            _, tensor = self._engine.pieces()[0]
            tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
        elif kind == "slow-rank":
            self._slow, self._began = fault, time.monotonic()

    def _drag(self, name: str) -> None:
        now = time.monotonic()
        if name == "forward_backward":
            self._began = now
        elif name == "reduce" and self._slow is not None:
            time.sleep((now - self._began) * (self._slow.factor - 1.0))
