"""What the driver tells the policy; what the policy answers stands in `commands.py`. The protocol of both:

The driver is one loop: take the next event, `state, commands, reason = decide(state, event, now)` (`policy.py`), carry
out the commands in order without waiting for their end, log event, reason and commands. When no event comes before
`state.wake_at` (seconds on the clock of `now`; None: nothing to wait for), it feeds `Tick()`. It knows nothing else
about recovery.

**Numbers.** Steps count from 1: `step` is the number of committed optimizer steps; a snapshot or checkpoint of step s
is the state after s steps; step 0 is the initial state. In `NonFinite`, `StateDamaged` and `RankHung`, `step` is the
step that was being made (last committed + 1). Every event from ranks carries their generation; the policy drops stale
ones.

**Start.** `DriverStarted` (facts of the run folder; `generation` = the last one ever used, so numbers only grow), then
a `NodeJoined` for every node agent there is, survivors of an earlier driver included, then `RosterComplete`. Nodes that
come later are further `NodeJoined` at any time; a node whose agent was started again is a `NodeJoined` again.

**A generation.**
1. `Fence(g)`: agents refuse everything of generations <= g, kill their ranks of those generations (SIGKILL), verify
   them gone, and answer with the snapshots they hold. An agent that does not answer within the driver's bound is
   reported as `AgentLost` first. Then exactly one `Fenced(g, memory)`; `memory` = `usable_memory(...)` of the answers
   (`elastic/memory.py`). Failures may arrive meanwhile, as events. A later `Fence` of a higher or the same number
   replaces a running one (answer the last).
2. `StartGeneration`: start `placement.assignments()`, restore as told, continue from `restore.step`. Answer: one
   `GenerationReady` once every rank has formed its groups and restored, or a failure event.
3. While it runs: `StepCommitted`, `SnapshotPublished`, `CheckpointCommitted`, failures. The *first* failure makes the
   policy send `Fence`: the generation ends for everybody at once. Go to 1.
4. `AskStop(g, save, why)`: the ranks agree on a last step (the stop flag of the step's all-reduce), save as told, exit.
   Answer: `GenerationEnded(asked=True)`. If they do not by `wake_at`, the policy fences them.
5. All steps done and the last checkpoint committed: `GenerationEnded(asked=False)`.
Every wait of the policy is bounded: an answer that never comes is a failure when `state.wake_at` passes.

**End.** `Finish(code, reason)` is always the last command: kill what is left, end the agents, write `exit.json`.

**Who sees what.** Tile actor: `RankDied` (child's death by the operating system, with the exit the rank reported, see
`Cause`). Driver: `WorkerLost`, `AgentLost`, `NodeLost` (actor died = fact; unavailable = only silence, see
`hang.Heartbeats`), `RankHung` (`hang.HangDetector`), `Straggler` (`straggler.StragglerDetector`). Ranks: `NonFinite`,
`StateDamaged`, `RestoreFailed`, `FatalError` by way of agent and driver. Storage, deadline, signals: driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Tier(StrEnum):
    """Where a generation's state comes from: one tier and one step for all ranks."""

    OWN = "own memory"
    """Every seat reads the snapshot in its own node's memory."""
    MEMORY = "buddy memory"
    """Some seats read from another node's memory: a buddy's copy, or other ranks' parts after a change of dp."""
    DISK = "disk"
    """A full checkpoint: slot full-a or full-b."""
    MODEL = "model only"
    """A kept model-only checkpoint, on request: optimizer state is lost, and that is said."""
    FRESH = "fresh"
    """Nothing was ever saved: the initial weights, a pure function of the seed."""


class Cause(StrEnum):
    """Why a rank process ended, best evidence last: a dead peer explains an error, never the other way round."""

    PEER = "lost its peers"
    """The rank saw only that a collective failed: somebody else is to blame."""
    ERROR = "error"
    """An exception of its own; `detail` is its last line."""
    SIGNAL = "signal"
    """Ended by a signal or a hard exit; `detail` names it."""


@dataclass(frozen=True)
class MemoryCopy:
    """A snapshot of all ranks that can be put together from the nodes' memory.

    `holders[i]` is the node from which seat i of the snapshot's own placement (`dp` replicas) is read; its own node
    wherever that still has it. `spare_holders[i]`: the second node that has it, or "".
    """

    generation: int
    step: int
    dp: int
    holders: tuple[str, ...]
    spare_holders: tuple[str, ...] = ()


@dataclass(frozen=True)
class DiskCopy:
    """A committed checkpoint in the run folder. `full` False: model only (`model-<step>`)."""

    step: int
    slot: str
    full: bool = True


# ---- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DriverStarted:
    """First event. `generation`: last one ever used in this run folder (-1: none); `takeover`: agents of an earlier
    driver may live. `committed`: last step that committed; `disk`: verified checkpoints; `ever_saved`: one was
    committed once. `skips`: steps whose window is left out; `cordoned`: nodes not to be used."""

    generation: int = -1
    takeover: bool = False
    committed: int = 0
    disk: tuple[DiskCopy, ...] = ()
    ever_saved: bool = False
    skips: tuple[int, ...] = ()
    cordoned: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeJoined:
    """An agent is ready on `node` with `tiles` tiles. `domain`: failure domain (rack, chassis, host); "" = the node."""

    node: str
    tiles: int
    domain: str = ""


