"""A launch request on four hosts, and the specification of an agent of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mula_ray.config.site import SiteConfig
from mula_ray.launch.hosts import Host
from mula_ray.launch.run import LaunchRequest, agent_spec
from mula_ray.launch.spec import AgentSpec, make_token

HOSTS = (Host("head", "10.0.0.1"), Host("a", "10.0.0.2"), Host("b", "10.0.0.3"), Host("c", "10.0.0.4"))


def request(tmp_path: Path, site: SiteConfig, hosts: tuple[Host, ...] = HOSTS, **values: Any) -> LaunchRequest:
    """A launch of `hosts` with two nodes and one spare; `values` replace fields."""
    facts: dict[str, Any] = {
        "site": site,
        "site_name": site.name,
        "hosts": hosts,
        "run_dir": tmp_path / "run",
        "resume": "auto",
        "train": ("mula-tiny",),
        "nodes": 2,
        "spares": 1,
        "tiles": 2,
        "job": 4711,
        "orphan_s": 30.0,
    }
    return LaunchRequest(**facts | values)


def with_launch(site: SiteConfig, **values: object) -> SiteConfig:
    """The site with other launch settings."""
    return site.model_copy(update={"launch": site.launch.model_copy(update=values)})


def spec_of(tmp_path: Path, site: SiteConfig, **values: Any) -> AgentSpec:
    """What agent 1 of such a launch is told; the token lies in the run folder."""
    folder = tmp_path / "run" / "launch"
    folder.mkdir(parents=True)
    make_token(folder / "token")
    return agent_spec(request(tmp_path, site, **values), folder / "1", folder / "token")
