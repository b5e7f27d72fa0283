"""Failures in pipeline, tensor and expert parallel layouts, and a world that shrinks and grows: nothing shows."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helper import Run, processes_with, wait_for

from mula_ray.runtime.local import LocalCluster

# Bounds for a crowded machine: on a quiet one a run takes some fifteen seconds.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]

LAYOUTS = {
    "pp2-ep2": ("parallel.pp=2", "parallel.ep=2", "parallel.schedule=1f1b"),
    "pp2-dp2-zb": ("parallel.pp=2", "parallel.schedule=zbv", "parallel.virtual_stages=2", "model.layers=4"),
    "tp2-dp2": ("parallel.tp=2",),
    "tp2-ep2": ("parallel.tp=2", "parallel.ep=2"),
}
SHAPE = ("cluster.tiles_per_node=2", "cluster.nodes=2", "cluster.spares=1", "train.micro_batch=1", "train.steps=14")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    cluster = LocalCluster.start(3, 2, 100.0)
    cluster.wait_address()
    yield cluster
    cluster.end()
    assert not processes_with(str(cluster.folder))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "pp2-ep2" else pytest.mark.slow) for name in LAYOUTS],
)
def test_failures_do_not_show_in(layout: str, cluster: LocalCluster, tmp_path: Path) -> None:
    sets = (*SHAPE, *LAYOUTS[layout])
    unbroken = Run(tmp_path / "unbroken", cluster, *sets)
    assert unbroken.wait() == 0, unbroken.report()
    faults = ("kill-rank:1@step=4", "freeze-rank:2@step=7", "kill-node:0@step=10")
    broken = Run(tmp_path / "broken", cluster, "elastic.policy=wait", *sets, inject=faults)
    assert broken.wait() == 0, broken.report()
    assert broken.losses() == unbroken.losses()
    assert broken.ledger_holds()
    assert len(broken.events("recovery")) == 3, broken.report()
    assert all(event["lost_steps"] == 0 for event in broken.events("recovery"))
    cluster.add_node()


@pytest.mark.slow
def test_a_world_that_shrinks_and_grows(tmp_path: Path) -> None:
    """DP 4 -> 3 -> 2 -> 4 in one run: losses within fp32 rounding of the fixed world, every sample once."""
    cluster, steps = LocalCluster.start(4, 1, 100.0), 100
    try:
        shape = ("cluster.nodes=4", "train.global_batch=40", "train.micro_batch=2", f"train.steps={steps}")
        sets = (*shape, "model.hidden=128", "data.context=128", "optim.lr=2.0e-4", "optim.min_lr=1.0e-4")
        fixed = Run(tmp_path / "fixed", cluster, *sets)
        assert fixed.wait() == 0, fixed.report()
        run = Run(tmp_path / "elastic", cluster, *sets, "elastic.policy=shrink")
        for step, world in ((8, 3), (20, 2)):
            run.until(step)
            cluster.kill_node(run.events("generation_start")[-1]["nodes"][0])
            wait_for(lambda world=world: run.events("generation_start")[-1]["world"] == world, 60.0, run.report)
        run.until(32)
        cluster.add_node()
        cluster.add_node()
        wait_for(lambda: run.events("generation_start")[-1]["world"] == 4, 120.0, run.report)
        assert run.wait(300.0) == 0, run.report()
    finally:
        cluster.end()
    assert {event["world"] for event in run.events("generation_start")} == {4, 3, 2}
    assert run.ledger_holds()
    got, want = run.losses(), fixed.losses()
    assert sorted(got) == list(range(1, steps + 1))
    for step, values in want.items():
        assert got[step] == pytest.approx(values, rel=1e-4), step
