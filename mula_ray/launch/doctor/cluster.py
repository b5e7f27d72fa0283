"""Doctor on every node of a running Ray cluster: one task a node, each bounded, and what only shows between nodes."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from mula_ray.config.errors import CannotContinue
from mula_ray.config.site import SiteConfig
from mula_ray.launch.doctor import measure
from mula_ray.launch.doctor.facts import Facts, gather
from mula_ray.launch.hosts import own_address

CONNECT_S = 30.0


def examine(
    address: str, site: SiteConfig, bound_s: float, *, gemm: bool
) -> tuple[list[Facts], dict[str, float], list[str], dict[str, float | str]]:
    """(facts of the nodes, clock skew by host, addresses without answer, collectives over all nodes).

    Raises:
        CannotContinue: the cluster does not let us in.
    """
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise CannotContinue(
            f"cannot reach the Ray cluster at {address}: {type(error).__name__}; check the address and, with token "
            "authentication, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        ) from None
    try:
        nodes = [node for node in cast(Any, ray).nodes() if node["Alive"]]
        answers, missing = _ask(nodes, lambda _: (_facts_of_node, (site, gemm)), bound_s)
        found, skews = [], {}
        for _, (sent, received, data) in answers.items():
            facts = Facts.from_json(data)
            found.append(facts)
            skews[facts.host] = _beyond_doubt(facts.time, sent, received)
        reachable = [node for node in nodes if node["NodeManagerAddress"] in answers]
        return found, skews, missing, _collectives(reachable, site, bound_s)
    finally:
        ray.shutdown()


def _ask(
    nodes: list[dict[str, Any]], work: Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]], bound_s: float
) -> tuple[dict[str, tuple[float, float, Any]], list[str]]:
    """Run `work(index)` on each node: (address → (sent, received, answer), addresses without answer in time)."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    pending: dict[Any, tuple[str, float]] = {}
    for index, node in enumerate(nodes):
        function, arguments = work(index)
        remote = cast(Any, ray.remote(num_cpus=0, max_retries=0)(function))
        placed = remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        pending[placed.remote(*arguments)] = (node["NodeManagerAddress"], time.time())
    answers: dict[str, tuple[float, float, Any]] = {}
    until = time.monotonic() + bound_s
    while pending and time.monotonic() < until:
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=min(1.0, until - time.monotonic()))
        for reference in ready:
            address, sent = pending.pop(reference)
            try:
                answers[address] = (sent, time.time(), ray.get(reference))
            except Exception:  # the node went away, or the task failed: it counts as without answer
                continue
    for reference in pending:
        ray.cancel(reference, force=True)
    return answers, [n["NodeManagerAddress"] for n in nodes if n["NodeManagerAddress"] not in answers]


def _facts_of_node(site: SiteConfig, gemm: bool) -> dict[str, Any]:
    facts = gather(site)
    if gemm:
        tiles = site.node.tiles if site.node.device != "cpu" else 1
        speeds, error = measure.gemm_of_tiles(site.node.device, tiles, site.node.tile_mask)
        facts = replace(facts, gemm_tflops=speeds, gemm_error=error, time=time.time())
    return facts.to_json()


def _collectives(nodes: list[dict[str, Any]], site: SiteConfig, bound_s: float) -> dict[str, float | str]:
    """One rank a node; rank 0's node hosts the store."""
    if len(nodes) < 2:
        return {}
    here = own_address()
    nodes = sorted(nodes, key=lambda node: node["NodeManagerAddress"] != here)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    host, world = nodes[0]["NodeManagerAddress"], len(nodes)
    answers, missing = _ask(nodes, lambda rank: (_rank_of_node, (host, port, rank, world, bound_s, site)), bound_s + 10)
    merged = measure.merge([answer for _, _, answer in answers.values()])
    return merged | {f"rank on {address}": "gave no answer" for address in missing}


def _rank_of_node(
    host: str, port: int, rank: int, world: int, bound_s: float, site: SiteConfig
) -> dict[str, float | str]:
    environment = dict(os.environ)
    if site.network.interface:
        environment["GLOO_SOCKET_IFNAME"] = site.network.interface
    return measure.finish_rank(measure.start_rank(host, port, rank, world, bound_s, environment), bound_s)


def _beyond_doubt(there: float, sent: float, received: float) -> float:
    """Seconds by which a clock is off, less what the time between question and answer could explain."""
    if there < sent:
        return there - sent
    return max(0.0, there - received)
