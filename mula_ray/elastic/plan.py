"""From usable nodes and copies to the next generation: how many replicas, who sits where, what is restored. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import compress, filterfalse
from operator import is_not

from mula_ray.elastic.commands import Finish, Restore, StartGeneration, Wait
from mula_ray.elastic.events import MemoryCopy, Tier
from mula_ray.elastic.placement import Placement, exchange, place
from mula_ray.elastic.state import Decision, Phase, State, Trial, but


def needed(state: State) -> int:
    """Fewest replicas that the next generation may have."""
    rules = state.config
    return rules.min_dp if rules.policy == "shrink" and not state.patient else rules.dp


def missing(state: State) -> int:
    """Whole nodes that are missing for the fewest allowed replicas."""
    return max(0, state.config.shape.seats(needed(state)) - len(state.nodes))


def gather(state: State, now: float, why: str) -> Decision:
    """Nothing can run: wait for nodes, within the bound."""
    rules = state.config
    lack = missing(state)
    if rules.policy == "stop" and not state.patient:
        reason = f"{why}; {lack} more nodes are needed and elastic.policy is stop"
        return finish(state, 30, reason)
    until = now + rules.wait_s if state.wait_until is None else state.wait_until
    state = but(state, phase=Phase.GATHERING, until=until, wait_until=until, incident=())
    return state, (Wait(lack, until),), f"{why}; waiting up to {max(0.0, until - now):.0f} s for {lack} more nodes"


def finish(state: State, code: int, reason: str) -> Decision:
    """The end of the run."""
    state = but(state, phase=Phase.DONE, until=None, wait_until=None, grow_at=None, retry_at=None)
    return state, (Finish(code, reason),), reason


def launch(state: State, found: Usable | None, now: float, why: str) -> Decision:
    """Start the next generation, all ranks being gone, with as many replicas as the nodes have room for."""
    dp = state.capacity
    if dp < needed(state):
        return gather(state, now, why)
    previous = state.placement
    placement, state = _seat(state, dp)
    new: frozenset[str] = frozenset()
    if previous is not None and placement is not previous:
        new = _newcomers(previous, placement)
    restore = choose(state, found, placement)
    if restore is None:
        return finish(state, 40, f"{why}; no valid checkpoint is left to restore from")
    generation = state.generation + 1
    idle = tuple(n for n in state.nodes if n not in placement.seats) if len(placement.seats) == 1 else ()
    start = StartGeneration(
        generation=generation,
        placement=placement,
        restore=restore,
        nodes=state.nodes,
        idle=idle,
        skips=tuple(s for s in state.skips if s > restore.step),
        rebuild=restore.tier is not Tier.OWN and restore.tier is not Tier.FRESH,
    )
    state = but(
        state,
        phase=Phase.STARTING,
        generation=generation,
        placement=placement,
        fresh=state.fresh | new,
        base=restore.step,
        source=restore.generation,
        incident=(),
        avoid=frozenset(),
        holed=False,
        patient=False,
        until=now + state.config.start_s,
        started_at=now,
        grow_at=None,
    )
    return state, (start,), f"{why}; {_words(state, previous, placement, new, restore)}"


def _seat(state: State, dp: int) -> tuple[Placement, State]:
    """Seats for `dp` replicas: survivors stay, avoided nodes leave if others are free; a trial's suspects move."""
    shape = state.config.shape
    wanted = shape.seats(dp)
    nodes = state.nodes
    last = state.placement
    previous = last.seats if last is not None else ()
    avoid = state.avoid & nodes.keys()
    excess = len(nodes) - wanted
    if len(avoid) > excess:
        avoid = frozenset(sorted(avoid, key=lambda n: (-state.strikes.get(n, 0), n))[:excess])
    if last is not None and last.dp == dp and not avoid and not state.trial and not state.holed:
        return last, state
    taken = last.nodes if last is not None else frozenset()
    free = list(filterfalse(taken.__contains__, nodes))
    if avoid:
        free = [n for n in free if n not in avoid]
    if state.trial is not None and avoid and state.strikes:
        # Another suspect proves nothing: better change places with a node that works.
        free = [n for n in free if not state.strikes.get(n)]
        holes = wanted - sum(n in nodes and n not in avoid for n in previous[:wanted])
        if len(free) < holes:
            avoid, free = frozenset(), [n for n in nodes if n not in taken]
    if state.strikes:
        free.sort(key=lambda n: state.strikes.get(n, 0))
    keep = nodes.keys() - avoid if avoid else nodes
    placement = place(shape, dp, previous, keep, free)
    trial = state.trial
    if trial is None or state.placement is None:
        return placement, state
    if not _moved(trial, state.placement, placement):
        placement = exchange(placement, trial.suspects, trial.ranks, state.strikes)
    return placement, but(state, trial=replace(trial, moved=_moved(trial, state.placement, placement)))


