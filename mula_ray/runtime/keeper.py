"""The keeper of a local Ray cluster: a small process that owns it, so that it outlives a driver, but not for long.

    python -m mula_ray.runtime.keeper FOLDER NODES TILES ORPHAN_S

Drivers connect to its Unix socket in FOLDER; a connection that ends is a driver that is gone, however it went. With no
driver left for ORPHAN_S seconds, or on request, everything is ended: every Ray process is a descendant (orphans come
back to the keeper, a subreaper), SIGKILLed and verified. A second process, the guard, waits for nothing but the
keeper's own end and does the same then.

One Ray node for the head without tiles, NODES with `tile: TILES`. Requests: `hello`, `nodes`, `add-node`,
`kill-node NAME`, `end`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from mula_ray.runtime import standin, wire
from mula_ray.runtime.osproc import adopt_orphans, descendants, die_with_parent, kill_verified, stand_back, start_batch

OBJECT_STORE_BYTES = 80 << 20
ADD_TRIES = 3


def thin_helpers() -> None:
    """From now on raylets that this process starts get `standin` for their two helper processes.

    Ray's own are kept where a version of Ray has no such place: nothing but time is lost then.
    """
    try:
        from ray._private import services
        from ray._raylet import get_port_filename  # type: ignore[attr-defined]
    except ImportError:
        return
    start = services.start_ray_process

    def standing_in(command: list[str], *args: Any, **named: Any) -> Any:
        values = dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)
        if "runtime_env_agent_command" in values and "dashboard_agent_command" in values:
            file = partial(get_port_filename, values["node_id"])
            command = [_with_standin(word, values, file) for word in command]
        return start(command, *args, **named)

    services.start_ray_process = standing_in


def _with_standin(word: str, values: dict[str, str], file: Callable[[str], str]) -> str:
    """One word of a raylet's command line; `file(port)`: the name under which a helper announces that port."""
    thin = [sys.executable, "-I", "-S", standin.__file__, values["session_dir"]]
    if word.startswith("--dashboard_agent_command="):
        unused = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
        command = [*thin, *(f"{file(port)}=-1" for port in unused)]
    elif word.startswith("--runtime_env_agent_command="):
        real = shlex.split(values["runtime_env_agent_command"])
        command = [*thin, f"{file('runtime_env_agent_port')}=?", values["node_ip_address"], *real]
    else:
        return word
    return f"{word.partition('=')[0]}={subprocess.list2cmdline(command)}"


class _Starter:
    """Runs `work` on a thread that then stays: what a thread started dies (PDEATHSIG) when that *thread* ends."""

    def __init__(self, work: Callable[[], Any], tell: threading.Event | None = None) -> None:
        self.error: BaseException | None = None
        self._value: Any = None
        self._done = threading.Event()
        self._work, self._tell = work, tell
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self.error = error
        self._done.set()
        if self._tell is not None:
            self._tell.set()
        threading.Event().wait()

    def result(self) -> Any:
        """What `work` returned or raised."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self._value


class RayNodes:
    """The Ray nodes of this machine, started through Ray's own `Node` (what `ray start` and its test cluster use)."""

    def __init__(self, folder: Path, tiles: int) -> None:
        self._folder, self._tiles = folder, tiles
        self.nodes: dict[str, Any] = {}
        self.address = ""
        self._head: Any = None
        self._count = 0
        self._lock = threading.Lock()

    def start(self, count: int) -> None:
        """Head and `count` nodes, at once: the nodes start as soon as the head's control service listens."""
        thin_helpers()
        up = threading.Event()
        head = _Starter(lambda: self._start_head(up), up)
        up.wait()
        starters = [head, *(_Starter(self._add) for _ in range(count if head.error is None else 0))]
        for starter in starters:
            starter.result()
        for info in self._head.all_processes.get("gcs_server", ()):  # not raylets: the ranks descend from them
            stand_back(info.process.pid)

    def add(self) -> str:
        """One more node; returns its name."""
        return str(_Starter(self._add).result())

    def _start_head(self, up: threading.Event) -> None:
        from ray._private.node import Node

        class Head(Node):  # type: ignore[misc, unused-ignore]
            """No dashboard process; says when the control service listens."""

            def start_api_server(self, **_: Any) -> None:
                """Not needed here."""

            def start_ray_processes(inner) -> None:
                """The control service is up: other nodes may start."""
                self._head = inner
                self.address = inner.gcs_address
                up.set()
                super().start_ray_processes()  # type: ignore[no-untyped-call]

        Head(self._params("head", None, {}), head=True, shutdown_at_exit=False, spawn_reaper=True)

    def _add(self) -> str:
        """Ray gives a node 30 s to come up, which a crowded machine may not grant: tried again."""
        for left in range(ADD_TRIES - 1, -1, -1):
            with self._lock:
                name = f"n{self._count}"
                self._count += 1
            try:
                return self._add_as(name)
            except Exception:
                kill_verified(_running_with(f"{name}.r"))
                if not left:
                    raise
        raise AssertionError("not reached")

    def _add_as(self, name: str) -> str:
        from ray._private.node import Node

        params = self._params(name, self.address, {"tile": self._tiles})
        node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=True)
        self.nodes[name] = node
        return name

    def _params(self, name: str, address: str | None, resources: dict[str, float]) -> Any:
        from ray._private.parameter import RayParams

        return RayParams(
            num_cpus=0,
            num_gpus=0,
            resources=resources,
            labels={"mula": name},
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            include_log_monitor=cast(Any, False),
            no_monitor=True,
            temp_dir=str(self._folder / "ray"),
            gcs_address=address,
            redis_address=address,
            dashboard_agent_listen_port=None if address else 0,
            min_worker_port=0,
            max_worker_port=0,
            plasma_store_socket_name=str(self._folder / "ray" / f"{name}.p"),
            raylet_socket_name=str(self._folder / "ray" / f"{name}.r"),
        )

    def living(self) -> list[str]:
        """Names of the nodes whose raylet runs."""
        raylets = {name: node.all_processes.get("raylet", ()) for name, node in list(self.nodes.items())}
        return sorted(name for name, infos in raylets.items() if all(i.process.poll() is None for i in infos))

    def kill(self, name: str) -> None:
        """The whole node at once: raylet and everything below it."""
        node = self.nodes.pop(name)
        raylets = [info.process for infos in node.all_processes.values() for info in infos]
        pids = [process.pid for process in raylets]
        kill_verified([*pids, *(below for pid in pids for below in descendants(pid))])
        for process in raylets:
            process.wait()


