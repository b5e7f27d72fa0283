"""The ring and the stream that fills it: the same bytes as direct reads, whatever is behind, torn, stale or gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import make_set

from mula_ray.config.model import ModelConfig
from mula_ray.config.run import DataConfig, RunConfig, TrainConfig
from mula_ray.data.batches import Batch, BatchSource, Share
from mula_ray.data.ring import RingReader, RingSource, RingSpec, RingWriter, StepSamples
from mula_ray.data.source import RunData, open_run_data
from mula_ray.runtime.chunks import Chunk, ChunkReader, StreamPlan
from mula_ray.runtime.stream import NodeStream, make_plan


def config_of(folder: Path, **data: Any) -> RunConfig:
    """A run on a data folder."""
    return RunConfig(
        model=ModelConfig(hidden=8, layers=1, heads=1, ffn=8, vocab_size=1000),
        train=TrainConfig(steps=1000, global_batch=10, micro_batch=2, eval_samples=7),
        data=DataConfig(path=str(folder), context=16, **data),
    )


@pytest.fixture(params=[False, True], ids=["plain", "masked"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> RunConfig:
    """A run, without and with a document mask."""
    folder = make_set(tmp_path / "set", [[40, 300, 7], [900, 3, 3, 60]])
    return config_of(folder, document_mask=request.param)


def same(first: list[Batch], second: list[Batch]) -> None:
    """The same micro-batches, bit for bit."""
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.tokens.dtype == np.int64
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.weight, other.weight)
        assert (one.doc_starts is None) == (other.doc_starts is None)
        if one.doc_starts is not None and other.doc_starts is not None:
            assert np.array_equal(one.doc_starts, other.doc_starts)


def shares_of(config: RunConfig, ddp: int, mine: list[int]) -> list[Share]:
    """Shares of some ddp indexes."""
    base = Share(10, 2, ddp, 0, document_mask=config.data.document_mask, eval_samples=7)
    return [replace(base, ddp_index=index) for index in mine]


def open_here(plan: StreamPlan, spec: RingSpec) -> Iterator[Chunk]:
    """The stream without Ray."""
    for chunk in ChunkReader(plan).serve(spec):
        yield Chunk.of_arrow(chunk.to_arrow())


def test_all_shares_together_are_the_step(config: RunConfig) -> None:
    data = open_run_data(config)
    for ddp in (1, 3, 4, 7, 12):
        rows = [
            batch.tokens[batch.weight > 0]
            for part in shares_of(config, ddp, list(range(ddp)))
            for batch in BatchSource(data, part).micro_batches(3)
        ]
        windows = data.order.windows(np.arange(30, 40))
        assert np.array_equal(np.concatenate(rows), data.open().windows(windows, 16))


def test_evaluation_reads_every_sample_once(config: RunConfig) -> None:
    data = open_run_data(config)
    for ddp in (1, 2, 5, 9):
        sources = [BatchSource(data, part).eval_batches() for part in shares_of(config, ddp, list(range(ddp)))]
        assert len({len(batches) for batches in sources}) == 1
        real = np.concatenate([batch.tokens[batch.weight > 0] for batches in sources for batch in batches])
        assert np.array_equal(real, data.open("held_out").windows(np.arange(7), 16))


def filled(plan: StreamPlan, steps: range, depth: int = 6, cells: int = 1) -> RingWriter:
    """A ring that holds some steps."""
    kind, starts = np.dtype("uint16"), plan.document_mask
    ring = RingWriter.create(samples=len(plan.offsets), context=16, depth=depth, cells=cells, dtype=kind, starts=starts)
    for step in steps:
        ring.put(step, ChunkReader(plan).read(step).step(step))
    return ring


def test_ring_and_shards_give_the_same_bytes(config: RunConfig) -> None:
    data = open_run_data(config)
    shares = shares_of(config, 4, [1, 2])
    plan = make_plan(data, shares, 4, 100)
    assert plan is not None
    ring = filled(plan, range(5, 11), cells=2)
    for cell, part in enumerate(shares):
        source, direct = RingSource(data, part, ring.spec, cell, 7), BatchSource(data, part)
        for step in range(3, 13):
            same(source.micro_batches(step), direct.micro_batches(step))
        assert (source.counters.ring_steps, source.counters.direct_steps) == (6, 4)
    assert ring.wanted(7) == 13
    assert ring.wanted(8) is None, "cells of another generation do not count"
    ring.close()


@pytest.mark.parametrize("what", ["token", "number", "count", "step", "crc"])
def test_a_torn_slot_is_never_used(tmp_path: Path, what: str) -> None:
    config = config_of(make_set(tmp_path / "set", [[900]]))
    data = open_run_data(config)
    shares = shares_of(config, 1, [0])
    plan = make_plan(data, shares, 4, 100)
    assert plan is not None
    ring = filled(plan, range(4))
    slot = ring._slot(2)
    at = {"step": 0, "count": 8, "crc": 16, "number": 24, "token": 24 + 8 * 10 + 5}[what]
    slot[at] ^= 1
    source = RingSource(data, shares[0], ring.spec, 0, 0)
    same(source.micro_batches(2), BatchSource(data, shares[0]).micro_batches(2))
    assert source.counters.direct_steps == 1
    ring.close()


def test_another_layouts_slot_is_not_used(tmp_path: Path) -> None:
    """A slot with the right step but without this rank's samples, though its CRC is right."""
    data = open_run_data(config_of(make_set(tmp_path / "set", [[900]])))
    ring = RingWriter.create(samples=4, context=16, depth=2, cells=1, dtype=np.dtype("uint16"))
    ring.put(1, StepSamples(np.array([10, 11, 13, 14]), np.zeros((4, 17), np.uint16), None))
    reader = RingReader.attach(ring.spec)
    assert reader is not None
    assert reader.take(1, np.array([11, 13])) is not None
    assert reader.take(1, np.array([11, 12])) is None
    assert reader.take(1, np.array([15])) is None
    assert reader.take(0, np.array([11])) is None
    assert data.train_count > 0
    ring.close()


