"""`mula-ray doctor`, and the quick part that `train` runs first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mula_ray.config.run import RunConfig
from mula_ray.config.site import SiteConfig
from mula_ray.launch.doctor import measure
from mula_ray.launch.doctor.checks import Finding, Needs, judge, judge_cluster
from mula_ray.launch.doctor.facts import OPTIONAL, Facts, gather
from mula_ray.launch.spec import ports_of
from mula_ray.plan.layout import total_params

CHECKPOINT_COPIES = 3  # two slots and the one being written
STATE_BYTES = 12


@dataclass(frozen=True)
class Report:
    """What doctor found."""

    nodes: list[Facts]
    findings: list[Finding]

    @property
    def errors(self) -> bool:
        """Whether anything must be mended before a run."""
        return any(finding.level == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": not self.errors,
            "findings": [vars(finding) for finding in self.findings],
            "nodes": [facts.to_json() for facts in self.nodes],
        }

    def lines(self) -> list[str]:
        """For people."""
        lines = []
        for facts in self.nodes:
            torch, ray = facts.versions.get("torch"), facts.versions.get("ray")
            lines.append(
                f"{facts.host} ({facts.address}): Python {facts.python}, torch {torch}, ray {ray}, "
                f"{facts.devices} {facts.device}, {facts.memory / 1e9:.1f} GB free"
            )
            more = [f"{package} {facts.versions[package]}" for package in OPTIONAL if package in facts.versions]
            if more:
                lines.append(f"  also installed: {', '.join(more)}")
            if facts.storage is not None and facts.storage.write_mb_s is not None:
                store = facts.storage
                lines.append(f"  {store.path}: {store.write_mb_s:.0f} MB/s written, fsync {store.fsync_ms:.1f} ms")
            for name, value in facts.collectives.items():
                if isinstance(value, float):
                    lines.append(f"  {name}: {value * 1e3:.1f} ms")
            if facts.gemm_tflops:
                lines.append(
                    "  matrix products: " + ", ".join(f"{t}: {v:.3g} TFLOP/s" for t, v in facts.gemm_tflops.items())
                )
        lines += [finding.line() for finding in self.findings]
        return [*lines, "no findings" if not self.findings else f"{len(self.findings)} findings"]


def examine_here(site: SiteConfig, folder: Path, job: int | None) -> Report:
    """This machine, everything: also bare collectives and matrix products."""
    ports = ports_of(site.network, job).values() if job is not None else ()
    facts = gather(site, folder=folder, ports=ports, tokens=folder.glob("launch/token"))
    tiles = site.node.tiles if site.node.device != "cpu" else 1
    speeds, error = measure.gemm_of_tiles(site.node.device, tiles, site.node.tile_mask)
    facts = replace(facts, collectives=measure.local_collectives(), gemm_tflops=speeds, gemm_error=error)
    found = judge(facts, site, Needs(distributed=site.scheduler.kind != "none" or job is not None))
    return Report([facts], found + judge_cluster([facts], {}, []))


def examine_cluster(site: SiteConfig, address: str, bound_s: float) -> Report:
    """Every node of the Ray cluster at `address`."""
    from mula_ray.launch.doctor.cluster import examine

    nodes, skews, missing, collectives = examine(address, site, bound_s, gemm=True)
    if nodes:
        nodes[0] = replace(nodes[0], collectives=collectives)
    found = [finding for facts in nodes for finding in judge(facts, site, Needs(distributed=True))]
    return Report(nodes, found + judge_cluster(nodes, skews, missing))


def quick(config: RunConfig, site: SiteConfig, run_dir: Path) -> list[Finding]:
    """The part of a few milliseconds that `train` runs first: versions, variables, memory, space."""
    facts = gather(site, folder=run_dir, devices=False, storage=False)
    params = total_params(config.model)
    here = config.cluster.kind == "local"
    ranks = config.cluster.nodes * config.cluster.tiles_per_node
    item = 2 if config.train.dtype == "bf16" else 4
    needs = Needs(
        memory=params * (2 * item * ranks + STATE_BYTES) if here and site.node.device == "cpu" else 0,
        storage=params * STATE_BYTES * CHECKPOINT_COPIES,
    )
    return judge(facts, site, needs)
