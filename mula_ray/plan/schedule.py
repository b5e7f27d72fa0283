"""Pipeline schedules as tables: for every pipeline rank, the order of its forward and backward chunks. Pure.

One table drives execution (parallel/pipeline.py), the count of collectives and the bubble in `plan`, so these cannot
disagree. Actions on stage s and micro-batch m:

- F: forward; B: whole backward;
- I: backward of the inputs only; W: the weight gradients put off by an I (zero-bubble schedules).

Sources: 1F1B (Narayanan et al. 2019), interleaved (Narayanan et al. 2021), zero bubble H1 and V (Qi et al. 2023). Zero
bubble with several stages a rank comes from a list scheduler on unit costs, within the memory of those schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mula_ray.config.errors import UserError
from mula_ray.plan.stages import rank_stages, stage_owner

ActionKind = Literal["F", "B", "I", "W"]
UNIT_COST: Mapping[ActionKind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Action(NamedTuple):
    """One chunk of work of a pipeline rank."""

    kind: ActionKind
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order. `orders[rank]` is run as it stands."""

    pp: int
    virtual: int
    micro_batches: int
    name: str
    orders: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.virtual

    def owner(self, stage: int) -> int:
        """Pipeline rank that holds `stage`."""
        return stage_owner(stage, self.pp, self.name)


class Message(NamedTuple):
    """A transfer between two pipeline ranks: an activation (F) towards `stage`, or a gradient (B) towards `stage`."""

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int


def build_schedule(name: str, pp: int, virtual: int, micro_batches: int) -> Schedule:
    """The table of schedule `name` (`1f1b`, `interleaved`, `zero_bubble`, `zbv`) for one step.

    Raises:
        UserError: too few micro-batches, or a number that the schedule cannot take.
    """
    check_schedule(name, pp, virtual, micro_batches)
    if name == "1f1b":
        orders = tuple(_one_f_one_b(rank, pp, micro_batches) for rank in range(pp))
    elif name == "interleaved":
        orders = tuple(_interleaved(rank, pp, virtual, micro_batches) for rank in range(pp))
    elif virtual == 1:
        orders = tuple(_zero_bubble_h1(rank, pp, micro_batches) for rank in range(pp))
    else:
        orders = _list_schedule(name, pp, virtual, micro_batches)
    return Schedule(pp, virtual, micro_batches, name, orders)


def splits_backward(name: str) -> bool:
    """Whether schedule `name` puts weight gradients off (zero bubble)."""
    return name in ("zero_bubble", "zbv")


def forward_only(name: str, pp: int, virtual: int, micro_batches: int) -> Schedule:
    """The table of an evaluation: every rank runs all micro-batches through its first stage, then its next one."""
    orders = tuple(
        tuple(Action("F", stage, m) for stage in rank_stages(pp, virtual, name, rank) for m in range(micro_batches))
        for rank in range(pp)
    )
    return Schedule(pp, virtual, micro_batches, name, orders)


