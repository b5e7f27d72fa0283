"""`mula-ray plan`: what a configuration costs, before it costs anything. Needs neither torch nor ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mula_ray.cli.options import Config, Json, Sets
from mula_ray.config.errors import UserError
from mula_ray.config.load import Loaded, load

if TYPE_CHECKING:
    from mula_ray.config.site import SiteConfig
    from mula_ray.elastic.forecast import Forecast
    from mula_ray.plan.estimate import Estimate, ScalingPoint

GB = 1e9


def plan(
    config: Config,
    tiles: Annotated[int | None, typer.Option(min=1, help="ranks; default: those of the configuration")] = None,
    site: Annotated[str | None, typer.Option(help="site file: aurora, local, … or a path")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="scale the site's speed to this measured run")
    ] = None,
    scaling: Annotated[bool, typer.Option("--scaling", help="weak-scaling table from 384 to 12,288 tiles")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.html", help="the scaling table as a picture")] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> int:
    """Print parameters of CONFIG and, with --tiles or --site, memory, traffic, speed and goodput."""
    from mula_ray.plan.layout import active_params, total_params
    from mula_ray.plan.legal import refuse_for_the_model

    loaded = load(config, sets or ())
    refuse_for_the_model(loaded.config)
    model = loaded.config.model
    result: dict[str, Any] = {
        "config": loaded.name,
        "parameters": {"total": total_params(model), "active": active_params(model)},
    }
    lines = [f"{loaded.name}: {total_params(model):,} parameters, {active_params(model):,} active"]
    if any(option is not None for option in (tiles, site, calibrate, picture)) or scaling:
        machine, note = _site(loaded, site, calibrate)
        details, text = _estimate(loaded, machine, tiles, curve=scaling or picture is not None, picture=picture)
        result |= details | {"notes": note}
        lines += [*text, *(f"note: {item}" for item in note)]
    typer.echo(json.dumps(result) if as_json else "\n".join(lines))
    return 0


def _site(loaded: Loaded, name: str | None, run_dir: Path | None) -> tuple[SiteConfig, list[str]]:
    from mula_ray.config.site import load_site
    from mula_ray.plan.estimate import calibrate

    kind = loaded.config.cluster.kind
    machine = load_site(name or ("local" if kind in ("local", "ray") else kind))
    notes = [f"speed of {machine.name}: {machine.speed.source}"]
    if run_dir is not None:
        machine, note = calibrate(machine, run_dir)
        notes.append(note)
    if machine.name == "aurora":
        notes.append("not run on Aurora itself: these are estimates of a model, not measurements")
    return machine, notes


def _estimate(
    loaded: Loaded, site: SiteConfig, tiles: int | None, *, curve: bool, picture: Path | None
) -> tuple[dict[str, Any], list[str]]:
    from mula_ray.elastic.forecast import forecast
    from mula_ray.plan.estimate import estimate, scaling, with_tiles

    config, topology = with_tiles(loaded.config, tiles, site)
    found = estimate(config, topology, site)
    runs = forecast(config, site, found.time.total, found.checkpoint.seconds)
    points = scaling(config, site) if curve else []
    if picture is not None:
        from mula_ray.plan.picture import write_scaling

        if not points:
            raise UserError(
                f"--picture {picture}: no size between 384 and 12,288 tiles holds whole replicas of this layout"
            )
        write_scaling(points, loaded.name, site.name, picture)
    return _numbers(found, runs, points), list(_text(found, runs, points, site))


def _numbers(found: Estimate, runs: Forecast, points: list[ScalingPoint]) -> dict[str, Any]:
    time = found.time
    return {
        "layout": {axis: getattr(found.topology, axis) for axis in ("dp", "ep", "tp", "pp")},
        "tiles": found.topology.world,
        "memory_bytes": found.memory.kinds() | {"total": found.memory.total},
        "memory_bytes_without_recompute": found.memory_without_recompute.total,
        "tile_bytes": found.tile_bytes,
        "fits": found.fits,
        "fits_without_recompute": found.fits_without_recompute,
        "over_without_recompute": found.over_without_recompute,
        "traffic": [
            {"group": t.group, "ranks": t.size, "kind": t.kind, "what": t.what, "calls": t.calls}
            | {"payload_bytes": t.payload, "sent_bytes": t.sent}
            for t in found.traffic
        ],
        "bubble": time.bubble_share,
        "step_s": time.total,
        "step_parts_s": {
            "compute": time.compute,
            "experts": time.experts,
            "bubble": time.bubble,
            "gradients": time.gradients,
            "optimizer": time.optimizer,
            "jitter": time.jitter,
        },
        "tokens_per_s": time.tokens_per_s,
        "mfu": time.mfu,
        "checkpoint": {
            "full_bytes": found.checkpoint.bytes,
            "model_bytes": found.checkpoint.model_bytes,
            "write_s": found.checkpoint.seconds,
        },
        "goodput": runs.numbers(),
        "scaling": [
            {"tiles": p.tiles, "step_s": p.step_s, "tokens_per_s": p.tokens_per_s, "efficiency": p.efficiency}
            for p in points
        ],
    }


def _text(found: Estimate, runs: Forecast, points: list[ScalingPoint], site: SiteConfig) -> Iterator[str]:
    at, time = found.topology, found.time
    yield f"layout: dp {at.dp} x ep {at.ep} x tp {at.tp} x pp {at.pp} = {at.world} tiles of {site.name}"
    yield ""
    yield f"memory of the fullest tile ({found.tile_bytes / GB:.0f} GB usable)"
    for kind, size in found.memory.kinds().items():
        yield f"  {kind:12} {size / GB:10.3f} GB"
    yield f"  {'total':12} {found.memory.total / GB:10.3f} GB: {'fits' if found.fits else 'DOES NOT FIT'}"
    without = found.memory_without_recompute.total
    verdict = "would fit" if found.fits_without_recompute else "would not fit"
    yield f"  without recomputation {without / GB:.3f} GB: {verdict}"
    for line in found.over_without_recompute:
        yield f"    {line}"
    yield ""
    yield f"traffic of a step, busiest rank {'calls':>23} {'payload GB':>11} {'sent GB':>9}"
    for t in found.traffic:
        name = f"{t.group} ({t.size}) {t.kind}: {t.what}"
        yield f"  {name:46} {t.calls:>7} {t.payload / GB:>11.4f} {t.sent / GB:>9.4f}"
    yield ""
    rate = f"{time.tokens_per_s:,.0f} tokens/s, MFU {time.mfu:.1%}"
    yield f"step {time.total:.3f} s, {rate}, bubble {time.bubble_share:.1%}"
    yield (
        f"  compute {time.compute:.3f}, EP and TP traffic {time.experts:.3f}, bubble {time.bubble:.3f}, gradient sums "
        f"{time.gradients:.3f}, optimizer {time.optimizer:.3f}, jitter {time.jitter:.3f}"
    )
    box = found.checkpoint
    yield (
        f"checkpoint: {box.bytes / GB:,.1f} GB full, {box.model_bytes / GB:,.1f} GB model only; "
        f"{box.seconds:.1f} s to write from all nodes"
    )
    yield from runs.lines()
    if points:
        yield ""
        yield f"weak scaling {'tiles':>8} {'step s':>9} {'tokens/s':>14} {'efficiency':>11}"
        for p in points:
            yield f"{p.tiles:>21} {p.step_s:>9.3f} {p.tokens_per_s:>14,.0f} {p.efficiency:>10.1%}"
        yield "published for Mula-220B from 384 to 12,288 tiles: about 90 %"
