"""The one place where Ray is touched untyped: connecting, actors as typed handles, authentication, log levels.

Import this module (and thereby Ray) only after `prepare_environment`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, cast

from mula_ray.config.environment import auth_variables

NAMESPACE = "mula_ray"

QUIET: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_enable_open_telemetry": "0",
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
"""For Ray's processes of a local cluster and for a driver: less chatter, fewer threads, nothing sent anywhere."""
_CLUSTER_ONLY = frozenset({"OMP_NUM_THREADS", "RAY_BACKEND_LOG_LEVEL"})
"""Not for a driver: its threads are the user's, and Ray's core says on the screen that it was given a level."""


def prepare_environment(token_file: str | None, *, keep_auth: bool = False) -> None:
    """Before Ray is imported in this process. `keep_auth`: the cluster is somebody else's; take its mode as it is set
    here, else switch it explicitly off (a stray token file of the user must not switch it on for one process only)."""
    os.environ.update({name: value for name, value in QUIET.items() if name not in _CLUSTER_ONLY})
    if keep_auth and os.environ.get("RAY_AUTH_MODE"):
        return
    os.environ.update(auth_variables(token_file))


class ActorRef(Protocol):
    """A handle; `method` names are those of the class."""

    def __getattr__(self, name: str) -> Any: ...


def import_ray() -> None:
    """Import Ray now (it takes a second), while something else is being waited for."""
    import ray  # noqa: F401


def connect(address: str, namespace: str = NAMESPACE) -> None:
    """Connect this process to a running cluster as a driver, quietly."""
    import logging

    import ray

    ray.init(
        address=address,
        namespace=namespace,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
        configure_logging=True,
        include_dashboard=False,
    )


def actor(cls: type, **options: Any) -> Any:
    """`ray.remote(cls).options(...)`: call `.remote(...)` on it."""
    import ray

    return cast(Any, ray.remote(cls)).options(**options)


def on_node(node_id: str) -> Any:
    """Scheduling strategy: this node and no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)


def find_actor(name: str, namespace: str = NAMESPACE) -> Any | None:
    """A named actor, None when there is none."""
    import ray

    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def actors_ending(suffix: str) -> set[str]:
    """Names of living or pending named actors that end so."""
    import ray

    names = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in names if actor["name"].endswith(suffix)}


def kill(handle: Any) -> None:
    """End an actor's process by force; an actor that is gone is fine."""
    import contextlib

    import ray

    with contextlib.suppress(Exception):
        ray.kill(handle, no_restart=True)


def tile_nodes() -> dict[str, tuple[int, str, str]]:
    """Living nodes with tiles: node id -> (tiles, host name, label)."""
    import ray

    found = {}
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        tiles = int(node["Resources"].get("tile", 0))
        if node["Alive"] and tiles:
            found[node["NodeID"]] = (tiles, node["NodeManagerAddress"], node.get("Labels", {}).get("mula", ""))
    return found


def free_tiles() -> dict[str, int]:
    """Tiles that nobody has taken, by node id."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    return {node: int(have.get("tile", 0)) for node, have in free.items()}
