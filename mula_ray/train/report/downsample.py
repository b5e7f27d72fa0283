"""Long series drawn with few points, without hiding anything: mean of a bucket, with its minimum and maximum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mula_ray.train.report.load import Array

POINTS = 480
"""Most points of a drawn line: more than a phone or a printed column can show apart."""


@dataclass(frozen=True)
class Reduced:
    """(P,) each: position, mean, minimum and maximum of every bucket; `size` values went into a bucket at most."""

    x: Array
    mean: Array
    low: Array
    high: Array
    size: int


def edges(count: int, points: int = POINTS) -> tuple[np.ndarray, int]:
    """Start of each of at most `points` equally long buckets of `count` values, and their length."""
    size = max(1, -(-count // points))
    return np.arange(0, count, size), size


def reduce_series(x: Array, y: Array, points: int = POINTS) -> Reduced:
    """Buckets of equally many values in order; NaN counts for nothing, a bucket of nothing else stays NaN."""
    if not len(x):
        return Reduced(x, y, y, y, 1)
    starts, size = edges(len(x), points)
    known = ~np.isnan(y)
    amount = np.add.reduceat(known.astype(np.float64), starts)
    total = np.add.reduceat(np.where(known, y, 0.0), starts)
    empty = amount == 0
    mean = np.where(empty, np.nan, total / np.where(empty, 1.0, amount))
    low = np.where(empty, np.nan, np.minimum.reduceat(np.where(known, y, np.inf), starts))
    high = np.where(empty, np.nan, np.maximum.reduceat(np.where(known, y, -np.inf), starts))
    lengths = np.diff(np.append(starts, len(x)))
    middle = np.add.reduceat(x, starts) / lengths
    return Reduced(middle, mean, low, high, size)


def reduce_rows(rows: Array, points: int) -> Array:
    """(N, C) to (P, C): NaN-aware mean of each bucket of rows."""
    if not len(rows):
        return rows
    starts, _ = edges(len(rows), points)
    known = ~np.isnan(rows)
    amount = np.add.reduceat(known.astype(np.float64), starts, axis=0)
    total = np.add.reduceat(np.where(known, rows, 0.0), starts, axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(amount > 0, total / amount, np.nan), dtype=np.float64)
