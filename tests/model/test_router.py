"""Routing, its auxiliary losses and statistics."""

from __future__ import annotations

import pytest
import torch

from mula_ray.config.errors import UserError
from mula_ray.config.model import ModelConfig, MoEConfig, RouterConfig
from mula_ray.model.aux import AuxSink
from mula_ray.model.moe import Experts, MoE
from mula_ray.model.router import NonFiniteRouter, Router

EXPERTS, TOP_K, HIDDEN, LAYERS = 6, 2, 16, 3


def config(**router: object) -> ModelConfig:
    return ModelConfig(
        vocab_size=32, hidden=HIDDEN, layers=LAYERS, heads=2,
        moe=MoEConfig(experts=EXPERTS, top_k=TOP_K, expert_width=8), router=RouterConfig(**router),
    )  # fmt: skip


def make_router(cfg: ModelConfig, layer: int = 0, rank: int = 0) -> Router:
    router = Router(cfg, layer, rank, None, torch.float32)
    torch.nn.init.normal_(router.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    return router


def hidden(batch: int, seq: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, seq, HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_weights_are_the_softmax_of_all_experts() -> None:
    router, x = make_router(config()), hidden(2, 5)
    weights, ids = router(x, None, None)
    probs = torch.softmax(x.flatten(0, 1) @ router.weight.t(), dim=-1)
    torch.testing.assert_close(weights, probs.gather(1, ids))
    assert (weights.sum(dim=1) < 1).all()
    normed, _ = make_router(config(norm_topk_prob=True))(x, None, None)
    torch.testing.assert_close(normed.sum(dim=1), torch.ones(10))


def test_balance_loss_by_its_formula() -> None:
    cfg, x = config(), hidden(2, 7)
    aux = AuxSink(cfg)
    router = make_router(cfg)
    _, ids = router(x, None, aux)
    expected = 0.0
    for sequence, chosen in zip(x, ids.view(2, 7, TOP_K), strict=True):
        probs = torch.softmax(sequence @ router.weight.t(), dim=-1).mean(dim=0)
        fraction = torch.bincount(chosen.flatten(), minlength=EXPERTS) / 7
        expected += EXPERTS * (fraction * probs).sum()
    torch.testing.assert_close(aux.balance_sum(), expected / LAYERS)
    assert aux.counts().sum() == 2 * 7 * TOP_K


def test_losses_do_not_depend_on_how_the_batch_is_split() -> None:
    cfg, x, weight = config(), hidden(4, 9), torch.tensor([1.0, 1.0, 0.0, 1.0])
    router = make_router(cfg)
    whole, parts = AuxSink(cfg), []
    router(x, weight, whole)
    for part, w in zip(x.split(1), weight.split(1), strict=True):
        parts.append(AuxSink(cfg))
        router(part, w, parts[-1])
    torch.testing.assert_close(sum(p.loss(3, 27) for p in parts), whole.loss(3, 27))
    torch.testing.assert_close(sum(p.counts() for p in parts), whole.counts())
    torch.testing.assert_close(sum(p.entropy_sum() for p in parts), whole.entropy_sum())
    assert whole.counts().sum() == 27 * TOP_K  # the empty sample is counted nowhere


def test_both_losses_train_the_router() -> None:
    for coefs in ({"balance_coef": 1.0, "z_coef": 0.0}, {"balance_coef": 0.0, "z_coef": 1.0}):
        cfg = config(**coefs)
        router, aux = make_router(cfg), AuxSink(cfg)
        router(hidden(2, 8), None, aux)
        aux.loss(2, 16).backward()
        assert router.weight.grad.norm() > 1e-4


def test_uniform_routing_is_exactly_uniform() -> None:
    cfg = config(fur=True)
    aux, router = AuxSink(cfg), make_router(cfg)
    weights, ids = router(hidden(2, 2 * EXPERTS), None, aux)
    assert ids[:3].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert ids[EXPERTS - 1].tolist() == [EXPERTS - 1, 0]
    assert (aux.counts() == 4 * TOP_K).all()
    weights.sum().backward()
    assert router.weight.grad.norm() > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_name_layer_and_rank(bad: float) -> None:
    router, x = make_router(config(), layer=5, rank=3), hidden(1, 4)
    x[0, 2] = bad
    with pytest.raises(NonFiniteRouter, match=r"layer 5 on rank 3: 1 of 4 tokens"):
        router(x, None, None)
    router.raises = False
    router(x, None, None)


@pytest.mark.parametrize("bad", [-1, EXPERTS, EXPERTS + (1 << 16)])
def test_ids_out_of_range_name_layer_and_rank(bad: int) -> None:
    moe = MoE(config(), 5, 3, None, torch.float32)
    ids = torch.tensor([[0, 1], [2, bad], [0, 1], [2, 3]])
    with pytest.raises(UserError, match=rf"layer 5 on rank 3: expert ids reach from {min(bad, 0)} to {max(bad, 3)}"):
        moe.after_routing(hidden(1, 4)[0], torch.rand(4, 2), ids)


def test_hidden_states_of_another_width_name_layer_and_rank() -> None:
    router = make_router(config(), layer=5, rank=3)
    with pytest.raises(UserError, match=r"layer 5 on rank 3: hidden states \(1, 4, 3\)"):
        router(hidden(1, 4)[..., :3], None, None)


def test_default_memory_guard_is_twice_the_fair_share() -> None:
    experts = Experts(config(), 0, 0, torch.device("meta"), torch.float32)
    ids = torch.zeros(6000, 2, dtype=torch.int64)
    assert experts._fair_share(ids) == 2 * 12000
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[:1])
    assert experts._fair_share(ids) == 2 * 2000
