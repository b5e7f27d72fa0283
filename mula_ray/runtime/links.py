"""The driver's line to an agent: asynchronous calls, and what their failures mean."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, Protocol

Loss = Literal["dead", "unreachable", "error"]
Answered = Callable[[Any, BaseException | None], None]


class Link(Protocol):
    """A line to the agent of `node`. `peer`: address of its copy service; `domain`: failure domain."""

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
    name = type(error).__name__
    if name in ("ActorDiedError", "RayActorError", "OwnerDiedError", "ActorPlacementGroupRemoved"):
        return "dead"
    if name in ("ActorUnavailableError", "GetTimeoutError", "RaySystemError"):
        return "unreachable"
    return "error"


class RayLink:
    """A `Link` over Ray."""

    def __init__(self, node: str, handle: Any, peer: str, tiles: int, domain: str) -> None:
        self.node, self.peer, self.tiles, self.domain = node, peer, tiles, domain
        self._handle = handle

    def call(self, method: str, *args: Any, then: Answered | None = None) -> None:
        """See `Link`."""
        try:
            ref = getattr(self._handle, method).remote(*args)
        except Exception as error:
            if then is not None:
                then(None, error)
            return
        if then is None:
            return

        def done(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                cause = getattr(error, "cause", None)
                then(None, cause if cause is not None and loss_of(error) == "error" else error)
            else:
                then(future.result(), None)

        ref.future().add_done_callback(done)

    def kill(self) -> None:
        """See `Link`."""
        from mula_ray.runtime import seam

        seam.kill(self._handle)
