"""What a machine is like: devices, network, environment, storage, queues, speed. One YAML file a site in `cluster/`.

site = load_site("aurora")
site.node.tiles                      # 12
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from mula_ray.config.base import Section
from mula_ray.config.errors import UserError
from mula_ray.config.load import validate
from mula_ray.config.shipped import find_file
from mula_ray.config.yamlish import parse_document

Variables = dict[str, str]


class NodeSpec(Section):
    """One node."""

    device: Literal["cpu", "cuda", "xpu"]
    tiles: PositiveInt = Field(description="ranks a node: one a tile")
    tile_memory_gb: PositiveFloat = Field(description="device memory of a tile, GB (10^9 bytes)")
    reserved_gb: NonNegativeFloat = Field(0.0, description="of that, taken by driver, library and allocator")
    memory_gb: PositiveFloat = Field(description="usable host memory, GB")
    tmp_is_memory: bool = Field(False, description="/tmp counts against host memory")
    cores: list[str] = Field(default_factory=list, description="core lists, one a tile (`1-8`); empty: not bound")
    tile_mask: str = Field("", description="variable that shows a rank process its tile only, set before torch loads")

    @model_validator(mode="after")
    def _check(self) -> NodeSpec:
        if self.cores and len(self.cores) != self.tiles:
            raise ValueError(f"cores has {len(self.cores)} lists, but a node has {self.tiles} tiles; give one a tile")
        for text in self.cores:
            parse_cores(text)
        return self


class NetworkSpec(Section):
    """How nodes reach each other."""

    interface: str = Field("", description="name of the fast interface; empty: left to the libraries")
    host_suffix: str = Field("", description="appended to a short host name to get the fast network's address")
    no_proxy: list[str] = Field(default_factory=lambda: ["localhost", "127.0.0.1"])
    base_port: PositiveInt = Field(20000, description="first of the fixed ports of a job")
    port_stride: PositiveInt = Field(20, description="ports of one job; the job number picks the block")
    port_blocks: PositiveInt = 100

    @model_validator(mode="after")
    def _check(self) -> NetworkSpec:
        last = self.base_port + self.port_stride * self.port_blocks
        if self.base_port <= 19999 and last >= 10002:
            raise ValueError(
                f"ports {self.base_port} to {last} meet Ray's worker ports 10002-19999; use base_port 20000"
            )
        if last > 32767:
            raise ValueError(f"ports end at {last}; they must stay below 32768, where ephemeral ports begin")
        return self


class ScaledVariables(Section):
    """Variables that are needed from a number of nodes on."""

    from_nodes: PositiveInt
    variables: Variables


class EnvironmentSpec(Section):
    """Every variable that is set, in the one place that sets it (`config/environment.py` builds the blocks)."""

    modules: list[str] = Field(default_factory=list, description="modules loaded by the job script, in order")
    unset: list[str] = Field(default_factory=list, description="variables removed before anything starts")
    common: Variables = Field(default_factory=dict, description="for every process")
    ray: Variables = Field(default_factory=dict, description="for Ray's own processes and workers")
    ray_scaled: list[ScaledVariables] = Field(default_factory=list)
    ranks_by_ray: Variables = Field(default_factory=dict, description="rank processes that Ray's actors start")
    ranks_by_mpi: Variables = Field(default_factory=dict, description="rank processes that mpiexec starts")
    ranks_scaled: list[ScaledVariables] = Field(default_factory=list, description="both ways, at scale")
    ranks_by_mpi_scaled: list[ScaledVariables] = Field(default_factory=list)
    hang_workarounds: Variables = Field(default_factory=dict, description="added on request when collectives hang")
    local_rank: str = Field("", description="variable that tells the library the rank inside its node")
    local_size: str = Field("", description="variable that tells it the ranks of the node")


class LaunchSpec(Section):
    """How one agent is started on every node of an allocation."""

    method: Literal["mpiexec", "each", "existing"] = Field(
        "each", description="mpiexec: one command for all; each: one command a host; existing: Ray runs already"
    )
    command: list[str] = Field(
        default_factory=lambda: ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "{host}"],
        description="put before the agent's command; {nodes} and {host} are filled in",
    )
    head: Literal["works", "dedicated"] = Field("works", description="whether the head's node also has ranks")
    stagger_s: NonNegativeFloat = Field(0.0, description="joining is spread: one node every so many seconds")
    bring_up_s: PositiveFloat = Field(120.0, description="longest wait for all nodes")
    shutdown_s: PositiveFloat = Field(60.0, description="longest wait for logs and exit of all nodes")
    temp_root: str = Field("/tmp", description="short: socket paths over 107 bytes fail")


class QueueSpec(Section):
    """A queue of the batch system."""

    name: str
    min_nodes: PositiveInt
    max_nodes: PositiveInt
    max_hours: PositiveFloat


class SchedulerSpec(Section):
    """The batch system."""

    kind: Literal["pbs", "slurm", "none"] = "none"
    queues: list[QueueSpec] = Field(default_factory=list)
    filesystems: str = Field("", description="PBS -l filesystems")
    extra: list[str] = Field(default_factory=list, description="more directive lines, without #PBS or #SBATCH")
    spares_min: NonNegativeInt = 1
    spares_percent: NonNegativeFloat = 2.0


class StorageSpec(Section):
    """The shared file system."""

    write_gb_s: PositiveFloat = Field(1.0, description="what all writers together reach, GB/s")
    node_write_gb_s: PositiveFloat = Field(1.0, description="what one node reaches, GB/s")


class SpeedSpec(Section):
    """The roofline model of `plan`: peak figures and the fractions of them that are reached. All per tile."""

    peak_tflops: PositiveFloat = Field(description="bf16 matrix products, what a large one reaches; the base of MFU")
    gemm_efficiency: PositiveFloat = Field(0.6, le=1, description="of that peak, reached by the model's own products")
    memory_gb_s: PositiveFloat = Field(description="device memory bandwidth")
    node_gb_s: PositiveFloat = Field(description="between tiles of a node, one direction")
    network_gb_s: PositiveFloat = Field(description="share of a tile in its node's network, one direction")
    network_efficiency: PositiveFloat = Field(0.6, le=1)
    node_latency_us: NonNegativeFloat = 20.0
    network_latency_us: NonNegativeFloat = 30.0
    overlap: NonNegativeFloat = Field(0.5, le=1, description="part of gradient traffic hidden behind backward")
    jitter_percent: NonNegativeFloat = Field(0.0, description="lost a step for each doubling of the nodes")
    source: str = Field("", description="where the figures come from")


class ReliabilitySpec(Section):
    """What breaks, and how long it takes to mend."""

    node_mtbf_hours: PositiveFloat = Field(20_000.0, description="mean time between failures of one node")
    repair_hours: PositiveFloat = Field(4.0, description="until a lost node is back")
    source: str = ""


class SiteConfig(Section):
    """A machine."""

    name: str
    description: str
    node: NodeSpec
    network: NetworkSpec = NetworkSpec()
    environment: EnvironmentSpec = EnvironmentSpec()
    launch: LaunchSpec = LaunchSpec()
    scheduler: SchedulerSpec = SchedulerSpec()
    storage: StorageSpec = StorageSpec()
    speed: SpeedSpec
    reliability: ReliabilitySpec = ReliabilitySpec()


def load_site(path_or_name: str | Path) -> SiteConfig:
    """The site file at a path, or the shipped one of that name.

    Raises:
        UserError: missing, not YAML, unknown key or wrong value.
    """
    path = find_file(path_or_name, "cluster")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"site file {path} cannot be read: {error}; give a readable UTF-8 YAML file") from None
    document = parse_document(text, str(path))
    return validate(SiteConfig, document.tree, {key: f"{path}:{line}" for key, line in document.lines.items()})


def parse_cores(text: str) -> frozenset[int]:
    """Core numbers of a list such as `1-8,105-112`.

    Raises:
        ValueError: not such a list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"cores {text!r} is not a list such as 1-8,105-112")
        cores.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(cores)
