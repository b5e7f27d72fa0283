"""The engine on one rank and on a few: restore, bad numbers, damage, unequal work, gradients of each loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from dist_helper import run_ranks
from layouts import Case, micro_batches, run_cases

from mula_ray.optim.epso import Epso
from mula_ray.optim.integrity import StateGuard, digest
from mula_ray.optim.reduce import owned_grad
from mula_ray.parallel.executor import Divisors, Sums
from mula_ray.parallel.groups import Groups
from mula_ray.plan.layout import narrow, param_specs
from mula_ray.plan.pieces import Piece
from mula_ray.plan.topology import Topology
from mula_ray.train.engine import Engine, MicroBatch


class Memory:
    """A `StateReader` over copies of pieces."""

    def __init__(self, pieces: list[tuple[Piece, torch.Tensor]]) -> None:
        self.copies = {piece: value.clone() for piece, value in pieces}

    def read_into(self, piece: Piece, out: Any) -> None:
        out.copy_(self.copies[piece])

    def read_many(self, items: Iterable[tuple[Piece, Any]]) -> None:
        for piece, out in items:
            self.read_into(piece, out)


def engine_of(case: Case, *, init: bool = True) -> Engine:
    return Engine(case.config(), Topology(), 0, Groups(Topology(), 0, None), "cpu", init=init)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_restore_continues_bit_for_bit(dtype: str) -> None:
    case = Case(dtype=dtype)
    whole, half = engine_of(case), engine_of(case)
    for step in range(2):
        half.step(step, micro_batches(case, 0, step))
    restored = engine_of(case, init=False)
    restored.load(Memory(half.pieces()))
    want = [whole.step(step, micro_batches(case, 0, step)) for step in range(4)]
    got = [restored.step(step, micro_batches(case, 0, step)) for step in range(2, 4)]
    assert [(r.loss, r.grad_norm) for r in got] == [(r.loss, r.grad_norm) for r in want[2:]]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole.pieces(), restored.pieces(), strict=True))


def test_non_finite_step_changes_nothing_and_says_what() -> None:
    case = Case()
    engine = engine_of(case)
    before = [value.clone() for _, value in engine.pieces()]
    router = engine.stages[0].get_parameter("model.layers.2.mlp.gate.weight")
    with torch.no_grad():
        kept = router[0, 0].item()
        router[0, 0] = float("nan")
    result = engine.step(0, micro_batches(case, 0, 0))
    assert not result.finite
    assert "router of layer 2" in result.cause
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, engine.pieces(), strict=True))
    with torch.no_grad():
        router[0, 0] = kept
    assert engine.step(0, micro_batches(case, 0, 0)).finite


def test_digest_sees_every_flipped_bit() -> None:
    values = torch.randn(3000)
    want = digest(values)
    words = values.view(torch.int32)
    for at in (0, 1, 1500, 2047, 2048, 2999):
        for bit in (0, 13, 31):
            words[at] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            assert digest(values) != want
            words[at] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    assert digest(values) == want


def test_flipped_state_is_found_before_the_next_update() -> None:
    case = Case()
    engine = engine_of(case)
    assert not engine.step(0, micro_batches(case, 0, 0)).damage
    _, value = next((p, v) for p, v in engine.pieces() if p.kind == "exp_avg_sq")
    value.view(torch.int32)[3] ^= 1 << 7
    after_flip = [v.clone() for _, v in engine.pieces()]
    result = engine.step(1, micro_batches(case, 0, 1))
    assert "exp_avg_sq" in result.damage
    assert all(torch.equal(a, b) for a, (_, b) in zip(after_flip, engine.pieces(), strict=True))
    assert StateGuard(engine.optimizer).damaged() == []


def damage_on_one(rank: int, _world: int, port: int, what: str) -> list[tuple[str, bool]]:
    case = Case(dp=2, micro_batch=2)
    groups = Groups.connect(case.topology, rank, host="127.0.0.1", port=port, prefix="r/1", strict=True)
    engine = Engine(case.config(), case.topology, rank, groups, "cpu")
    found = []
    for step in range(3):
        result = engine.step(step, micro_batches(case, rank, step))
        found.append((result.damage, result.finite))
        if step == 0 and rank == 1:
            if what == "state":
                engine.pieces()[0][1].view(torch.int32)[0] ^= 1
            if what == "weights":
                engine.optimizer.families[0].weights.view(torch.int32)[11] ^= 1 << 3
            if what == "nan":
                engine.stages[0].get_parameter("lm_head.weight").data[0, 0] = float("nan")
    return found


@pytest.mark.dist
def test_damage_on_one_rank_stops_the_update_on_all() -> None:
    state = run_ranks(damage_on_one, 2, "state")
    assert "rank 1" in state[1][1][0]
    assert "1 other ranks" in state[0][1][0]
    weights = run_ranks(damage_on_one, 2, "weights")
    assert all("replicas differ: dense weights" in rank[1][0] for rank in weights)
    nan = run_ranks(damage_on_one, 2, "nan")
    assert all(not rank[1][1] for rank in nan), "one rank's NaN makes the step not finite on all"


def test_state_bytes_are_exact() -> None:
    """12 B x (dense / (dp ep) + local experts / edp), padding at most 512 elements a family."""
    for dp, ep in ((1, 1), (2, 1), (2, 2), (1, 4), (4, 3), (8, 12)):
        topology = Topology(dp=dp, ep=ep)
        case = Case(dp=dp, ep=ep)
        plans = _plans(case, topology)
        for family, shards in (("dense", topology.ddp), ("expert", topology.edp)):
            local = sum(
                narrow(spec, topology, topology.coords(0)).numel
                for spec in param_specs(case.config().model)
                if spec.family == family
            )
            plan = plans[family]
            assert plan.local_numel == local
            assert plan.shard_numel * shards - local <= 512
    engine = engine_of(Case())
    assert sum(f.state_bytes() for f in engine.optimizer.families) == 12 * sum(
        f.plan.numel for f in engine.optimizer.families
    )


def _plans(case: Case, topology: Topology) -> dict[str, Any]:
    from mula_ray.parallel.apply import layout_of
    from mula_ray.plan.partition import plan_family

    layout = layout_of(case.config(), topology, 0)[0]
    return {
        family: plan_family(
            family,  # type: ignore[arg-type]
            [(at, p) for at, p in enumerate(layout) if p.spec.family == family],
            topology.ddp if family == "dense" else topology.edp,
            1000,
            first=frozenset(),
        )
        for family in ("dense", "expert")
    }


def router_gradients(rank: int, _world: int, port: int, case: Case) -> dict[str, list[tuple[Piece, np.ndarray]]]:
    """Owned router gradients of each loss part: the part's coefficient is on, the others are off (ce: both off)."""
    found = {}
    for part, coefs in {
        "ce": {"balance_coef": 0.0, "z_coef": 0.0},
        "balance": {"balance_coef": 1.0, "z_coef": 0.0},
        "z": {"balance_coef": 0.0, "z_coef": 1.0},
    }.items():
        groups = Groups.connect(case.topology, rank, host="127.0.0.1", port=port, prefix=part, strict=True)
        engine = Engine(case.config(**coefs), case.topology, rank, groups, "cpu")
        optimizer: Epso = engine.optimizer
        batches = micro_batches(case, rank, 0)
        optimizer.begin_step(len(batches))
        sums = Sums(engine.config.model, engine.device)
        engine._executor.run(batches, Divisors(case.global_batch, case.global_batch * 16), sums)
        optimizer.reduce()
        rows = []
        for family in optimizer.families:
            for segment in family.segments:
                if segment.slot.param.spec.name.endswith("mlp.gate.weight"):
                    bucket = family.plan.buckets[segment.bucket]
                    base = family.own(bucket)[1].start
                    grad = owned_grad(family, bucket, torch.float32)[segment.shard - base :][: segment.numel]
                    rows.append((segment.piece("master", "fp32"), grad.numpy().copy()))
        found[part] = rows
    return found


