"""Layout legality: every refusal names the nearest legal choices."""

from __future__ import annotations

from pathlib import Path

import pytest

from mula_ray.config.errors import UserError
from mula_ray.config.load import load
from mula_ray.config.run import RunConfig
from mula_ray.config.shipped import shipped_names
from mula_ray.plan.legal import legal_topology, micro_batches, single_process_topology, warnings
from mula_ray.plan.recompute import parse_recompute
from mula_ray.plan.topology import Topology


def config(*sets: str) -> RunConfig:
    return load("mula-tiny", sets).config


def refused(*sets: str) -> str:
    with pytest.raises(UserError) as caught:
        legal_topology(config(*sets))
    return str(caught.value)


@pytest.mark.parametrize("name", shipped_names("configs"))
def test_shipped_layouts_are_legal(name: str) -> None:
    loaded = load(name).config
    topology = legal_topology(loaded)
    assert topology.world == loaded.cluster.nodes * loaded.cluster.tiles_per_node
    assert warnings(loaded, topology) == []


def test_dp_auto_fills_the_working_nodes() -> None:
    assert legal_topology(config()) == Topology(dp=2)
    assert legal_topology(config("cluster.tiles_per_node=4", "parallel.ep=2")) == Topology(dp=4, ep=2)
    assert legal_topology(config("cluster.nodes=4", "parallel.ep=2"), nodes=2) == Topology(dp=1, ep=2)


@pytest.mark.parametrize(
    ("sets", "parts"),
    [
        (["parallel.ep=3"], ("parallel.ep is 3", "model.moe.experts 16", "nearest legal: 1, 2, 4, 8")),
        (["parallel.tp=3"], ("parallel.tp is 3", "model.heads 4", "nearest legal: 1, 2, 4")),
        (["parallel.dp=3"], ("parallel.dp 3", "2 tiles", "set parallel.dp=2 or dp: auto, or cluster.nodes=3")),
        (["parallel.tp=2"], ("a node has 1 tiles", "set parallel.tp=1 or less, or cluster.tiles_per_node=2")),
        (
            ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=3"],
            ("6 stages", "set parallel.pp=1 virtual_stages=1"),
        ),
        (
            ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=4", "model.layers=4"],
            ("8 stages", "nearest legal parallel.virtual_stages: 2"),
        ),
        (["parallel.pp=4"], ("4 stages", "2 layers", "nearest legal parallel.pp: 1, 2")),
        (["parallel.ep=4"], ("one replica needs ep 4", "use at least 4 nodes")),
        (["parallel.ep=4", "cluster.tiles_per_node=3", "cluster.nodes=4"], ("neither fill whole nodes", "3, 6")),
        (["parallel.ep=4", "cluster.nodes=6"], ("take 4 nodes each", "nearest legal cluster.nodes: 4, 8")),
        (["parallel.virtual_stages=2"], ("parallel.pp is 1", "set virtual_stages=1")),
        (["parallel.pp=2", "parallel.schedule=interleaved"], ("virtual_stages >= 2",)),
        (["parallel.pp=2", "parallel.virtual_stages=2"], ("use schedule: interleaved",)),
        (["parallel.pp=2", "parallel.schedule=zbv"], ("set virtual_stages=2",)),
        (["parallel.recompute=atention"], ("'atention' is not a part", "did you mean attention?")),
        (["parallel.recompute=moe@0:3"], ("STOP <= 2",)),
        (["model.moe=null", "model.ffn=64", "parallel.ep=2"], ("the model is dense", "set ep=1")),
        (["model.router.balance=hf"], ("needs one rank and one micro-batch", "use balance: sequence")),
    ],
)
def test_illegal_layouts(sets: list[str], parts: tuple[str, ...]) -> None:
    message = refused(*sets)
    for part in parts:
        assert part in message


def test_suggested_choices_are_legal() -> None:
    for ep in (1, 2, 4, 8):
        legal_topology(config(f"parallel.ep={ep}", "cluster.tiles_per_node=8"))
    legal_topology(config("parallel.ep=4", "cluster.nodes=8"))


def test_a_vocabulary_that_tp_does_not_divide_is_to_be_padded() -> None:
    message = refused("model.vocab_size=4098", "parallel.tp=4", "cluster.tiles_per_node=4")
    assert "does not divide model.vocab_size 4098" in message
    assert "pad the vocabulary with model.vocab_size=4100" in message
    assert "nearest legal: 1, 2" in message
    legal_topology(config("model.vocab_size=4100", "parallel.tp=4", "cluster.tiles_per_node=4"))


def test_choices_of_tp_divide_everything_that_tp_cuts() -> None:
    message = refused("parallel.tp=2", "data.context=7", "train.micro_batch=1", "cluster.tiles_per_node=2")
    assert message.endswith("train.micro_batch x data.context) 7; nearest legal: 1")


def test_single_process() -> None:
    assert single_process_topology(config()).world == 1
    with pytest.raises(UserError, match=r"parallel\.ep 2.*--set parallel\.ep=1"):
        single_process_topology(config("parallel.ep=2"))


def test_warnings_name_the_consequence() -> None:
    wide = config("parallel.ep=2", "cluster.nodes=2")
    assert "crosses the network" in warnings(wide, legal_topology(wide))[0]
    small = config("train.global_batch=1")
    assert "1 of them have nothing to do" in warnings(small, legal_topology(small))[0]


def test_micro_batches_round_up() -> None:
    uneven = config("train.global_batch=17", "train.micro_batch=4")
    assert micro_batches(uneven, Topology(dp=2)) == 3


def test_recompute_syntax() -> None:
    assert parse_recompute("none", 4) == {}
    assert parse_recompute("norms+moe@1:3", 4) == {"norms": range(4), "moe": range(1, 3)}
    with pytest.raises(UserError, match="named twice"):
        parse_recompute("moe+moe", 4)


def test_config_has_no_secret_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No environment variable is configuration."""
    monkeypatch.chdir(tmp_path)
    for name in ("MULA_STEPS", "TRAIN_STEPS", "train.steps", "TRAIN__STEPS"):
        monkeypatch.setenv(name, "1")
    assert load("mula-tiny").config.train.steps != 1
