"""`mula-ray ckpt` on the golden checkpoint and on damaged ones: figures, exit codes, messages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mula_ray.cli.ckpt import app
from mula_ray.config.errors import MulaError, NoCheckpoint, UserError

GOLDEN = Path(__file__).parent / "golden" / "v1"


def call(*args: object) -> tuple[int, str]:
    """Exit code and output, as `cli/main.py` would make them."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], standalone_mode=False)
    if isinstance(result.exception, MulaError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, typer.Exit), result.exception
    return result.return_value or 0, result.output


def test_ls_and_verify_of_sound_checkpoints() -> None:
    code, text = call("ls", GOLDEN)
    assert code == 0
    assert [line.split()[:3] for line in text.splitlines()[1:]] == [["full-a", "full", "2"], ["model-2", "model", "2"]]
    assert text.count(" yes") == 2
    rows = json.loads(call("ls", GOLDEN / "full-a", "--json")[1])["checkpoints"]
    assert [(r["slot"], r["step"], r["tokens"], r["valid"]) for r in rows] == [("full-a", 2, 1600, True)]
    assert rows[0]["bytes"] == sum(file.stat().st_size for file in (GOLDEN / "full-a").glob("*.safetensors"))
    code, text = call("verify", GOLDEN)
    assert code == 0
    assert text.count("every byte as written") == 2


def test_verify_names_the_damage_with_exit_20(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "run" / "checkpoints")
    file = tmp_path / "run" / "checkpoints" / "full-a" / "node-00001-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    code, text = call("verify", tmp_path / "run")
    assert code == 20
    assert "node-00001-0.safetensors, tensor lm_head.weight: checksum" in text
    assert " yes" in call("ls", tmp_path / "run")[1]  # sizes and manifest are fine
    file.write_bytes(data[:-5])
    (tmp_path / "run" / "checkpoints" / "model-2" / "manifest.json").write_text("{}")
    text = call("ls", tmp_path / "run")[1]
    assert text.count("NO: ") == 2
    assert "size" in text
    damages = json.loads(call("verify", tmp_path / "run", "--json")[1])["checkpoints"]
    assert [entry["damages"][0]["damage"] for entry in damages] == ["size", "manifest"]


def test_export_and_import(tmp_path: Path) -> None:
    _, text = call("export-hf", GOLDEN, tmp_path / "hf")
    assert "config.json" in text
    assert "no tokenizer" in text
    _, text = call("import-hf", tmp_path / "run", tmp_path / "hf")
    assert "model-0" in text
    assert call("verify", tmp_path / "run")[0] == 0
    with pytest.raises(UserError, match="already"):
        call("import-hf", tmp_path / "run", tmp_path / "hf")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        call("ls", tmp_path / "none")
    with pytest.raises(UserError, match="is not a folder"):
        call("import-hf", tmp_path / "run", tmp_path / "none")
    with pytest.raises(NoCheckpoint, match="holds no checkpoint"):
        call("verify", tmp_path)
