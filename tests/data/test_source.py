"""What `train` refuses before anything starts, and the default corpus."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_files import make_set

from mula_ray.config.errors import UserError
from mula_ray.config.model import ModelConfig
from mula_ray.config.run import DataConfig, RunConfig, TrainConfig
from mula_ray.data import corpus
from mula_ray.data.inspect import inspect_folder, verify_folder
from mula_ray.data.manifest import read_manifest
from mula_ray.data.source import open_run_data


def config_of(folder: Path | str, *, vocab: int = 1000, context: int = 16, **train: Any) -> RunConfig:
    """A run on a data folder."""
    return RunConfig(
        model=ModelConfig(hidden=8, layers=1, heads=1, ffn=8, vocab_size=vocab),
        train=TrainConfig(**({"steps": 10, "global_batch": 4} | train)),
        data=DataConfig(path=str(folder), context=context),
    )


def test_facts_of_good_data(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", [[100, 60], [41]])
    data = open_run_data(config_of(folder, seed=3))
    assert (data.train_count, data.held_out_count, data.seed, data.vocab_size) == (12, 24, 3, 1000)
    assert open_run_data(config_of(folder, vocab=1024)).vocab_size == 1000, "a padded model vocabulary is fine"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"vocab": 999}, r"vocabulary of 1000 ids.*model\.vocab_size is 999.*at least 1000"),
        ({"context": 201}, r"201 tokens.*data\.context 201 needs 202"),
        ({"context": 190}, r"held-out split.*150 tokens.*--held-out"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, wrong: dict[str, int], said: str) -> None:
    folder = make_set(tmp_path / "set", [[100, 60], [41]], held=150)
    with pytest.raises(UserError, match=said):
        open_run_data(config_of(folder, **wrong))


def test_no_held_out_is_fine_without_evaluation(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", [[100, 60], [41]], held=150)
    assert open_run_data(config_of(folder, context=190, eval_samples=0)).train_count == 1


def test_a_recorded_id_outside_the_vocabulary(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", [[100], [500]], vocab=200)
    path = folder / "manifest.json"
    text = path.read_text()
    content = read_manifest(folder)
    assert max(entry.max_id for entry in content.splits["train"]) == 199
    path.write_text(text.replace('"max_id": 199', '"max_id": 200'))
    with pytest.raises(UserError, match=r"token id 200, but the vocabulary has 200 ids"):
        open_run_data(config_of(folder))


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", [[100], [500]])
    shard = folder / "train-00001.arrow"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(UserError, match="truncated"):
        open_run_data(config_of(folder))


def test_the_default_corpus_when_two_start_at_once(tmp_path: Path) -> None:
    """Two processes, one cache: both get the same finished folder, and nothing else stays there."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom mula_ray.data.corpus import ensure_stdlib\n"
        "print(ensure_stdlib(Path(sys.argv[1])))"
    )
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", script, str(cache)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {child.communicate(timeout=100)[0].strip() for child in both}
    assert [child.returncode for child in both] == [0, 0]
    assert len(found) == 1
    folder = Path(found.pop())
    assert sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock")) == [folder.name]
    manifest = read_manifest(folder)
    assert manifest.vocab_size == corpus.VOCAB_SIZE == 4096
    assert manifest.report["held_out_by"] == "file"
    assert manifest.tokens("train") > 1_000_000
    assert manifest.documents("held_out") >= 10
    assert not any(checked.problem for checked in verify_folder(folder))
    facts = inspect_folder(folder, 30)[0]
    assert facts.sample_text
    assert sum(count for _, count in facts.histogram) == facts.documents


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        corpus.ensure_stdlib(tmp_path / "file" / "cache")
