"""What doctor knows of one machine. Gathering only: nothing is judged or changed here, every look is bounded."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mula_ray.config.site import SiteConfig
from mula_ray.launch.agent import machine_identity
from mula_ray.launch.hosts import own_address
from mula_ray.launch.spec import SESSION_TAIL
from mula_ray.parallel.legacy import BINDINGS, EXTENSION

PACKAGES = ("torch", "ray", "pyarrow", "pydantic", "safetensors", "tokenizers", "numpy")
OPTIONAL = ("triton", "oneccl", EXTENSION, BINDINGS)
VARIABLES = (
    "ZE_FLAT_DEVICE_HIERARCHY",
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
    "CUDA_VISIBLE_DEVICES",
    "TMPDIR",
    "RAY_AUTH_MODE",
    "RAY_ADDRESS",
    "OMP_NUM_THREADS",
    "http_proxy",
    "https_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "no_proxy",
    "NO_PROXY",
)
WRITE_BYTES = 32 << 20


@dataclass(frozen=True)
class Storage:
    """Speed of a folder: sequential write with fsync, and one small fsync."""

    path: str
    free: int
    write_mb_s: float | None = None
    fsync_ms: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """One machine. Sizes in bytes, `time` seconds since the epoch; parts that were not asked for are None or empty."""

    host: str
    address: str
    machine: str
    time: float
    python: str
    versions: Mapping[str, str | None]
    variables: Mapping[str, str]
    device: str
    devices: int | None
    nofile: int
    stack: int
    memory: int
    tmp_free: int
    shm_free: int
    socket_length: int
    interfaces: tuple[str, ...]
    fast_name: str
    fast_address: str | None
    busy_ports: tuple[int, ...] = ()
    token_modes: Mapping[str, int] = field(default_factory=dict)
    user_token: bool = False
    storage: Storage | None = None
    gemm_tflops: Mapping[str, float] = field(default_factory=dict)
    gemm_error: str = ""
    collectives: Mapping[str, float | str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For JSON and for other machines."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Facts:
        """The inverse of `to_json`."""
        values = dict(data)
        if values["storage"] is not None:
            values["storage"] = Storage(**values["storage"])
        for name in ("interfaces", "busy_ports"):
            values[name] = tuple(values[name])
        return cls(**values)


def gather(
    site: SiteConfig,
    *,
    folder: Path | None = None,
    ports: Iterable[int] = (),
    tokens: Iterable[Path] = (),
    devices: bool = True,
    storage: bool = True,
) -> Facts:
    """Look at this machine. `devices` starts a bounded process that loads torch; `storage` writes 32 MiB and syncs."""
    name = socket.gethostname().split(".")[0]
    fast = name + site.network.host_suffix if site.network.host_suffix else name
    disk = shutil.disk_usage(site.launch.temp_root)
    return Facts(
        host=name,
        address=own_address(),
        machine=machine_identity(),
        time=time.time(),
        python=platform.python_version(),
        versions={package: _version(package) for package in PACKAGES} | _present(OPTIONAL),
        variables={key: os.environ[key] for key in VARIABLES if key in os.environ},
        device=site.node.device,
        devices=count_devices(site.node.device) if devices else None,
        nofile=_limit(resource.RLIMIT_NOFILE),
        stack=_limit(resource.RLIMIT_STACK),
        memory=available_memory(),
        tmp_free=disk.free,
        shm_free=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0,
        socket_length=len(f"{site.launch.temp_root}/mr-{os.getuid()}-12345678-10000") + SESSION_TAIL,
        interfaces=tuple(interface for _, interface in socket.if_nameindex()),
        fast_name=fast,
        fast_address=_address(fast),
        busy_ports=tuple(port for port in ports if _is_busy(port)),
        token_modes={str(path): path.stat().st_mode & 0o777 for path in tokens if path.exists()},
        user_token=(Path.home() / ".ray" / "auth_token").exists(),
        storage=measure_storage(folder, write=storage) if folder is not None else None,
    )


def available_memory() -> int:
    """Bytes that new processes can have: what the kernel says, or the control group's bound when that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    known = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    available = known.get("MemAvailable", 0)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def count_devices(device: str, bound_s: float = 60.0) -> int | None:
    """Devices that torch sees, asked in a process of its own; None when it cannot say within the bound."""
    if device == "cpu":
        return os.cpu_count()
    code = f"import torch; print(torch.{device}.device_count())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=bound_s)
        return int(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return None


def measure_storage(folder: Path, *, write: bool) -> Storage:
    """Free space and, with `write`, the speed of `folder`; the test file is removed."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not write:
        return Storage(str(folder), free)
    path = existing / f".mula-doctor-{os.getpid()}"
    try:
        started = time.perf_counter()
        with path.open("wb") as file:
            block = os.urandom(1 << 20)
            for _ in range(WRITE_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = WRITE_BYTES / (time.perf_counter() - started) / 1e6
            started = time.perf_counter()
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            return Storage(str(folder), free, rate, (time.perf_counter() - started) * 1e3)
    except OSError as error:
        return Storage(str(folder), free, error=error.strerror or str(error))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _present(packages: Iterable[str]) -> dict[str, str | None]:
    return {package: found for package in packages if (found := _version(package)) is not None}


def _limit(kind: int) -> int:
    """The hard limit, which our processes raise themselves to; -1 is none."""
    return resource.getrlimit(kind)[1]


def _address(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError:
        return None


def _is_busy(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
