"""Axes: where a value lies (0..1), and which ticks a person wants to read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mula_ray.train.report.load import Array


@dataclass(frozen=True)
class Axis:
    """A range of values, linear or logarithmic, `low < high`."""

    low: float
    high: float
    log: bool = False

    def at(self, values: Array) -> Array:
        """Position of each value: 0 at `low`, 1 at `high`; values outside lie on the border."""
        low, high, clipped = self.low, self.high, np.clip(values, self.low, self.high)
        if self.log:
            low, high, clipped = math.log(low), math.log(high), np.log(clipped)
        return np.asarray((clipped - low) / (high - low), dtype=np.float64)

    def ticks(self, wanted: int = 5) -> list[tuple[float, str]]:
        """(position, text) of about `wanted` round values inside the range."""
        values = _log_ticks(self.low, self.high) if self.log else _round_ticks(self.low, self.high, wanted)
        if self.log and len(values) < 2:
            values = _round_ticks(self.low, self.high, wanted)
        marks = [value for value in values if self.low <= value <= self.high]
        texts = [number(value) for value in marks] if self.log else linear_texts(marks)
        return [(float(self.at(np.array([value]))[0]), text) for value, text in zip(marks, texts, strict=True)]


def _round_ticks(low: float, high: float, wanted: int) -> list[float]:
    raw = (high - low) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, (last - first) // 5)
    few = last - first <= 2
    steps = (1.0, 2.0, 5.0) if few else (1.0,)
    return [factor * 10.0**power for power in range(first, last + 1, stride) for factor in steps]


UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """One value in as few digits as it needs: 0.25, 12k, 2.5G, 1e-05."""
    size = abs(value)
    if size >= 1e4:
        unit, letter = next((unit, letter) for unit, letter in UNITS if size >= unit)
        return f"{value / unit:.4g}{letter}"
    return f"{value:.2g}" if 0 < size < 1e-3 else f"{value:.4g}"


def linear_texts(marks: list[float]) -> list[str]:
    """Texts of equally spaced ticks: one unit, and just the digits that tell neighbours apart."""
    if len(marks) < 2:
        return [number(mark) for mark in marks]
    largest, step = max(map(abs, marks)), marks[1] - marks[0]
    unit, letter = next(((u, name) for u, name in UNITS if largest >= max(u, 1e4)), (1.0, ""))
    digits = max(0, math.ceil(-math.log10(step / unit) - 1e-9) + 1)
    if digits > 6:
        precise = max(1, math.ceil(math.log10(largest / step)) + 1)
        return ["0" if abs(mark) < step / 2 else f"{mark:.{min(precise, 16)}g}" for mark in marks]
    return [_strip(f"{mark / unit:.{digits}f}") + letter if abs(mark) > step / 2 else "0" for mark in marks]


def _strip(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def axis_for(values: list[Array], *, log: bool = False, zero: bool = False) -> Axis:
    """A range that holds all finite values, with a little air; `zero`: starts at 0."""
    flat = np.concatenate([value.ravel() for value in values]) if values else np.zeros(0)
    flat = flat[np.isfinite(flat)]
    if log:
        flat = flat[flat > 0]
    if not len(flat):
        return Axis(0.1, 1.0, True) if log else Axis(0.0, 1.0)
    low, high = float(flat.min()), float(flat.max())
    if log:
        low, high = low / 1.1, high * 1.1
        return Axis(low, high if high > low * 1.01 else low * 10, True)
    if zero:
        low = min(0.0, low)
    if high - low < 1e-12 * max(1.0, abs(high)):
        pad = abs(high) * 0.1 or 1.0
        return Axis(low if zero and low == 0.0 else low - pad, high + pad)
    air = (high - low) * 0.04
    return Axis(low if zero else low - air, high + air)
