"""A headless Chromium driven over its DevTools protocol: console, network, screenshots, emulated screens.

python tests/report/browser.py PAGE.html OUT.png [WIDTH] [dark]
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--disable-dev-shm-usage",
    "about:blank",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
T = TypeVar("T")


def find_chromium() -> str | None:
    """The browser's path, or None where none is installed."""
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


@dataclass
class Tab:
    """One page under test. `errors`: console errors and exceptions; `requests`: addresses asked for."""

    socket: aiohttp.ClientWebSocketResponse
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _number: int = 0

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; events that arrive meanwhile are noted."""
        self._number += 1
        await self.socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = json.loads((await self.socket.receive(timeout=30)).data)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message)
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def screen(self, width: int, height: int = 900, *, dark: bool = False, media: str = "screen") -> None:
        """A screen of this size, light or dark, or paper (`media="print"`)."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])

    async def open(self, page: Path) -> None:
        """Loads a file and waits until its script is through."""
        await self.send("Page.navigate", url=page.resolve().as_uri())
        for _ in range(200):
            if (
                await self.run("document.readyState") == "complete"
                and (await self.run("location.href")) != "about:blank"
            ):
                return
            await asyncio.sleep(0.05)
        raise TimeoutError(f"{page} did not load")

    async def picture(self, path: Path, whole: bool = True) -> None:
        """A PNG of the whole page."""
        shot = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


def browse(work: Callable[[Tab], Coroutine[Any, Any, T]]) -> T:
    """Starts a browser with an empty profile, runs `work` on a tab, and ends the browser."""
    binary = find_chromium()
    assert binary is not None, "no Chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [binary, f"--user-data-dir={profile}", *FLAGS], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            return asyncio.run(_session(Path(profile), work))
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


async def _session(profile: Path, work: Callable[[Tab], Coroutine[Any, Any, T]]) -> T:
    port_file, end = profile / "DevToolsActivePort", time.monotonic() + 30
    while not (port_file.exists() and port_file.read_text().count("\n")):
        assert time.monotonic() < end, "Chromium did not start"
        await asyncio.sleep(0.05)
    port = port_file.read_text().split()[0]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
            tabs = await reply.json(content_type=None)
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        async with session.ws_connect(address, max_msg_size=0) as socket:
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.send(f"{domain}.enable")
            return await work(tab)


async def _shoot(tab: Tab, page: Path, out: Path, width: int, dark: bool) -> None:
    await tab.screen(width, dark=dark)
    await tab.open(page)
    height = await tab.run("document.documentElement.scrollHeight")
    await tab.screen(width, int(height), dark=dark)
    await tab.picture(out)
    print(out, width, height, tab.errors)


if __name__ == "__main__":
    browse(
        lambda tab: _shoot(
            tab,
            Path(sys.argv[1]),
            Path(sys.argv[2]),
            int(sys.argv[3]) if len(sys.argv) > 3 else 1280,
            "dark" in sys.argv,
        )
    )
