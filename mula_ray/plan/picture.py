"""The weak-scaling table as a self-contained HTML file: one inline SVG, no library."""

from __future__ import annotations

import html
import math
from pathlib import Path

from mula_ray.plan.estimate import PUBLISHED_EFFICIENCY, ScalingPoint

WIDTH, HEIGHT, EDGE = 720, 400, 60


def write_scaling(points: list[ScalingPoint], config: str, site: str, path: Path) -> None:
    """Efficiency over tiles (logarithmic), with the published 90 % as a dashed line."""
    first, last = math.log2(points[0].tiles), math.log2(max(points[-1].tiles, points[0].tiles + 1))

    def place(tiles: float, efficiency: float) -> tuple[float, float]:
        x = EDGE + (math.log2(tiles) - first) / (last - first) * (WIDTH - 2 * EDGE)
        return x, HEIGHT - EDGE - (efficiency - 0.5) / 0.5 * (HEIGHT - 2 * EDGE)

    marks = [place(point.tiles, point.efficiency) for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in marks)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{p.tiles} tiles: {p.step_s:.2f} s a step</title></circle>'
        f'<text x="{x:.1f}" y="{y - 10:.1f}" text-anchor="middle">{p.efficiency:.0%}</text>'
        f'<text x="{x:.1f}" y="{HEIGHT - EDGE + 20}" text-anchor="middle">{p.tiles:,}</text>'
        for p, (x, y) in zip(points, marks, strict=True)
    )
    (x0, y0), (x1, y1) = place(points[0].tiles, 1.0), place(points[-1].tiles, PUBLISHED_EFFICIENCY)
    levels = "".join(
        f'<line class="grid" x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{place(points[0].tiles, e)[1]:.1f}" '
        f'y2="{place(points[0].tiles, e)[1]:.1f}"/><text x="{EDGE - 8}" y="{place(points[0].tiles, e)[1] + 4:.1f}" '
        f'text-anchor="end">{e:.0%}</text>'
        for e in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    )
    title = html.escape(f"Weak scaling of {config} on {site}: model, not measured")
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>'
        "body{font:14px sans-serif;margin:2em;background:#fff;color:#222}svg text{font:12px sans-serif;fill:#222}"
        ".grid{stroke:#ddd}polyline{fill:none;stroke:#0b62a4;stroke-width:2}circle{fill:#0b62a4}"
        ".published{stroke:#b03a2e;stroke-dasharray:6 4;stroke-width:2}</style>"
        f"<h1>{title}</h1><p>Efficiency against {points[0].tiles} tiles; dashed: the published figure, about "
        f"{PUBLISHED_EFFICIENCY:.0%} at 12,288 tiles.</p>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{title}">{levels}'
        f'<line class="published" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'
        f'<polyline points="{line}"/>{dots}'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">tiles</text></svg></html>\n',
        encoding="utf-8",
    )