def test_a_ring_that_is_gone_means_direct_reads(config: RunConfig) -> None:
    data = open_run_data(config)
    part = shares_of(config, 1, [0])[0]
    ring = RingWriter.create(samples=10, context=16, depth=2, cells=1, dtype=np.dtype("uint16"))
    spec = ring.spec
    ring.close()
    for gone in (None, spec, replace(spec, pid=2**22 - 1), replace(spec, nonce=1)):
        source = RingSource(data, part, gone, 0, 0)
        same(source.micro_batches(0), BatchSource(data, part).micro_batches(0))


def test_nothing_stays_when_all_are_killed(tmp_path: Path) -> None:
    """The memory has no name: after SIGKILL of writer and reader it is not there any more."""
    before = set(os.listdir("/dev/shm"))
    script = """
import numpy as np, time
from mula_ray.data.ring import RingWriter
ring = RingWriter.create(samples=10, context=16, depth=2, cells=1, dtype=np.dtype("uint16"))
print(ring.spec.pid, ring.spec.fd, ring.spec.nonce, flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pid, fd, nonce = map(int, child.stdout.readline().split())
    reader = RingReader.attach(RingSpec(pid, fd, nonce, 10, 16, 2, 1, "uint16", False))
    assert reader is not None
    assert not reader.closed
    child.kill()
    child.wait()
    child.stdout.close()
    assert reader.closed
    assert not {name for name in os.listdir("/dev/shm") if "mula-ring" in name} - before
    assert str(tmp_path)


def run_ranks(data: RunData, spec: RingSpec | None, shares: list[Share], generation: int, steps: range) -> int:
    """Ranks of a generation, step by step, against direct reads; how many steps came from the ring."""
    sources = [RingSource(data, part, spec, cell, generation) for cell, part in enumerate(shares)]
    direct = [BatchSource(data, part) for part in shares]
    for step in steps:
        for source, other in zip(sources, direct, strict=True):
            same(source.micro_batches(step), other.micro_batches(step))
        time.sleep(0.01)
    return sum(source.counters.ring_steps for source in sources)


def wait_for(stream: NodeStream, steps: int) -> None:
    """Until the stream has put so many steps into rings."""
    end = time.monotonic() + 30
    while stream.stats().steps < steps and time.monotonic() < end:
        time.sleep(0.01)


def test_a_stream_over_generations(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start, go on, rewind by a few steps and by many, change the world: always the same bytes, one stream a plan."""
    monkeypatch.setattr("mula_ray.runtime.stream._FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("mula_ray.runtime.stream._MAX_CHUNK_STEPS", 12)
    data = open_run_data(config)
    stream = NodeStream(data, config, opener=open_here)
    shares = shares_of(config, 4, [2, 3])
    spec = stream.begin(1, 0, 1000, shares)
    run_ranks(data, spec, shares, 1, range(3))
    wait_for(stream, 4)
    assert run_ranks(data, spec, shares, 1, range(3, 40)) > 40
    assert stream.begin(2, 35, 1000, shares) == spec, "the same ring for the next generation"
    assert run_ranks(data, spec, shares, 2, range(35, 38)) == 6, "rewound steps are still there"
    assert run_ranks(data, spec, shares, 2, range(38, 60)) > 20
    put = stream.stats().steps
    assert stream.begin(3, 4, 1000, shares) == spec
    run_ranks(data, spec, shares, 3, range(4, 6))
    wait_for(stream, put + 4)
    assert run_ranks(data, spec, shares, 3, range(6, 30)) > 20
    assert stream.stats().streams == 1
    other = shares_of(config, 3, [0, 2])
    moved = stream.begin(4, 30, 1000, other)
    assert moved != spec
    run_ranks(data, moved, other, 4, range(30, 40))
    assert stream.begin(5, 40, 1000, []) is None
    begin = time.monotonic()
    stream.close()
    assert time.monotonic() - begin < 3
    assert stream.stats().error == ""


def test_a_broken_stream_only_costs_time(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mula_ray.runtime.stream._FIRST_PAUSE_S", 0.0)

    def broken(_: StreamPlan, __: RingSpec) -> Iterator[Chunk]:
        raise RuntimeError("no such thing")
        yield

    data = open_run_data(config)
    stream = NodeStream(data, config, opener=broken)
    shares = shares_of(config, 2, [0])
    spec = stream.begin(1, 0, 1000, shares)
    assert run_ranks(data, spec, shares, 1, range(30)) == 0
    end = time.monotonic() + 10
    while stream.stats().streams < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert stream.stats().error == "RuntimeError: no such thing"
    assert stream.stats().streams == 3, "given up after some attempts"
    stream.close()


def test_crc_is_the_librarys() -> None:
    """The CRC of parts chained is that of the whole: what `put` and `take` rely on."""
    assert zlib.crc32(b"world", zlib.crc32(b"hello ")) == zlib.crc32(b"hello world")


@pytest.mark.ray
def test_the_ray_data_stream_of_a_node(tmp_path: Path) -> None:
    """The real thing, in a process of its own: Ray reads its authentication once a process."""
    folder = make_set(tmp_path / "set", [[900, 800]])
    script = Path(__file__).with_name("stream_in_ray.py")
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["streams"] == 1
    assert told["error"] == ""
    assert told["same"]
    assert told["first"] > 50, "most steps came from the ring"
    assert told["rewound"] >= 20
