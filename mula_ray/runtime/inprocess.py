"""`mula-ray train --in-process`: the same engine and loop in this process, with no Ray and no other rank.

Faults that one process can play are played: the run then ends as a failed one would (there is nobody to recover it).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mula_ray.checkpoint.failures import StoreFailure
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.checkpoint.saver import Saver, SaveResult
from mula_ray.config.errors import CannotContinue, MulaError
from mula_ray.config.request import TrainRequest
from mula_ray.data.batches import BatchSource, Share
from mula_ray.data.source import RunData, open_run_data
from mula_ray.parallel.backend import choose_device
from mula_ray.parallel.executor import MicroBatch
from mula_ray.parallel.groups import Groups
from mula_ray.plan.layout import param_specs
from mula_ray.plan.legal import single_process_topology
from mula_ray.plan.topology import Topology
from mula_ray.runtime import inject
from mula_ray.runtime.faults import RankFaults
from mula_ray.runtime.folder import RunFolder, facts_of, open_folder, versions, write_exit
from mula_ray.runtime.outputs import Outputs
from mula_ray.runtime.signals import stop_signals
from mula_ray.train import loop
from mula_ray.train.engine import Engine
from mula_ray.train.peak import measure_peak_tflops
from mula_ray.train.profile import StepProfiler


def train(request: TrainRequest) -> int:
    """Run the request to its end in this process; exit code by the outer contract.

    Raises:
        MulaError: what is wrong with the request, or why training cannot go on.
    """
    config = request.loaded.config
    faults, _ = inject.parse(request.inject)
    topology = single_process_topology(config)
    print(f"run folder: {request.run_dir}", flush=True)
    data = open_run_data(config)
    with contextlib.ExitStack() as stack:
        folder = open_folder(request, data)
        stack.callback(folder.close)
        code, reason, step = 1, "internal error", 0
        try:
            run = _Run(request, data, folder, topology, faults)
            stack.callback(run.close)
            code, reason, step = run.run()
        except MulaError as error:
            code, reason = type(error).exit_code, str(error)
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            write_exit(request.run_dir, code, reason, step)
    return code


@dataclass
class _Control:
    """`Control` of the loop and `EngineHooks`: signals and the deadline become a wish to stop."""

    deadline: float | None = None
    why: str = ""
    faults: RankFaults | None = None
    profiler: StepProfiler | None = None
    step: int = 0
    committed_step: int = 0
    pace: list[float] = field(default_factory=list)

    def phase(self, name: str, step: int) -> None:
        """Fault rehearsal, profile."""
        if self.profiler is not None:  # it counts from 0, as the engine that calls here does
            self.profiler.phase(name, step)
        if name == "data":
            self.step = step
        if self.faults is not None:
            self.faults.phase(name, self.step)

    def committed(self, step: int) -> None:
        """Remember it, and how long steps take."""
        self.committed_step = step
        self.pace = [*self.pace[-8:], time.time()]

    def stop_wanted(self) -> bool:
        """A signal came, or the deadline is nearer than three steps and a save."""
        if self.deadline is not None and not self.why:
            gap = max((b - a for a, b in zip(self.pace, self.pace[1:], strict=False)), default=1.0)
            if time.time() > self.deadline - max(5.0, 3 * gap):
                self.why = "the deadline is near"
        return bool(self.why)

    def prepare(self, step: int, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Fault rehearsal."""
        return batches if self.faults is None else self.faults.batches(step, batches)


