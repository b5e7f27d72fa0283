"""The driver's loop: takes what happens, asks the policy, carries out its commands. Knows nothing of recovery itself.

One thread; everything else (agents' answers, saves, signals, new nodes) comes through one queue. `Link` is all it sees
of an agent, so that it runs the same against fakes. Traffic is O(nodes): one outstanding poll an agent.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mula_ray.elastic import commands as cmd
from mula_ray.elastic import events as ev
from mula_ray.elastic.hang import HangDetector, Heartbeats
from mula_ray.elastic.memory import usable_memory
from mula_ray.elastic.policy import decide, notable
from mula_ray.elastic.state import PolicyConfig, initial
from mula_ray.elastic.straggler import Windows
from mula_ray.runtime.board import STOP_DISK, STOP_MEMORY
from mula_ray.runtime.fencing import Fencing
from mula_ray.runtime.generation import Generation, Trouble
from mula_ray.runtime.inject import Fault
from mula_ray.runtime.links import Link, loss_of
from mula_ray.runtime.messages import FenceAnswer, Report, RunFacts
from mula_ray.runtime.saves import Saved, Saves
from mula_ray.runtime.strikes import strike
from mula_ray.runtime.watcher import Watcher

BEAT_S = 0.2
CHECK_S = 0.1
_UNREACHABLE_S = 0.3


class Conductor:
    """See the module. `run` returns (exit code, reason)."""

    def __init__(
        self,
        run: RunFacts,
        rules: PolicyConfig,
        started: ev.DriverStarted,
        watcher: Watcher,
        saves: Saves | None,
        lost: Callable[[str, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_facts, self.state = run, initial(rules)
        self._started, self._watcher, self.saves, self._lost_node, self._clock = started, watcher, saves, lost, clock
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.links: dict[str, Link] = {}
        self._cursors: dict[str, int] = {}
        self._hang = HangDetector()
        self._hearts = Heartbeats()
        self._windows = Windows()
        self._fence = Fencing(self.post)
        self._doubt: dict[str, float] = {}
        self.generation: Generation | None = None
        self._dismiss: dict[str, int] = {}
        self._fired: set[int] = set()
        self._owes_save = False
        self._result: tuple[int, str] | None = None
        self._checked = 0.0
        self._timers: list[tuple[float, tuple[Any, ...]]] = []
        self.busy_s = 0.0
        self._handlers: dict[str, Callable[..., None]] = {
            "report": self._report,
            "fenced": self._fence_answer,
            "fence-again": lambda node: self._fence.ask(node, self.links),
            "probe": lambda: self._fence.probe(self.links),
            "gone": lambda node: self._agent_lost(node, "its agent is gone: nothing listens any more"),
            "started": self._start_answer,
            "joined": self._joined,
            "roster": lambda: self.feed(ev.RosterComplete()),
            "event": self.feed,
            "saved": self._saved,
            "poll": self._poll,
            "strike": self._strike,
            "played": watcher.fault,
            "trouble": self._flush_trouble,
        }

    # ---- from outside (any thread) ---------------------------------------------------------------------------------

    def post(self, *item: Any) -> None:
        """Put something into the queue: ("joined", link), ("roster",), ("event", event), ("saved", saved)."""
        self._inbox.put(item)

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> tuple[int, str]:
        """Until the policy says that the run is over."""
        self.feed(self._started)
        while self._result is None:
            try:
                item = self._inbox.get(timeout=self._patience())
            except queue.Empty:
                item = ("tick",)
            began = time.perf_counter()
            self._take(item)
            self._check(self._clock())
            self.busy_s += time.perf_counter() - began
        return self._result

    def _patience(self) -> float:
        now = self._clock()
        due = [at for at, _ in self._timers]
        if self.state.wake_at is not None:
            due.append(self.state.wake_at)
        return max(0.0, min([CHECK_S, *(at - now for at in due)]))

    def _check(self, now: float) -> None:
        wake = self.state.wake_at
        if wake is not None and now >= wake:
            self.feed(ev.Tick())
        if now - self._checked < CHECK_S:
            return
        self._checked = now
        for timer in [timer for timer in self._timers if timer[0] <= now]:
            self._timers.remove(timer)
            self._take(timer[1])
        for node in self._hearts.silent(now):
            self._agent_lost(node, f"its agent was silent for more than {self._hearts.deadline:.1f} s")
        hang = self._hang.check(now)
        if hang is not None and self.generation is not None:
            self.feed(ev.RankHung(self.generation.number, hang.step, hang.ranks, hang.detail))

    def _take(self, item: tuple[Any, ...]) -> None:
        handler = self._handlers.get(item[0])
        if handler is not None:
            handler(*item[1:])

    def feed(self, event: ev.Event) -> None:
        """Ask the policy, carry out what it says."""
        self.state, commands, reason = decide(self.state, event, self._clock())
        if notable(event, commands):
            self._watcher.decided(self.state, event, commands, reason)
        for command in commands:
            self._carry_out(command)

    # ---- commands --------------------------------------------------------------------------------------------------

    def _carry_out(self, command: cmd.Command) -> None:
        if isinstance(command, cmd.Fence):
            self._begin_fence(command.generation)
        elif isinstance(command, cmd.StartGeneration):
            self._start(command)
        elif isinstance(command, cmd.AskStop):
            mode = STOP_DISK if command.save == "disk" else STOP_MEMORY
            if self.generation is not None and self.generation.number == command.generation:
                self.generation.stop_save = command.save
                self._tell_seats("ask_stop", command.generation, mode)
        elif isinstance(command, cmd.RequestSave):
            if self.generation is not None and self.generation.number == command.generation:
                self._tell_seats("ask_save", command.generation, self.generation.save_step())
        elif isinstance(command, cmd.Cordon):
            self._dismiss[command.node] = self.state.generation
        elif isinstance(command, cmd.Finish):
            self._hang.end()
            self._result = (command.exit_code, command.reason)

    def _tell_seats(self, method: str, *args: Any) -> None:
        assert self.generation is not None
        for link in self.generation.seats.values():
            link.call(method, *args)

    def _begin_fence(self, generation: int) -> None:
        self._hang.end()
        if self.saves is not None:
            self.saves.fence()
        self._fence.begin(generation, self.links)
        self._timers.append((self._clock() + 0.15, ("probe",)))
        self._fence_done()

    def _fence_answer(
        self, node: str, generation: int, answer: FenceAnswer | None, error: BaseException | None
    ) -> None:
        if not self._fence.expects(node, generation):
            return
        if error is not None:
            self._doubted(node, error, ("fence-again", node))
        elif answer is not None and answer.survivors:
            self._agent_lost(node, f"its ranks {answer.survivors} could not be ended")
        elif answer is not None:
            self._fence.answers[node] = answer
            self._doubt.pop(node, None)
            self._hearts.beat(node, self._clock())
            self._fence_done()

    def _doubted(self, node: str, error: BaseException, again: tuple[Any, ...]) -> None:
        """A call failed: dead is a fact; unreachable becomes one when it lasts while everybody waits for it."""
        loss = loss_of(error)
        now = self._clock()
        since = self._doubt.setdefault(node, now)
        text = str(error).strip().splitlines()[0][:200] if str(error) else ""
        if loss == "dead" or (loss == "unreachable" and self._fence.under_way and now - since > _UNREACHABLE_S):
            self._agent_lost(node, f"its agent is {'gone' if loss == 'dead' else 'unreachable'}")
        elif loss == "error":
            self._agent_lost(node, f"its agent failed: {type(error).__name__}: {text}")
        elif again[0] == "poll":
            self._timers.append((now + 0.05, again))
        else:
            self._timers.append((now + 0.05, ("fence-again", node)))

    def _fence_done(self) -> None:
        generation = self._fence.finished()
        if generation is not None:
            self._doubt.clear()
            self.feed(ev.Fenced(generation, usable_memory(self.state.config.shape, self._fence.holdings())))

    def _start(self, command: cmd.StartGeneration) -> None:
        self._watcher.generation_begins(command.generation)
        stores = {node: answer.store for node, answer in self._fence.answers.items()}
        faults = tuple(f for f in self.run_facts.faults if f.serial not in self._fired)
        generation = Generation(
            replace(self.run_facts, faults=faults), command, self.links, stores, self._clock(), self.state.config.shape
        )
        self.generation = generation
        self._hang.begin(generation.number, self._clock())
        self._windows.begin(generation.number, self._clock())
        for seat, link in generation.seats.items():
            link.call(
                "start",
                generation.spec(seat),
                then=partial(self.post, "started", link.node, generation.number),
            )

    def _start_answer(self, node: str, number: int, _answer: float | None, error: BaseException | None) -> None:
        generation = self.generation
        if generation is None or number != generation.number:
            return
        if error is not None:
            self._doubted(node, error, ("poll", node))
            return
        generation.unstarted.discard(node)
        if not generation.unstarted:
            self._hang.begin(number, self._clock())

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def _joined(self, link: Link) -> None:
        node = link.node
        self.links[node] = link
        self._cursors[node] = 0
        self._hearts.watch(node, self._clock())
        link.call("fence", self.state.generation if not self.state.alive else self.state.generation - 1)
        self._poll(node)
        self.feed(ev.NodeJoined(node, link.tiles, link.domain))
        self._fence.include(node, self.links)

    def _agent_lost(self, node: str, why: str) -> None:
        link = self.links.pop(node, None)
        if link is None:
            return
        self._hearts.forget(node)
        self._doubt.pop(node, None)
        link.kill()
        self._lost_node(node, 1.0 if node not in self._dismiss else 1e9)
        self.feed(ev.AgentLost(node, why))
        self._fence.drop(node)
        self._fence_done()

    def _poll(self, node: str) -> None:
        link = self.links.get(node)
        if link is not None:
            wait = max(BEAT_S, 0.0004 * len(self.links))
            link.call("poll", self._cursors[node], wait, then=partial(self.post, "report", link))

    def _report(self, link: Link, report: Report | None, error: BaseException | None) -> None:
        node = link.node
        if self.links.get(node) is not link:
            return
        if error is not None:
            self._doubted(node, error, ("poll", node))
            return
        assert report is not None
        now = self._clock()
        self._hearts.beat(node, now)
        if not self._fence.under_way:
            self._doubt.pop(node, None)
        self._cursors[node] = report.cursor
        self._poll(node)
        for news in report.news:
            self._news(node, news.kind, news.generation, dict(news.body))
        generation = self.generation
        if report.pulse is not None:
            # Until every seat has started its ranks, those that wait for the others are no hang.
            if generation is not None and not generation.unstarted:
                self._hang.pulse(report.pulse, now)
            if generation is not None and report.pulse.generation == generation.number and not self._fence.under_way:
                self._progress(generation, node, report)

    def _progress(self, generation: Generation, node: str, report: Report) -> None:
        assert report.pulse is not None
        step, snapshot = generation.pulse(node, report.pulse)
        if step is not None:
            self.feed(ev.StepCommitted(generation.number, step))
        if snapshot is not None:
            self.feed(ev.SnapshotPublished(generation.number, snapshot))
            self._dismiss_cordoned(generation)
        slow = self._windows.pulse(report.pulse, self._clock())
        if slow is not None:
            self.feed(ev.Straggler(generation.number, slow.rank, slow.factor))

    def _dismiss_cordoned(self, generation: Generation) -> None:
        for node, since in list(self._dismiss.items()):
            if since <= generation.number and node not in {link.node for link in generation.seats.values()}:
                self._dismiss[node] = 1 << 60
                if node in self.links:
                    self._agent_lost(node, "cordoned; its snapshots are not needed any more")

    # ---- what ranks and agents report ------------------------------------------------------------------------------

    def _news(self, node: str, kind: str, number: int, body: dict[str, Any]) -> None:
        self._watcher.news(kind, number, {**body, "node": node})
        generation = self.generation
        if kind == "fault":
            self._strike(body["fault"])
        if generation is None or number != generation.number:
            return
        if kind == "peak":
            self.run_facts = replace(self.run_facts, peak_tflops=body["tflops"])
        elif kind == "save-ready" and self.saves is not None:
            self.saves.seat_ready(body["step"], body["what"], number, body["seat"], generation.seats)
        elif kind == "worker-lost":
            self.feed(ev.WorkerLost(node, body["tile"], number))
        elif kind == "restore-failed":
            source = next((n for n, link in self.links.items() if body.get("peer") and link.peer == body["peer"]), node)
            restore = generation.restore
            holder = source if restore.tier in (ev.Tier.OWN, ev.Tier.MEMORY) else ""
            self.feed(ev.RestoreFailed(number, restore.step, restore.tier, body["why"], holder))
        elif kind == "fatal":
            self.feed(ev.FatalError(body["code"], body["message"], number))
        else:
            self._rank_news(generation, kind, body)

    def _rank_news(self, generation: Generation, kind: str, body: dict[str, Any]) -> None:
        if kind == "ready" and generation.rank_ready(body["rank"], body["phases"]):
            self.feed(ev.GenerationReady(generation.number, generation.restore.step))
            if self._owes_save:
                self._owes_save = False
                self._tell_seats("ask_save", generation.number, generation.save_step())
        elif kind == "ended" and generation.rank_ended(body["rank"], body["step"], body["asked"]):
            self._maybe_ended()
        elif kind in ("error", "exit"):
            event = generation.died(kind, body)
            if event is not None:
                self.feed(event)
        elif kind == "failed-step":
            # All ranks report the same step; wait a moment for the one that says it is its own state.
            if generation.trouble is None:
                generation.trouble = Trouble(body["what"], body["step"], body["detail"])
                self._timers.append((self._clock() + 0.02, ("trouble", generation.number)))
            generation.trouble.add(body["rank"], body["detail"])

    def _flush_trouble(self, number: int) -> None:
        generation = self.generation
        if generation is None or generation.number != number or generation.trouble is None:
            return
        self.feed(generation.trouble.event(number))

    def _maybe_ended(self) -> None:
        """All ranks left cleanly; the generation has ended once its saves are on disk."""
        generation = self.generation
        if generation is None or generation.ended is None:
            return
        self._hang.end()
        if self.saves is not None and self.saves.busy:
            return
        step, asked = generation.ended
        save: Any = generation.stop_save if asked else "disk"
        saved = save == "memory" or generation.saved_step == step
        self.feed(ev.GenerationEnded(generation.number, step, asked, saved, save))

    def _saved(self, saved: Saved) -> None:
        self._watcher.saved(saved)
        if saved.slot:
            if self.generation is not None and saved.kind == "full":
                self.generation.saved_step = max(self.generation.saved_step, saved.step)
            self.feed(ev.CheckpointCommitted(saved.generation, saved.step, saved.slot, saved.kind == "full"))
        elif not saved.abandoned:
            self.feed(ev.StorageFailed(saved.step, saved.why, saved.no_space))
        elif "already" in saved.why and self.generation is not None and saved.kind == "full":
            self.generation.saved_step = max(self.generation.saved_step, saved.step)
        else:
            self._owes_save = self._owes_save or saved.kind == "full"
        self._maybe_ended()

    # ---- rehearsals ------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        """Play what a rank cannot play on itself."""
        self._fired.add(fault.serial)
        if fault.kind == "disk-full" and self.saves is not None:
            self.saves.fault = "disk-full"
        strike(self.generation, fault, lambda: self.post("played", fault))
