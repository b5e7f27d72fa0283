"""What doctor makes of the facts: pure judgement, every finding with its fix. One small function a check."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mula_ray.config.site import SiteConfig
from mula_ray.launch.doctor.facts import Facts
from mula_ray.launch.spec import SOCKET_LIMIT
from mula_ray.parallel.legacy import BINDINGS, EXTENSION

Level = Literal["error", "warning"]
RANGES = {"torch": ((2, 8), (2, 14)), "ray": ((2, 52), (3, 0)), "pydantic": ((2, 7), (3, 0))}
MIN_FILES, MIN_STACK = 65535, 8192 * 1024
MIN_TMP, MIN_SHM = 2 << 30, 256 << 20
MIN_WRITE_MB_S, MAX_FSYNC_MS = 50.0, 500.0
MAX_SKEW_S = 1.0
SLOW_TILE = 0.8


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, where, and what to do about it."""

    level: Level
    check: str
    host: str
    message: str
    fix: str

    def line(self) -> str:
        """For people."""
        return f"{self.level}: {self.host}: {self.message}; {self.fix}"


@dataclass(frozen=True)
class Needs:
    """What the run to come asks of a machine. Bytes; zero asks nothing."""

    memory: int = 0
    storage: int = 0
    distributed: bool = False
    """several hosts: network, proxies, ports and limits matter"""


def judge(facts: Facts, site: SiteConfig, needs: Needs) -> list[Finding]:
    """All findings about one machine."""
    found = [
        *_versions(facts),
        *_legacy(facts),
        *_devices(facts, site),
        *_variables(facts, site),
        *_memory(facts, site, needs),
    ]
    found += [*_storage(facts, needs), *_measured(facts), *_tokens(facts)]
    if needs.distributed:
        found += [*_sockets(facts), *_limits(facts), *_network(facts, site)]
    return found


def judge_cluster(nodes: Sequence[Facts], skews: dict[str, float], missing: Sequence[str]) -> list[Finding]:
    """Findings that show only when machines are compared. `skews`: seconds a host's clock is off ours, beyond doubt."""
    found = [
        Finding(
            "error", "reachable", host, "gave no answer within the bound", "leave it out, or see its logs/nodes archive"
        )
        for host in missing
    ]
    machines: dict[str, str] = {}
    for facts in nodes:
        other = machines.setdefault(facts.machine, facts.address)
        if other != facts.address:
            found.append(
                Finding("error", "distinct", facts.host, f"is the same machine as {other}", "list every node once")
            )
    for host, skew in skews.items():
        if abs(skew) > MAX_SKEW_S:
            message = f"clock is {skew:+.1f} s off, at most {MAX_SKEW_S:g} s is fine"
            found.append(
                Finding("warning", "clock", host, message, "start chrony or ntpd there: times in events.jsonl mislead")
            )
    found += _uneven_versions(nodes)
    return found + _slow_tiles(nodes)


def _versions(facts: Facts) -> Iterator[Finding]:
    if _numbers(facts.python) < (3, 11):
        yield Finding(
            "error", "python", facts.host, f"Python {facts.python}, at least 3.11 is needed", "use python3.11 or newer"
        )
    for package, version in facts.versions.items():
        if version is None:
            yield Finding("error", "versions", facts.host, f"{package} is not installed", f"pip install {package}")
            continue
        first, stop = RANGES.get(package, ((0,), (10**6,)))
        if not first <= _numbers(version) < stop:
            wanted = f">={'.'.join(map(str, first))},<{'.'.join(map(str, stop))}"
            yield Finding(
                "error",
                "versions",
                facts.host,
                f"{package} {version}, {wanted} is needed",
                f'pip install "{package}{wanted}"',
            )


def _legacy(facts: Facts) -> Iterator[Finding]:
    """Intel's retired packages must be of torch's own version: importing them beside another one fails or crashes."""
    torch = facts.versions.get("torch")
    for package in (EXTENSION, BINDINGS):
        version = facts.versions.get(package)
        if torch is not None and version is not None and _numbers(version)[:2] != _numbers(torch)[:2]:
            yield Finding(
                "warning", "legacy", facts.host, f"{package} {version} does not belong to torch {torch}",
                f"pip uninstall {package}: torch needs it no more since 2.8",
            )  # fmt: skip


