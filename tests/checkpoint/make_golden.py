"""Writes tests/checkpoint/golden/v<version>: run once for a new format version, never again for an old one."""

from __future__ import annotations

from pathlib import Path

import torch
from states import MOE, facts, rank_pieces, shapes, values

from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.store import part_name, write_part
from mula_ray.plan.format import FULL_KINDS, MODEL_KINDS, VERSION
from mula_ray.plan.topology import Topology


def main() -> None:
    """A full checkpoint of two nodes and a bf16 model, step 2."""
    root = Path(__file__).parent / "golden" / f"v{VERSION}"
    manager = CheckpointManager(root, "golden")
    manager.acquire(renew=False)
    topology = Topology(dp=1, ep=2)
    for kind, kinds, dtype in (("full", FULL_KINDS, torch.float32), ("model", MODEL_KINDS, torch.bfloat16)):
        pending = manager.begin(2, kind)
        entries = []
        for rank in range(2):
            state = [(p, torch.from_numpy(values(p, 2)).to(dtype)) for p in rank_pieces(MOE, topology, rank, kinds)]
            if kind == "model":
                state = [(type(p)(**{**vars(p), "dtype": "bf16"}), t) for p, t in state]
            entries.append(write_part(pending.folder, part_name(rank), state))
        config = {"model": MOE.model_dump(mode="json")}
        pending.commit(facts(2, manager.generation, config=config), entries, shapes(MOE))
        assert pending.settle() == []
    manager.close()
    (root / "lease.json").unlink()


if __name__ == "__main__":
    main()