@pytest.mark.dist
def test_router_gets_every_loss_part_alike_in_all_layouts() -> None:
    whole: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    cases = [Case(), Case(dp=2), Case(ep=2), Case(dp=2, ep=2, micro_batch=1)]
    for number, case in enumerate(cases):
        for rank in run_ranks(router_gradients, case.topology.world, case):
            for part, rows in rank.items():
                for piece, grad in rows:
                    full = whole.setdefault((number, part), {}).setdefault(
                        piece.name, np.full(piece.global_shape, np.nan, np.float32)
                    )
                    full.reshape(-1)[piece.start : piece.stop] = grad
    for part in ("ce", "balance", "z"):
        for name, want in whole[0, part].items():
            if part != "ce":
                want = want - whole[0, "ce"][name]
            assert np.abs(want).max() > 1e-6, f"{part} does not train {name}"
            for number in range(1, len(cases)):
                np.testing.assert_allclose(whole[number, part][name], whole[0, part][name], rtol=1e-4, atol=1e-6)


@pytest.mark.dist
def test_unequal_samples_give_the_exact_mean() -> None:
    """3 samples on 2 ranks, and one rank without any: the same as one rank with all of them."""
    for batch in (3, 1):
        reference = run_cases([Case(global_batch=batch, micro_batch=batch, steps=2)])[0]
        for case in (Case(dp=2, global_batch=batch, micro_batch=1, steps=2), Case(ep=2, global_batch=batch, steps=2)):
            outcome = run_cases([case])[0]
            assert outcome.tokens == reference.tokens == [batch * 16] * 2
            np.testing.assert_allclose(outcome.rows, reference.rows, rtol=1e-5)


