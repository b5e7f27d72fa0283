"""The command line's own manners: messages, exit codes, speed of starting (by what it imports)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mula_ray.cli import main as cli_main
from mula_ray.cli.bench import NAMES
from mula_ray.config.errors import CannotContinue, NoCheckpoint, StoppedEarly, UserError
from tests.conftest import Cli

COUNTS = {
    "mula-1b": (1_279_787_008, 1_279_787_008),
    "mula-7b-a1b": (6_919_161_856, 1_282_017_280),
    "mula-20b-a2b": (20_076_824_576, 2_360_084_480),
    "mula-100b-a7b": (99_987_557_376, 7_578_651_648),
    "mula-220b-a10b": (220_205_681_664, 10_020_719_616),
}


@pytest.mark.parametrize(("name", "total", "active"), [(n, *c) for n, c in COUNTS.items()])
def test_plan_prints_the_exact_parameter_counts(cli: Cli, name: str, total: int, active: int) -> None:
    result = cli("plan", name, "--json")
    assert result.code == 0
    assert json.loads(result.out)["parameters"] == {"total": total, "active": active}
    assert f"{total:,} parameters, {active:,} active" in cli("plan", name).out


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["train"], "Missing argument"),
        (["train", "mula-tiny", "--foo"], "No such option"),
        (["trian"], "No such command"),
        (["train", "mula-tiny", "--resume", "maybe"], "auto, must, never"),
        (["train", "mula-tiny", "--deadline", "soon"], "--deadline 'soon' is not a time"),
        (["train", "mula-tiny", "--deadline", "2001-01-01T00:00:00Z"], "has passed"),
        (["train", "mula-tiny", "--profile", "9:3"], "A:B"),
        (["train", "mula-tiny", "--in-process", "--address", "auto"], "--in-process uses no Ray"),
        (["train", "mula-tiny", "--address", "auto", "--inject", "kill-rank@step=1"], "--i-mean-it"),
        (["train", "mula-tiny", "--in-process", "--set", "parallel.ep=2"], "--set parallel.ep=1"),
        (["train", "mula-tiny", "--set", "parallel.ep=3"], "nearest legal: 1, 2, 4, 8"),
        (["plan", "nothing"], "does not exist"),
        (["plan", "mula-tiny", "--set", "parallel.ep=3"], "nearest legal: 1, 2, 4, 8"),
        *((["bench", name, "--case", "nope"], f"bench {name} has no case 'nope'; choose among") for name in NAMES),
        (["bench", "nothing"], "choose one of moe, step"),
    ],
)
def test_user_mistakes_are_exit_20_and_one_message(
    cli: Cli, args: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli(*args)
    assert result.code == 20
    assert part in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("a"), 20),
        (StoppedEarly("b"), 10),
        (CannotContinue("c"), 30),
        (NoCheckpoint("d"), 40),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli_main, "app", fail)
    result = cli("plan", "mula-tiny")
    assert result.code == code
    assert len(result.err.splitlines()) == 1


def test_internal_error_leaves_its_traceback_in_the_run_folder(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(obj: SimpleNamespace, **_: object) -> None:
        obj.run_dir = tmp_path
        raise RuntimeError("boom")

    monkeypatch.setattr(cli_main, "app", fail)
    result = cli("plan", "mula-tiny")
    assert result.code == 1
    assert len(result.err.splitlines()) == 1
    (file,) = (tmp_path / "logs").iterdir()
    assert str(file) in result.err
    assert "RuntimeError: boom" in file.read_text()


def test_train_hands_the_request_over(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def fake(request: object) -> int:
        seen.append(request)
        return 10

    monkeypatch.setitem(sys.modules, "mula_ray.runtime.inprocess", SimpleNamespace(train=fake))
    result = cli(
        "train", "mula-tiny", "--in-process", "--run-dir", tmp_path, "--set", "train.steps=2", "--deadline", "+5m"
    )
    assert result.code == 10
    (request,) = seen
    assert request.run_dir == tmp_path
    assert request.loaded.config.train.steps == 2
    assert request.in_process
    assert request.deadline is not None


def test_planning_and_help_import_neither_torch_nor_ray() -> None:
    script = (
        "import sys; from mula_ray.cli.main import main; main(['--help']); "
        "main(['plan', 'mula-220b-a10b', '--tiles', '3072', '--site', 'aurora']); "
        "heavy = {'torch', 'ray', 'pyarrow', 'transformers', 'plotly'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_reader_of_the_output_may_leave() -> None:
    done = subprocess.run(
        f"{sys.executable} -m mula_ray plan mula-1b | true", shell=True, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
