"""Heat maps as tiny palette PNGs: they stretch to any width, print, and need no script."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mula_ray.train.report.axis import Axis
from mula_ray.train.report.load import Array

NOTHING, DEAD, FIRST = 0, 1, 2
LEVELS = 255 - FIRST
Rgba = tuple[int, int, int, int]


@dataclass(frozen=True)
class Scale:
    """Values to colours. `low` and `high` are the ends; the neutral middle is transparent, so that both the light and
    the dark page shine through; `diverging` scales have it halfway, others at `low` (or at `high`: `falling`)."""

    low: float
    high: float
    diverging: bool = False
    falling: bool = False

    def levels(self, values: Array) -> NDArray[np.uint8]:
        """Palette index of each value; NaN is nothing."""
        span = (self.high - self.low) or 1.0
        share = np.clip((np.nan_to_num(values, nan=self.low) - self.low) / span, 0.0, 1.0)
        index = (FIRST + np.round(share * LEVELS)).astype(np.uint8)
        return np.where(np.isnan(values), np.uint8(NOTHING), index)

    def palette(self) -> list[Rgba]:
        """256 colours: nothing, dead, then the scale from `low` to `high`."""
        colors: list[Rgba] = [(0, 0, 0, 0), DEAD_COLOR]
        for index in range(LEVELS + 1):
            share = index / LEVELS
            if self.diverging:
                away = 2.0 * share - 1.0
                colors.append(_tint(COLD if away < 0 else HOT, abs(away)))
            else:
                colors.append(_tint(HOT, 1.0 - share if self.falling else share))
        return colors


COLD, HOT = (36, 113, 184), (214, 96, 0)
DEAD_COLOR: Rgba = (200, 0, 110, 255)


def _tint(color: tuple[int, int, int], strength: float) -> Rgba:
    return (*color, round(255 * min(1.0, 0.04 + 0.96 * strength**0.85)))


def png(levels: NDArray[np.uint8], palette: Sequence[Rgba]) -> bytes:
    """An indexed PNG, one pixel a cell, of `levels` (rows, columns) (RFC 2083)."""
    rows, columns = levels.shape
    raw = np.concatenate([np.zeros((rows, 1), np.uint8), levels], axis=1).tobytes()
    colors = b"".join(bytes(color[:3]) for color in palette)
    alpha = bytes(color[3] for color in palette)
    head = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", head), (b"PLTE", colors), (b"tRNS", alpha), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, body) for name, body in parts)


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def uri(levels: NDArray[np.uint8], scale: Scale) -> str:
    """The PNG as a `data:` address."""
    return "data:image/png;base64," + base64.b64encode(png(levels, scale.palette())).decode()


def image(
    key: str,
    label: str,
    levels: NDArray[np.uint8],
    scale: Scale,
    x: Axis,
    span: tuple[float, float],
    rows: str = "layer",
    sub: int = 1,
    labels: int = 9,
) -> str:
    """A framed heat map whose columns cover the steps `span`; row 0 on top.

    `rows` names what a row is; a row has `sub` lines of pixels and at most `labels` are numbered.
    """
    count = levels.shape[0] // sub
    stride = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if count / step <= labels)
    marks = "".join(
        f'<span style="bottom:{100 - 100 * (row + 0.5) / count:.2f}%">{row}</span>' for row in range(0, count, stride)
    )
    left, right = (float(value) for value in x.at(np.array(span)))
    ticks = "".join(f'<span style="left:{100 * at:.2f}%">{escape(text)}</span>' for at, text in x.ticks(6))
    return (
        f'<div class="plot heat" role="img" tabindex="0" aria-label="{escape(label)}" data-key="{key}">'
        f'<div class="ys" title="{rows}">{marks}</div><div class="frame"><img alt="" src="{uri(levels, scale)}" '
        f'style="left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%"></div><div class="xs">{ticks}</div></div>'
    )


def cells(
    levels: NDArray[np.uint8],
    scale: Scale,
    span: tuple[float, float],
    x: Axis,
    row: str,
    what: str,
    power: bool = False,
) -> dict[str, Any]:
    """What the script needs to name the cell under the pointer. `power`: the scale holds log2 of what is shown."""
    return {
        "kind": "heat",
        "x": [x.low, x.high],
        "span": list(span),
        "rows": levels.shape[0],
        "columns": levels.shape[1],
        "levels": base64.b64encode(levels.tobytes()).decode(),
        "scale": [scale.low, scale.high],
        "row": row,
        "what": what,
        "power": power,
    }


def strip(scale: Scale, marks: Sequence[tuple[float, str]], extra: str = "") -> str:
    """A colour scale with marks at values; `extra` is more legend as HTML."""
    ramp = (FIRST + np.round(np.linspace(0, 1, 128) * LEVELS)).astype(np.uint8)[None, :]
    span = (scale.high - scale.low) or 1.0
    labels = "".join(
        f'<span style="left:{100 * (value - scale.low) / span:.1f}%">{escape(text)}</span>' for value, text in marks
    )
    shown = f'<span class="ramp"><img alt="" src="{uri(ramp, scale)}">{labels}</span>'
    return f'<div class="legend scale">{shown}{extra}</div>'
