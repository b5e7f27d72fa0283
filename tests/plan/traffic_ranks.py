"""What tests/plan/test_estimate.py measures: bytes of the engine's calls, bytes kept for backward."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from mula_ray.config.load import load
from mula_ray.config.run import RunConfig
from mula_ray.model.aux import AuxSink
from mula_ray.model.layers import Region, run_once
from mula_ray.model.transformer import DecoderLayer, Transformer
from mula_ray.parallel.executor import MicroBatch
from mula_ray.parallel.groups import Call, Groups
from mula_ray.parallel.recompute import apply_recompute
from mula_ray.plan.legal import legal_topology, micro_batches
from mula_ray.train.engine import Engine


class Counting:
    """Counts calls and bytes by (group name, kind)."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()

    def call(self, call: Call) -> None:
        key = (call.group, call.kind)
        self.bytes[key] += call.numel * call.dtype.itemsize
        self.calls[key] += 1


def count_step(rank: int, world: int, port: int, sets: list[str]) -> tuple[dict[tuple[str, str], int], int]:
    """Bytes of the second step of `mula-tiny` with `sets`, by (group, kind), and the pipeline rank."""
    config = load("mula-tiny", sets).config
    topology = legal_topology(config)
    assert topology.world == world
    observer = Counting()
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    groups = Groups(topology, rank, store, prefix="run/1", observers=(observer,))
    engine = Engine(config, topology, rank, groups, "cpu")
    size, seq = config.train.micro_batch, config.data.context
    tokens = torch.randint(0, config.model.vocab_size, (size, seq + 1), generator=torch.Generator().manual_seed(rank))
    batches = [MicroBatch(tokens, torch.ones(size))] * micro_batches(config, topology)
    engine.step(0, batches)
    observer.bytes.clear()
    engine.step(1, batches)
    return dict(observer.bytes), topology.coords(rank).pp


def kept_bytes(config: RunConfig, layers: int) -> int:
    """Bytes that a stage of `layers` keeps after its forward pass of 2 sequences, parameters left out.

    What autograd saves is seen by its hooks; the inputs of recomputed regions are kept beside them.
    """
    dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    stage = Transformer(config.model, 0, layers, dtype=dtype, has_head=False)
    for param in stage.parameters():
        torch.nn.init.normal_(param, std=0.02)
    apply_recompute(stage, config.parallel.recompute, config.model.layers)
    own = {param.untyped_storage().data_ptr() for param in stage.parameters()}
    kept: dict[int, torch.Tensor] = {}  # holds the tensors, so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def noting(region: Region) -> Region:
        if region is run_once:
            return region

        def run(fn, *tensors):  # type: ignore[no-untyped-def]
            for tensor in tensors:
                note(tensor)
            return region(fn, *tensors)

        return run

    for layer in stage.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        layer.norm_region, layer.attention_region = noting(layer.norm_region), noting(layer.attention_region)
        layer.mlp.region = noting(layer.mlp.region)  # type: ignore[assignment,arg-type]
    tokens = torch.zeros(2, config.data.context, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        stage(tokens, AuxSink(config.model), weight=torch.ones(2))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
