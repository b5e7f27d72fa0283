"""Wrong numbers: is it the hardware, the data, or the model? A trial finds out: the step is made again elsewhere. Pure.

- It passes: the hardware that was left is at fault (`resolve`).
- It fails on the same ranks, all of whose nodes have changed: the data or the model is at fault.
- It fails on other ranks that now sit on a suspect: the failure went with the hardware.
- It fails however the suspects move, because several nodes are bad at once: what took part every time is cordoned.
- A pipeline fails as a whole, since its last stage sees what an earlier one did: *candidates* are the nodes that took
  part every time; suspects are scattered over the replicas, so that the next failure tells them apart.
"""

from __future__ import annotations

from dataclasses import replace

from mula_ray.elastic.plan import needed
from mula_ray.elastic.state import Failure, State, Trial, but

# A window is left out at most this many times in a row: then it is not the data.
_MOST_SKIPS = 3
# With this many strikes a node is not tried again.
_STRIKES = 2
# Same hardware, no other to be had; other hardware, but candidates are left.
_TRIES_HERE, _TRIES_ELSEWHERE = 2, 4

Judged = tuple[State, str, str]


def wrong_numbers(state: State, first: Failure, blamed: frozenset[str]) -> Judged:
    """Judge a failed step. `blamed`: nodes of the failing ranks, empty if nobody could be named.

    Returns (state, why the run must end or "", finding).
    """
    assert first.kind in ("numeric", "damaged")
    ranks = frozenset(first.ranks)
    if not blamed and state.placement is not None and len(state.placement.seats) == 1:
        blamed = frozenset(state.placement.seats)
    trial = state.trial
    if trial is None or (trial.step, trial.kind) != (first.step, first.kind):
        return _begin(state, first, blamed, ranks)
    common = trial.candidates & blamed
    if first.kind == "damaged":
        state = _again(state, trial, common or blamed, ranks)
        return but(state, distrust=state.generation), "", f"{first.text}, again: snapshots in memory are distrusted now"
    if ranks and trial.ranks and not ranks & trial.ranks:
        return _followed(state, first, trial, common, blamed, ranks)
    if common and trial.attempts < (_TRIES_ELSEWHERE if trial.moved else _TRIES_HERE):
        state = _again(state, trial, common, ranks)
        return (
            state,
            "",
            f"{first.text}, again with {_list(common)} taking part: once more without, if that is possible",
        )
    if not blamed and not trial.moved and trial.attempts < _TRIES_HERE:
        return _again(state, trial, blamed, ranks), "", f"{first.text}, again on the same hardware: once more"
    if trial.moved and trial.attempts < _TRIES_ELSEWHERE and any(state.strikes.get(n, 0) for n in blamed):
        state = _again(state, trial, blamed, ranks)
        return state, "", f"{first.text}, again, but on hardware that was suspect before: once more elsewhere"
    if common and trial.moved and _can_spare(state, common):
        return _cordon_all(
            state, first, common, "took part in every try of a step that failed, and cannot be told apart"
        )
    return _verdict(state, first, trial, blamed)


def resolve(state: State) -> tuple[State, tuple[str, ...], str]:
    """The step of a trial committed: a single suspect that was moved off is at fault.

    Returns (state, nodes to cordon, finding). A suspect that still has a seat (no spare was free) keeps its strike; so
    do several suspects, of which one is at fault.
    """
    trial = state.trial
    assert trial is not None
    suspects = sorted(trial.suspects & state.nodes.keys())
    state = but(state, trial=None)
    if not suspects:
        return state, (), f"step {trial.step} passed when made again; no hardware could be named"
    if not trial.moved:
        return state, (), f"step {trial.step} passed on the same hardware: taken as transient"
    text = f"step {trial.step} passed on other hardware"
    if len(suspects) > 1:
        return state, (), f"{text}; one of {_list(suspects)} is suspect, which one cannot be told"
    if state.placed(suspects[0]):
        return state, (), f"{text}; {suspects[0]} is suspect, but there was no spare to take over"
    return state, (suspects[0],), text


def _begin(state: State, first: Failure, blamed: frozenset[str], ranks: frozenset[int]) -> Judged:
    """Make the step again without the nodes to blame; each gets a strike, with the third it is cordoned."""
    assert first.kind in ("numeric", "damaged")
    suspects = _narrow(state, blamed)
    worn = [n for n in suspects if state.strikes.get(n, 0) >= _STRIKES and n in state.nodes]
    cordoned = ""
    if len(worn) == 1:
        state = cordon(state, frozenset(worn), "suspect for the third time")
        cordoned = f"; {worn[0]} cordoned, suspect for the third time"
    state = strike(state, suspects, 1)
    trial = Trial(first.step, first.kind, ranks, blamed, suspects, struck=suspects)
    text = f"{first.text}: the step is discarded and made again on other hardware if there is any"
    return but(state, trial=trial, avoid=suspects), "", text + cordoned


