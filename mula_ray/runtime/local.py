"""A many-node Ray cluster on this machine: started through its keeper, found again by a later driver.

cluster = LocalCluster.start(nodes=3, tiles=2, orphan_s=30)
... ray.init(cluster.wait_address()) ...
cluster.end()
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mula_ray.config.environment import auth_variables
from mula_ray.config.errors import CannotContinue
from mula_ray.runtime import wire
from mula_ray.runtime.seam import QUIET

HEALTH = {
    "RAY_health_check_initial_delay_ms": "3000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_register_timeout_seconds": "120",
}
"""Ray's own health checks are only the backstop of ours; nothing is started before it is asked for."""

UNHURRIED = {
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_local_fs_monitor_interval_ms": "10000",
    "RAY_memory_monitor_refresh_ms": "2000",
    "RAY_raylet_check_gc_period_milliseconds": "5000",
    "RAY_report_worker_backlog_interval_ms": "10000",
    "RAY_kill_idle_workers_interval_ms": "5000",
    "RAY_metrics_report_interval_ms": "60000",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "RAY_event_stats": "0",
    "RAY_event_stats_print_interval_ms": "0",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    "RAY_io_context_event_loop_lag_collection_interval_ms": "60000",
    "RAY_worker_niceness": "0",
}
"""Ray's processes share the cores with the ranks here: what they do by the clock is done less often, and the ranks,
descendants of Ray's workers, stand behind nobody (Ray gives its workers niceness 15)."""


@dataclass
class LocalCluster:
    """A connection to a keeper: while it is open, the cluster stays."""

    folder: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _sock: socket.socket | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def token_file(self) -> str:
        """Ray's authentication token, mode 0600."""
        return str(self.folder / "token")

    @classmethod
    def start(cls, nodes: int, tiles: int, orphan_s: float) -> LocalCluster:
        """Start a keeper; returns at once, `wait_address` waits for Ray."""
        folder = Path(tempfile.mkdtemp(prefix="mula-", dir="/tmp"))
        try:
            handle = os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(32))
            environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
            environment |= {**QUIET, **HEALTH, **UNHURRIED} | auth_variables(str(folder / "token"))
            command = [
                sys.executable,
                "-m",
                "mula_ray.runtime.keeper",
                str(folder),
                str(nodes),
                str(tiles),
                str(orphan_s),
            ]
            log = (folder / "keeper.log").open("wb")
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            log.close()
            return cls(folder, process)._attach(30.0)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    @classmethod
    def find(cls, folder: Path) -> LocalCluster | None:
        """The cluster of an earlier driver, if its keeper lives."""
        try:
            return cls(folder)._attach(2.0)
        except (CannotContinue, OSError):
            return None

    def _attach(self, bound_s: float) -> LocalCluster:
        end = time.monotonic() + bound_s
        while True:
            try:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.connect(str(self.folder / "keeper.sock"))
                self._sock = sock
                return self
            except (FileNotFoundError, ConnectionRefusedError):
                sock.close()
                ended = self.process is not None and self.process.poll() is not None
                if self.process is None or ended or time.monotonic() > end:
                    raise CannotContinue(f"the local cluster's keeper did not start: {self._log()}") from None
                time.sleep(0.01)

    def wait_address(self, bound_s: float = 90.0) -> str:
        """Address of the Ray cluster once all its nodes are up.

        Raises:
            CannotContinue: it did not come up within the bound; with what its log says.
        """
        end = time.monotonic() + bound_s
        path = self.folder / "address"
        while not path.exists():
            if time.monotonic() > end or (self.process is not None and self.process.poll() is not None):
                raise CannotContinue(f"the local Ray cluster did not start within {bound_s:.0f} s: {self._log()}")
            time.sleep(0.01)
        text = path.read_text()
        if text.startswith("!"):
            raise CannotContinue(f"the local Ray cluster did not start: {text[1:]}")
        return text

    def _log(self) -> str:
        try:
            return (self.folder / "keeper.log").read_text(errors="replace").strip()[-400:] or "its log is empty"
        except OSError as error:
            return str(error)

    def _ask(self, *request: str) -> Any:
        assert self._sock is not None
        with self._lock:
            wire.send(self._sock, request)
            answer, _ = wire.receive(self._sock)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def keeper_pid(self) -> int:
        """Of the keeper."""
        return int(self._ask("hello"))

    def add_node(self) -> str:
        """One more node; its name."""
        return str(self._ask("add-node"))

    def nodes(self) -> list[str]:
        """Names of the nodes that run."""
        return list(self._ask("nodes"))

    def kill_node(self, name: str) -> None:
        """SIGKILL of a node's raylet and everything on it."""
        self._ask("kill-node", name)

    def end(self, bound_s: float = 20.0) -> None:
        """End the cluster unless another driver uses it; waits until all of it is gone."""
        try:
            others = self._ask("end")
        except (EOFError, OSError, AssertionError):
            others = 0
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if others:
            return
        end = time.monotonic() + bound_s
        while self.folder.exists() and time.monotonic() < end:
            time.sleep(0.01)
        if self.process is not None:
            self.process.wait(timeout=bound_s)
