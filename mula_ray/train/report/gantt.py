"""Gantt picture of a profiled step, by rank."""

from __future__ import annotations

from collections.abc import Sequence

from mula_ray.train.report.curves import Named
from mula_ray.train.report.figure import Figure


def figures(named: Named, runs: Sequence[Named]) -> list[Figure]:  # noqa: ARG001
    """One picture a profiled step."""
    return []
