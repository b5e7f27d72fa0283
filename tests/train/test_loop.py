"""The loop over fakes: numbering, evaluation, stop, skips, failed steps."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mula_ray.config.model import ModelConfig
from mula_ray.config.run import MetricsConfig, RunConfig, TrainConfig
from mula_ray.data.batches import Batch
from mula_ray.parallel.executor import MicroBatch
from mula_ray.train import loop
from mula_ray.train.engine import EvalResult, StepResult


@dataclass
class World:
    """Engine, batches, checkpoints, control and reporter in one; remembers what was asked of it."""

    stop_at: int = -1
    bad_at: int = -1
    damaged_at: int = -1
    calls: list[Any] = field(default_factory=list)
    _step: int = 0

    def micro_batches(self, step: int) -> list[Batch]:
        self.calls.append(("batch", step))
        return [Batch(np.zeros((1, 5), np.int64), np.ones(1, np.float32))]

    def eval_batches(self) -> list[Batch]:
        return self.micro_batches(-1)

    def step(self, step: Any, batches: list[MicroBatch] | None = None, stop: bool = False) -> Any:
        if batches is None:
            self.calls.append(("record", step))
            return None
        self.calls.append(("engine", step))
        finite = step + 1 != self.bad_at
        return StepResult(
            step, 2.0, 0.1, 0.2, 1.0, 1e-3, 4, finite, stop,
            cause="" if finite else "gradient norm not finite", damage="w" if step + 1 == self.damaged_at else "",
        )  # fmt: skip

    def evaluate(self, batches: list[MicroBatch]) -> EvalResult:
        return EvalResult(3.0, 4 * len(batches))

    def evaluation(self, record: Any) -> None:
        self.calls.append(("eval", record.step, record.eval_loss))

    def after_step(self, step: int, *, last: bool, stop: bool, record: Any = None) -> float:  # noqa: ARG002
        self.calls.append(("after", step, last, stop))
        return 0.0

    def phase(self, name: str, step: int) -> None:
        if name == "data":
            self._step = step

    def committed(self, step: int) -> None:
        self.calls.append(("committed", step))

    def stop_wanted(self) -> bool:
        return self._step == self.stop_at

    def prepare(self, step: int, batches: list[MicroBatch]) -> list[MicroBatch]:  # noqa: ARG002
        return batches


def run(world: World, *, start: int = 0, skips: tuple[int, ...] = ()) -> loop.End:
    model = ModelConfig(vocab_size=16, hidden=8, layers=1, heads=2, ffn=8, norm="rmsnorm")
    train = TrainConfig(steps=5, global_batch=1, eval_every=2, eval_samples=1)
    config = RunConfig(model=model, train=train, metrics=MetricsConfig(every=2))
    return loop.run(world, world, world, world, world, loop.Plan(config, start, 0, 1, 1.0, skips))


def of(world: World, kind: str) -> list[Any]:
    return [call[1:] for call in world.calls if call[0] == kind]


def test_steps_count_from_one_and_resume_where_they_were() -> None:
    world = World()
    assert run(world, start=2) == loop.End(5, asked=False)
    assert of(world, "engine") == [(2,), (3,), (4,)]
    assert of(world, "committed") == [(3,), (4,), (5,)]
    assert of(world, "after") == [(3, False, False), (4, False, False), (5, True, False)]
    assert of(world, "eval") == [(4, 3.0), (5, 3.0)]
    records = [call[0] for call in of(world, "record")]
    assert [record.step for record in records] == [4, 5]
    assert records[0].tokens == 4
    assert 0 < records[0].mfu < 1


def test_an_agreed_stop_ends_after_the_step_that_agreed() -> None:
    world = World(stop_at=3)
    assert run(world) == loop.End(3, asked=True)
    assert of(world, "after")[-1] == (3, False, True)


def test_a_stop_in_the_last_step_is_the_ordinary_end() -> None:
    world = World(stop_at=5)
    assert run(world) == loop.End(5, asked=False)
    assert of(world, "after")[-1] == (5, True, False)


def test_a_skipped_step_counts_but_is_not_trained() -> None:
    world = World()
    run(world, skips=(2, 3))
    assert of(world, "engine") == [(0,), (3,), (4,)]
    assert of(world, "committed") == [(1,), (2,), (3,), (4,), (5,)]


@pytest.mark.parametrize(("world", "kind"), [(World(bad_at=3), "gradient"), (World(damaged_at=3), "damage")])
def test_a_step_that_must_not_commit_is_not_committed(world: World, kind: str) -> None:
    with pytest.raises(loop.StepFailed) as failed:
        run(world)
    assert (failed.value.kind, failed.value.step) == (kind, 3)
    assert of(world, "committed") == [(1,), (2,)]
    assert of(world, "after")[-1] == (2, False, False)
