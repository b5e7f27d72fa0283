"""What a wheel carries: configurations, site files and job templates are found without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    repository = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=repository, check=True, capture_output=True, timeout=100)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, tmp_path: Path, *args: str) -> str:
    env = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "mula_ray", *args]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_the_wheel_that_runs(installed: Path, tmp_path: Path) -> None:
    code = "import mula_ray; print(list(mula_ray.__path__)[0])"
    env = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str(installed / "mula_ray")


def test_shipped_names(installed: Path, tmp_path: Path) -> None:
    assert "220,205,681,664" in run(installed, tmp_path, "plan", "mula-220b-a10b")
    assert "2,757,760" in run(installed, tmp_path, "plan", "configs/mula-tiny.yaml")


def test_sites_and_templates(installed: Path, tmp_path: Path) -> None:
    args = ("--site", "aurora", "--account", "X", "--walltime", "1h", "--nodes", "2", "--spares", "0", "--dry-run")
    script = run(installed, tmp_path, "submit", "mula-20b-a2b", *args)
    assert "#PBS -l select=2" in script


def test_every_package_is_in(installed: Path) -> None:
    repository = Path(__file__).resolve().parents[2] / "mula_ray"
    there = {path.relative_to(repository) for path in repository.rglob("*.py")}
    packed = {path.relative_to(installed / "mula_ray") for path in (installed / "mula_ray").rglob("*.py")}
    assert there <= packed
    assert (installed / "mula_ray" / "py.typed").exists()