def _again(state: State, trial: Trial, candidates: frozenset[str], ranks: frozenset[int]) -> State:
    """Another try, without the candidates that are left."""
    suspects = _narrow(state, candidates)
    state = strike(state, suspects - trial.struck, 1)
    trial = replace(
        trial,
        ranks=ranks or trial.ranks,
        candidates=candidates,
        suspects=suspects,
        struck=trial.struck | suspects,
        attempts=trial.attempts + 1,
        moved=trial.moved and not suspects,
    )
    return but(state, trial=trial, avoid=suspects)


def _followed(
    state: State, first: Failure, trial: Trial, common: frozenset[str], blamed: frozenset[str], ranks: frozenset[int]
) -> Judged:
    """Other ranks fail now. With the hardware, if a candidate sits there; else it is another failure."""
    if not common:
        return _begin(state, first, blamed, ranks)
    if len(common) > 1 and trial.attempts < _TRIES_ELSEWHERE:
        state = _again(state, trial, common, ranks)
        return state, "", f"{first.text}: the failure went with one of {_list(common)}; once more to tell them apart"
    state = cordon(state, common, "wrong numbers went with it from one set of ranks to another")
    text = f"{first.text}: the failure went with the hardware, {_list(common)} cordoned"
    return but(state, trial=None, avoid=frozenset()), "", text


def _can_spare(state: State, nodes: frozenset[str]) -> bool:
    """Whether enough would be left without `nodes`."""
    return state.config.shape.capacity(len(state.nodes.keys() - nodes)) >= needed(state)


def _cordon_all(state: State, first: Failure, nodes: frozenset[str], text: str) -> Judged:
    state = but(cordon(state, nodes, text), trial=None, avoid=frozenset())
    return state, "", f"{first.text}: {_list(nodes)} {text}: all cordoned"


def _verdict(state: State, first: Failure, trial: Trial, blamed: frozenset[str]) -> Judged:
    """The hardware is cleared: skip the window, or end.

    Several windows in a row that fail on the same few ranks are not the data: once, all that ran those ranks goes.
    """
    where = "on other hardware" if trial.moved else "and there is no other hardware to try"
    finding = f"{first.text}: came back with the same data {where}, so the data or the model is at fault"
    before = len([s for s in state.skips if first.step - _MOST_SKIPS <= s < first.step])
    if not state.config.skip_bad_data:
        reason = f"{finding}; elastic.skip_bad_data does not allow to skip the window"
        return state, reason, reason
    ran = (trial.struck | blamed) & state.nodes.keys()
    if before >= _MOST_SKIPS and first.step > state.purged + 2 * _MOST_SKIPS and ran and _can_spare(state, ran):
        state = but(state, purged=first.step)
        return _cordon_all(state, first, ran, f"ran what failed in {before + 1} windows in a row")
    if before >= _MOST_SKIPS:
        reason = f"{finding}; {before} windows before it were skipped already"
        return state, reason, reason
    state = strike(state, trial.struck, -1)
    state = but(state, trial=None, skips=(*state.skips, first.step), avoid=frozenset())
    return state, "", f"{finding}; the window of step {first.step} is skipped"


def _narrow(state: State, nodes: frozenset[str]) -> frozenset[str]:
    """The one node that was suspect most often, if there is one; else all of them."""
    most = max((state.strikes.get(n, 0) for n in nodes), default=0)
    worst = frozenset(n for n in nodes if state.strikes.get(n, 0) == most)
    return worst if most > 0 and len(worst) == 1 else nodes


def strike(state: State, nodes: frozenset[str], by: int) -> State:
    """Change the strikes of `nodes` by `by`; nodes without any have no entry. Those long gone are forgotten."""
    strikes = dict(state.strikes)
    for node in nodes:
        count = strikes.pop(node, 0) + by
        if count > 0:
            strikes[node] = count
    if len(strikes) > 2 * len(state.nodes):
        strikes = {n: count for n, count in strikes.items() if n in state.nodes}
    return but(state, strikes=strikes)


def cordon(state: State, bad: frozenset[str], why: str) -> State:
    """Take `bad` out of use; `Cordon` commands follow from the difference."""
    if not bad:
        return state
    nodes = {n: v for n, v in state.nodes.items() if n not in bad}
    cordoned = {**state.cordoned, **dict.fromkeys(sorted(bad), why)}
    return but(state, nodes=nodes, cordoned=cordoned, lingering=state.lingering.union(bad), holed=True)


def _list(nodes: frozenset[str] | list[str]) -> str:
    shown = sorted(nodes)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
