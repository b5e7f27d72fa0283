"""The one place that decides which environment variables a process of ours gets. Pure: builds, never sets.

No variable is configuration: each comes from a site file or from the arguments here. `ray_block` is for `ray start` and
everything below it, `rank_block` for a rank process; a caller applies a block before the process loads torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mula_ray.config.run import ClusterConfig
from mula_ray.config.site import ScaledVariables, SiteConfig, load_site, parse_cores

RankStart = Literal["ray", "mpi"]
ALLOCATOR: Mapping[str, str] = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.cpu.x86_non_temporal_threshold=4194304"}
"""For a rank process: glibc asks for huge pages. Without them every step of mula-tiny faults 8,160 pages in anew, with
them 17, and takes 0.85 of the processor time; peak memory grows by some per cent. (Thresholds that keep freed memory
gain 3 % more, but fragmentation then costs up to a fifth.) Copies of 4 MiB and more, which are snapshots', go past the
cache: 256 MB in 20 ms instead of 29."""
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")


@dataclass(frozen=True)
class EnvBlock:
    """Variables to remove, then variables to set."""

    set: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()

    def apply(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`environment` with this block applied."""
        kept = {name: value for name, value in environment.items() if name not in self.unset}
        return kept | dict(self.set)


def ray_block(
    site: SiteConfig, nodes: int, *, temp_dir: str, token_file: str | None, hosts: Iterable[str] = ()
) -> EnvBlock:
    """For Ray's own processes and everything they start, on a cluster of `nodes`.

    `token_file` None switches token authentication off, explicitly. `hosts` are added to no_proxy.
    """
    spec = site.environment
    variables = dict(spec.common) | spec.ray
    variables |= _scaled(spec.ray_scaled, nodes)
    variables["TMPDIR"] = temp_dir
    suffix = site.network.host_suffix
    direct = ",".join(dict.fromkeys([*site.network.no_proxy, *([suffix] if suffix else []), *hosts]))
    variables |= {"no_proxy": direct, "NO_PROXY": direct}
    variables |= auth_variables(token_file)
    proxies = [*PROXIES, *(name.upper() for name in PROXIES)]
    return EnvBlock(variables, tuple(dict.fromkeys([*spec.unset, *proxies])))


def auth_variables(token_file: str | None) -> dict[str, str]:
    """Ray's authentication, set explicitly for every process: a user's own token file would switch it on for some."""
    if token_file is None:
        return {"RAY_AUTH_MODE": "disabled"}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_file}


def rank_block(
    site: SiteConfig,
    nodes: int,
    *,
    local_rank: int,
    local_size: int,
    start: RankStart = "ray",
    workarounds: bool = False,
) -> EnvBlock:
    """For the rank process of tile `local_rank` of `local_size` on its node, before it imports torch."""
    spec = site.environment
    variables = dict(spec.common)
    if start == "ray":
        variables |= spec.ranks_by_ray
    else:
        variables |= spec.ranks_by_mpi
    variables |= _scaled(spec.ranks_scaled, nodes)
    if start == "mpi":
        variables |= _scaled(spec.ranks_by_mpi_scaled, nodes)
    if workarounds:
        variables |= spec.hang_workarounds
    variables |= tile_variables(site, local_rank, local_size if start == "ray" else None)
    if site.network.interface:
        variables["GLOO_SOCKET_IFNAME"] = site.network.interface
    return EnvBlock(variables, tuple(spec.unset))


def tile_variables(site: SiteConfig, local_rank: int, local_size: int | None) -> dict[str, str]:
    """What differs between the ranks of a node: the tile mask and, where no MPI tells, place and number of ranks."""
    spec, variables = site.environment, {}
    if site.node.tile_mask:
        variables[site.node.tile_mask] = str(local_rank)
    if local_size is not None and spec.local_rank:
        variables[spec.local_rank] = str(local_rank)
    if local_size is not None and spec.local_size:
        variables[spec.local_size] = str(local_size)
    return variables


def tile_setup(cluster: ClusterConfig, tile: int) -> tuple[dict[str, str], frozenset[int]]:
    """(variables, cores) of the rank on `tile` of a node that Ray starts; both empty where there is no site file."""
    if cluster.kind in ("local", "ray"):
        return {}, frozenset()
    site = load_site(cluster.kind)
    cores = parse_cores(site.node.cores[tile]) if tile < len(site.node.cores) else frozenset()
    return tile_variables(site, tile, cluster.tiles_per_node), cores


def _scaled(blocks: Iterable[ScaledVariables], nodes: int) -> dict[str, str]:
    result: dict[str, str] = {}
    for block in sorted(blocks, key=lambda item: item.from_nodes):
        if nodes >= block.from_nodes:
            result |= block.variables
    return result
