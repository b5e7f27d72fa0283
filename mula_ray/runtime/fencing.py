"""A fence under way: which agents were asked to end their ranks, and what they answered."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from mula_ray.elastic.memory import Holding
from mula_ray.runtime.links import Link
from mula_ray.runtime.messages import FenceAnswer


class Fencing:
    """One at a time; a later one replaces it. Answers come back through `post("fenced", node, generation, …)`.

    `answers` of the last fence stay: they say where fresh stores listen.
    """

    def __init__(self, post: Callable[..., None]) -> None:
        self._post = post
        self._generation: int | None = None
        self._asked: set[str] = set()
        self.answers: dict[str, FenceAnswer] = {}

    @property
    def under_way(self) -> bool:
        """Whether answers are missing."""
        return self._generation is not None

    def begin(self, generation: int, links: Mapping[str, Link]) -> None:
        """Ask everybody."""
        self._generation, self.answers, self._asked = generation, {}, set(links)
        for node in list(links):
            self.ask(node, links)

    def ask(self, node: str, links: Mapping[str, Link]) -> None:
        """Ask one (again)."""
        link = links.get(node)
        if link is not None and self._generation is not None:
            link.call("fence", self._generation, then=partial(self._post, "fenced", node, self._generation))

    def include(self, node: str, links: Mapping[str, Link]) -> None:
        """A node that joined meanwhile."""
        if self._generation is not None and node not in self._asked:
            self._asked.add(node)
            self.ask(node, links)

    def probe(self, links: Mapping[str, Link]) -> None:
        """Ask agents that have not answered yet: a refused connection says that one is gone (`post("gone", node)`)."""
        for node in self._asked - self.answers.keys():
            link = links.get(node)
            if self.under_way and link is not None and link.peer:
                threading.Thread(target=self._knock, args=(node, link.peer), daemon=True).start()

    def _knock(self, node: str, peer: str) -> None:
        host, _, port = peer.rpartition(":")
        with contextlib.suppress(OSError):  # silence proves nothing yet
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
            except ConnectionRefusedError:
                self._post("gone", node)

    def drop(self, node: str) -> None:
        """A node that was lost: nothing is expected of it, and its memory is gone."""
        self._asked.discard(node)
        self.answers.pop(node, None)

    def expects(self, node: str, generation: int) -> bool:
        """Whether an answer counts."""
        return generation == self._generation and node in self._asked

    def finished(self) -> int | None:
        """The generation, once, when all have answered."""
        if self._generation is None or not self._asked <= self.answers.keys():
            return None
        generation, self._generation = self._generation, None
        return generation

    def holdings(self) -> dict[str, Iterable[Holding]]:
        """What every node's memory holds."""
        return {node: answer.holdings for node, answer in self.answers.items()}
