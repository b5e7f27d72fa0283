"""Every layout reads every other's checkpoint, bit for bit, from disk and from memory; what does not fit is named."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from states import DENSE, MOE, facts, rank_pieces, shapes, values, whole

from mula_ray.checkpoint.buffers import select
from mula_ray.checkpoint.failures import DamagedCheckpoint, StoreFailure
from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.checkpoint.snapshot import MemoryPiece, SnapshotReader
from mula_ray.checkpoint.store import part_name, write_part
from mula_ray.config.model import ModelConfig
from mula_ray.plan.overlap import common_pieces
from mula_ray.plan.pieces import Piece
from mula_ray.plan.scatter import scatter
from mula_ray.plan.topology import Topology

LAYOUTS: dict[str, tuple[Topology, str]] = {
    "1": (Topology(), "epso"),
    "dp2": (Topology(dp=2), "epso"),
    "dp3": (Topology(dp=3), "epso"),
    "dp8": (Topology(dp=8), "epso"),
    "ep2": (Topology(ep=2), "epso"),
    "ep4": (Topology(ep=4), "epso"),
    "dp2-ep2": (Topology(dp=2, ep=2), "epso"),
    "dp2-ep4": (Topology(dp=2, ep=4), "epso"),
    "dp4-ep2-zero1": (Topology(dp=4, ep=2), "zero1"),
    "dp2-ep2-zero1": (Topology(dp=2, ep=2), "zero1"),
    "tp2": (Topology(tp=2), "epso"),
    "dp2-tp2": (Topology(dp=2, tp=2), "epso"),
    "pp2": (Topology(pp=2), "epso"),
    "pp2-tp2-ep2": (Topology(pp=2, tp=2, ep=2), "epso"),
    "dp2-pp2-ep2": (Topology(dp=2, pp=2, ep=2), "epso"),
}
MODELS = {"moe": MOE, "dense": DENSE}
Item = tuple[Piece, torch.Tensor]


def held(model: ModelConfig, layout: str, step: int) -> list[list[Item]]:
    """What every rank holds."""
    topology, optimizer = LAYOUTS[layout]
    ranks = [list(rank_pieces(model, topology, rank, optimizer=optimizer)) for rank in range(topology.world)]
    return [[(p, torch.from_numpy(values(p, step))) for p in pieces] for pieces in ranks]


def write(root: Path, model: ModelConfig, layout: str) -> Path:
    """A checkpoint of step 1, as two nodes would write it."""
    state = held(model, layout, 1)
    nodes = [rank * 2 // len(state) for rank in range(len(state))]
    plan = scatter([[piece for piece, _ in items] for items in state], nodes)
    manager = CheckpointManager(root, "run")
    manager.acquire(renew=False)
    pending = manager.begin(1)
    entries = []
    for node in sorted(set(nodes)):
        ranks = [rank for rank in range(len(state)) if nodes[rank] == node]
        items = [item for rank in ranks for item in select(state[rank], plan[rank])]
        entries.append(write_part(pending.folder, part_name(node), items))
    pending.commit(facts(1, manager.generation), entries, shapes(model))
    assert pending.settle() == []
    manager.close()
    return root / "full-a"


@pytest.fixture(scope="module", params=MODELS)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelConfig, dict[str, Path]]:
    """Model -> a checkpoint of every layout that it has."""
    model = MODELS[request.param]
    base = tmp_path_factory.mktemp(request.param)
    layouts = [name for name, (t, _) in LAYOUTS.items() if model.moe is not None or t.ep == 1]
    return model, {name: write(base / name, model, name) for name in layouts}


def check_pair(model: ModelConfig, path: Path, target: str) -> None:
    """Every rank of `target` gets its bits."""
    topology, optimizer = LAYOUTS[target]
    with CheckpointReader(path) as reader:
        reader.expect(model)
        for rank in range(topology.world):
            for piece in rank_pieces(model, topology, rank, optimizer=optimizer):
                out = torch.full((piece.numel,), torch.nan)
                reader.read_into(piece, out)
                assert np.array_equal(out.numpy(), values(piece, 1)), (path, target, piece)


def test_layouts_read_each_other(written: tuple[ModelConfig, dict[str, Path]]) -> None:
    model, paths = written
    assert len(paths) >= (12 if model.moe else 5)
    pairs = list(itertools.product(paths, paths))
    for source, target in random.Random(0).sample(pairs, 24):
        check_pair(model, paths[source], target)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_ordered_pairs(written: tuple[ModelConfig, dict[str, Path]]) -> None:
    model, paths = written
    for source, target in itertools.product(paths, paths):
        check_pair(model, paths[source], target)
    print(f"{len(paths)} layouts, {len(paths) ** 2} pairs")


def test_the_files_hold_every_byte_once_and_are_plain_safetensors(written: tuple[ModelConfig, dict[str, Path]]) -> None:
    from safetensors.numpy import load_file

    model, paths = written
    numel = sum(int(np.prod(shape)) for shape in shapes(model).values())
    for path in paths.values():
        files = sorted(path.glob("*.safetensors"))
        assert 1 <= len(files) <= 2
        assert sum(array.size for file in files for array in load_file(file).values()) == 3 * numel
        assert sum(file.stat().st_size for file in files) >= 12 * numel


def test_snapshots_of_many_ranks_reshard_and_name_what_to_fetch() -> None:
    """Replicated sources are allowed; pieces fetched from another node are sources like the others."""
    for source, target in [("dp2-ep2-zero1", "tp2"), ("dp2-ep4", "dp3"), ("pp2-tp2-ep2", "dp4-ep2-zero1")]:
        sources = [
            MemoryPiece(p, memoryview(t.numpy()).cast("B"), None, "r") for r in held(MOE, source, 1) for p, t in r
        ]
        reader = SnapshotReader(sources)
        topology, optimizer = LAYOUTS[target]
        for piece in rank_pieces(MOE, topology, 0, optimizer=optimizer):
            out = np.empty(piece.numel, np.float32)
            reader.read_into(piece, out)
            assert np.array_equal(out, values(piece, 1))
            wanted = [w for s in reader.sources(piece.name, piece.kind) for w in common_pieces(s.piece, piece)]
            fetched = []
            for want in wanted:
                data = np.empty(want.numel, np.float32)
                reader.read_into(want, data)
                fetched.append(MemoryPiece(want, memoryview(data).cast("B"), None, "fetched"))
            SnapshotReader(fetched).read_into(piece, out)
            assert np.array_equal(out, values(piece, 1))


def test_blocks_larger_than_a_read_are_cut(tmp_path: Path) -> None:
    """Tensors of several blocks: contiguous, strided and shifted reads, on numbers of threads from 1 to 4."""
    shape = (900, 2000)
    piece = Piece("w", "master", "fp32", shape, (0, 0), shape, 0, 1_800_000)
    full = whole("w", "master", shape)
    entry = write_part(tmp_path, part_name(0), [(piece, full)])
    assert len(entry.pieces[0].blocks) == 2
    manager = CheckpointManager(tmp_path / "c", "run")
    manager.acquire(renew=False)
    manager.save(facts(1, manager.generation), [(piece, full)])
    for threads, (offset, box, start, stop) in enumerate(
        [
            ((0, 0), (900, 2000), 0, 1_800_000),
            ((0, 500), (900, 250), 0, 225_000),
            ((3, 0), (800, 2000), 77, 1_234_567),
            ((899, 1999), (1, 1), 0, 1),
        ],
        start=1,
    ):
        wanted = Piece("w", "master", "fp32", shape, offset, box, start, stop)
        out = np.empty(wanted.numel, np.float32)
        with CheckpointReader(tmp_path / "c" / "full-a", threads=threads) as reader:
            reader.read_into(wanted, out)
        assert np.array_equal(out, values(wanted))


def test_commit_names_missing_extra_and_overlapping_slices(tmp_path: Path) -> None:
    shape = (4, 5)
    whole_piece = Piece("w", "master", "fp32", shape, (0, 0), shape, 0, 20)
    zeros = np.zeros(20, np.float32)
    manager = CheckpointManager(tmp_path / "c", "run")
    manager.acquire(renew=False)
    cases = {
        "w: 3 of 20 elements are missing": [dataclasses.replace(whole_piece, start=3)],
        "overlap": [whole_piece, dataclasses.replace(whole_piece, start=19)],
        "v: master is not a tensor of the model": [whole_piece, dataclasses.replace(whole_piece, name="v")],
        "u: master is missing": [whole_piece],
        "the model says": [dataclasses.replace(whole_piece, global_shape=(4, 6))],
    }
    for message, pieces in cases.items():
        wanted = {"w": shape, "u": (1,)} if message.startswith("u") else {"w": shape}
        with pytest.raises(StoreFailure, match=message):
            manager.save(facts(1, manager.generation), [(p, zeros[: p.numel]) for p in pieces], shapes=wanted)
        assert manager.latest() is None
    assert manager.ever_committed() is False


def test_expect_lists_tensors_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, DENSE, "1")
    with CheckpointReader(path) as reader, pytest.raises(DamagedCheckpoint) as caught:
        reader.expect(MOE)
    text = "\n".join(str(damage) for damage in caught.value.damages)
    assert "model.layers.0.mlp.experts.gate_up_proj: coverage: master is missing" in text
    assert "model.layers.1.mlp.up_proj.weight: coverage: exp_avg is not a tensor of the model" in text


def test_model_only_state_as_full_state_only_on_request(tmp_path: Path) -> None:
    """bf16 weights widen exactly into fp32 masters; moments are zero; without asking it is refused."""
    weight = Piece("w", "weight", "bf16", (3, 4), (0, 0), (3, 4), 0, 12)
    tensor = torch.randn(12).bfloat16()
    manager = CheckpointManager(tmp_path / "c", "run")
    manager.acquire(renew=False)
    manager.save(facts(7, manager.generation), [(weight, tensor)], "model")
    assert manager.latest() is None
    master = Piece("w", "master", "fp32", (3, 4), (1, 0), (2, 4), 1, 8)
    out = torch.empty(7)
    with CheckpointReader(tmp_path / "c" / "model-7") as reader, pytest.raises(KeyError, match="no master of w"):
        reader.read_into(master, out)
    with CheckpointReader(tmp_path / "c" / "model-7", optimizer_lost=True) as reader:
        reader.read_into(master, out)
        assert torch.equal(out, tensor[5:].float())
        reader.read_into(dataclasses.replace(master, kind="exp_avg"), out)
        assert not out.any()


def test_select_gathers_a_planned_piece_from_the_parts_that_are_held() -> None:
    """A rank may hold neighbours in two buffers (buckets); the plan merges them."""
    piece = Piece("w", "master", "fp32", (20,), (0,), (20,), 0, 20)
    parts = [dataclasses.replace(piece, start=a, stop=b) for a, b in ((12, 20), (0, 5), (5, 12))]
    items = [(part, values(part)) for part in parts]
    chosen = select(items, [dataclasses.replace(piece, start=3, stop=15)])
    assert [(p.start, p.stop) for p, _ in chosen] == [(3, 5), (5, 12), (12, 15)]
    assert all(np.array_equal(array, values(p)) for p, array in chosen)
    with pytest.raises(KeyError, match="does not hold"):
        select(items[:2], [piece])
