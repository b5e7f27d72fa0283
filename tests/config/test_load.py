"""Configuration: every wrong input gives one message with what, the value, the constraint and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from mula_ray.config.errors import UserError
from mula_ray.config.keys import all_keys
from mula_ray.config.load import load, write_resolved
from mula_ray.config.run import RunConfig
from mula_ray.config.shipped import find_file, shipped_names

MINIMAL = """
model:
  hidden: 64
  layers: 2
  heads: 2
  moe: {experts: 4, top_k: 2, expert_width: 32}
train:
  steps: 3
  global_batch: 4
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def refused(path: object, *sets: str) -> str:
    with pytest.raises(UserError) as caught:
        load(str(path), sets)
    return str(caught.value)


@pytest.mark.parametrize("name", shipped_names("configs"))
def test_shipped_configurations_load_by_name_and_by_path(name: str) -> None:
    assert load(name).config == load(f"configs/{name}.yaml").config == load(f"{name}.yaml").config


def test_sets_apply_in_order_and_override_the_file(config_file: Path) -> None:
    loaded = load(config_file, ["train.steps=7", "train.steps=9", "optim.lr=1e-3", "parallel.dp=auto"])
    assert loaded.config.train.steps == 9
    assert loaded.config.optim.lr == 1e-3


def test_set_of_a_section_replaces_it(config_file: Path) -> None:
    loaded = load(config_file, ["model.moe={experts: 8, top_k: 1, expert_width: 16}"])
    assert loaded.config.model.moe is not None
    assert loaded.config.model.moe.experts == 8
    assert loaded.origins["model.moe.experts"] == "--set"
    assert loaded.origins["model.moe.backend"] == "default"


def test_every_value_has_an_origin(config_file: Path) -> None:
    loaded = load(config_file, ["train.seed=3"])
    assert loaded.origins["train.seed"] == "--set"
    assert loaded.origins["train.steps"] == f"{config_file}:8"
    assert loaded.origins["optim.lr"] == "default"
    leaves = {key for key in all_keys(RunConfig) if not any(k.startswith(f"{key}.") for k in all_keys(RunConfig))}
    assert set(loaded.origins) == leaves


def test_resolved_configuration_loads_to_the_same(config_file: Path, tmp_path: Path) -> None:
    loaded = load(config_file, ["optim.eps=1e-9", "data.path='a: b # c'", "parallel.recompute=norms+moe@0:1"])
    write_resolved(loaded, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "steps: 3  # " in text
    assert load(tmp_path / "config.yaml").config == loaded.config


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.stepz", "train.steps"),
        ("train.lr", "optim.lr"),
        ("modle.hidden", "model"),
        ("model.moe.expert", "model.moe.experts"),
        ("model.router.furr", "model.router.fur"),
        ("elastic.spares", "cluster.spares"),
        ("cluster.node", "cluster.nodes"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(config_file: Path, key: str, meant: str) -> None:
    message = refused(config_file, f"{key}=1")
    assert f"unknown key {key.split('.')[0] if meant == 'model' else key}" in message
    assert f"did you mean {meant}?" in message


def test_unknown_key_in_a_file_names_its_line(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "  stepps: 4\n")
    assert f"{config_file}:10: unknown key train.stepps; did you mean train.steps?" in refused(config_file)


@pytest.mark.parametrize("key", [k for k in all_keys(RunConfig) if k.count(".") >= 1])
def test_any_key_with_a_letter_too_many_is_refused(config_file: Path, key: str) -> None:
    assert f"unknown key {key}x; did you mean {key}?" in refused(config_file, f"{key}x=1")


@pytest.mark.parametrize(
    ("item", "parts"),
    [
        ("train.steps=abc", ("train.steps is 'abc'", "valid integer", "--set train.steps=VALUE")),
        ("train.steps='12'", ("train.steps is '12'", "valid integer")),
        ("train.steps=true", ("train.steps is True", "valid integer")),
        ("train.steps=0", ("train.steps is 0", "greater than 0")),
        ("train.steps=1.5", ("train.steps is 1.5", "valid integer")),
        ("model.router.fur=yes", ("model.router.fur is 'yes'", "valid boolean")),
        ("parallel.dp=some", ("parallel.dp is 'some'", "a positive integer or one of auto")),
        ("parallel.dp=0", ("parallel.dp is 0", "a positive integer or one of auto")),
        ("train.dtype=bf61", ("train.dtype is 'bf61'", "fp32, bf16", "did you mean bf16?")),
        ("train=3", ("train is 3", "it is a section")),
        ("model.moe.top_k=9", ("top_k 9 exceeds experts 4", "set top_k <= experts")),
        ("model.ffn=64", ("exactly one of model.ffn", "model.moe")),
        ("model.heads=3", ("hidden 64", "heads 3")),
        ("optim.min_lr=1", ("optim.min_lr 1.0 exceeds optim.lr",)),
        ("data.path=[a]", ("data.path is ['a']", "valid string")),
    ],
)
def test_wrong_values_say_value_constraint_and_fix(config_file: Path, item: str, parts: tuple[str, ...]) -> None:
    message = refused(config_file, item)
    for part in parts:
        assert part in message
    assert "pydantic" not in message


def test_all_faults_come_in_one_message(config_file: Path) -> None:
    message = refused(config_file, "train.steps=0", "train.dtype=f", "optim.lr=-1")
    assert len(message.splitlines()) == 3


def test_missing_required_keys(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    message = refused(path)
    assert "model is missing" in message
    assert "train is missing" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n", "must be a mapping"),
        ("model: {hidden: 3\n", "not valid YAML"),
        ("train:\n  steps: 3\n  steps: 4\n", "run.yaml:3: train.steps is given twice (first on line 2)"),
        ("train: &a {steps: 3}\n\tx: 1\n", "not valid YAML"),
        ("a: !!python/object:os.system x\n", "not valid YAML"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert part in refused(path)


def test_unreadable_and_missing_files(tmp_path: Path) -> None:
    assert "did you mean mula-tiny?" in refused("mula-tny")
    assert "mula-220b-a10b" in refused(tmp_path / "nothing.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refused(binary)


@pytest.mark.parametrize("item", ["train.steps", "=3", "train.steps.x=3"])
def test_malformed_set(config_file: Path, item: str) -> None:
    assert item in refused(config_file, item)


def test_yaml_1_2_scalars(config_file: Path) -> None:
    loaded = load(config_file, ["optim.lr=4e-4", "optim.min_lr=1e-5", "data.path=no", "train.steps=4_000"])
    assert loaded.config.optim.lr == 4e-4
    assert loaded.config.data.path == "no"
    assert loaded.config.train.steps == 4000


def test_site_files_are_found_too() -> None:
    assert find_file("aurora", "cluster").name == "aurora.yaml"