def _moved(trial: Trial, old: Placement, new: Placement) -> bool:
    """Whether others now do what the suspects did (no suspects: whether everything moved once)."""
    if not trial.suspects:
        return trial.moved or all(a != b for a, b in zip(old.seats, new.seats, strict=False))
    where = {new.locate(rank)[0] for rank in trial.ranks if rank < new.world} or set(new.seats)
    return not where & trial.suspects


@dataclass(frozen=True)
class Usable:
    """A complete snapshot in memory, and from whom every seat of it is read."""

    copy: MemoryCopy
    holders: tuple[str, ...]


def newest(state: State, memory: Iterable[MemoryCopy]) -> Usable | None:
    """The newest snapshot of which every part is there, neither damaged nor distrusted."""
    for copy in memory:
        holders = _holders(state, copy)
        if holders is not None:
            return Usable(copy, holders)
    return None


def choose(state: State, found: Usable | None, placement: Placement) -> Restore | None:
    """The newest usable copy for everybody, the faster tier if equal.

    Nothing was ever saved: fresh. None: something was saved, but nothing is left."""
    best: Restore | None = None
    if found is not None:
        copy = found.copy
        own = copy.dp == placement.dp and found.holders == placement.seats
        tier = Tier.OWN if own else Tier.MEMORY
        best = Restore(tier, copy.step, generation=copy.generation, dp=copy.dp, holders=found.holders)
    for saved in state.disk:
        usable = (saved.full or state.config.model_only) and ("disk", saved.step, "") not in state.bad
        if usable and (best is None or saved.step > best.step):
            best = Restore(Tier.DISK if saved.full else Tier.MODEL, saved.step, slot=saved.slot)
    if best is None and not state.ever_saved and not state.config.must_resume:
        return Restore(Tier.FRESH, 0)
    return best


def restorable(state: State, found: Usable | None) -> int:
    """Newest step that can be restored; -1: none."""
    steps = [d.step for d in state.disk if d.full and ("disk", d.step, "") not in state.bad]
    return max(steps, default=-1) if found is None else max(found.copy.step, *steps, -1)


def _holders(state: State, copy: MemoryCopy) -> tuple[str, ...] | None:
    """Who is read for every seat of the snapshot; None when a part is lost, damaged or distrusted."""
    name = f"memory {copy.generation}"
    if copy.generation <= state.distrust or (name, copy.step, "") in state.bad:
        return None
    nodes = state.nodes
    if not state.holed and not state.bad and state.placement is not None and copy.holders is state.placement.seats:
        return copy.holders
    broken = {node for tier, step, node in state.bad if tier == name and step == copy.step}
    lost = list(filterfalse(nodes.__contains__, copy.holders))
    if broken:
        lost += [n for n in copy.holders if n in broken and n in nodes]
    gone = sorted(map(copy.holders.index, lost))
    if not gone:
        return copy.holders
    holders = list(copy.holders)
    for seat in gone:
        tries = (holders[seat], copy.spare_holders[seat] if copy.spare_holders else "")
        good = [n for n in tries if (n in nodes or n in state.lingering) and n not in broken]
        if not good:
            return None
        holders[seat] = good[0]
    return tuple(holders)


def _newcomers(old: Placement, new: Placement) -> frozenset[str]:
    """Nodes of `new` that had no seat in `old`; cheap when most seats did not change."""
    changed = compress(new.seats, map(is_not, old.seats, new.seats))
    return frozenset((*changed, *new.seats[len(old.seats) :])) - old.nodes


def _words(
    state: State, previous: Placement | None, placement: Placement, new: frozenset[str], restore: Restore
) -> str:
    """The plan in words."""
    parts = [f"generation {state.generation}"]
    if placement is previous:
        parts.append("same places")
    elif previous is None:
        parts.append(f"dp {placement.dp} on {len(placement.seats)} nodes")
    else:
        if placement.dp != previous.dp:
            parts.append(f"dp {previous.dp} -> {placement.dp}")
        if new:
            parts.append(f"{', '.join(sorted(new)[:4])}{' and more' if len(new) > 4 else ''} take over")
        elif placement.seats[: len(previous.seats)] == previous.seats[: len(placement.seats)]:
            parts.append("same places")
        else:
            parts.append("nodes change places")
    source = f" {restore.slot}" if restore.slot else ""
    parts.append(f"from {restore.tier}{source} at step {restore.step}")
    return ", ".join(parts)
