"""Runs on one shared local cluster: failures do not show, runs do not disturb each other, drivers may die."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helper import Run, processes_with, wait_for

from mula_ray.runtime.local import LocalCluster

# Bounds for a crowded machine: on a quiet one a run takes some ten seconds.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    cluster = LocalCluster.start(4, 1, 100.0)
    cluster.wait_address()
    yield cluster
    cluster.end()
    assert not cluster.folder.exists()
    assert not processes_with(str(cluster.folder))


@pytest.fixture(scope="module")
def unbroken(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs beside the first test's run, in the same cluster."""
    run = Run(tmp_path_factory.mktemp("unbroken") / "run", cluster)
    yield run
    if run.process.poll() is None:
        run.kill()


def test_failures_of_every_kind_do_not_show_and_runs_do_not_disturb_each_other(
    cluster: LocalCluster, unbroken: Run, tmp_path: Path
) -> None:
    faults = (
        "kill-rank:1@step=4", "kill-actor:0@step=7", "freeze-rank:0@step=10", "nan-loss:1@step=13",
        "kill-agent:1@step=16", "kill-rank:0@recovery=2", "hang-collective:1@recovery=3",
    )  # fmt: skip
    broken = Run(tmp_path / "broken", cluster, "elastic.policy=wait", inject=faults)
    assert unbroken.wait() == 0, unbroken.report()
    assert broken.wait() == 0, broken.report()
    assert sorted(broken.losses()) == list(range(1, 21))
    assert broken.losses() == unbroken.losses()
    assert broken.ledger_holds()
    assert len(broken.events("injected")) == len(faults), broken.report()
    # Each of the five faults at a step ends a generation. A generation struck before its first step has been
    # reported has no recovery of its own: it is part of the recovery that the next one completes.
    generations = [start["generation"] for start in broken.events("generation_start")]
    assert len(generations) > 5
    assert len(broken.events("failure")) >= 5
    assert generations == list(range(len(generations)))
    assert broken.events("recovery")[-1]["generation"] == generations[-1]
    assert all(event["lost_steps"] == 0 for event in broken.events("recovery"))
    assert not unbroken.events("failure")
    assert broken.exit_code() == 0
    assert not processes_with(str(tmp_path))


def test_a_lost_node_is_replaced_by_the_spare(cluster: LocalCluster, unbroken: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", cluster, "cluster.spares=1", "elastic.policy=wait", inject=("kill-node:1@step=9",))
    assert run.wait() == 0, run.report()
    assert run.losses() == unbroken.losses()
    (recovery,) = run.events("recovery")
    assert (recovery["source"], recovery["lost_steps"]) == ("buddy", 0)
    cluster.add_node()


def test_a_new_driver_takes_over_from_memory(cluster: LocalCluster, unbroken: Run, tmp_path: Path) -> None:
    first = Run(tmp_path / "run", cluster, inject=("kill-driver@step=8",))
    assert first.wait() == -signal.SIGKILL
    second = Run(tmp_path / "run", cluster)
    assert second.wait() == 0, second.report()
    assert second.losses() == unbroken.losses()
    starts = second.events("generation_start")
    assert starts[-1]["source"] in ("own memory", "buddy memory"), second.report()
    assert starts[-1]["step"] >= 7


def test_nothing_outlives_a_driver_that_nobody_replaces(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", cluster, "elastic.orphan_s=3", "train.steps=100000", "metrics.every=1")
    run.until(3)
    assert processes_with(str(tmp_path))
    run.kill()
    wait_for(lambda: not processes_with(str(tmp_path)), 15.0, lambda: str(processes_with(str(tmp_path))))


def test_ctrl_c_saves_and_resume_goes_on_bit_for_bit(cluster: LocalCluster, unbroken: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", cluster, inject=("slow-rank:0,factor=20@step=6",))
    run.until(6)
    run.kill(signal.SIGINT)
    assert run.wait() == 10, run.report()
    assert run.exit_code() == 10
    at = max(run.losses())
    again = Run(tmp_path / "run", cluster, more=("--resume", "must"))
    assert again.wait() == 0, again.report()
    assert again.losses() == unbroken.losses()
    assert again.events("generation_start")[-1]["step"] == at
