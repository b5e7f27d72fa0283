"""The Ray Data source of a node's stream: a single reading task that yields chunks in the order of the requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from mula_ray.data.ring import RingSpec
from mula_ray.runtime.chunks import ChunkReader, StreamPlan


class PlanSource(Datasource):
    """Addresses of one node's plan."""

    def __init__(self, plan: StreamPlan, spec: RingSpec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plan = plan
        self._spec = spec

    def estimate_inmemory_data_size(self) -> int | None:
        """Unknown: the stream is as long as the run."""
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:  # noqa: ARG002
        """One task, whatever parallelism Ray would like: the order is the requests' order."""
        plan, spec = self._plan, self._spec

        def read() -> Iterator[pa.Table]:
            for chunk in ChunkReader(plan).serve(spec):
                yield chunk.to_arrow()

        return [ReadTask(read, BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None))]
