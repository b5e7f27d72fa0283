"""The driver's line to an agent: asynchronous calls, and what their failures mean."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from mula_ray.runtime.peers import PeerLink

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


class PollLine:
    """Polls over a connection of our own to the agent of `peer`; one that fails goes through `otherwise` instead."""

    def __init__(self, peer: str, secret: bytes, otherwise: Callable[[int, float, Answered], None]) -> None:
        self._peer, self._secret, self._otherwise = peer, secret, otherwise
        self._wanted: queue.SimpleQueue[tuple[int, float, Answered] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"poll-{peer}", daemon=True).start()

    def ask(self, cursor: int, wait_s: float, then: Answered) -> None:
        """One poll; answered on this line's thread."""
        self._wanted.put((cursor, wait_s, then))

    def close(self) -> None:
        """No more polls."""
        self._wanted.put(None)

    def _work(self) -> None:
        link: PeerLink | None = None
        while (item := self._wanted.get()) is not None:
            cursor, wait_s, then = item
            try:
                link = link or PeerLink(self._peer, self._secret)
                report = link.poll(cursor, wait_s)
            except (OSError, EOFError):  # what that means, Ray says: gone, or only out of reach
                link = None
                self._otherwise(cursor, wait_s, then)
            else:
                then(report, None)
        if link is not None:
            link.close()


class RayLink:
    """A `Link` over Ray; `secret`: of the run, for the line that carries the polls."""

    def __init__(self, node: str, handle: Any, peer: str, tiles: int, domain: str, secret: bytes) -> None:
        self.node, self.peer, self.tiles, self.domain = node, peer, tiles, domain
        self._handle = handle
        self._polls = PollLine(peer, secret, lambda cursor, wait, then: self._call("poll", cursor, wait, then=then))

    def call(self, method: str, *args: Any, then: Answered | None = None) -> None:
        """See `Link`."""
        if method == "poll" and then is not None:
            cursor, wait_s = args
            self._polls.ask(cursor, wait_s, then)
        else:
            self._call(method, *args, then=then)

    def _call(self, method: str, *args: Any, then: Answered | None = None) -> None:
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

        self._polls.close()
        seam.kill(self._handle)