@dataclass(frozen=True)
class RosterComplete:
    """Every node that can be found now has been reported."""


@dataclass(frozen=True)
class NodeLost:
    """The machine is gone, with everything on it."""

    node: str
    why: str = "the node is gone"


@dataclass(frozen=True)
class AgentLost:
    """The node's agent, and with it the node's snapshots, is gone; the machine may live."""

    node: str
    why: str = "the agent is gone"


@dataclass(frozen=True)
class WorkerLost:
    """A tile's actor died (its rank with it); the agent starts it again before the next generation."""

    node: str
    tile: int
    generation: int
    why: str = "the tile's actor died"


@dataclass(frozen=True)
class RankDied:
    """A rank process ended without being asked to."""

    generation: int
    rank: int
    cause: Cause
    detail: str = ""


@dataclass(frozen=True)
class RankHung:
    """No progress within the learned deadline. `ranks`: the least advanced ones, when they can be told apart."""

    generation: int
    step: int
    ranks: tuple[int, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class Straggler:
    """`rank` has been `factor` times slower than its peers for long."""

    generation: int
    rank: int
    factor: float


@dataclass(frozen=True)
class NonFinite:
    """All ranks agreed that `step` is not finite and discarded it. `ranks`: where it was seen first (own loss or
    gradient before any reduction); empty: cannot be told."""

    generation: int
    step: int
    ranks: tuple[int, ...] = ()
    kind: Literal["loss", "gradient", "spike"] = "loss"


@dataclass(frozen=True)
class StateDamaged:
    """A checksum of state at rest, or of replicated weights, is wrong on `ranks`."""

    generation: int
    step: int
    ranks: tuple[int, ...]
    detail: str = ""


@dataclass(frozen=True)
class StorageFailed:
    """Writing checkpoint `step` failed."""

    step: int
    why: str
    no_space: bool = False


@dataclass(frozen=True)
class RestoreFailed:
    """The copy that `StartGeneration` named cannot be used (checksum, missing file, unreachable holder).

    `node`: whose copy, for memory tiers ("" on disk). Ranks may be left waiting: the policy fences."""

    generation: int
    step: int
    tier: Tier
    why: str
    node: str = ""


@dataclass(frozen=True)
class FatalError:
    """An error that must not be retried: exit 20 (user), 40 (no checkpoint), 30 (cannot continue)."""

    exit_code: int
    message: str
    generation: int = -1


@dataclass(frozen=True)
class Fenced:
    """Answer to `Fence(generation)`: no rank of that or an earlier generation lives; `memory` best (newest) first."""

    generation: int
    memory: tuple[MemoryCopy, ...] = ()


@dataclass(frozen=True)
class GenerationReady:
    """Every rank has its groups and its state and starts step `step` + 1."""

    generation: int
    step: int


@dataclass(frozen=True)
class StepCommitted:
    """`step` committed on all ranks (any later one implies the earlier; the driver need not report every step)."""

    generation: int
    step: int


@dataclass(frozen=True)
class SnapshotPublished:
    """All ranks' snapshots of `step`, buddy copies included, are acknowledged."""

    generation: int
    step: int


@dataclass(frozen=True)
class CheckpointCommitted:
    """The manifest of checkpoint `step` is on disk."""

    generation: int
    step: int
    slot: str
    full: bool = True


@dataclass(frozen=True)
class GenerationEnded:
    """All ranks exited cleanly after `step`; `asked`: because of `AskStop`, else the run's steps are done.

    `saved`: the save to `save` (as `AskStop` named it; the last checkpoint of the run otherwise) succeeded."""

    generation: int
    step: int
    asked: bool
    saved: bool = True
    save: Literal["memory", "disk"] = "disk"


@dataclass(frozen=True)
class DeadlineNear:
    """Time to stop: the run must be over at `end` (clock of `now`)."""

    end: float
    why: str = "the deadline is near"


@dataclass(frozen=True)
class StopRequested:
    """SIGTERM, first Ctrl-C; `hard`: second Ctrl-C."""

    why: str
    hard: bool = False


@dataclass(frozen=True)
class Tick:
    """`state.wake_at` passed without another event. Harmless at any other time."""


Event = (
    DriverStarted
    | NodeJoined
    | RosterComplete
    | NodeLost
    | AgentLost
    | WorkerLost
    | RankDied
    | RankHung
    | Straggler
    | NonFinite
    | StateDamaged
    | StorageFailed
    | RestoreFailed
    | FatalError
    | Fenced
    | GenerationReady
    | StepCommitted
    | SnapshotPublished
    | CheckpointCommitted
    | GenerationEnded
    | DeadlineNear
    | StopRequested
    | Tick
)
