"""Every command of docs/data.md does what the page says."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_files import texts, write_jsonl


def commands(repository: Path) -> list[list[str]]:
    """Command lines of the page's code blocks, in order."""
    blocks = (repository / "docs" / "data.md").read_text().split("```bash\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("mula-ray")]


def make_input(folder: Path) -> None:
    """What the page's commands name."""
    for source, seed in (("my-texts", 1), ("web", 2), ("code", 3)):
        (folder / source).mkdir()
        for number, text in enumerate(texts(seed, 60, 1500)):
            (folder / source / f"{number}.txt").write_text(text + " ".join(f"w{number * i * i}" for i in range(900)))
    question = {"question": "alpha", "choices": ["beta", "gamma"], "answer": 1}
    write_jsonl(folder / "questions.jsonl", [{"text": "alpha beta"}, question])


def test_data_commands(
    repository: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_input(tmp_path)
    monkeypatch.chdir(tmp_path)
    mine = [words for words in commands(repository) if words[1] == "data"]
    assert len(mine) == 4
    for words in mine:
        told = cli(*words[1:])
        assert told.code == 0, told.err
    assert (tmp_path / "mixed" / "manifest.json").exists()


@pytest.mark.slow
def test_train_and_eval_commands(repository: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """The remaining commands; training cut to two steps in one process."""
    make_input(tmp_path)
    short = ["--in-process", "--set", "train.steps=2", "--set", "train.eval_samples=2", "--set", "optim.warmup_steps=1"]
    rest = [words for words in commands(repository) if words[1] in ("train", "eval")]
    assert cli("data", "prepare", tmp_path / "my-texts", "--out", tmp_path / "my-data", "--vocab", 4096).code == 0
    assert len(rest) == 3
    for words in rest:
        line = [sys.executable, "-m", "mula_ray", *words[1:], *(short if words[1] == "train" else [])]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        if "--json" in words:
            assert json.loads(done.stdout)["questions"] == 1
