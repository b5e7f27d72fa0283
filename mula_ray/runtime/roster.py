"""Finds nodes with free tiles and puts an agent on each: a thread of the driver. New nodes join a running job."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from mula_ray.runtime import seam
from mula_ray.runtime.links import AgentLink
from mula_ray.runtime.messages import NodeFacts, RunFacts
from mula_ray.runtime.node import NodeAgent

log = logging.getLogger(__name__)
SCAN_S = 0.5
READY_BOUND_S = 180.0
RIVAL_S = 3.0


class Roster:
    """`joined(link)` for every agent that is ready, `complete()` once after the first round.

    At most `wanted` nodes (working and spare) are taken at a time; a node that is lost makes room for another. Agents
    of an earlier driver come first, all of them: they have the state in memory. Nodes in `shunned` (cordoned by an
    earlier driver) get no new agent, and one that is still there keeps nobody out.
    """

    def __init__(
        self,
        run: RunFacts,
        secret: bytes,
        wanted: int,
        environment: dict[str, str],
        joined: Callable[[AgentLink], None],
        complete: Callable[[], None],
        shunned: frozenset[str] = frozenset(),
    ) -> None:
        self._run, self._secret, self._wanted, self._environment = run, secret, wanted, environment
        self._joined, self._complete, self._shunned = joined, complete, shunned
        self._held: dict[str, tuple[str, Any]] = {}
        self._barred: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="roster", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """No more nodes."""
        self._stop.set()
        self._wake.set()

    def lost(self, node: str, bar_s: float = 0.0) -> None:
        """The agent of `node` is gone; its machine may be used again after `bar_s`."""
        with self._lock:
            for node_id, (name, _) in list(self._held.items()):
                if name == node:
                    del self._held[node_id]
                    self._barred[node_id] = time.monotonic() + bar_s
        self._wake.set()

    def release_all(self) -> None:
        """End every agent."""
        for _, handle in list(self._held.values()):
            seam.kill(handle)

    def _work(self) -> None:
        first = True
        while not self._stop.is_set():
            try:
                threads = self._round(first)
            except Exception as error:  # a node or name that is just going away: the next round sees it anew
                log.warning("looking for nodes: %s: %s", type(error).__name__, error)
                threads = []
            if first:
                for thread in threads:
                    thread.join(READY_BOUND_S)
                self._complete()
                first = False
            self._wake.wait(SCAN_S)
            self._wake.clear()

    def _round(self, first: bool) -> list[threading.Thread]:
        """Start an agent on every node that is wanted and free."""
        try:
            nodes, free = seam.tile_nodes(), seam.free_tiles()
        except Exception:  # the head does not answer: the driver's own bounds deal with that
            return []
        tiles = self._run.config.cluster.tiles_per_node
        threads = []
        with self._lock:
            for node_id in [n for n in self._held if n not in nodes]:
                del self._held[node_id]
            taken = sum(name not in self._shunned for name, _ in self._held.values())
            order = self._in_order(nodes)
            there = {node_id: seam.find_actor(self._actor_name(node_id)) for node_id, _ in order} if first else {}
            for node_id, (have, address, label) in sorted(order, key=lambda item: there.get(item[0]) is None):
                name = label or node_id[:12]
                if node_id in self._held or self._barred.get(node_id, 0.0) > time.monotonic():
                    continue
                handle = there.get(node_id)
                if handle is None:
                    if name in self._shunned or taken >= self._wanted:
                        continue
                    handle = None if first else seam.find_actor(self._actor_name(node_id))
                if handle is None:
                    if have < tiles or free.get(node_id, 0) < tiles:
                        continue
                    handle = self._make(node_id, name, address)
                self._held[node_id] = (name, handle)
                taken += name not in self._shunned
                thread = threading.Thread(target=self._greet, args=(node_id, name, handle), daemon=True)
                thread.start()
                threads.append(thread)
        return threads

    def _in_order(self, nodes: dict[str, tuple[int, str, str]]) -> list[tuple[str, tuple[int, str, str]]]:
        """Ours first, then in an order of this run's own: runs that start together seldom reach for the same node."""
        draw = random.Random(self._run.run_id + self._run.run_dir)
        order = sorted(nodes.items(), key=lambda item: (item[1][2], item[0]))
        draw.shuffle(order)
        return sorted(order, key=lambda item: item[0] not in self._held)

    def _actor_name(self, node_id: str) -> str:
        return f"{self._run.run_id}/agent/{node_id}"

    def _make(self, node_id: str, name: str, address: str) -> Any:
        make = seam.actor(
            NodeAgent,
            name=self._actor_name(node_id),
            namespace=seam.NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            resources={"tile": self._run.config.cluster.tiles_per_node},
            max_restarts=0,
            scheduling_strategy=seam.on_node(node_id),
        )
        return make.remote(self._run, name, address, self._secret, self._environment)

    def _greet(self, node_id: str, name: str, handle: Any) -> None:
        facts = self._wait(node_id, handle)
        if facts is None:
            seam.kill(handle)
            self.lost(name, bar_s=random.uniform(0.5, 3.0))
            return
        if not self._stop.is_set():
            self._joined(AgentLink(name, handle, facts.peer, facts.tiles, _domain(facts), self._secret))

    def _wait(self, node_id: str, handle: Any) -> NodeFacts | None:
        """The agent's first word; None when it failed, or should make way for another run's agent on the same node.

        Two runs that start together may both have seen the node's tiles free. Ray grants them to one and lets the other
        wait without saying so: while there is no answer and a rival exists, the later name makes way at once, the
        earlier one after a while (it may be the one that waits).
        """
        import ray

        ref, began = handle.hello.remote(), time.monotonic()
        while time.monotonic() - began < READY_BOUND_S and not self._stop.is_set():
            ready, _ = ray.wait([ref], timeout=RIVAL_S)
            try:
                if ready:
                    facts: NodeFacts = ray.get(ref)
                    return facts
                rivals = seam.actors_ending(f"/agent/{node_id}") - {self._actor_name(node_id)}
            except Exception:
                return None
            if rivals and (self._actor_name(node_id) > min(rivals) or time.monotonic() - began > 10 * RIVAL_S):
                return None
        return None


def _domain(facts: NodeFacts) -> str:
    """Failure domain: the machine; on a cluster of many nodes on one machine each node is its own."""
    return "" if facts.host in ("127.0.0.1", socket.gethostbyname(socket.gethostname())) else facts.host
