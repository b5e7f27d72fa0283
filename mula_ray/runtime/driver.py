"""`mula-ray train` on Ray: brings everything together, and takes everything down again.

    code = train(request)        # exit code by the outer contract; raises MulaError for a user's mistake

Order: run folder and data are checked before anything is started; the local cluster comes up while the data are looked
at. At the end, whatever happened: agents ended, cluster ended, `exit.json` written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mula_ray.config.environment import ALLOCATOR, rank_block
from mula_ray.config.errors import MulaError, StoppedEarly
from mula_ray.config.request import TrainRequest
from mula_ray.config.site import load_site
from mula_ray.data.source import RunData, open_run_data
from mula_ray.elastic import events as ev
from mula_ray.elastic.state import State, policy_config
from mula_ray.plan.layout import param_specs
from mula_ray.plan.legal import legal_topology
from mula_ray.runtime import inject, seam
from mula_ray.runtime.conductor import Conductor
from mula_ray.runtime.folder import RunFolder, facts_of, open_folder, versions, write_exit
from mula_ray.runtime.local import LocalCluster
from mula_ray.runtime.messages import RunFacts
from mula_ray.runtime.osproc import stand_back
from mula_ray.runtime.outputs import Outputs, quiet_screen
from mula_ray.runtime.prometheus import RayMetrics
from mula_ray.runtime.saves import Saves
from mula_ray.runtime.signals import stop_signals
from mula_ray.runtime.view import View

DEADLINE_SPAN_S = 60.0
HEAD_CHECKS = 3


def train(request: TrainRequest) -> int:
    """Run the request to its end.

    Raises:
        MulaError: what is wrong with the request or the machine, before training began.
    """
    config = request.loaded.config
    faults, storms = inject.parse(request.inject)
    legal_topology(config)
    local = request.address is None and config.cluster.kind == "local"
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        earlier = _earlier(request)
        cluster = None
        if local:
            cluster = earlier or LocalCluster.start(
                config.cluster.nodes + config.cluster.spares, config.cluster.tiles_per_node, config.elastic.orphan_s
            )
            stack.callback(cluster.end)
            stand_back(os.getpid())
        print(f"run folder: {request.run_dir}", flush=True)
        data = open_run_data(config)
        folder = open_folder(request, data)
        stack.callback(folder.close)
        if cluster is not None:
            folder.remember(cluster=str(cluster.folder))
            if earlier is None:  # nodes of a new cluster bear the old names, but are others
                folder.remember(cordoned=[])
        screen = stack.enter_context(quiet_screen(request.run_dir / "logs" / "driver.log"))
        code, reason, step, head_lost = 1, "internal error", 0, False
        try:
            run = _facts(request, data, folder, faults)
            job = _Job(request, run, folder, screen, cluster, began)
            code, reason, step = job.run(storms)
            head_lost = job.head_lost
        except MulaError as error:
            code, reason = type(error).exit_code, str(error)
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            write_exit(request.run_dir, code, reason, step)
    if code not in (0, 10):
        print(f"mula-ray: {reason}", file=sys.stderr, flush=True)
    if head_lost:  # Ray's library would wait for its head, then abort the process
        sys.stdout.flush()
        os._exit(code)
    return code


def _earlier(request: TrainRequest) -> LocalCluster | None:
    """The local cluster of a driver that died, if its keeper lives."""
    import json

    with contextlib.suppress(OSError, ValueError, KeyError):
        state = json.loads((request.run_dir / "state.json").read_text())
        return LocalCluster.find(Path(state["cluster"]))
    return None


def _facts(request: TrainRequest, data: RunData, folder: RunFolder, faults: tuple[inject.Fault, ...]) -> RunFacts:
    if "secret" not in folder.state:
        folder.remember(secret=secrets.token_hex(32), run_id=folder.run_id)
    return RunFacts(
        folder.run_id,
        str(request.run_dir.resolve()),
        request.loaded.config,
        data,
        faults=faults,
        profile=request.profile,
    )


class _Job:
    """One driver's life."""

    def __init__(
        self,
        request: TrainRequest,
        run: RunFacts,
        folder: RunFolder,
        screen: Any,
        cluster: LocalCluster | None,
        began: float,
    ) -> None:
        self._request, self._run, self._folder, self._cluster, self._began = request, run, folder, cluster, began
        self._config = request.loaded.config
        done = folder.found.manifest.facts.step if folder.found else 0
        self._out = Outputs(request.run_dir, folder.run_id, self._config, screen, done)
        self._resumed = done if folder.found else None
        self._view = View(self._out, folder, self._run_start)
        self._conductor: Conductor
        self._signals = 0
        self.head_lost = False
        self._over = threading.Event()
        self._prior = folder.last_generation

    def run(self, storms: tuple[inject.Storm, ...]) -> tuple[int, str, int]:
        """(exit code, reason, last step)."""
        from mula_ray.runtime.roster import Roster

        config = self._config
        if self._resumed is None and self._folder.last_generation < 0:
            self._out.say("nothing was committed in this folder yet: starting fresh")
        elif self._resumed is not None:
            self._out.say(f"resuming from checkpoint of step {self._resumed}")
            assert self._folder.found is not None
            self._out.passed_over(self._folder.last_generation, self._folder.found.rejected)
        self._out.progress.state("starting the cluster")
        self._connect()
        if self._cluster is None:  # in a cluster of our own nobody scrapes, and Ray's collection is off
            self._out.scrape(RayMetrics(self._folder.run_id))
        shapes = {spec.name: spec.shape for spec in param_specs(config.model)}
        saves = Saves(self._folder.manager, shapes, self._checkpoint_facts, config.checkpoint.keep, self._saved)
        rules = policy_config(config, must_resume=self._request.resume == "must")
        roster: Roster | None = None
        self._conductor = Conductor(
            self._run,
            rules,
            self._started(),
            self._view,
            saves,
            lambda node, bar: roster.lost(node, bar) if roster else None,
        )
        self._view.on_recovery = self._recovery_faults
        roster = Roster(
            self._run,
            bytes.fromhex(self._folder.state["secret"]),
            config.cluster.nodes + config.cluster.spares,
            self._environment(),
            lambda link: self._conductor.post("joined", link),
            lambda: self._conductor.post("roster"),
            frozenset(self._folder.state.get("cordoned", ())),
        )
        with self._signal_handlers():
            roster.start()
            self._deadline()
            self._storms(storms)
            threading.Thread(target=self._watch_head, name="head", daemon=True).start()
            try:
                code, reason = self._conductor.run()
            finally:
                self._over.set()
                roster.close()
                if not self.head_lost:
                    self._end_agents(roster)
                saves.close()
        step = max(self._view.step, self._conductor.state.committed)
        self._out.events.run_end(self._conductor.state.generation, code=code, reason=reason, step=step)
        self._out.say(reason)
        self._out.close()
        return code, reason, step

    def _connect(self) -> None:
        if self._cluster is not None:
            seam.prepare_environment(self._cluster.token_file)
            seam.import_ray()
            seam.connect(self._cluster.wait_address())
        else:
            seam.prepare_environment(None, keep_auth=True)
            seam.connect(self._request.address or "auto")

    def _started(self) -> ev.DriverStarted:
        folder = self._folder
        return ev.DriverStarted(
            generation=folder.last_generation,
            takeover=folder.last_generation >= 0,
            committed=folder.committed,
            disk=folder.disk,
            ever_saved=folder.ever_saved,
            skips=folder.skips,
            cordoned=tuple(folder.state.get("cordoned", ())),
        )

    def _environment(self) -> dict[str, str]:
        """What a rank process gets beyond what Ray's worker has."""
        threads = {"OMP_NUM_THREADS": str(self._config.cluster.threads_per_rank), "TOKENIZERS_PARALLELISM": "false"}
        threads |= ALLOCATOR
        kind = self._config.cluster.kind
        if kind in ("local", "ray"):
            return threads
        site, nodes = load_site(kind), self._config.cluster.nodes
        tiles, extra = self._config.cluster.tiles_per_node, self._config.cluster.hang_workarounds
        return {**threads, **rank_block(site, nodes, local_rank=0, local_size=tiles, workarounds=extra).set}

    def _checkpoint_facts(self, step: int, generation: int) -> Any:
        placement = self._conductor.state.placement
        assert placement is not None
        return facts_of(self._config, self._run.data, self._run.run_id, step, generation, placement.topology)

    def _saved(self, saved: Any) -> None:
        self._conductor.post("saved", saved)

    def _run_start(self, state: State) -> None:
        placement = state.placement
        self._out.events.run_start(
            run_id=self._run.run_id,
            steps=self._config.train.steps,
            world=placement.world if placement is not None else 0,
            resumed_step=self._resumed,
            host=socket.gethostname(),
            pid=os.getpid(),
            versions=versions(),
            threads=self._config.cluster.threads_per_rank,
            nodes=sorted(state.nodes),
            startup_s=round(time.monotonic() - self._began, 3),
        )

    # ---- signals, deadline, rehearsals -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """First SIGINT or SIGTERM: one agreed save, exit 10. Second SIGINT: now, exit 130."""

        def handle(number: int, _frame: Any) -> None:
            self._signals += 1
            name = signal.Signals(number).name
            hard = number == signal.SIGINT and self._signals > 1
            self._conductor.post("event", ev.StopRequested(name, hard))

        with stop_signals(handle):
            yield

    def _watch_head(self) -> None:
        """The head's control service must answer; without it nothing can be decided any more."""
        import ray

        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        silent = 0
        while not self._over.wait(1.0):
            try:
                socket.create_connection((host, int(port)), timeout=2.0).close()
                silent = 0
            except OSError:
                silent += 1
            if silent >= HEAD_CHECKS:
                self.head_lost = True
                why = f"the head of the Ray cluster ({host}:{port}) is gone; start Ray again and resume"
                self._conductor.post("event", ev.FatalError(30, why))
                return

    def _deadline(self) -> None:
        if self._request.deadline is None:
            return
        left = self._request.deadline - time.time()
        if left <= 0:
            raise StoppedEarly("the deadline has passed before training began; nothing was done")
        lead = min(DEADLINE_SPAN_S, left / 2)
        end = time.monotonic() + left
        timer = threading.Timer(left - lead, lambda: self._conductor.post("event", ev.DeadlineNear(end)))
        timer.daemon = True
        timer.start()

    def _recovery_faults(self, count: int) -> None:
        for fault in self._run.faults:
            if fault.at == "recovery" and fault.number == count:
                timer = threading.Timer(0.03, self._conductor.post, ("strike", replace(fault, at="now")))
                timer.daemon = True
                timer.start()

    def _storms(self, storms: tuple[inject.Storm, ...]) -> None:
        world = legal_topology(self._config).world

        def blow(storm: inject.Storm) -> None:
            for gap, fault in storm.faults(world, self._config.cluster.nodes):
                time.sleep(gap)
                self._conductor.post("strike", fault)

        for storm in storms:
            threading.Thread(target=blow, args=(storm,), daemon=True).start()

    def _end_agents(self, roster: Any) -> None:
        """Ask every agent to end its ranks, then end it."""
        done = threading.Event()
        links = list(self._conductor.links.values())
        waiting = {link.node for link in links}

        def ended(node: str, _answer: Any, _error: BaseException | None) -> None:
            waiting.discard(node)
            if not waiting:
                done.set()

        for link in links:
            link.call("end", then=partial(ended, link.node))
        if links:
            done.wait(5.0)
        roster.release_all()
        with contextlib.suppress(Exception):
            import ray

            ray.shutdown()
