"""The engine's own state through a checkpoint: any layout goes on where any other stopped, bit for bit where equal.

Ranks train two steps, each writes its part; every target layout loads all of these checkpoints and trains three more.
A new axis of `Topology` joins by adding a row to `LAYOUTS`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "train"))  # the engine tests' helper
from dist_helper import run_ranks
from layouts import Case, micro_batches

from mula_ray.checkpoint.buffers import select
from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.checkpoint.store import part_name, write_part
from mula_ray.parallel.groups import Groups
from mula_ray.plan.format import FULL_KINDS, Facts
from mula_ray.plan.layout import param_specs
from mula_ray.plan.pieces import Piece
from mula_ray.plan.scatter import scatter
from mula_ray.train.engine import Engine

pytestmark = pytest.mark.dist
BEFORE, AFTER = 2, 3

LAYOUTS = {
    "1": Case(),
    "dp2": Case(dp=2),
    "dp3": Case(dp=3, micro_batch=3),
    "dp4": Case(dp=4),
    "ep2": Case(ep=2),
    "ep4": Case(ep=4),
    "dp2-ep2": Case(dp=2, ep=2),
    "dp2-ep2-zero1": Case(dp=2, ep=2, kind="zero1"),
    "dp4-ep2": Case(dp=4, ep=2, micro_batch=1),
    "tp2": Case(tp=2),
    "dp2-tp2": Case(dp=2, tp=2),
    "pp2": Case(pp=2),
    "dp2-pp2": Case(dp=2, pp=2),
    "tp2-pp2": Case(tp=2, pp=2),
}
DENSE = {name: Case(**{**vars(case), "dense": True}) for name, case in LAYOUTS.items() if case.ep == 1}
Rows = list[tuple[float, float]]


def connect(case: Case, rank: int, port: int, prefix: str, init: bool) -> Engine:
    groups = Groups.connect(case.topology, rank, host="127.0.0.1", port=port, prefix=prefix, timeout_s=60.0)
    return Engine(case.config(), case.topology, rank, groups, "cpu", init=init)


def steps(engine: Engine, case: Case, rank: int, first: int, count: int) -> Rows:
    rows = []
    for step in range(first, first + count):
        result = engine.step(step, micro_batches(case, rank, step))
        rows.append((result.loss, result.grad_norm))
    return rows


def train(rank: int, _world: int, port: int, case: Case) -> tuple[list[tuple[Piece, np.ndarray]], Rows]:
    """Two steps, a copy of this rank's state, then the unbroken three."""
    engine = connect(case, rank, port, "train", init=True)
    steps(engine, case, rank, 0, BEFORE)
    items = [(piece, value.numpy().copy()) for piece, value in engine.pieces()]
    rows = steps(engine, case, rank, BEFORE, AFTER)
    engine.close()
    return items, rows


def load_and_train(rank: int, _world: int, port: int, case: Case, paths: Sequence[str]) -> list[tuple[Rows, list[str]]]:
    """From each checkpoint: load, compare every loaded element with the checkpoint's whole tensors, three steps."""
    results = []
    for number, path in enumerate(paths):
        engine = connect(case, rank, port, f"load/{number}", init=False)
        wrong = []
        with CheckpointReader(Path(path)) as reader:
            reader.expect(case.config().model)
            engine.load(reader)
            for piece, value in engine.pieces():
                whole = np.empty(piece.global_shape, np.float32)
                at = (0,) * whole.ndim
                everything = Piece(piece.name, piece.kind, "fp32", whole.shape, at, whole.shape, 0, whole.size)
                reader.read_into(everything, whole.reshape(-1))
                box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))
                if not np.array_equal(whole[box].reshape(-1)[piece.start : piece.stop], value.numpy()):
                    wrong.append(f"{piece.kind} {piece.name}")
        results.append((steps(engine, case, rank, BEFORE, AFTER), wrong))
        engine.close()
    return results


def save(case: Case, root: Path) -> tuple[Path, Rows]:
    """A committed checkpoint of the case, and how it went on."""
    ranks = run_ranks(train, case.topology.world, case, timeout=100.0)
    plan = scatter([[piece for piece, _ in items] for items, _ in ranks], list(range(len(ranks))))
    manager = CheckpointManager(root, "run")
    manager.acquire(renew=False)
    pending = manager.begin(BEFORE)
    entries = [
        write_part(pending.folder, part_name(rank), select(items, plan[rank])) for rank, (items, _) in enumerate(ranks)
    ]
    shapes = {spec.name: spec.shape for spec in param_specs(case.config().model)}
    facts = Facts(BEFORE, BEFORE * case.global_batch, 0, manager.generation, "run")
    manifest = pending.commit(facts, entries, shapes)
    assert {s.piece.kind for entry in manifest.files for s in entry.pieces} == set(FULL_KINDS)
    assert pending.settle() == []
    manager.close()
    return root / "full-a", ranks[0][1]


def check(cases: dict[str, Case], sources: Sequence[str], targets: Sequence[str], folder: Path) -> list[str]:
    """Every source into every target; returns a line a pair."""
    saved = {name: save(cases[name], folder / name) for name in sources}
    lines = []
    for target in targets:
        paths = [str(saved[name][0]) for name in sources]
        ranks = run_ranks(load_and_train, cases[target].topology.world, cases[target], paths, timeout=110.0)
        for at, source in enumerate(sources):
            rows, unbroken = ranks[0][at][0], saved[source][1]
            for rank in ranks:
                assert rank[at][1] == [], f"{source} -> {target}: other bits in {rank[at][1][:5]}"
                assert rank[at][0] == rows
            got, wanted = np.array(rows), np.array(unbroken)
            off = float((np.abs(got - wanted) / np.abs(wanted)).max())
            lines.append(f"{source} -> {target}: {off:.1e}")
            assert off <= 1e-5, lines[-1]
            if source == target:
                assert rows == unbroken, f"{source}: not bit for bit"
    return lines


def test_sampled_layouts(tmp_path: Path) -> None:
    print("\n".join(check(LAYOUTS, ["dp2-ep2-zero1", "ep2"], ["ep2", "pp2", "1"], tmp_path)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cases", [LAYOUTS, DENSE], ids=["moe", "dense"])
def test_all_ordered_pairs_of_layouts(cases: dict[str, Case], tmp_path: Path) -> None:
    lines = check(cases, list(cases), list(cases), tmp_path)
    worst = max(float(line.rsplit(" ", 1)[1]) for line in lines)
    print(f"{len(cases)} layouts, {len(lines)} ordered pairs, largest relative difference {worst:.1e}")
