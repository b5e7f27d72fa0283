"""The report in a real headless Chromium, from file://: no console errors, charts, phone, dark, print, contrast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import Tab, browse, find_chromium
from synthetic_run import write_run

from mula_ray.train.report.page import build

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium: apt-get install chromium")

CONTRAST = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const lum = (c) => { const f = (v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
    return .2126 * f(c[0]) + .7152 * f(c[1]) + .0722 * f(c[2]); };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > .99) return c; } return [255, 255, 255]; };
  const bad = [];
  for (const e of document.querySelectorAll("h1,h2,h3,h4,p,dt,dd,small,a,li,span,summary,th,td,b")) {
    if (!e.textContent.trim() || !e.offsetParent) continue;
    const a = lum(parse(getComputedStyle(e).color)), b = lum(ground(e));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) bad.push(`${e.tagName}.${e.className} ${e.textContent.slice(0, 20)} ${ratio.toFixed(2)}`);
  }
  return bad.slice(0, 10);
})()"""

HOVER = """(() => {
  const out = {};
  for (const plot of document.querySelectorAll(".plot[data-key]")) {
    const box = plot.querySelector(".frame").getBoundingClientRect();
    plot.dispatchEvent(new PointerEvent("pointermove",
      { clientX: box.left + box.width * .6, clientY: box.top + box.height * .4 }));
    out[plot.dataset.key] = document.getElementById("tip").hidden ? "" : document.getElementById("tip").textContent;
    plot.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
    plot.dispatchEvent(new PointerEvent("pointerleave"));
  }
  return out;
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    moe = write_run(folder / "moe", steps=800, layers=4, experts=16, failures=8)
    path = folder / "one.html"
    path.write_text(build([moe]), encoding="utf-8")
    dense = write_run(folder / "dense", steps=500, failures=1, dense=True, seed=1)
    (folder / "two.html").write_text(build([moe, dense]), encoding="utf-8")
    return path


async def _look(tab: Tab, page: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, width, dark, media in (
        ("desktop", 1280, False, "screen"),
        ("dark", 1280, True, "screen"),
        ("phone", 360, False, "screen"),
        ("paper", 794, False, "print"),
    ):
        await tab.screen(width, dark=dark, media=media)
        await tab.open(page)
        seen[name] = {
            "ready": await tab.run("document.documentElement.dataset.ready"),
            "overflow": await tab.run("document.documentElement.scrollWidth - innerWidth"),
            "contrast": await tab.run(CONTRAST),
            "small": await tab.run(
                "Math.min(...[...document.querySelectorAll('.ys span,.xs span')]"
                ".map((e) => parseFloat(getComputedStyle(e).fontSize)))"
            ),
        }
    await tab.screen(1280)
    await tab.open(page)
    seen["hover"] = await tab.run(HOVER)
    seen["charts"] = await tab.run("document.querySelectorAll('figure.chart').length")
    seen["blank"] = await tab.run(
        "[...document.querySelectorAll('.frame img')].filter((e) => !e.naturalWidth).length + "
        "[...document.querySelectorAll('path.line')].filter((e) => !e.getTotalLength()).length"
    )
    return seen


@pytest.mark.parametrize("name", ["one.html", "two.html"])
def test_the_page_works_in_a_real_browser(page: Path, name: str) -> None:
    async def visit(tab: Tab) -> tuple[dict[str, Any], list[str], list[str]]:
        return await _look(tab, page.with_name(name)), tab.errors, tab.requests

    seen, errors, requests = browse(visit)
    assert not errors
    assert all(address.startswith(("file:", "data:")) for address in requests), requests
    for kind in ("desktop", "dark", "phone", "paper"):
        found = seen[kind]
        assert found["ready"] == "yes"
        assert found["overflow"] <= 0, f"{kind} scrolls sideways"
        assert not found["contrast"], f"{kind}: too little contrast"
    assert seen["phone"]["small"] >= 10, "labels stay readable on a phone"
    assert seen["charts"] >= 14
    assert seen["blank"] == 0
    assert all("step" in text for text in seen["hover"].values()), seen["hover"]


def test_the_test_would_notice_an_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.html"
    path.write_text("<!doctype html><link rel=icon href=data:,><script>nothing.here()</script>")

    async def visit(tab: Tab) -> list[str]:
        await tab.open(path)
        return tab.errors

    assert any("nothing" in error for error in browse(visit))
