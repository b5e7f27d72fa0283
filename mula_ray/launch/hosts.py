"""Which hosts this job has, and how they are reached over the fast network."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mula_ray.config.errors import UserError
from mula_ray.config.site import SiteConfig


@dataclass(frozen=True)
class Host:
    """A node of the allocation. `address` is its IP on the network that Ray and the ranks use."""

    name: str
    address: str


def find_hosts(
    site: SiteConfig, listed: str | None, hostfile: Path | None, environment: Mapping[str, str]
) -> list[Host]:
    """Hosts from `listed` (`a,b` or `a=10.0.0.1,…`), a file with one a line, or what the batch system says.

    Raises:
        UserError: no source, a name twice, or a name without address.
    """
    names = _names(listed, hostfile, environment)
    unique = list(dict.fromkeys(names))
    if len(unique) < len(names) and (listed is not None):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UserError(f"--hosts names {', '.join(twice)} twice; each node must be another one")
    hosts = [_resolve(entry, site) for entry in unique]
    by_address: dict[str, str] = {}
    for host in hosts:
        other = by_address.setdefault(host.address, host.name)
        if other != host.name:
            raise UserError(
                f"hosts {other} and {host.name} have the same address {host.address}; nodes must be distinct"
            )
    return hosts


def _names(listed: str | None, hostfile: Path | None, environment: Mapping[str, str]) -> list[str]:
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    file = hostfile or (Path(environment["PBS_NODEFILE"]) if "PBS_NODEFILE" in environment else None)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").split()
        except OSError as error:
            raise UserError(
                f"host file {file} cannot be read: {error.strerror}; give --hosts or another --hostfile"
            ) from None
        if not lines:
            raise UserError(f"host file {file} is empty; it must name one host a line")
        return lines
    if "SLURM_JOB_NODELIST" in environment and shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    raise UserError(
        "no list of hosts: not inside a PBS or Slurm job (PBS_NODEFILE, SLURM_JOB_NODELIST); "
        "give --hosts a,b or --hostfile"
    )


def _resolve(entry: str, site: SiteConfig) -> Host:
    name, given, address = entry.partition("=")
    if given:
        return Host(name, own_address() if address.startswith("127.") else address)
    fast = name.split(".")[0] + site.network.host_suffix if site.network.host_suffix else name
    try:
        found = str(socket.getaddrinfo(fast, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise UserError(
            f"host {name}: {fast} has no address ({error.strerror}); check network.host_suffix of site {site.name}, or "
            f"give the address as --hosts {name}=IP"
        ) from None
    return Host(name, own_address() if found.startswith("127.") else found)


def own_address() -> str:
    """An address of this machine that others could use: Ray does not take loopback ones."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the kernel only picks the source address
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def is_this_machine(host: Host) -> bool:
    """Whether `host` is where this process runs: its address can be bound here."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host.address, 0))
        except OSError:
            return False
    return True


def short_name() -> str:
    """This machine's name without its domain."""
    return socket.gethostname().split(".")[0]


def job_number(job: str | None, environment: Mapping[str, str]) -> int:
    """A number that tells this job from others on the same nodes, for its ports and temporary folder."""
    text = job or environment.get("PBS_JOBID") or environment.get("SLURM_JOB_ID") or str(os.getpid())
    digits = "".join(ch for ch in text.split(".")[0] if ch.isdigit())
    return int(digits or os.getpid())
