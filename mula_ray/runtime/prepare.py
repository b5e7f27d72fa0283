"""Data preparation as a Ray Data pipeline: the stages of `data/prepare.py`, spread over the workers of a cluster.

    with RayWorkers.local(4) as spread:            # or RayWorkers.of_cluster(address, workers)
        run_job(job, spread, report)

A row of the data set is a task, a block of it one row, so a task is retried alone when a worker dies; what a task
writes it writes under its final name only when complete, and the same bytes whoever does it. Tokens never pass through
Ray: workers read and write the file system that holds input and output (shared between nodes, as for checkpoints).
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from mula_ray.config.errors import MulaError
from mula_ray.data.job import Job
from mula_ray.data.prepare import work
from mula_ray.runtime.local import LocalCluster
from mula_ray.runtime.seam import connect, prepare_environment

_ORPHAN_S = 10.0


class RayWorkers:
    """An executor of `data.prepare.run_job`: a Ray Data pipeline of `workers` tasks at a time."""

    def __init__(self, workers: int, cluster: LocalCluster | None, resources: dict[str, float], cpus: float) -> None:
        self._workers = workers
        self._cluster = cluster
        self._resources = resources
        self._cpus = cpus

    @classmethod
    def local(cls, workers: int) -> RayWorkers:
        """On a Ray cluster of this machine, made for it and gone with it, also when this process is killed."""
        cluster = LocalCluster.start(1, workers, _ORPHAN_S)
        try:
            prepare_environment(cluster.token_file)
            connect(cluster.wait_address())
        except BaseException:
            cluster.end()
            raise
        return cls(workers, cluster, {"tile": 1.0}, 0.0)

    @classmethod
    def of_cluster(cls, address: str, workers: int) -> RayWorkers:
        """On a running cluster; a task takes one of its processors."""
        prepare_environment(None, keep_auth=True)
        connect(address)
        return cls(workers, None, {}, 1.0)

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        ray.shutdown()
        if self._cluster is not None:
            self._cluster.end()

    def __call__(self, job: Job, stage: str, tasks: Sequence[Any]) -> Iterator[Any]:
        """Results as they come; an error of a task is raised here as it was there."""
        if not tasks:
            return
        import ray.data

        logging.getLogger("ray.data").setLevel(logging.ERROR)  # its console lines would cut up the progress lines
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_no_progress_timeout_s = -1  # a long item is no fault
        slim = pickle.dumps(replace(job, items=(), out=Path(job.out).resolve()))

        def do(row: dict[str, Any]) -> dict[str, Any]:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker a core already
            try:
                return {"done": pickle.dumps(work(pickle.loads(slim), stage, pickle.loads(row["task"])))}
            except MulaError as error:  # typed errors keep their type on the way
                return {"done": pickle.dumps(error)}

        rows = ray.data.from_items(
            [{"task": pickle.dumps(task)} for task in tasks], override_num_blocks=len(tasks)
        ).map(do, compute=ray.data.TaskPoolStrategy(size=self._workers), num_cpus=self._cpus, resources=self._resources)
        for row in rows.iter_rows():
            done = pickle.loads(row["done"])
            if isinstance(done, MulaError):
                raise done
            yield done
