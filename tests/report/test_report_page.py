"""The report page: contents, honesty of the drawing, size, and whatever state the files are in."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import write_run

from mula_ray.cli.main import main
from mula_ray.config.errors import UserError
from mula_ray.train.report.axis import Axis, axis_for, number
from mula_ray.train.report.downsample import reduce_series
from mula_ray.train.report.goodput import KINDS, account, sessions
from mula_ray.train.report.heat import Scale, png
from mula_ray.train.report.load import load_run
from mula_ray.train.report.page import build

CHARTS = ("loss", "loss-late", "norm", "lr", "aux", "z", "rate", "mfu", "parts-0", "imbalance-0", "entropy")
CHARTS += ("entropy-map-0", "loads-0", "time-0", "goodput", "recoveries-0")
VOID = {"meta", "link", "img", "path", "br"}


class Checker(HTMLParser):
    """Well-formedness, identifiers, and what is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.unnamed: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        if "id" in facts:
            self.ids.append(str(facts["id"]))
        self.loaded += [str(facts[name]) for name in ("src", "href") if facts.get(name)]
        if facts.get("role") == "img" and not facts.get("aria-label"):
            self.unnamed.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes another element"


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert len(set(checker.ids)) == len(checker.ids)
    assert not checker.unnamed
    assert all(link.startswith(("#", "data:")) for link in checker.loaded), "the page loads nothing from elsewhere"
    assert "http://" not in page
    assert "https://" not in page
    return checker


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "small", steps=600, layers=4, experts=16, failures=6)


def test_every_chart_is_there_and_nothing_comes_from_outside(small: Path) -> None:
    checker = check(build([small]))
    for key in CHARTS:
        assert f"fig-{key}" in checker.ids, key


def test_the_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    """The bar of the project: 10,000 steps, 64 experts, 16 layers, 50 failures; at most 6 MB."""
    page = build([write_run(tmp_path / "long")])
    assert len(page.encode()) <= 6_000_000
    check(page)
    assert "50 failures" in page


def test_the_page_of_the_largest_model_stays_small(tmp_path: Path) -> None:
    run = write_run(tmp_path / "wide", steps=700, layers=64, experts=240, failures=2)
    assert len(build([run]).encode()) <= 6_000_000


def test_several_runs_side_by_side_with_what_differs(small: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "dense", steps=400, failures=0, seed=1, dense=True)
    page = build([small, other])
    checker = check(page)
    for key in ("loss", "imbalance-0", "parts-0", "parts-1", "time-1", "goodput"):
        assert f"fig-{key}" in checker.ids
    assert "imbalance-1" not in page, "a dense model has no experts to show"
    assert "model.ffn" in page
    assert "8192" in page
    assert "train.seed" not in re.sub(r"<pre.*?</pre>", "", page, flags=re.S), "values that are alike are left out"


def test_runs_of_the_same_name_can_be_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "run", steps=20, layers=2, experts=4, failures=0) for name in ("a", "b")]
    page = build(runs)
    assert "a/run" in page
    assert "b/run" in page


def test_texts_of_a_run_cannot_break_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "evil", steps=20, layers=2, experts=4, failures=0)
    with (run / "events.jsonl").open("a") as file:
        line = {
            "time": "2026-11-01T09:00:00+00:00",
            "event": "failure",
            "generation": 0,
            "kind": "hard",
            "step": 3,
            "reason": "</script><script>alert(1)</script>\"'<b>&",
        }
        file.write(json.dumps(line) + "\n")
    page = build([run])
    check(page)
    assert "<script>alert" not in page


@pytest.mark.parametrize("keep", ["config.yaml", "metrics.jsonl", "events.jsonl"])
def test_half_a_run_folder_gives_half_a_report(tmp_path: Path, small: Path, keep: str) -> None:
    (tmp_path / keep).write_bytes((small / keep).read_bytes())
    check(build([tmp_path]))


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"loss":null,"generation":0}\n{"step":2,"lo')
    check(build([tmp_path]))


def test_no_run_folder_is_one_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no run folder"):
        build([tmp_path])
    assert main(["report", str(tmp_path / "nowhere")]) == 20
    assert "does not exist" in capsys.readouterr().err


def test_the_verb_writes_the_page(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(small), "--out", str(out)]) == 0
    assert "page.html" in capsys.readouterr().out
    check(out.read_text())
    assert main(["report", str(small), "--out", str(tmp_path / "no" / "page.html")]) == 20


