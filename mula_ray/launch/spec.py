"""What `launch` and its agents agree on, and the small files through which they talk.

They share a file system (the run folder), never each other's memory: `spec.json` says what to start, each agent keeps
`agents/<host>.json` up to date, `stop` asks everybody to end, `beat` shows that the launcher lives. Files appear by
rename; waiting is polling (no locks on shared file systems).
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mula_ray.config.errors import UserError
from mula_ray.config.site import NetworkSpec
from mula_ray.launch.hosts import Host

SOCKET_LIMIT = 107
SESSION_TAIL = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.sock")
PORT_NAMES = (
    "gcs",
    "node_manager",
    "object_manager",
    "runtime_env_agent",
    "metrics_export",
    "dashboard",
    "dashboard_agent_listen",
    "dashboard_agent_grpc",
    "ray_client_server",
)


@dataclass(frozen=True)
class AgentSpec:
    """One bring-up of a cluster. `hosts[0]` is the head. Times in seconds, paths on the shared file system."""

    folder: str
    hosts: tuple[Host, ...]
    ports: dict[str, int]
    set: dict[str, str]
    unset: tuple[str, ...]
    temp_root: str
    job: int
    tiles: int
    head_works: bool
    stagger_s: float
    bring_up_s: float
    orphan_s: float
    logs: str
    job_server: bool

    def temp_dir(self, index: int) -> str:
        """Temporary folder of the Ray processes of host `index`: short, of this user, job and host alone."""
        return f"{self.temp_root}/mr-{os.getuid()}-{self.job}-{index}"

    @property
    def address(self) -> str:
        """Ray's address."""
        return f"{self.hosts[0].address}:{self.ports['gcs']}"

    def tiles_of(self, index: int) -> int:
        """Tiles that host `index` offers."""
        return 0 if index == 0 and not self.head_works else self.tiles

    @classmethod
    def read(cls, path: Path) -> AgentSpec:
        """The spec in a file."""
        data = json.loads(path.read_text(encoding="utf-8"))
        data["hosts"] = tuple(Host(**host) for host in data["hosts"])
        data["unset"] = tuple(data["unset"])
        return cls(**data)


def write_json(path: Path, data: Any) -> None:
    """Write by rename: readers see all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """What a file says, None when there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return data if isinstance(data, dict) else None


def write_spec(spec: AgentSpec) -> Path:
    """Make the folders of this bring-up, for the owner only, and write `spec.json`."""
    folder = Path(spec.folder)
    (folder / "agents").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    write_json(folder / "spec.json", asdict(spec))
    return folder / "spec.json"


def make_token(path: Path) -> None:
    """A fresh authentication token in a file that only the owner can read. It is never printed or logged."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))


def ports_of(network: NetworkSpec, job: int) -> dict[str, int]:
    """Fixed ports of a job: a block chosen by its number."""
    first = network.base_port + network.port_stride * (job % network.port_blocks)
    return {name: first + offset for offset, name in enumerate(PORT_NAMES)}


def check_temp_root(root: str, job: int, hosts: int) -> None:
    """Refuse a temporary folder under which socket paths get too long.

    Raises:
        UserError: with the length and the limit.
    """
    longest = f"{root}/mr-{os.getuid()}-{job}-{hosts}"
    length = len(longest) + SESSION_TAIL
    if length > SOCKET_LIMIT:
        raise UserError(
            f"temporary folder {longest}: socket paths below it would have {length} bytes, at most {SOCKET_LIMIT} "
            "work; set launch.temp_root of the site file to something short such as /tmp"
        )