def _devices(facts: Facts, site: SiteConfig) -> Iterator[Finding]:
    if site.node.device == "cpu" or facts.devices == site.node.tiles:
        return
    if facts.devices is None:
        return
    fix = "see the driver and module set-up of the site"
    if site.node.device == "xpu" and facts.devices * 2 == site.node.tiles:
        fix = "set ZE_FLAT_DEVICE_HIERARCHY=FLAT (a site file's environment.common does)"
    message = f"torch sees {facts.devices} {site.node.device} devices, {site.node.tiles} are expected"
    yield Finding("error", "devices", facts.host, message, fix)


def _variables(facts: Facts, site: SiteConfig) -> Iterator[Finding]:
    for name, value in site.environment.common.items():
        if name.startswith("ZE_") and facts.variables.get(name, value) != value:
            message = f"{name} is {facts.variables[name]!r}, {value!r} is needed"
            yield Finding(
                "warning", "hierarchy", facts.host, message, f"export {name}={value}; launch sets it by itself"
            )
    for name in site.environment.unset:
        if name in facts.variables:
            message = f"{name} is set ({facts.variables[name]!r}), which breaks ray start and actors without devices"
            yield Finding(
                "warning", "selector", facts.host, message, f"unset {name} before `ray start`; launch does it by itself"
            )


def _sockets(facts: Facts) -> Iterator[Finding]:
    if facts.socket_length > SOCKET_LIMIT:
        message = f"Ray's socket paths would have {facts.socket_length} bytes, at most {SOCKET_LIMIT} work"
        yield Finding("error", "sockets", facts.host, message, "set launch.temp_root of the site file to /tmp")


def _limits(facts: Facts) -> Iterator[Finding]:
    if 0 <= facts.nofile < MIN_FILES:
        message = f"open files are limited to {facts.nofile}, {MIN_FILES} are needed at scale"
        yield Finding(
            "warning", "files", facts.host, message, f"ulimit -n {MIN_FILES}, or ask the site to raise the hard limit"
        )
    if 0 <= facts.stack < MIN_STACK:
        message = f"stacks are limited to {facts.stack >> 10} KiB, {MIN_STACK >> 10} KiB are needed"
        yield Finding("warning", "stack", facts.host, message, f"ulimit -s {MIN_STACK >> 10}")


def _network(facts: Facts, site: SiteConfig) -> Iterator[Finding]:
    wanted = site.network.interface
    if wanted and wanted not in facts.interfaces:
        message = f"has no interface {wanted} (there are {', '.join(facts.interfaces)})"
        yield Finding("error", "interface", facts.host, message, "correct network.interface of the site file")
    if site.network.host_suffix and facts.fast_address is None:
        message = f"{facts.fast_name} has no address"
        yield Finding(
            "error", "hsn", facts.host, message, "correct network.host_suffix of the site file, or give --hosts a=IP"
        )
    proxies = [name for name in facts.variables if name.lower() in ("http_proxy", "https_proxy")]
    direct = facts.variables.get("no_proxy", "") + "," + facts.variables.get("NO_PROXY", "")
    if (
        proxies
        and facts.address not in direct
        and not (site.network.host_suffix and site.network.host_suffix in direct)
    ):
        message = f"{', '.join(proxies)} would capture Ray's traffic to {facts.address}"
        yield Finding(
            "warning", "proxies", facts.host, message, "unset them, or add the nodes to no_proxy and NO_PROXY"
        )
    if facts.busy_ports:
        ports = ", ".join(map(str, facts.busy_ports))
        message = f"ports {ports} are taken"
        yield Finding(
            "error", "ports", facts.host, message, "end the job that has them (ray stop), or pass another --job number"
        )


def _memory(facts: Facts, site: SiteConfig, needs: Needs) -> Iterator[Finding]:
    if facts.memory < needs.memory:
        message = f"{facts.memory / 1e9:.1f} GB of memory are free, the run needs about {needs.memory / 1e9:.1f} GB"
        fix = "end other programs, or use fewer tiles a node or a smaller model"
        yield Finding("warning", "memory", facts.host, message, fix)
    if facts.tmp_free < MIN_TMP:
        free, least = facts.tmp_free / 1e9, MIN_TMP / 1e9
        message = f"{free:.2f} GB are free in {site.launch.temp_root}, Ray's logs and spills need {least:.1f}"
        yield Finding("warning", "tmp", facts.host, message, f"clean {site.launch.temp_root}, or set launch.temp_root")
    if facts.shm_free < MIN_SHM:
        message = f"{facts.shm_free / 1e6:.0f} MB of shared memory are free, {MIN_SHM / 1e6:.0f} MB are needed"
        yield Finding(
            "warning", "shm", facts.host, message, "clean /dev/shm, or start the container with a larger --shm-size"
        )


