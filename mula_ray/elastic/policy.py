"""The policy of the run: `decide(state, event, now) -> (state, commands, reason)`, pure, every decision with a reason.

The protocol stands in `events.py`, what an incident means in `judge.py`, the next generation in `plan.py`. Here: which
event moves the policy from which phase to which. `now` is any monotonic clock in seconds, the same for all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import filterfalse
from types import MappingProxyType
from typing import Any

from mula_ray.elastic import events as ev
from mula_ray.elastic.commands import AskStop, Command, Cordon, Fence, RequestSave, Wait
from mula_ray.elastic.judge import describe, judge
from mula_ray.elastic.numeric import resolve, strike
from mula_ray.elastic.placement import Node
from mula_ray.elastic.plan import finish, gather, launch, missing, needed, newest, restorable
from mula_ray.elastic.state import Decision, Failure, Phase, State, Stop, but


def decide(state: State, event: ev.Event, now: float) -> Decision:
    """What to do about `event`. Never raises for what a driver may send; O(1) unless nodes or generations change."""
    if state.phase is Phase.DONE:
        return state, (), f"{type(event).__name__} after the end of the run: ignored"
    return _HANDLERS[type(event)](state, event, now)


# ---- start and membership -----------------------------------------------------------------------------------------


def _driver_started(state: State, event: ev.DriverStarted, now: float) -> Decision:
    until = now + state.config.wait_s
    state = but(
        state,
        generation=max(state.generation, event.generation),
        committed=event.committed,
        mark=event.committed,
        disk=tuple(sorted(event.disk, key=lambda d: -d.step)),
        ever_saved=event.ever_saved or bool(event.disk),
        skips=event.skips,
        cordoned=dict.fromkeys(event.cordoned, "cordoned by an earlier driver"),
        takeover=event.takeover,
        until=until,
        wait_until=until,
    )
    start = f"takes over after step {event.committed}" if event.takeover else "starts"
    return state, (Wait(missing(state), until),), f"the driver {start}; waiting for {missing(state)} nodes"


def _node_joined(state: State, event: ev.NodeJoined, now: float) -> Decision:
    node = event.node
    if node in state.cordoned:
        return state, (), f"node {node} came back, but it is cordoned: {state.cordoned[node]}"
    if event.tiles < state.config.shape.tiles_per_node:
        why = f"it has {event.tiles} tiles, {state.config.shape.tiles_per_node} are needed"
        state = but(state, cordoned={**state.cordoned, node: why})
        return state, (Cordon(node, why),), f"node {node} is not used: {why}"
    if node in state.nodes:  # its agent was started again before the loss of the old one was noticed
        lost, commands, reason = _lost(state, ev.AgentLost(node, "its agent was started again"), now)
        joined, more, also = _node_joined(lost, event, now)
        return joined, commands + more, f"{reason}; {also}"
    nodes = {**state.nodes, node: Node(event.domain or node, state.serial)}
    state = but(state, nodes=nodes, serial=state.serial + 1, lingering=state.lingering - {node})
    if state.phase is Phase.GATHERING:
        return _try_start(state, now, f"node {node} joined")
    state, text = _look_at_growing(state, now)
    return state, (), f"node {node} joined: {text or f'a spare, {len(nodes)} nodes'}"


def _roster_complete(state: State, _event: ev.RosterComplete, now: float) -> Decision:
    if state.phase is not Phase.GATHERING:
        return state, (), f"all nodes reported: {len(state.nodes)}"
    if state.takeover:  # what an earlier driver lost meanwhile is lost now: answer as to any other loss
        state = but(state, patient=False)
    decided, commands, reason = _try_start(state, now, f"all nodes reported: {len(state.nodes)}")
    if decided.phase is Phase.GATHERING and not decided.patient:
        return gather(decided, now, reason)
    return decided, commands, reason


def _try_start(state: State, now: float, why: str) -> Decision:
    """Enough nodes: make sure that nothing lives and see what memory holds, then start."""
    lack = missing(state)
    if state.capacity < needed(state):
        return state, (), f"{why}; {lack} more nodes are needed"
    return _fence(state, (), f"{why}: enough for dp {state.capacity}", now)


def _look_at_growing(state: State, now: float) -> tuple[State, str]:
    """Plan to grow back after things have settled: nodes tend to return together, and a restart has its price."""
    placement = state.placement
    if placement is None or state.phase is not Phase.RUNNING or state.capacity <= placement.dp or state.stop:
        return state, ""
    settle = max(state.config.settle_s, 3 * state.start_s)
    if state.grow_at is None:
        state = but(state, grow_at=now + settle)
    return state, f"room for dp {state.capacity}, now {placement.dp}: growing in {settle:.1f} s at a step boundary"


# ---- failures -----------------------------------------------------------------------------------------------------


def _lost(state: State, event: ev.NodeLost | ev.AgentLost, now: float) -> Decision:
    node = event.node
    if node not in state.nodes:
        return but(state, lingering=state.lingering - {node}), (), f"node {node}: {event.why}; it was not in use"
    failure = describe(state, event)
    nodes = dict(state.nodes)
    del nodes[node]
    seated = state.placed(node)
    state = but(state, nodes=nodes, holed=True)
    if state.alive and seated and failure is not None:
        return _fail(state, failure, now)
    if state.phase is Phase.GATHERING:
        return state, (), f"node {node}: {event.why}; {missing(state)} more nodes are needed"
    return state, (), f"spare node {node}: {event.why}; {len(nodes)} nodes left"


def _failed(state: State, event: Any, now: float) -> Decision:
    """A failure reported by, or about, ranks of a generation."""
    if event.generation != state.generation or not state.alive:
        return _stale(state, event)
    if isinstance(event, ev.WorkerLost) and not _in_use(state, event):
        return state, (), f"node {event.node} tile {event.tile}: {event.why}; no rank was on it"
    if isinstance(event, ev.RestoreFailed):
        if state.phase is Phase.RUNNING:
            return state, (), f"{event.why}: reported by a generation that runs; ignored"
        state = but(state, bad=state.bad | {_ruled_out(state, event)})
    failure = describe(state, event)
    assert failure is not None
    return _fail(state, failure, now)


def _ruled_out(state: State, event: ev.RestoreFailed) -> tuple[str, int, str]:
    """Entry of `bad`: one node's copy at first; with the second bad one the whole snapshot."""
    if event.tier not in (ev.Tier.OWN, ev.Tier.MEMORY):
        return ("disk", event.step, "")
    copy = f"memory {state.source}"
    before = any(tier == copy and step == event.step for tier, step, _ in state.bad)
    return (copy, event.step, "" if before else event.node)


