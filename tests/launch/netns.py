"""Several hosts on one machine: network namespaces with addresses of their own, joined by a bridge in another one."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

SITE = {
    "name": "netns",
    "description": "network namespaces of this machine",
    "node": {"device": "cpu", "tiles": 2, "tile_memory_gb": 4, "memory_gb": 8},
    "network": {"interface": "eth0"},
    "environment": {"ray": {"RAY_health_check_failure_threshold": "3", "RAY_health_check_period_ms": "1000"}},
    "launch": {
        "method": "each",
        "command": ["ip", "netns", "exec", "{host}"],
        "head": "dedicated",
        "bring_up_s": 60,
        "shutdown_s": 30,
    },
    "speed": {"peak_tflops": 0.05, "memory_gb_s": 10, "node_gb_s": 2, "network_gb_s": 1},
}


def run(*command: str) -> None:
    """Run a command, with what it said in the error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


@dataclass
class Hosts:
    """Namespaces, the head first."""

    names: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    switch: str = ""

    @property
    def listed(self) -> str:
        """For --hosts."""
        return ",".join(f"{name}={address}" for name, address in zip(self.names, self.addresses, strict=True))

    def command(self, index: int, *command: str) -> list[str]:
        """`command` on host `index`."""
        return ["ip", "netns", "exec", self.names[index], *command]

    def cut(self, index: int) -> None:
        """Pull the cable of host `index`."""
        run("ip", "-n", self.switch, "link", "set", f"p{index}", "down")

    def pids(self, index: int) -> list[int]:
        """Processes on host `index`."""
        done = subprocess.run(["ip", "netns", "pids", self.names[index]], capture_output=True, text=True, check=False)
        return [int(pid) for pid in done.stdout.split()]


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """`count` hosts with `eth0` on one network; whatever runs on them at the end is killed."""
    tag = f"mr{os.getpid() % 100000}{secrets.token_hex(1)}"
    made = Hosts(switch=f"{tag}s")
    try:
        run("ip", "netns", "add", made.switch)
        run("ip", "-n", made.switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", made.switch, "link", "set", "br0", "up")
        for index in range(count):
            name, address = f"{tag}h{index}", f"10.77.0.{index + 1}"
            run("ip", "netns", "add", name)
            made.names.append(name)
            made.addresses.append(address)
            run(
                "ip",
                "-n",
                made.switch,
                "link",
                "add",
                f"p{index}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            run("ip", "-n", made.switch, "link", "set", f"p{index}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for index, name in enumerate(made.names):
            for pid in made.pids(index):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", made.switch], check=False, capture_output=True)


def site_file(folder: Path, **launch: object) -> Path:
    """A site file for these hosts, with some values of its launch section replaced."""
    path = folder / "netns.yaml"
    path.write_text(yaml.safe_dump(SITE | {"launch": {**SITE["launch"], **launch}}))  # type: ignore[dict-item]
    return path