def _storage(facts: Facts, needs: Needs) -> Iterator[Finding]:
    store = facts.storage
    if store is None:
        return
    if store.error:
        yield Finding(
            "error", "storage", facts.host, f"{store.path} cannot be written: {store.error}", "choose another --run-dir"
        )
    if store.free < needs.storage:
        message = (
            f"{store.free / 1e9:.2f} GB are free in {store.path}, the checkpoints need {needs.storage / 1e9:.2f} GB"
        )
        yield Finding("error", "space", facts.host, message, "free some, or choose another --run-dir")
    if store.write_mb_s is not None and store.write_mb_s < MIN_WRITE_MB_S:
        message = f"{store.path} takes {store.write_mb_s:.0f} MB/s with fsync, checkpoints want {MIN_WRITE_MB_S:.0f}"
        yield Finding("warning", "write speed", facts.host, message, "choose a faster file system for --run-dir")
    if store.fsync_ms is not None and store.fsync_ms > MAX_FSYNC_MS:
        message = f"one fsync in {store.path} takes {store.fsync_ms:.0f} ms, at most {MAX_FSYNC_MS:.0f} is fine"
        yield Finding(
            "warning", "fsync", facts.host, message, "choose another file system for --run-dir, or save less often"
        )


def _measured(facts: Facts) -> Iterator[Finding]:
    for name, value in facts.collectives.items():
        if isinstance(value, str):
            fix = "see network.interface of the site file, firewalls, hang_workarounds; else leave the host out"
            yield Finding("error", "collectives", facts.host, f"{name} failed: {value}", fix)
    if facts.gemm_error:
        yield Finding(
            "error",
            "gemm",
            facts.host,
            f"no matrix product: {facts.gemm_error}",
            "check driver, module and torch build",
        )


def _tokens(facts: Facts) -> Iterator[Finding]:
    for path, mode in facts.token_modes.items():
        if mode & 0o077:
            message = f"token file {path} has mode {mode:04o}: others can read it"
            yield Finding("error", "token", facts.host, message, f"chmod 600 {path}, and make a new token")
    if facts.user_token and "RAY_AUTH_MODE" not in facts.variables:
        message = "~/.ray/auth_token switches Ray's authentication on for processes that nobody told otherwise"
        yield Finding(
            "warning", "auth mode", facts.host, message, "export RAY_AUTH_MODE explicitly; mula-ray's own processes do"
        )


def _uneven_versions(nodes: Sequence[Facts]) -> list[Finding]:
    found = []
    for package in ("torch", "ray"):
        seen: dict[str, list[str]] = {}
        for facts in nodes:
            seen.setdefault(str(facts.versions.get(package)), []).append(facts.host)
        if len(seen) > 1:
            common = max(seen, key=lambda version: len(seen[version]))
            for version, hosts in seen.items():
                if version != common:
                    message = f"{package} {version}, the others have {common}"
                    found.append(
                        Finding("error", "uneven", ", ".join(hosts), message, "use one environment on all nodes")
                    )
    return found


def _slow_tiles(nodes: Sequence[Facts]) -> list[Finding]:
    speeds = {(facts.host, tile): speed for facts in nodes for tile, speed in facts.gemm_tflops.items()}
    if len(speeds) < 2:
        return []
    usual = statistics.median(speeds.values())
    return [
        Finding(
            "warning",
            "slow tile",
            host,
            f"tile {tile} makes {speed:.3g} TFLOP/s, the median is {usual:.3g}",
            "leave the node out: the slowest tile sets the pace of all",
        )
        for (host, tile), speed in speeds.items()
        if speed < SLOW_TILE * usual
    ]


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: `2.13.0+cpu` is (2, 13, 0)."""
    numbers: list[int] = []
    for part in version.replace("+", ".").split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