def _in_use(state: State, event: ev.WorkerLost) -> bool:
    """Whether the lost worker's tile had a rank."""
    assert state.placement is not None
    seats = state.placement.seats
    return event.node in state.placement.nodes and event.tile < len(state.placement.ranks(seats.index(event.node)))


def _fail(state: State, failure: Failure, now: float) -> Decision:
    """The first failure ends the generation for everybody; later ones are evidence."""
    if state.phase is Phase.FENCING:
        return but(state, incident=(*state.incident, failure)), (), f"also {failure.text}"
    return _fence(state, (failure,), f"{failure.text}: generation {state.generation} ends for all", now)


def _fence(state: State, incident: tuple[Failure, ...], why: str, now: float) -> Decision:
    until = now + state.config.fence_s
    state = but(state, phase=Phase.FENCING, incident=incident, until=until, grow_at=None, retry_at=None)
    return state, (Fence(state.generation),), why


def _fenced(state: State, event: ev.Fenced, now: float) -> Decision:
    if state.phase is not Phase.FENCING or event.generation != state.generation:
        return _stale(state, event)
    why = "all ranks have ended"
    before = state
    found = newest(state, event.memory)
    if state.incident:
        state, over, why = judge(state, restorable(state, found))
        if over:
            return finish(state, 30, over)
        if state.nodes is not before.nodes or state.distrust != before.distrust:
            found = newest(state, event.memory)
    if state.stop is not None and (now >= state.stop.end or restorable(state, found) <= _saved(state)):
        return finish(state, 10, f"{why}; {state.stop.why}: ended, the last checkpoint is step {_saved(state)}")
    cordons: tuple[Command, ...] = ()
    if state.cordoned is not before.cordoned:
        cordons = tuple(Cordon(n, why) for n, why in state.cordoned.items() if n not in before.cordoned)
    state, commands, reason = launch(state, found, now, why)
    return state, cordons + commands, reason


def _saved(state: State) -> int:
    """Step of the last full checkpoint; 0: none."""
    return max((d.step for d in state.disk if d.full), default=0)


def _stale(state: State, event: Any) -> Decision:
    name = type(event).__name__
    return state, (), f"{name} of generation {event.generation} ignored: generation {state.generation}, {state.phase}"


# ---- progress -----------------------------------------------------------------------------------------------------


def _ready(state: State, event: ev.GenerationReady, now: float) -> Decision:
    if state.phase is not Phase.STARTING or event.generation != state.generation:
        return _stale(state, event)
    state = but(state, phase=Phase.RUNNING, until=None, wait_until=None, start_s=now - state.started_at)
    text = f"generation {state.generation} runs from step {event.step} after {state.start_s:.2f} s"
    if state.stop is not None:
        return _ask_stop(state, "disk", state.stop.why, now, text)
    state, grow = _look_at_growing(state, now)
    return state, (), f"{text}; {grow}" if grow else text


