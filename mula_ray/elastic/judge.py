"""What an incident means: who is to blame, whether it is systemic, what a numeric failure proves.

One failure makes others: peers of a dead rank end with errors of their own. An incident is therefore judged when
everything has ended, by its best evidence: node lost > state or numbers wrong > killed process > no progress > an
exception > lost peers. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from mula_ray.elastic import events as ev
from mula_ray.elastic.state import Failure, State, Trial, but

# A window is left out at most this many times in a row: then it is not the data.
_MOST_SKIPS = 3
_STRIKES = 2


def describe(state: State, event: ev.Event) -> Failure | None:
    """The failure that `event` reports, with who is to blame in terms of nodes; None when it is no failure."""
    step = state.committed + 1
    match event:
        case ev.NodeLost(node, why) | ev.AgentLost(node, why):
            return Failure("lost", 6, (node,), (), step, f"lost: {why}", f"node {node}: {why}")
        case ev.NonFinite(_, at, ranks, kind):
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
        return _numeric(state, first, blamed)
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
            strikes = {**state.strikes, node: state.strikes.get(node, 0) + 1}
            state = but(state, strikes=strikes, avoid=frozenset({node}), streak="")
            return state, "", f"{first.text}; twice in a row without a committed step: {node} is suspect"
        return but(state, streak=node), "", first.text
    return but(state, streak=""), "", first.text


def _numeric(state: State, first: Failure, blamed: frozenset[str]) -> tuple[State, str, str]:
    """Wrong numbers: try the step on other hardware; if they come back there, it is the data or the model."""
    assert first.kind in ("numeric", "damaged")
    trial = state.trial
    ranks = frozenset(first.ranks)
    if not blamed and state.placement is not None and len(state.placement.seats) == 1:
        blamed = frozenset(state.placement.seats)
    again = trial is not None and (trial.step, trial.kind) == (first.step, first.kind)
    if trial is not None and again and blamed & trial.suspects and ranks and not ranks & trial.ranks:
        culprits = blamed & trial.suspects
        state = _cordon(state, culprits, "wrong numbers went with it from one set of ranks to another")
        state = but(state, trial=None, avoid=frozenset())
        return state, "", f"{first.text}: the failure went with the hardware, {', '.join(sorted(culprits))} cordoned"
    back = again and (not ranks or trial is None or not trial.ranks or bool(ranks & trial.ranks))
    if not back or trial is None:
        return _new_trial(state, first, blamed, ranks)
    if first.kind == "damaged":
        state = but(state, trial=replace(trial, attempts=trial.attempts + 1), avoid=blamed, distrust=state.generation)
        return state, "", f"{first.text}, again: the snapshots in memory are no longer trusted"
    if not trial.moved and trial.attempts < 2:
        state = but(state, trial=replace(trial, attempts=trial.attempts + 1), avoid=blamed)
        return state, "", f"{first.text}, again on the same hardware: once more"
    where = "on other hardware" if trial.moved else "and there is no other hardware to try"
    finding = f"{first.text}: came back with the same data {where}, so the data or the model is at fault"
    run = len([s for s in state.skips if first.step - _MOST_SKIPS <= s < first.step])
    if state.config.skip_bad_data and run < _MOST_SKIPS:
        state = _strike(state, trial.suspects | blamed, -1)
        state = but(state, trial=None, skips=(*state.skips, first.step), avoid=frozenset())
        return state, "", f"{finding}; the window of step {first.step} is skipped"
    if state.config.skip_bad_data:
        reason = f"{finding}; {run} windows before it were skipped already"
    else:
        reason = f"{finding}; elastic.skip_bad_data does not allow to skip the window"
    return state, reason, reason


def _new_trial(state: State, first: Failure, blamed: frozenset[str], ranks: frozenset[int]) -> tuple[State, str, str]:
    """Make the step again without the nodes to blame; each gets a strike, with the third it is cordoned."""
    assert first.kind in ("numeric", "damaged")
    worn = frozenset(n for n in blamed if state.strikes.get(n, 0) >= _STRIKES and n in state.nodes)
    state = _cordon(state, worn, "suspect for the third time")
    state = _strike(state, blamed, 1)
    state = but(state, trial=Trial(first.step, first.kind, blamed, ranks), avoid=blamed)
    text = f"{first.text}: the step is discarded and made again on other hardware if there is any"
    return state, "", text + (f"; {', '.join(sorted(worn))} cordoned, suspect for the third time" if worn else "")


def _strike(state: State, nodes: frozenset[str], by: int) -> State:
    """Change the strikes of `nodes` by `by`; nodes without any have no entry."""
    changed = {**state.strikes, **{n: state.strikes.get(n, 0) + by for n in nodes}}
    return but(state, strikes={n: count for n, count in changed.items() if count > 0})


def _cordon(state: State, bad: frozenset[str], why: str) -> State:
    """Take `bad` out of use; `Cordon` commands follow from the difference."""
    if not bad:
        return state
    nodes = {n: v for n, v in state.nodes.items() if n not in bad}
    cordoned = {**state.cordoned, **dict.fromkeys(sorted(bad), why)}
    return but(state, nodes=nodes, cordoned=cordoned, lingering=state.lingering.union(bad))


def resolve(state: State) -> tuple[State, tuple[str, ...], str]:
    """The step of a trial committed: suspects that were moved off are at fault.

    Returns (state, nodes to cordon, finding). A suspect that still has a seat (no spare was free) keeps its strike.
    """
    trial = state.trial
    assert trial is not None
    suspects = sorted(trial.suspects & state.nodes.keys())
    state = but(state, trial=None)
    if not suspects:
        return state, (), f"step {trial.step} passed when made again; no hardware could be named"
    if not trial.moved:
        return state, (), f"step {trial.step} passed on the same hardware: taken as transient"
    seated = [n for n in suspects if state.placed(n)]
    cordon = tuple(n for n in suspects if n not in seated)
    text = f"step {trial.step} passed on other hardware"
    if seated:
        text += f"; {', '.join(seated)} suspect, but there was no spare to take over"
    return state, cordon, text


def _nodes(state: State, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Nodes of `ranks` in the present placement, each once."""
    if state.placement is None:
        return ()
    world = state.placement.world
    return tuple(dict.fromkeys(state.placement.locate(rank)[0] for rank in ranks if 0 <= rank < world))


def _named(state: State, ranks: tuple[int, ...]) -> str:
    """`ranks` in words: at most four are named."""
    if not ranks:
        return ""
    shown = ", ".join(str(rank) for rank in ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    nodes = _nodes(state, ranks[:4])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{' on ' + ', '.join(nodes) if nodes else ''}"


def _tail(detail: str) -> str:
    return f", {detail}" if detail else ""
