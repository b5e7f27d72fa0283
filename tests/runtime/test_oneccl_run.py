"""A run over real oneCCL: the losses of gloo, and a killed rank comes back as it does there."""

from pathlib import Path

import pytest
from run_helper import Run, processes_with

from mula_ray.parallel.oneccl_library import library_folder
from mula_ray.runtime.local import LocalCluster

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    pytest.mark.skipif(library_folder() is None, reason="the oneccl extra is not installed"),
]


def test_a_killed_rank_recovers_over_oneccl(tmp_path: Path) -> None:
    cluster = LocalCluster.start(2, 2, 100.0)
    try:
        sets = ("cluster.tiles_per_node=2", "parallel.ep=2", "train.steps=10")
        gloo = Run(tmp_path / "gloo", cluster, *sets)
        assert gloo.wait() == 0, gloo.report()
        ccl = Run(tmp_path / "ccl", cluster, *sets, "parallel.backend=ccl", inject=("kill-rank:1@step=5",))
        assert ccl.wait() == 0, ccl.report()
    finally:
        cluster.end()
    (recovery,) = ccl.events("recovery")
    assert "SIGKILL" in recovery["reason"]
    assert recovery["lost_steps"] == 0
    assert ccl.ledger_holds()
    got, want = ccl.losses(), gloo.losses()
    assert sorted(got) == list(range(1, 11))
    assert all(got[step] == pytest.approx(want[step], rel=2e-5) for step in want)
    assert not processes_with(str(tmp_path))