def _step_committed(state: State, event: ev.StepCommitted, _now: float) -> Decision:
    if event.generation != state.generation or not state.alive:
        return _stale(state, event)
    if event.step > state.committed:
        state = but(state, committed=event.step)
    if state.trial is None or event.step < state.trial.step or state.phase is Phase.FENCING:
        return state, (), f"step {event.step} committed"
    state, bad, reason = resolve(state)
    if not bad:
        return state, (), reason
    why = f"{reason}: soft node failure"
    return _cordon(state, bad, why, f"{reason}; {', '.join(bad)} cordoned")


def _cordon(state: State, bad: tuple[str, ...], why: str, reason: str) -> Decision:
    nodes = {n: v for n, v in state.nodes.items() if n not in bad}
    cordoned = {**state.cordoned, **dict.fromkeys(bad, why)}
    state = but(state, nodes=nodes, cordoned=cordoned, lingering=state.lingering.union(bad), holed=True)
    return state, tuple(Cordon(n, why) for n in bad), reason


def _snapshot(state: State, event: ev.SnapshotPublished, _now: float) -> Decision:
    if state.lingering and event.generation == state.generation:
        state = but(state, lingering=frozenset())
    return state, (), f"snapshot of step {event.step} published"


def _checkpoint(state: State, event: ev.CheckpointCommitted, _now: float) -> Decision:
    # A slot holds one checkpoint: the new one replaces what was there.
    # Of the model-only ones the last is enough.
    kept = tuple(d for d in state.disk if d.slot != event.slot and (d.full or event.full))
    disk = tuple(sorted((*kept, ev.DiskCopy(event.step, event.slot, event.full)), key=lambda d: -d.step))
    oldest = disk[-1].step
    bad = frozenset(b for b in state.bad if b[1] >= oldest and b != ("disk", event.step, ""))
    state = but(state, disk=disk, ever_saved=True, bad=bad, save_failures=0, retry_at=None)
    return state, (), f"checkpoint of step {event.step} committed ({event.slot})"


def _ended(state: State, event: ev.GenerationEnded, now: float) -> Decision:
    if event.generation != state.generation or state.phase not in (Phase.RUNNING, Phase.STOPPING):
        return _stale(state, event)
    state = but(state, committed=max(state.committed, event.step))
    if not event.asked:
        if event.saved:
            return finish(state, 0, f"all steps are done: step {event.step}")
        return finish(
            state, 30, f"all steps are done, but the last checkpoint could not be written (step {event.step})"
        )
    if state.stop is None:
        return _fence(state, (), f"generation {state.generation} ended at the boundary after step {event.step}", now)
    if event.saved and event.save == "disk":
        return finish(state, 10, f"{state.stop.why}: saved at step {event.step}, resumable")
    if event.saved:  # it stopped for another reason just before: bring it up again for the save
        return _fence(state, (), f"{state.stop.why}: ended at step {event.step}, but not saved to disk yet", now)
    reason = f"{state.stop.why}: the save at step {event.step} failed; the last checkpoint is step {_saved(state)}"
    return finish(state, 30, reason)


# ---- wishes: stop, slow ranks, storage ----------------------------------------------------------------------------


def _ask_stop(state: State, save: Any, why: str, now: float, reason: str) -> Decision:
    state = but(state, phase=Phase.STOPPING, until=now + state.config.stop_s, grow_at=None, retry_at=None)
    return state, (AskStop(state.generation, save, why),), reason


def _stop(state: State, event: ev.DeadlineNear | ev.StopRequested, now: float) -> Decision:
    if isinstance(event, ev.StopRequested) and event.hard:
        return finish(state, 130, f"{event.why}: ended at once")
    end = event.end if isinstance(event, ev.DeadlineNear) else float("inf")
    if state.stop is not None:
        state = but(state, stop=Stop(state.stop.why, min(end, state.stop.end)))
        return state, (), f"{event.why}: stopping already ({state.stop.why if state.stop else ''})"
    state = but(state, stop=Stop(event.why, end), grow_at=None)
    if state.phase is Phase.GATHERING:
        return finish(state, 10, f"{event.why}: nothing was running; the last checkpoint is step {_saved(state)}")
    if state.phase in (Phase.RUNNING, Phase.STOPPING):
        return _ask_stop(state, "disk", event.why, now, f"{event.why}: one agreed save, then the end")
    return state, (), f"{event.why}: will save and end once the generation runs"


