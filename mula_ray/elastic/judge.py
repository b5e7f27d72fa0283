"""What an incident means: who is to blame, and whether it is systemic. Wrong numbers: see `numeric.py`.

One failure makes others: peers of a dead rank end with errors of their own. An incident is therefore judged when
everything has ended, by its best evidence: node lost > state or numbers wrong > killed process > no progress > an
exception > lost peers. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from mula_ray.elastic import events as ev
from mula_ray.elastic.numeric import strike, wrong_numbers
from mula_ray.elastic.state import Failure, State, but


def describe(state: State, event: ev.Event) -> Failure | None:
    """The failure that `event` reports, with who is to blame in terms of nodes; None when it is no failure."""
    step = state.committed + 1
    match event:
        case ev.NodeLost(node, why) | ev.AgentLost(node, why):
            return Failure("lost", 6, (node,), (), step, f"lost: {why}", f"node {node}: {why}")
        case ev.NonFinite(_, at, seen, kind):
            ranks = _pipelines(state, seen)
            where = _named(state, ranks) or "nobody can be named"
            return Failure(
                "numeric",
                5,
                _nodes(state, ranks),
                ranks,
                at,
                f"numeric {kind}",
                f"{kind} not finite at step {at} ({where})",
            )
        case ev.StateDamaged(_, at, ranks, detail):
            text = f"state damaged at step {at} ({_named(state, ranks)}){_tail(detail)}"
            return Failure("damaged", 5, _nodes(state, ranks), ranks, at, "damaged", text)
        case ev.RestoreFailed(_, at, tier, why, node):
            text = f"{tier} of step {at} cannot be used{f' (node {node})' if node else ''}: {why}"
            return Failure("restore", 5, (), (), at, f"restore {tier}", text)
        case ev.WorkerLost(node, tile, _, why):
            return Failure("died", 4, (node,), (), step, f"worker: {why}", f"node {node} tile {tile}: {why}")
        case ev.RankDied(_, rank, cause, detail):
            weight = {ev.Cause.SIGNAL: 4, ev.Cause.ERROR: 2, ev.Cause.PEER: 1}[cause]
            nodes = () if cause is ev.Cause.PEER else _nodes(state, (rank,))
            text = f"{_named(state, (rank,))} died: {cause}{_tail(detail)}"
            return Failure("died", weight, nodes, (rank,), step, f"{cause}: {detail}", text)
        case ev.RankHung(_, at, ranks, detail):
            text = f"no progress in step {at} ({_named(state, ranks) or 'all ranks wait'}){_tail(detail)}"
            return Failure("hung", 3, _nodes(state, ranks), ranks, at, "hung", text)
    return None


def judge(state: State, restorable: int) -> tuple[State, str, str]:
    """Judge `state.incident` (not empty). `restorable`: newest step that can be restored, a sign of progress.

    Returns (state with blame, strikes and trial brought up to date; why the run must end, or ""; the finding in words).
    """
    first = max(state.incident, key=lambda failure: failure.weight)
    blamed = frozenset(n for f in state.incident if f.weight == first.weight for n in f.nodes)
    rules = state.config
    if state.committed > state.mark or restorable > state.base:
        state = but(state, idle=0, repeats=0, last_mark="", streak="", fresh=frozenset())
    if first.kind == "restore":  # ends by itself: every try rules a copy out
        return state, "", first.text
    if state.idle >= rules.max_recoveries:
        reason = f"systemic: {state.idle} recoveries without a new committed step; the last failure: {first.text}"
        return state, reason, reason
    state = but(state, idle=state.idle + 1, mark=state.committed)
    if first.kind in ("numeric", "damaged"):
        return wrong_numbers(state, first, blamed)
    return _process(state, first, blamed)


def _process(state: State, first: Failure, blamed: frozenset[str]) -> tuple[State, str, str]:
    """Something ended or stood still: the same failure on fresh hardware is systemic; twice in a row is suspect."""
    same = first.mark == state.last_mark
    # An exception with the same words needs no fresh hardware to be recognised: its process was fresh.
    again = same and ((blamed and blamed <= state.fresh) or first.mark.startswith(ev.Cause.ERROR))
    repeats = (state.repeats + 1 if again else state.repeats) if same else 0
    state = but(state, repeats=repeats, last_mark=first.mark)
    if repeats >= state.config.same_failure:
        reason = f"systemic: the same failure came back {repeats} times on fresh nodes or processes: {first.text}"
        return state, reason, reason
    if first.kind in ("died", "hung") and len(blamed) == 1:
        (node,) = blamed
        if state.streak == node and node in state.nodes:
            state = but(strike(state, blamed, 1), avoid=blamed, streak="")
            return state, "", f"{first.text}; twice in a row without a committed step: {node} is suspect"
        return but(state, streak=node), "", first.text
    return but(state, streak=""), "", first.text


def _nodes(state: State, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Nodes of `ranks` in the present placement, each once."""
    if state.placement is None:
        return ()
    world = state.placement.world
    return tuple(dict.fromkeys(state.placement.locate(rank)[0] for rank in ranks if 0 <= rank < world))


def _pipelines(state: State, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """`ranks` and the other stages of their pipelines: the last stage sees what an earlier one did."""
    if state.placement is None or state.placement.shape.pp == 1:
        return ranks
    layout = state.placement.topology
    coords = [layout.coords(rank) for rank in ranks if rank < layout.world]
    return tuple(dict.fromkeys(layout.rank(replace(at, pp=stage)) for at in coords for stage in range(layout.pp)))


def _named(state: State, ranks: tuple[int, ...]) -> str:
    """`ranks` in words: at most four are named."""
    if not ranks:
        return ""
    shown = ", ".join(str(rank) for rank in ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    nodes = _nodes(state, ranks[:4])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{' on ' + ', '.join(nodes) if nodes else ''}"


def _tail(detail: str) -> str:
    return f", {detail}" if detail else ""
