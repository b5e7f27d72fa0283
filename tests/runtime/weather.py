"""Runs that meet failures all the time: their shape, and how two runs' ends are compared bit for bit."""

from __future__ import annotations

import hashlib

import numpy as np
from run_helper import Run

from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.checkpoint.scan import find_latest
from mula_ray.plan.pieces import Piece
from mula_ray.train.records import Tail

SHAPE = (
    "model.hidden=64", "model.layers=4", "model.moe.experts=16", "model.moe.expert_width=160", "data.context=64",
    "train.steps=1000000", "train.global_batch=4", "train.micro_batch=1", "train.eval_every=0", "parallel.ep=2",
    "cluster.nodes=2", "cluster.tiles_per_node=2", "metrics.experts=false",
)  # fmt: skip
"""MoE with EP 2 x DP 2 on 2 nodes of 2 tiles, about 32 MB of state a run."""


class Events:
    """Counts of a run's events, read as they come."""

    def __init__(self, run: Run) -> None:
        self._tail = Tail(run.folder / "events.jsonl")

    def count(self, name: str) -> int:
        """Events of a kind so far."""
        return sum(line["event"] == name for line in self._tail.read())


def final_state(run: Run) -> tuple[int, dict[str, str]]:
    """(step, SHA-256 by name) of the newest checkpoint: every tensor of every kind whole, and cursor, tokens, RNG."""
    found = find_latest(run.folder / "checkpoints")
    assert found is not None, run.report()
    facts = found.manifest.facts
    sums = {"facts": repr((facts.cursor, facts.tokens, sorted(facts.rng.items())))}
    with CheckpointReader(found.path) as reader:
        for name, shape in found.manifest.shapes().items():
            for kind in ("weight", "master", "exp_avg", "exp_avg_sq"):
                if reader.has(name, kind):
                    dtype = reader.sources(name, kind)[0].piece.dtype
                    numel = int(np.prod(shape))
                    piece = Piece(name, kind, dtype, shape, (0,) * len(shape), shape, 0, numel)
                    out = np.zeros(piece.nbytes, np.uint8)
                    reader.read_into(piece, out)
                    sums[f"{kind} {name}"] = hashlib.sha256(out).hexdigest()
    return facts.step, sums