def _straggler(state: State, event: ev.Straggler, now: float) -> Decision:
    if event.generation != state.generation or state.phase is not Phase.RUNNING or state.placement is None:
        return _stale(state, event)
    node = state.placement.locate(event.rank)[0]
    slow = f"rank {event.rank} on {node} is {event.factor:.2f} times slower than its peers"
    strikes = state.strikes.get(node, 0)
    spares = filterfalse(state.placement.nodes.__contains__, state.nodes)
    if all(state.strikes.get(spare, 0) > strikes for spare in spares):
        return state, (), f"{slow}; no spare could take over"
    state = but(strike(state, frozenset({node}), 1), avoid=frozenset({node}))
    return _ask_stop(state, "memory", slow, now, f"{slow}: a spare takes over at a step boundary")


def _storage(state: State, event: ev.StorageFailed, now: float) -> Decision:
    text = f"checkpoint of step {event.step} failed: {event.why}"
    if state.config.storage_error == "stop":
        return finish(state, 30, f"{text}; checkpoint.on_error is stop")
    fails = state.save_failures + 1
    delay = state.config.retry_save_s * 2.0 ** min(fails - 1, 6)
    retry = now + delay if state.phase is Phase.RUNNING else state.retry_at
    state = but(state, save_failures=fails, retry_at=retry)
    return state, (), f"{text}; training goes on, failure {fails}, next try in {delay:.0f} s"


def _fatal(state: State, event: ev.FatalError, _now: float) -> Decision:
    if event.generation not in (-1, state.generation):
        return _stale(state, event)
    return finish(state, event.exit_code, event.message)


# ---- time ---------------------------------------------------------------------------------------------------------


def _tick(state: State, _event: ev.Tick, now: float) -> Decision:
    if state.stop is not None and now >= state.stop.end:
        return finish(state, 10, f"{state.stop.why}: time is up; the last checkpoint is step {_saved(state)}")
    if state.until is not None and now >= state.until:
        return _overdue(state, now)
    placement = state.placement
    if state.phase is not Phase.RUNNING or placement is None:
        return state, (), "nothing is due"
    if state.grow_at is not None and now >= state.grow_at:
        state = but(state, grow_at=None)
        if state.capacity <= placement.dp:
            return state, (), "the nodes to grow with are gone again"
        why = f"growing from dp {placement.dp} to {state.capacity}"
        return _ask_stop(state, "memory", why, now, f"{why} at a step boundary")
    if state.retry_at is not None and now >= state.retry_at:
        state = but(state, retry_at=None)
        return state, (RequestSave(state.generation, "the last save failed"),), "saving again after a failed save"
    return state, (), "nothing is due"


def _overdue(state: State, now: float) -> Decision:
    """A bound passed without its answer."""
    rules = state.config
    if state.phase is Phase.GATHERING:
        if state.patient and rules.policy == "shrink":
            state = but(state, patient=False)
            if state.capacity >= rules.min_dp:
                return _fence(state, (), f"not all nodes came within {rules.wait_s:.0f} s: dp {state.capacity}", now)
        return finish(state, 30, f"too few nodes: {missing(state)} more were needed within {rules.wait_s:.0f} s")
    if state.phase is Phase.FENCING:
        return finish(state, 30, f"the agents did not confirm within {rules.fence_s:.0f} s that all ranks ended")
    if state.phase is Phase.STOPPING and state.stop is not None:
        return finish(state, 10, f"{state.stop.why}: no save in time; the last checkpoint is step {_saved(state)}")
    text = "did not start in time" if state.phase is Phase.STARTING else "did not end at a step boundary in time"
    failure = Failure("overdue", 0, (), (), state.committed + 1, text, f"generation {state.generation} {text}")
    return _fail(state, failure, now)


_HANDLERS: Mapping[type, Callable[[State, Any, float], Decision]] = MappingProxyType(
    {
        ev.DriverStarted: _driver_started,
        ev.NodeJoined: _node_joined,
        ev.RosterComplete: _roster_complete,
        ev.NodeLost: _lost,
        ev.AgentLost: _lost,
        ev.WorkerLost: _failed,
        ev.RankDied: _failed,
        ev.RankHung: _failed,
        ev.NonFinite: _failed,
        ev.StateDamaged: _failed,
        ev.RestoreFailed: _failed,
        ev.Straggler: _straggler,
        ev.StorageFailed: _storage,
        ev.FatalError: _fatal,
        ev.Fenced: _fenced,
        ev.GenerationReady: _ready,
        ev.StepCommitted: _step_committed,
        ev.SnapshotPublished: _snapshot,
        ev.CheckpointCommitted: _checkpoint,
        ev.GenerationEnded: _ended,
        ev.DeadlineNear: _stop,
        ev.StopRequested: _stop,
        ev.Tick: _tick,
    }
)


def notable(event: ev.Event, commands: tuple[Command, ...]) -> bool:
    """Whether a decision belongs into `events.jsonl`: everything but the steady beat of a healthy run."""
    return bool(commands) or not isinstance(event, (ev.StepCommitted, ev.SnapshotPublished, ev.Tick))
