"""What `launch` starts on every host: brings up this host's part of Ray, watches it, packs its logs, ends it.

    python -m mula_ray.launch.agent SPEC.json [--host NAME]

Without --host the host's own name is looked up in the spec (mpiexec starts the same command everywhere). Ends on the
`stop` file, on SIGTERM, when Ray ends, or when the launcher's `beat` has stood still for longer than `orphan_s`.
Nothing that it started is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import IO, Any

from mula_ray.config.environment import EnvBlock
from mula_ray.launch.hosts import is_this_machine, short_name
from mula_ray.launch.spec import AgentSpec, read_json, write_json
from mula_ray.runtime.osproc import adopt_orphans, descendants, kill_verified

POLL_S = 0.2
MAX_LOG_BYTES = 50 << 20


class Agent:
    """This host's agent."""

    def __init__(self, spec: AgentSpec, index: int) -> None:
        self.spec, self.index, self.host = spec, index, spec.hosts[index]
        self.folder = Path(spec.folder)
        self.temp = Path(spec.temp_dir(index))
        self.stopping = False
        self._ray: subprocess.Popen[bytes] | None = None
        self._beat: tuple[object, float] = (None, time.monotonic())

    def run(self) -> int:
        """Until the end; 0 when asked to stop, 1 when Ray failed."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        adopt_orphans()
        _raise_limits()
        self._report("starting")
        code = 1
        try:
            self._fresh_temp()
            code = self._bring_up()
        except Exception as error:
            self._report("failed", f"{type(error).__name__}: {error}")
        finally:
            self._end()
        return code

    def _on_signal(self, *_: object) -> None:
        self.stopping = True

    def _bring_up(self) -> int:
        until = time.monotonic() + self.spec.bring_up_s
        if self.index > 0 and not self._wait_for_head(until):
            return 0 if self.stopping else 1
        self.temp.joinpath("ray.log").touch(mode=0o600)
        with self.temp.joinpath("ray.log").open("ab") as log:
            self._ray = self._start_ray(log)
            self._report("head" if self.index == 0 else "joining")
            while not self._should_stop():
                if self._ray.poll() is not None:
                    self._report("failed", f"ray start ended with {self._ray.returncode}: {self._last_words()}")
                    return 1
                time.sleep(POLL_S)
        return 0

    def _wait_for_head(self, until: float) -> bool:
        """Wait until the head's agent has started Ray, then for this host's turn (mass registration hangs heads)."""
        path = self.folder / "agents" / f"{self.spec.hosts[0].name}.json"
        while True:
            state = (read_json(path) or {}).get("state")
            if state == "head":
                break
            if self._should_stop():
                return False
            if state == "failed" or time.monotonic() > until:
                self._report("failed", f"the head {self.spec.hosts[0].name} did not come up (state {state})")
                return False
            time.sleep(POLL_S)
        turn = time.monotonic() + self.spec.stagger_s * self.index
        while time.monotonic() < turn and not self._should_stop():
            time.sleep(min(POLL_S, max(0.0, turn - time.monotonic())))
        return not self.stopping

    def _start_ray(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        environment = EnvBlock(self.spec.set, self.spec.unset).apply(os.environ) | {"TMPDIR": str(self.temp)}
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *self.ray_arguments()]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def ray_arguments(self) -> list[str]:
        """Arguments of `ray start` on this host: fixed ports, no GPUs for Ray to touch, tiles as a resource."""
        ports = self.spec.ports
        tiles = self.spec.tiles_of(self.index)
        resources = f'{{"tile": {tiles}}}' if tiles else "{}"
        arguments = [
            "--block",
            f"--node-ip-address={self.host.address}",
            f"--node-manager-port={ports['node_manager']}",
            f"--object-manager-port={ports['object_manager']}",
            f"--runtime-env-agent-port={ports['runtime_env_agent']}",
            f"--metrics-export-port={ports['metrics_export']}",
            f"--dashboard-agent-listen-port={ports['dashboard_agent_listen']}",
            f"--dashboard-agent-grpc-port={ports['dashboard_agent_grpc']}",
            f"--temp-dir={self.temp}",
            "--num-cpus=0",
            "--num-gpus=0",
            f"--resources={resources}",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
        ]
        if self.index > 0:
            return [*arguments, f"--address={self.spec.address}"]
        dashboard = ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={ports['dashboard']}"]
        return [
            *arguments,
            "--head",
            f"--port={ports['gcs']}",
            f"--ray-client-server-port={ports['ray_client_server']}",
            *(dashboard if self.spec.job_server else ["--include-dashboard=false"]),
        ]

    def _should_stop(self) -> bool:
        if self.stopping:
            return True
        if (self.folder / "stop").exists():
            self.stopping = True
        beat = (read_json(self.folder / "beat") or {}).get("count")
        now = time.monotonic()
        if beat != self._beat[0]:
            self._beat = (beat, now)
        elif now - self._beat[1] > self.spec.orphan_s:
            self._report("orphaned", f"the launcher gave no sign for {self.spec.orphan_s:.0f} s")
            self.stopping = True
        return self.stopping

    def _fresh_temp(self) -> None:
        """Make the temporary folder, for the owner only; what an earlier bring-up of this job left is removed."""
        if self.temp.exists() and self.temp.stat().st_uid == os.getuid():
            shutil.rmtree(self.temp, ignore_errors=True)
        self.temp.mkdir(mode=0o700)

    def _last_words(self) -> str:
        text = self.temp.joinpath("ray.log").read_text(errors="replace").strip()
        return text[-500:] or "it said nothing"

    def _report(self, state: str, reason: str = "") -> None:
        """Keep the first failure: what comes after it is a consequence."""
        path = self.folder / "agents" / f"{self.host.name}.json"
        before = read_json(path) or {}
        if before.get("state") == "failed" and before.get("pid") == os.getpid():
            state, reason = "failed", str(before.get("reason"))
        write_json(path, self._facts() | {"state": state, "reason": reason})

    def _facts(self) -> dict[str, Any]:
        return {
            "host": self.host.name,
            "address": self.host.address,
            "pid": os.getpid(),
            "machine": machine_identity(),
            "time": time.time(),
        }

    def _end(self) -> None:
        """End Ray and everything below it, keep its logs, leave nothing in the temporary folder."""
        if self._ray is not None and self._ray.poll() is None:
            self._ray.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ray.wait(timeout=5)
        left = kill_verified(descendants(os.getpid()))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        with contextlib.suppress(OSError):
            self._pack_logs()
        shutil.rmtree(self.temp, ignore_errors=True)
        self._report("ended", f"processes {left} could not be ended" if left else "")
        write_json(self.folder / "agents" / f"{self.host.name}.ended", {"left": left})

    def _pack_logs(self) -> None:
        """`<run>/logs/nodes/<bring-up>-<host>.tar.gz`: Ray's logs of this host, each file's last part."""
        target = Path(self.spec.logs)
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = target / f"{self.folder.name}-{self.host.name}.tar.gz"
        files = [self.temp / "ray.log", *self.temp.glob("session_*/logs/**/*")]
        with tarfile.open(name, "w:gz", compresslevel=1) as archive:
            for file in files:
                if file.is_file() and not file.is_symlink() and file.stat().st_size <= MAX_LOG_BYTES:
                    archive.add(file, arcname=str(file.relative_to(self.temp)), recursive=False)


def machine_identity() -> str:
    """Tells machines apart, also network namespaces on one of them."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else short_name()}/{os.readlink('/proc/self/ns/net')}"


def _raise_limits() -> None:
    for kind, wanted in ((resource.RLIMIT_NOFILE, 65535), (resource.RLIMIT_STACK, 8192 * 1024)):
        _, hard = resource.getrlimit(kind)
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (soft, hard))


def own_index(spec: AgentSpec, name: str | None) -> int:
    """Which host of the spec this is: by `name`, by the machine's own name, or by an address of its own."""
    wanted = name or short_name()
    for index, host in enumerate(spec.hosts):
        if host.name == wanted or (name is None and host.name.split(".")[0] == wanted):
            return index
    for index, host in enumerate(spec.hosts):
        if name is None and is_this_machine(host):
            return index
    raise SystemExit(f"mula-ray agent: {wanted} is not among the hosts of this launch")


def main() -> None:
    """Entry of `python -m`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--host")
    arguments = parser.parse_args()
    spec = AgentSpec.read(arguments.spec)
    sys.exit(Agent(spec, own_index(spec, arguments.host)).run())


if __name__ == "__main__":
    main()