def full_groups(name: str, pp: int, micro_batches: int) -> int:
    """The smallest number of micro-batches, at least `micro_batches`, that schedule `name` can take."""
    return -(-micro_batches // pp) * pp if name == "interleaved" else micro_batches


def check_schedule(name: str, pp: int, virtual: int, micro_batches: int) -> None:
    """Refuse what `build_schedule` cannot build.

    Raises:
        UserError: names the nearest legal choice.
    """
    if name == "interleaved" and micro_batches % pp:
        below, above = micro_batches // pp * pp, full_groups(name, pp, micro_batches)
        legal = ", ".join(str(n) for n in (below, above) if n)
        raise UserError(
            f"schedule interleaved takes micro-batches in groups of parallel.pp {pp}, but a step has {micro_batches}; "
            f"nearest legal: {legal}; change train.global_batch or train.micro_batch, or use schedule: 1f1b"
        )
    if name == "zbv" and virtual != 2:
        raise UserError(f"schedule zbv holds two stages a rank, but parallel.virtual_stages is {virtual}; set it to 2")
    if name == "1f1b" and virtual != 1:
        raise UserError(f"schedule 1f1b has one stage a rank, but virtual_stages is {virtual}; use interleaved")


def _one_f_one_b(rank: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    warm = min(micro_batches, pp - 1 - rank)
    order = [Action("F", rank, m) for m in range(warm)]
    for m in range(micro_batches - warm):
        order += [Action("F", rank, warm + m), Action("B", rank, m)]
    order += [Action("B", rank, m) for m in range(micro_batches - warm, micro_batches)]
    return tuple(order)


def _interleaved(rank: int, pp: int, virtual: int, micro_batches: int) -> tuple[Action, ...]:
    total = micro_batches * virtual
    warm = min(total, 2 * (pp - 1 - rank) + (virtual - 1) * pp)

    def chunk(k: int, *, backward: bool) -> Action:
        group, inside = divmod(k, pp * virtual)
        level = inside // pp
        stage = rank + pp * (virtual - 1 - level if backward else level)
        return Action("B" if backward else "F", stage, group * pp + inside % pp)

    order = [chunk(k, backward=False) for k in range(warm)]
    for k in range(total - warm):
        order += [chunk(warm + k, backward=False), chunk(k, backward=True)]
    order += [chunk(k, backward=True) for k in range(total - warm, total)]
    return tuple(order)


def _zero_bubble_h1(rank: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    """1F1B with weight gradients put off by `rank` micro-batches: every rank holds at most pp activations."""
    warm = min(micro_batches, pp - rank)
    order = [Action("F", rank, m) for m in range(warm)]
    for m in range(micro_batches):
        order.append(Action("I", rank, m))
        if m >= rank:
            order.append(Action("W", rank, m - rank))
        if warm + m < micro_batches:
            order.append(Action("F", rank, warm + m))
    order += [Action("W", rank, m) for m in range(max(0, micro_batches - rank), micro_batches)]
    return tuple(order)


@dataclass
class _RankState:
    """What the list scheduler knows of a rank. `limit` bounds the activations in flight."""

    stages: tuple[int, ...]
    limit: int
    in_flight: int
    order: list[Action]
    put_off: list[Action]


def _list_schedule(name: str, pp: int, virtual: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Greedy list schedule on unit costs: I before F before W; F only while activations in flight stay in bounds.

    Bounds, in chunks: 2*pp for the V, those of the first rank of the interleaved schedule otherwise.
    """
    count = pp * virtual
    ranks = []
    for rank in range(pp):
        limit = 2 * pp if name == "zbv" else 2 * (pp - 1) + (virtual - 1) * pp + 1
        ranks.append(_RankState(rank_stages(pp, virtual, name, rank), limit, 0, [], []))
    ended: dict[Action, int] = {}
    for now in range(9 * count * micro_batches):  # far more ticks than one rank alone would need
        chosen = [(state, _choose(state, ended, now, count, micro_batches)) for state in ranks]
        for state, action in chosen:
            if action is None:
                continue
            state.order.append(action)
            ended[action] = now + 1
            if action.kind == "F":
                state.in_flight += 1
            elif action.kind == "I":
                state.put_off.append(Action("W", action.stage, action.micro_batch))
            else:
                state.put_off.remove(action)
                state.in_flight -= 1
        if len(ended) == 3 * count * micro_batches:
            return tuple(tuple(state.order) for state in ranks)
    raise AssertionError(f"schedule {name} for {pp} ranks x {virtual} stages, {micro_batches} micro-batches has no end")


def _choose(state: _RankState, ended: dict[Action, int], now: int, count: int, micro_batches: int) -> Action | None:
    def ready(action: Action) -> bool:
        return all(ended.get(need, now + 1) <= now for need in needs(action, count))

    def first(kind: ActionKind) -> list[Action]:
        """The first action of `kind` not yet done of each stage, if it can start now."""
        heads = []
        for stage in state.stages:
            left = (Action(kind, stage, m) for m in range(micro_batches) if Action(kind, stage, m) not in ended)
            head = next(left, None)
            if head is not None and ready(head):
                heads.append(head)
        return heads

    if inputs := first("I"):
        return min(inputs, key=lambda a: (a.micro_batch, -a.stage))
    if state.in_flight < state.limit and (forwards := first("F")):
        # The deepest chunk first: it frees its activation soonest.
        return max(forwards, key=lambda a: (a.stage, -a.micro_batch))
    return state.put_off[0] if state.put_off else None


def needs(action: Action, stages: int) -> list[Action]:
    """What must have ended before `action` can start, besides its rank being free. I and B stand for each other."""
    kind, stage, m = action
    if kind == "F":
        return [Action("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [Action("I", stage, m)]
    after = [Action("F", stage, m)]
    return after if stage == stages - 1 else [*after, Action(kind, stage + 1, m)]


@dataclass(frozen=True)
class Timing:
    """What a table costs: `busy[rank]` seconds of work in `makespan` seconds, most activations held at once."""

    makespan: float
    busy: tuple[float, ...]
    peak: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, 0..1."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan)


def simulate(schedule: Schedule, cost: Mapping[ActionKind, float] = UNIT_COST, transfer: float = 0.0) -> Timing:
    """Run the table on a virtual clock.

    Args:
        cost: seconds of an action on one stage.
        transfer: seconds between ranks.

    Raises:
        ValueError: the table cannot run (a rank waits for something that never happens).
    """
    done: dict[Action, float] = {}
    clock, at = [0.0] * schedule.pp, [0] * schedule.pp
    total = sum(len(order) for order in schedule.orders)
    while len(done) < total:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                before = needs(action, schedule.stages)
                if any(need not in done for need in before):
                    break
                start = clock[rank]
                for need in before:
                    away = schedule.owner(need.stage) != rank
                    start = max(start, done[need] + (transfer if away else 0.0))
                clock[rank] = done[action] = start + cost[action.kind]
                at[rank] += 1
                moved = True
        if not moved:
            raise ValueError(f"schedule {schedule.name} cannot run: ranks wait at {at}")
    busy = tuple(sum(cost[action.kind] for action in order) for order in schedule.orders)
    return Timing(max(clock), busy, tuple(_peak(order) for order in schedule.orders))


def _peak(order: tuple[Action, ...]) -> int:
    held = most = 0
    for action in order:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, held)
    return most


def bubble_formula(name: str, pp: int, virtual: int, micro_batches: int) -> float:
    """Idle share by the formula of each schedule's paper, with backward twice the forward (I = W = F).

    1F1B: (p-1)/(m+p-1); interleaved: (p-1)/(v*m+p-1); zero bubble, also as a V: a third of the idle time of the
    schedule with as many stages a rank. (The papers' "zero" lets ranks begin the next step before others end this
    one; here a step ends for all at once.)
    """
    idle = {"1f1b": 3.0, "interleaved": 3.0, "zero_bubble": 1.0, "zbv": 1.0}[name] * (pp - 1) / virtual
    return idle / (3.0 * micro_batches + idle)


def messages(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """Transfers of a step, by (sender, receiver), in the order in which the sender makes them.

    Receivers take them in this order, so that a channel may be first-in first-out (as oneCCL's are).
    """
    result: dict[tuple[int, int], list[Message]] = {}
    for rank, order in enumerate(schedule.orders):
        for kind, stage, m in order:
            target = stage + 1 if kind == "F" else stage - 1
            if kind == "W" or not 0 <= target < schedule.stages or schedule.owner(target) == rank:
                continue
            message = Message("F" if kind == "F" else "B", target, m)
            result.setdefault((rank, schedule.owner(target)), []).append(message)
    return result