@given(st.lists(st.floats(-1e9, 1e9) | st.just(float("nan")), max_size=400), st.integers(1, 60))
def test_downsampling_hides_nothing(values: list[float], points: int) -> None:
    y = np.array(values, dtype=np.float64)
    small = reduce_series(np.arange(len(y), dtype=np.float64), y, points)
    assert len(small.x) <= points
    known = y[~np.isnan(y)]
    if len(known):
        assert np.nanmin(small.low) == known.min()
        assert np.nanmax(small.high) == known.max()
        assert ((small.low <= small.mean + 1e-6 * np.abs(small.mean)) | np.isnan(small.mean)).all()
    else:
        assert np.isnan(small.mean).all()


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12), st.booleans())
def test_axes_hold_their_values_and_have_ticks(low: float, width: float, log: bool) -> None:
    values = np.array([low, low + width])
    axis = axis_for([values], log=log)
    assert axis.low < axis.high
    inside = values[values > 0] if log else values
    assert ((inside >= axis.low) & (inside <= axis.high)).all()
    ticks = axis.ticks()
    assert all(0 <= at <= 1 for at, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks) or width < 1e-6 * abs(low)


def test_ticks_are_round_and_in_one_unit() -> None:
    assert [text for _, text in Axis(0, 10_000).ticks(6)] == ["0", "2k", "4k", "6k", "8k", "10k"]
    assert [text for _, text in Axis(0, 4e-4).ticks(4)] == ["0", "0.0001", "0.0002", "0.0003", "0.0004"]
    assert number(2.5e9) == "2.5G"


def test_goodput_adds_up_to_the_wall_time(small: Path) -> None:
    run = load_run(small)
    spent = account(run)
    assert set(spent.seconds) == {name for name, _ in KINDS}
    assert sum(spent.seconds.values()) == pytest.approx(spent.wall)
    assert spent.seconds["start-up"] == pytest.approx(12.0, abs=0.1)
    assert spent.seconds["other"] < 0.01 * spent.wall, "a run whose times are all on file leaves nothing unexplained"
    assert spent.seconds["replayed steps"] > 0
    assert 0.8 < spent.goodput < 1.0
    assert len(sessions(run)) == 1


def test_time_between_two_drivers_is_not_counted(tmp_path: Path) -> None:
    lines = []
    for start, first in ((0, 1), (3600, 3)):
        minute, second = divmod(start, 60)
        stamp = f"2026-11-01T{8 + minute // 60:02d}:{minute % 60:02d}:{second:02d}+00:00"
        lines.append({"time": stamp, "event": "run_start", "generation": 0, "steps": 4})
        for step in (first, first + 1):
            stamp = f"2026-11-01T{8 + minute // 60:02d}:{minute % 60:02d}:{second + 10 * (step - first + 1):02d}+00:00"
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "step_s": 10.0, "loss": 1.0, "time": stamp}) + "\n")
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spent = account(load_run(tmp_path))
    assert spent.wall == pytest.approx(40.0)
    assert spent.goodput == pytest.approx(1.0)


def test_heat_map_pngs_are_valid() -> None:
    import zlib

    levels = Scale(0.0, 1.0).levels(np.array([[0.0, 0.5, np.nan], [1.0, 2.0, -1.0]]))
    assert levels[0].tolist() == [2, 2 + 126, 0] or levels[0].tolist() == [2, 2 + 127, 0]
    assert levels[1].tolist() == [255, 255, 2]
    image = png(levels, Scale(0.0, 1.0).palette())
    assert image.startswith(b"\x89PNG")
    data = image[image.index(b"IDAT") + 4 : image.index(b"IEND") - 8]
    assert len(zlib.decompress(data)) == 2 * (3 + 1)
