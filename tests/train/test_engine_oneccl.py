"""Training over real oneCCL equals training over gloo, within fp32 rounding: EP x DP, and a pipeline's transfers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from dist_helper import run_ranks
from layouts import Case, micro_batches

from mula_ray.parallel.backend import BackendName
from mula_ray.parallel.groups import Groups
from mula_ray.parallel.oneccl_library import library_folder
from mula_ray.train.engine import Engine

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(library_folder() is None, reason="the oneccl extra is not installed"),
]


def _losses(rank: int, world: int, port: int, case: Case, backend: BackendName) -> list[tuple[float, float]]:
    torch.set_num_threads(1)
    assert world == case.topology.world
    groups = Groups.connect(
        case.topology, rank, host="127.0.0.1", port=port, prefix=f"ccl/{backend}", backend=backend, strict=True
    )
    engine = Engine(case.config(), case.topology, rank, groups, "cpu")
    results = [engine.step(step, micro_batches(case, rank, step)) for step in range(case.steps)]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (Case(2, 2, micro_batch=2, bucket_mb=1.0), 3),
        (Case(1, 1, 1, 2, schedule="zbv", virtual=2, bucket_mb=1.0), 3),
        pytest.param(Case(2, 2, micro_batch=2, bucket_mb=1.0, steps=50), 50, marks=pytest.mark.slow),
    ],
    ids=["dp2-ep2", "pp2-zbv", "dp2-ep2-50-steps"],
)
def test_losses_over_oneccl_equal_gloo(case: Case, steps: int) -> None:
    case = dataclasses.replace(case, steps=steps)
    gloo = run_ranks(_losses, case.topology.world, case, "gloo", timeout=110)
    ccl = run_ranks(_losses, case.topology.world, case, "ccl", timeout=110)
    assert all(ranks == ccl[0] for ranks in ccl)
    for one, two in zip(gloo[0], ccl[0], strict=True):
        assert two == pytest.approx(one, rel=2e-5)