def _running_with(text: str) -> list[int]:
    """Our descendants with `text` in their command lines."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if text.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


class Keeper:
    """Serves drivers and ends everything in time."""

    def __init__(self, folder: Path, nodes: int, tiles: int, orphan_s: float) -> None:
        self._folder, self._count, self._orphan_s = folder, nodes, orphan_s
        self._ray = RayNodes(folder, tiles)
        self._ended = threading.Event()
        self._drivers: set[socket.socket] = set()
        self._idle_since: float | None = time.monotonic()
        self._lock = threading.Lock()
        self._child_ended = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / "keeper.sock"))
        self._listener.listen(64)

    def run(self) -> None:
        """Until no driver is left."""
        signal.signal(signal.SIGCHLD, self._on_child)
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._start, daemon=True).start()
        while not self._ended.wait(0.25):
            with self._lock:
                idle = self._idle_since
            if idle is not None and time.monotonic() - idle > self._orphan_s:
                break
            if self._child_ended:
                self._child_ended = False
                self._reap()
        self.end()

    def _on_child(self, *_: Any) -> None:
        self._child_ended = True

    def _start(self) -> None:
        try:
            self._ray.start(self._count)
            text = self._ray.address
        except BaseException as error:
            text = f"!{type(error).__name__}: {error}"
        temp = self._folder / "address.new"
        temp.write_text(text)
        temp.rename(self._folder / "address")

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            if not wire.peer_is_us(sock):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with self._lock:
            self._drivers.add(sock)
            self._idle_since = None
        try:
            while True:
                request, _ = wire.receive(sock)
                wire.send(sock, self._answer(request))
        except (EOFError, OSError):
            pass
        finally:
            with self._lock:
                self._drivers.discard(sock)
                if not self._drivers:
                    self._idle_since = time.monotonic()
            sock.close()

    def _answer(self, request: tuple[str, ...]) -> Any:
        verb = request[0]
        try:
            if verb == "nodes":
                return self._ray.living()
            if verb == "add-node":
                return self._ray.add()
            if verb == "kill-node":
                return self._ray.kill(request[1])
            if verb == "end":
                with self._lock:
                    others = len(self._drivers) - 1
                if not others:
                    self._ended.set()
                return others
        except Exception as error:
            return error
        return os.getpid()

    def _reap(self) -> None:
        """Orphans that came back to us must not stay as zombies; Ray's own children are left to its objects."""
        known = {
            info.process.pid
            for node in [*self._ray.nodes.values(), self._ray._head]
            if node is not None
            for infos in node.all_processes.values()
            for info in infos
        }
        me = os.getpid()
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) in known:
                continue
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[1]) == me and fields[0] == "Z":
                    os.waitpid(int(name), os.WNOHANG)

    def end(self) -> None:
        """Everything below, then the folder, then this process."""
        for _ in range(20):
            below = descendants(os.getpid())
            if not below:
                break
            kill_verified(below, 5.0)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def guard(folder: Path) -> None:
    """Fork: the child goes on as the keeper; the parent only waits for its end, however it ends, and clears up then.

    Ray's own agents can outlive a killed raylet by a minute (they want to report it first): the kernel's death signals
    alone are not enough. When the guard itself is killed, the keeper ends everything (SIGTERM by the kernel).
    """
    adopt_orphans()
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        die_with_parent(me, signal.SIGTERM)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(-1, 0)[0] != pid:
                continue
        break
    for _ in range(20):
        below = descendants(me)
        if not below:
            break
        kill_verified(below, 5.0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Entry of `python -m`."""
    folder, nodes, tiles, orphan_s = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    start_batch()
    guard(folder)
    adopt_orphans()
    keeper = Keeper(folder, nodes, tiles, orphan_s)
    signal.signal(signal.SIGTERM, lambda *_: keeper._ended.set())
    keeper.run()


if __name__ == "__main__":
    main()
