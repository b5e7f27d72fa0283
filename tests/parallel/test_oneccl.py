"""Real oneCCL on the CPU against gloo: every collective and sub-groups. Needs the `oneccl` extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mula_ray.parallel.oneccl_library import library_folder

WORLD = 4
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(library_folder() is None, reason="the oneccl extra is not installed"),
]


def test_every_collective_equals_gloo(tmp_path: Path) -> None:
    """Ranks are separate processes here: oneCCL must not share a process with the tests."""
    body = Path(__file__).with_name("oneccl_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(body), str(rank), str(WORLD), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(outputs)
    assert all("all equal" in output for output in outputs)