def test_batch_other_than_configured_is_still_a_mean() -> None:
    case = Case()
    engine, other = engine_of(case), engine_of(Case(global_batch=2))
    batches = micro_batches(Case(global_batch=2), 0, 0)
    one, two = engine.step(0, batches), other.step(0, batches)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-6)
    assert one.tokens == 32


def one_expert(rank: int, world: int, port: int, dispatcher: str) -> tuple[float, list[Any], float]:
    """All tokens to the same two experts: the other rank's experts get none."""
    from mula_ray.parallel.observe import Recorder

    case = Case(dp=1, ep=world, dispatcher=dispatcher, micro_batch=8 // world)
    recorder = Recorder()
    groups = Groups.connect(
        case.topology, rank, host="127.0.0.1", port=port, prefix="one", strict=True, observers=(recorder,)
    ) if world > 1 else Groups(case.topology, 0, None)  # fmt: skip
    engine = Engine(case.config(), case.topology, rank, groups, "cpu")
    with torch.no_grad():
        for layer in engine.stages[0].model.layers.values():
            layer.mlp.gate.weight.zero_()  # type: ignore[union-attr, operator]
    result = engine.step(0, micro_batches(case, rank, 0))
    assert result.experts is not None
    halves = result.experts.counts.view(4, 2, 6).sum(dim=2)
    assert (halves.min(dim=1).values == 0).all(), "equal logits: the same two experts for every token"
    return result.grad_norm, recorder.calls, result.experts.imbalance


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_ranks_whose_experts_get_no_token_take_part(dispatcher: str) -> None:
    from mula_ray.parallel.observe import first_mismatch

    (alone,) = run_ranks(one_expert, 1, dispatcher)
    both = run_ranks(one_expert, 2, dispatcher)
    assert first_mismatch([rank[1] for rank in both]) is None
    assert both[0][0] == pytest.approx(alone[0], rel=1e-5)


def test_empty_micro_batch_counts_nowhere() -> None:
    case = Case()
    engine, other = engine_of(case), engine_of(case)
    batches = micro_batches(case, 0, 0)
    empty = MicroBatch(batches[0].tokens, torch.zeros(2))
    one, two = engine.step(0, batches), other.step(0, [*batches, empty])
    assert (one.loss, one.tokens) == (two.loss, two.tokens)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-6)
    assert one.experts is not None
    assert two.experts is not None
    assert torch.equal(one.experts.counts, two.experts.counts)
