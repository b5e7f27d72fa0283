"""`mula-ray plan` through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Cli


def test_everything_about_mula_220b_on_aurora(cli: Cli, tmp_path: Path) -> None:
    picture = tmp_path / "scaling.html"
    args = ("plan", "mula-220b-a10b", "--tiles", 3072, "--site", "aurora", "--scaling", "--picture", picture)
    text = cli(*args)
    assert text.code == 0, text.err
    for part in ("dp 32 x ep 12 x tp 1 x pp 8", ": fits", "without recomputation", "bubble", "goodput", "about 90 %"):
        assert part in text.out
    assert "not run on Aurora itself" in text.out
    page = picture.read_text()
    assert "<svg" in page
    assert "http" not in page
    data = json.loads(cli(*args, "--json").out)
    assert data["fits"] is True
    assert data["memory_bytes"]["total"] == sum(v for k, v in data["memory_bytes"].items() if k != "total")
    assert data["step_s"] == pytest.approx(sum(data["step_parts_s"].values()))
    assert [point["tiles"] for point in data["scaling"]] == [384, 768, 1536, 3072, 6144, 12288]


def test_where_it_does_not_fit_is_said(cli: Cli) -> None:
    out = cli("plan", "mula-220b-a10b", "--tiles", 384, "--site", "aurora", "--set", "train.micro_batch=2").out
    assert "would not fit" in out
    assert "pipeline rank 0 (layers " in out


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--tiles", 1000, "--site", "aurora"), "nearest legal: 960, 1056"),
        (("--site", "auorra"), "did you mean aurora?"),
        (("--calibrate", "/nonexistent"), "not a run folder"),
        (("--tiles", 0), "tiles"),
    ],
)
def test_mistakes(cli: Cli, args: tuple[object, ...], part: str) -> None:
    result = cli("plan", "mula-220b-a10b", *args)
    assert result.code == 20
    assert part in result.err
