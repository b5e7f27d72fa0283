"""Bring Ray up on every host of an allocation, run the driver, take everything down again.

    with Cluster(spec, site) as cluster:
        cluster.wait(needed)
        code = cluster.run(command)

Agents are started by the site's method: `mpiexec` (one command for all hosts) or `each` (one command a host: ssh, ip
netns exec, …; the host where this runs needs none).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from mula_ray.config.environment import EnvBlock
from mula_ray.config.errors import CannotContinue
from mula_ray.config.site import LaunchSpec
from mula_ray.launch.hosts import Host, is_this_machine
from mula_ray.launch.spec import AgentSpec, read_json, write_json, write_spec

POLL_S = 0.2
BEAT_S = 1.0
REMOTE_SHELLS = ("ssh", "rsh")


class Cluster:
    """A Ray cluster that belongs to this process. Bounded: every wait names who is missing."""

    def __init__(self, spec: AgentSpec, launch: LaunchSpec) -> None:
        self.spec, self._launch = spec, launch
        self.folder = Path(spec.folder)
        self._starters: list[subprocess.Popen[bytes]] = []
        self._stopping = threading.Event()
        self._driver: subprocess.Popen[bytes] | None = None
        self._signals = 0

    def __enter__(self) -> Cluster:
        path = write_spec(self.spec)
        self._write_beat(0)
        threading.Thread(target=self._keep_beating, daemon=True).start()
        log = (self.folder / "agents.log").open("ab")
        with log:
            for command in self.commands(path):
                self._starters.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
                )
        return self

    def commands(self, spec_path: Path) -> Iterator[list[str]]:
        """The command lines that start the agents."""
        agent = [sys.executable, "-m", "mula_ray.launch.agent", str(spec_path)]
        nodes = str(len(self.spec.hosts))
        if self._launch.method == "mpiexec":
            yield [part.format(nodes=nodes, host="") for part in self._launch.command] + agent
            return
        for host in self.spec.hosts:
            own = [*agent, "--host", host.name]
            if is_this_machine(host):
                yield own
                continue
            before = [part.format(nodes=nodes, host=host.name) for part in self._launch.command]
            remote = Path(before[0]).name in REMOTE_SHELLS  # these join their arguments with blanks
            yield before + ([shlex.join(own)] if remote else own)

    def environment(self) -> dict[str, str]:
        """For processes that talk to this cluster: the same block as on its nodes, the token included."""
        return EnvBlock(self.spec.set, self.spec.unset).apply(os.environ)

    def wait(self, needed: int) -> list[Host]:
        """Wait until every host is in Ray, or, at the bound, until at least `needed` hosts with tiles are.

        Returns the hosts that did not come.

        Raises:
            CannotContinue: too few came (says what is known of each missing host), or two hosts are one machine.
        """
        until = time.monotonic() + self.spec.bring_up_s
        seen: dict[str, Any] = {}
        with _Probe(self.spec.address, self.environment()) as probe:
            while True:
                seen = probe.latest
                missing = self._missing(seen)
                if not missing:
                    break
                hopeless = [host for host in missing if self._state(host).get("state") in ("failed", "ended")]
                late = time.monotonic() > until
                enough = self._working(missing) >= needed and self._head_is_there(missing)
                if late or len(hopeless) == len(missing) or (hopeless and not self._possible(hopeless, needed)):
                    if enough:
                        break
                    raise CannotContinue(self._explain(missing, seen, needed))
                if self._stopping.wait(POLL_S):
                    raise CannotContinue("stopped while the cluster was coming up")
        self._check_distinct()
        return missing

    def run(self, command: Sequence[str]) -> int:
        """Run the driver on this host; signals go on to it. Returns its exit code (128 + n after signal n)."""
        self._driver = subprocess.Popen(list(command), env=self.environment())
        previous = {number: signal.signal(number, self._forward) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self._driver.wait(timeout=POLL_S)
                    return code if code >= 0 else 128 - code
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def head_failed(self) -> str | None:
        """Why the head's Ray ended, or None while it is well."""
        state = self._state(self.spec.hosts[0])
        return str(state.get("reason") or state["state"]) if state.get("state") in ("failed", "ended") else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> list[str]:
        """End everything; returns the hosts whose agents gave no sign of having ended within the bound."""
        (self.folder / "stop").touch()
        until = time.monotonic() + self._launch.shutdown_s
        left = list(self.spec.hosts)
        while left and time.monotonic() < until:
            left = [host for host in left if not (self.folder / "agents" / f"{host.name}.ended").exists()]
            if all(starter.poll() is not None for starter in self._starters):
                break
            time.sleep(POLL_S)
        self._stopping.set()
        for starter in self._starters:
            _end(starter)
        return [host.name for host in left if self._state(host)]  # those that never started have nothing to end

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        """SIGTERM once and SIGINT go to the driver. A terminal sends SIGINT to the whole group by itself."""
        driver = self._driver
        if driver is None or driver.poll() is not None:
            return
        if number == signal.SIGINT and os.getpgid(driver.pid) == os.getpgrp() and os.isatty(0):
            return
        driver.send_signal(number)

    def _keep_beating(self) -> None:
        count = 0
        while not self._stopping.wait(BEAT_S):
            count += 1
            with contextlib.suppress(OSError):
                self._write_beat(count)

    def _write_beat(self, count: int) -> None:
        write_json(self.folder / "beat", {"count": count})

    def _state(self, host: Host) -> dict[str, Any]:
        return read_json(self.folder / "agents" / f"{host.name}.json") or {}

    def _missing(self, seen: dict[str, Any]) -> list[Host]:
        addresses = {node["address"] for node in seen.get("nodes", ())}
        return [host for host in self.spec.hosts if host.address not in addresses]

    def _working(self, missing: Sequence[Host]) -> int:
        """Hosts with tiles that are there."""
        return sum(
            1 for index, host in enumerate(self.spec.hosts) if host not in missing and self.spec.tiles_of(index) > 0
        )

    def _possible(self, hopeless: Sequence[Host], needed: int) -> bool:
        return self._head_is_there(hopeless) and self._working(hopeless) >= needed

    def _head_is_there(self, missing: Sequence[Host]) -> bool:
        return self.spec.hosts[0] not in missing

    def _explain(self, missing: Sequence[Host], seen: dict[str, Any], needed: int) -> str:
        lines = [
            f"{self._working(missing)} of the {needed} needed working nodes came within {self.spec.bring_up_s:.0f} s; "
            f"missing: {', '.join(host.name for host in missing)}"
        ]
        for host in missing:
            state = self._state(host)
            if not state:
                lines.append(f"  {host.name} ({host.address}): its agent never started")
            else:
                lines.append(f"  {host.name} ({host.address}): {state.get('state')} {state.get('reason', '')}".rstrip())
        if "error" in seen:
            lines.append(f"  Ray's head at {self.spec.address}: {seen['error']}")
        lines.append(f"  what the start commands said: {self.folder / 'agents.log'}; check hosts with mula-ray doctor")
        return "\n".join(lines)

    def _check_distinct(self) -> None:
        machines: dict[str, str] = {}
        for host in self.spec.hosts:
            machine = self._state(host).get("machine")
            if machine is None:
                continue
            other = machines.setdefault(str(machine), host.name)
            if other != host.name:
                raise CannotContinue(
                    f"hosts {other} and {host.name} are one machine; nodes must be distinct: check the host list"
                )


class _Probe:
    """Reads the lines of `probe.py` on a thread."""

    def __init__(self, address: str, environment: dict[str, str]) -> None:
        self.latest: dict[str, Any] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mula_ray.launch.probe", address],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> _Probe:
        self._thread.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                self.latest = json.loads(line)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join(timeout=1)
        if self._process.stdout is not None:
            self._process.stdout.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a starter (mpiexec, ssh, a local agent): asked first, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
