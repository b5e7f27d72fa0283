"""The soak: a thousand random faults, in recoveries too; the end is that of the run that met none, bit for bit."""

import signal
import time
from pathlib import Path

import pytest
from run_helper import Run, processes_with, wait_for
from weather import SHAPE, Events, final_state

from mula_ray.bench.storm import Restocker
from mula_ray.runtime.inject import Kind
from mula_ray.runtime.local import LocalCluster

FAULTS = 1000
MIX: dict[Kind, int] = {
    "kill-rank": 12, "freeze-rank": 4, "spin-rank": 2, "hang-collective": 4, "nan-loss": 2, "nan-grad": 1,
    "flip-state": 1, "slow-rank": 1, "kill-actor": 3, "kill-agent": 1, "kill-node": 1, "disk-full": 2,
    "torn-checkpoint": 2,
}  # fmt: skip
NODES = 5
EVERY_S = 2.0


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(3 * 3600)
def test_a_thousand_faults_leave_the_run_as_it_would_have_been(tmp_path: Path) -> None:
    cluster = LocalCluster.start(NODES, 2, 100.0)
    kinds = "+".join(kind for kind, share in MIX.items() for _ in range(share))
    sets = (
        *SHAPE,
        f"cluster.spares={NODES - 2}",
        "elastic.policy=wait",
        "elastic.max_recoveries=50",
        "checkpoint.every=50",
    )
    faults, starts = 0, 0
    try:
        cluster.wait_address()
        restocker = Restocker(cluster, tmp_path / "stormy")
        while faults < FAULTS:  # a driver's life: a fifth of the faults, then it is killed as well
            run = Run(
                tmp_path / "stormy", cluster, *sets, inject=(f"random@every={EVERY_S},seed={starts},kinds={kinds}",)
            )
            starts += 1
            events, until = Events(run), min(FAULTS, faults + FAULTS // 5)
            while faults < until:
                assert run.process.poll() is None, run.report()
                time.sleep(0.5)
                faults = events.count("injected")
            if faults < FAULTS:
                run.kill()
        run.kill(signal.SIGINT)
        assert run.wait() == 10, run.report()
        restocker.close()
        step, state = final_state(run)
        calm = Run(tmp_path / "calm", cluster, *sets[:-1], f"checkpoint.every={step}")
        calm.until(step + 1, 3600.0)
        wait_for(lambda: any(e["step"] == step for e in calm.events("checkpoint")), 60.0, calm.report)
        wanted = final_state(calm)
        calm.kill(signal.SIGINT)
        assert calm.wait() == 10, calm.report()
    finally:
        cluster.end()
    print(f"{faults} faults, {starts} drivers, {restocker.added} nodes added, {step} steps")
    assert (step, state) == wanted
    assert run.ledger_holds()
    losses, unbroken = run.losses(), calm.losses()
    assert {n: losses[n] for n in range(1, step + 1)} == {n: unbroken[n] for n in range(1, step + 1)}
    assert not processes_with(str(tmp_path))
    assert not cluster.folder.exists()
