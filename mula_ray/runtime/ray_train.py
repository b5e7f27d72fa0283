"""The same engine and loop under somebody else's launcher: Ray Train's `TorchTrainer`, or torchrun.

    result = train(loaded.config, run_dir, address="auto")                   # TorchTrainer on a running cluster
    torchrun --nproc-per-node 4 -m mula_ray.runtime.ray_train CONFIG RUN_DIR   # or under torchrun

A supported way in, and the baseline of `bench recovery`: the launcher restarts all ranks after a failure, and they read
the newest checkpoint of the run folder. No spares, no snapshots in memory, no change of the world's size.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.checkpoint.scan import find_latest
from mula_ray.checkpoint.store import part_name, write_part
from mula_ray.config.run import RunConfig
from mula_ray.data.batches import BatchSource, Share
from mula_ray.data.source import RunData, open_run_data
from mula_ray.parallel.backend import choose_backend, choose_device
from mula_ray.parallel.executor import MicroBatch
from mula_ray.parallel.groups import Groups
from mula_ray.plan.format import FileEntry
from mula_ray.plan.layout import param_specs
from mula_ray.plan.topology import Topology
from mula_ray.runtime.folder import facts_of
from mula_ray.train import loop
from mula_ray.train.engine import Engine
from mula_ray.train.metrics import EvalRecord, StepRecord
from mula_ray.train.sinks import LineFile, now_text

STORE_S = 600.0


def train(config: RunConfig, run_dir: Path, *, address: str | None = None, max_failures: int = -1) -> Any:
    """Run `config` under `TorchTrainer` with one worker a tile; returns Ray Train's result.

    `address` None uses the cluster that this process is connected to (or starts one as `ray.init` does).
    """
    import ray
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    if address is not None and not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    data = open_run_data(config)
    cluster = config.cluster
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"config": config, "data": data, "run_dir": str(run_dir.resolve())},
        scaling_config=ScalingConfig(
            num_workers=cluster.nodes * cluster.tiles_per_node, resources_per_worker={"CPU": 0, "tile": 1}
        ),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RayRunConfig(
            name=run_dir.name,
            storage_path=str(run_dir.resolve().parent / "ray_results"),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )
    return trainer.fit()


def _worker(arguments: dict[str, Any]) -> None:
    """In a worker of Ray Train: its process group is there already."""
    import ray.train

    end = run_rank(arguments["config"], arguments["data"], Path(arguments["run_dir"]))
    ray.train.report({"step": end.step})


def run_rank(config: RunConfig, data: RunData, run_dir: Path) -> loop.End:
    """One rank of a world that `torch.distributed` knows already (`init_process_group` was called)."""
    torch.set_num_threads(config.cluster.threads_per_rank)
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = config.parallel
    topology = Topology(dp=world // (layout.ep * layout.tp * layout.pp), ep=layout.ep, tp=layout.tp, pp=layout.pp)
    device = choose_device(config.cluster.device, int(os.environ.get("LOCAL_RANK", "0")))
    (run_dir / "pids").mkdir(parents=True, exist_ok=True)
    (run_dir / "pids" / str(rank)).write_text(str(os.getpid()))
    store = dist.distributed_c10d._get_default_store()
    started = store.add("mula/starts", 1)  # names this start of the world: the store may outlive a failed one
    prefix = f"mula/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}/{(started - 1) // world}"
    backend = choose_backend(layout.backend, device)
    groups = Groups(topology, rank, store, backend, device, STORE_S, prefix=prefix)
    found = find_latest(run_dir / "checkpoints", deep=False)
    side = _Side(config, data, run_dir, topology, rank, store, prefix)
    engine = Engine(config, topology, rank, groups, device, side, init=found is None)
    side.engine = engine
    start = 0
    if found is not None:
        start = found.manifest.facts.step
        with CheckpointReader(found.path) as reader:
            engine.load(reader)
    plan = loop.Plan(config, start, side.generation, world, config.metrics.peak_tflops)
    try:
        return loop.run(engine, BatchSource(data, Share.of(config, topology, rank)), side, side, side, plan)
    finally:
        side.close()
        engine.close()


class _Side:
    """Checkpoints, control and reporter of a rank: parts by every rank, manifest and metrics by rank 0."""

    def __init__(
        self, config: RunConfig, data: RunData, run_dir: Path, topology: Topology, rank: int, store: Any, prefix: str
    ) -> None:
        self._config, self._data, self._topology, self._rank = config, data, topology, rank
        self._store, self._prefix = store, prefix
        self.engine: Engine | None = None
        self._manager: CheckpointManager | None = None
        self._metrics: LineFile | None = None
        self.generation = 0
        if rank == 0:
            self._manager = CheckpointManager(run_dir / "checkpoints", run_dir.name)
            self._manager.acquire()
            self._metrics = LineFile(run_dir / "metrics.jsonl")
            self.generation = self._manager.generation

    def after_step(self, step: int, *, last: bool, stop: bool, record: Any = None) -> float:  # noqa: ARG002
        """A synchronous full save when due."""
        every = self._config.checkpoint.every
        if not (last or (every and step % every == 0)):
            return 0.0
        began = time.perf_counter()
        self._save(step)
        return time.perf_counter() - began

    def _save(self, step: int) -> None:
        assert self.engine is not None
        key = f"{self._prefix}/save/{step}"
        pending = None
        if self._manager is not None:
            pending = self._manager.begin(step, replace=True)
            self._store.set(f"{key}/folder", str(pending.folder))
        folder = Path(self._store.get(f"{key}/folder").decode())
        entry = write_part(folder, part_name(self._rank), self.engine.pieces())
        self._store.set(f"{key}/{self._rank}", json.dumps(entry.to_json()))
        if pending is not None:
            texts = [self._store.get(f"{key}/{rank}").decode() for rank in range(self._topology.world)]
            shapes = {spec.name: spec.shape for spec in param_specs(self._config.model)}
            facts = facts_of(
                self._config, self._data, pending.manager.lease.run_id, step, pending.generation, self._topology
            )
            pending.commit(facts, [FileEntry.from_json(json.loads(text)) for text in texts], shapes)
            pending.settle(verified=True)

    def phase(self, name: str, step: int) -> None:
        """Nobody watches."""

    def committed(self, step: int) -> None:
        """Nobody watches."""

    def stop_wanted(self) -> bool:
        """The launcher ends the ranks itself."""
        return False

    def prepare(self, step: int, batches: list[MicroBatch]) -> list[MicroBatch]:  # noqa: ARG002
        """As they are."""
        return batches

    def step(self, record: StepRecord) -> None:
        """A line of rank 0."""
        self._write(record)

    def evaluation(self, record: EvalRecord) -> None:
        """A line of rank 0."""
        self._write(record)

    def _write(self, record: StepRecord | EvalRecord) -> None:
        if self._metrics is not None:
            self._metrics.write({**record.to_json(), "pid": os.getpid(), "time": now_text()})

    def close(self) -> None:
        """Give the folder back."""
        if self._metrics is not None:
            self._metrics.close()
        if self._manager is not None:
            self._manager.close()


def main(arguments: list[str]) -> None:
    """Entry under torchrun."""
    from mula_ray.config.load import load

    config = load(arguments[0], arguments[2:]).config
    dist.init_process_group("gloo")
    run_rank(config, open_run_data(config), Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
