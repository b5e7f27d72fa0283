"""Lines from the driver to node agents: asynchronous calls, and what their failures mean."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from mula_ray.runtime.lines import Answered, Lanes, Line
from mula_ray.runtime.peers import open_peer

Loss = Literal["dead", "unreachable", "error"]
_HEARSAY_S = 0.15
_AGAIN_S = 0.5


class AgentDied(Exception):
    """Ray says that the agent's process is gone."""


class AgentUnreachable(Exception):
    """The agent does not answer; nobody says yet that it is gone."""


class Link(Protocol):
    """A line to the agent of `node`. `peer`: where it listens; `domain`: failure domain."""

    node: str
    peer: str
    tiles: int
    domain: str

    def call(self, method: str, *args: Any, then: Answered | None = None) -> None:
        """Call; `then(answer, error)` comes later, on any thread."""
        ...

    def kill(self) -> None:
        """End the agent by force."""
        ...


def loss_of(error: BaseException) -> Loss:
    """`dead` is a fact, `unreachable` a suspicion; anything else is an error of the call itself."""
    if isinstance(error, AgentDied):
        return "dead"
    return "unreachable" if isinstance(error, AgentUnreachable) else "error"


class AgentLink:
    """A `Link` over the agent's own line; `secret`: of the run. What a broken line means, Ray says.

    For as long as it exists, the agent's main thread is inside one Ray call, `serve` (see `lines`), whose failure is
    the news of the agent's death.
    """

    def __init__(self, node: str, handle: Any, peer: str, tiles: int, domain: str, secret: bytes) -> None:
        self.node, self.peer, self.tiles, self.domain = node, peer, tiles, domain
        self._handle = handle
        self._died = threading.Event()
        self._closed = False
        self._line = Line(lambda: open_peer(peer, secret), "call")
        self._lanes = Lanes(self._ask, f"agent-{node}")
        self._attend()

    def call(self, method: str, *args: Any, then: Answered | None = None) -> None:
        """See `Link`."""
        self._lanes.ask(method, args, then)

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return self._line.call(method, *args, bound_s=None)  # silence is judged by heartbeats
        except (OSError, EOFError) as error:
            if self._died.wait(_HEARSAY_S):  # Ray knows as a rule within a tenth of a second
                raise AgentDied(f"the agent of {self.node} is gone") from error
            raise AgentUnreachable(
                f"the agent of {self.node} ({self.peer}): {type(error).__name__}: {error}"
            ) from error

    def _attend(self) -> None:
        try:
            self._handle.serve.remote().future().add_done_callback(self._attended)
        except Exception:  # Ray itself is going away: the driver's watch over the head deals with that
            return

    def _attended(self, future: Future[Any]) -> None:
        """`serve` ended: the agent is gone, or out of Ray's reach, or it had not heard of us for a moment."""
        error = future.exception()
        if self._closed:
            return
        if error is not None and _is_death(error):
            self._died.set()
            return
        timer = threading.Timer(_AGAIN_S if error is not None else 0.0, self._attend)
        timer.daemon = True
        timer.start()

    def kill(self) -> None:
        """See `Link`."""
        from mula_ray.runtime import seam

        self._closed = True
        self._lanes.close()
        self._line.close()
        seam.kill(self._handle)


def _is_death(error: BaseException) -> bool:
    """Names, so that this module can be read without Ray; `ActorUnavailableError` is no death."""
    names = {type(error).__name__ for error in (error, getattr(error, "cause", None)) if error is not None}
    return bool(names & {"ActorDiedError", "RayActorError", "OwnerDiedError", "ActorPlacementGroupRemoved"})