class _Run:
    """`Checkpoints` and `Reporter` of the loop, and what it needs."""

    def __init__(
        self,
        request: TrainRequest,
        data: RunData,
        folder: RunFolder,
        topology: Topology,
        faults: tuple[inject.Fault, ...],
    ) -> None:
        config = request.loaded.config
        self._config, self._data, self._folder, self._topology = config, data, folder, topology
        self._generation = folder.manager.generation
        folder.remember(generation=self._generation)
        self._start = folder.found.manifest.facts.step if folder.found else 0
        self._out = Outputs(request.run_dir, folder.run_id, config, sys.stdout, self._start)
        torch.set_num_threads(config.cluster.threads_per_rank)
        self._device = choose_device(config.cluster.device)
        self._control = _Control(request.deadline)
        groups = Groups(topology, 0, None, device=self._device)
        self._engine = Engine(config, topology, 0, groups, self._device, self._control, init=folder.found is None)
        if folder.found is not None:
            with CheckpointReader(folder.found.path) as reader:
                reader.expect(config.model)
                self._engine.load(reader)
        self._control.faults = RankFaults(faults, 0, self._engine, self._fault)
        if request.profile is not None:
            folder_of = request.run_dir / "profile"
            self._control.profiler = StepProfiler(folder_of, 0, request.profile, self._device, self._generation)
            self._control.profiler.attach(self._engine.stages)
        shapes = {spec.name: spec.shape for spec in param_specs(config.model)}
        self._saver = Saver(folder.manager, shapes, config.checkpoint.mode, keep_models=config.checkpoint.keep)
        self._saved = self._start if folder.found else -1
        self._failure: SaveResult | None = None

    def run(self) -> tuple[int, str, int]:
        """(exit code, reason, last step)."""
        config, found = self._config, self._folder.found
        self._out.say(
            f"resuming from checkpoint of step {self._start}" if found else "nothing was committed yet: starting fresh"
        )
        self._out.passed_over(self._generation, found.rejected if found else ())
        peak = config.metrics.peak_tflops or measure_peak_tflops(
            self._device, torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
        )
        self._out.events.run_start(
            run_id=self._folder.run_id, steps=config.train.steps, world=1, resumed_step=self._start if found else None,
            host=socket.gethostname(), pid=os.getpid(), versions=versions(), threads=torch.get_num_threads(),
            peak_tflops=peak, in_process=True,
        )  # fmt: skip
        self._out.events.generation_start(
            self._generation, step=self._start, world=1, nodes=[socket.gethostname()], spares=0, reason="one process"
        )
        self._out.progress.membership(self._generation, 1, 0)
        source = BatchSource(self._data, Share.of(config, self._topology, 0))
        plan = loop.Plan(config, self._start, self._generation, 1, peak, self._folder.skips)
        with self._signals():
            try:
                if self._start >= config.train.steps:
                    end = loop.End(self._start, asked=False)
                else:
                    end = loop.run(self._engine, source, self, self._control, self, plan)
            except loop.StepFailed as error:
                self._out.events.failure(self._generation, kind="numeric", reason=str(error), step=error.step)
                raise CannotContinue(
                    f"{error}; one process has nothing to fall back on: resume with --resume auto"
                ) from None
        return self._finish(end)

    def _finish(self, end: loop.End) -> tuple[int, str, int]:
        self._results(wait=True)
        reason = (
            f"{self._control.why}: saved at step {end.step}, resumable"
            if end.asked
            else (f"all steps are done: step {end.step}")
        )
        code = 10 if end.asked else 0
        if self._saved != end.step:
            why = self._failure.failure if self._failure else "it was left out"
            code, reason = 30, f"the last checkpoint (step {end.step}) could not be written: {why}"
        self._out.events.run_end(self._generation, code=code, reason=reason, step=end.step)
        self._out.say(reason)
        return code, reason, end.step

    def close(self) -> None:
        """Everything back."""
        if self._control.profiler is not None:
            self._control.profiler.close()
        self._saver.close()
        self._engine.close()
        self._out.close()

    # ---- Checkpoints and Reporter ----------------------------------------------------------------------------------

    def after_step(self, step: int, *, last: bool, stop: bool, record: Any = None) -> float:  # noqa: ARG002
        """See `Checkpoints`."""
        config, began = self._config.checkpoint, time.perf_counter()
        self._results()
        full = last or stop or (config.every > 0 and step % config.every == 0)
        model = config.persist_every > 0 and step % config.persist_every == 0
        facts = None
        if full or model:
            facts = facts_of(self._config, self._data, self._folder.run_id, step, self._generation, self._topology)
        if full and facts is not None:
            self._saver.save(facts, self._engine.pieces())
        if model and facts is not None and not self._folder.manager.has_model(step):
            self._saver.save(facts, self._engine.weights(), "model")
        return time.perf_counter() - began if full or model else 0.0

    def _results(self, wait: bool = False) -> None:
        for result in self._saver.drain() if wait else self._saver.results():
            if result.path is not None:
                if result.kind == "full":
                    self._saved = result.step
                    self._out.progress.checkpoint(result.step)
                self._out.events.checkpoint(
                    self._generation, step=result.step, slot=result.path.name, bytes=result.nbytes,
                    seconds=sum(result.seconds.values()), stall_s=result.seconds.get("snapshot", 0.0), kind=result.kind,
                )  # fmt: skip
                continue
            self._failure = result
            self._out.events.failure(self._generation, kind="storage", reason=str(result.failure), step=result.step)
            self._out.say(f"checkpoint of step {result.step} failed: {result.failure}")
            if self._config.checkpoint.on_error == "stop":
                failure = result.failure or StoreFailure("io", self._folder.path, "re-reading found other bytes")
                raise failure.as_stop()

    def step(self, record: Any) -> None:
        """See `Reporter`."""
        self._out.step(record)

    def evaluation(self, record: Any) -> None:
        """See `Reporter`."""
        self._out.evaluation(record)

    def _fault(self, message: dict[str, Any]) -> None:
        fault = message["fault"]
        self._out.events.add("injected", self._generation, kind=fault.kind, index=fault.index, step=fault.number)
        if fault.kind in ("kill-driver", "kill-actor", "kill-agent", "kill-node"):
            os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def handle(number: int, _frame: Any) -> None:
            if self._control.why and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._control.why = signal.Signals(number).name

        with stop_signals(handle):
            yield
