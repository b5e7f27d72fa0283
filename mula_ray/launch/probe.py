"""Which nodes a Ray cluster has: one JSON line a look, in a process of its own so that the caller never loads ray.

python -m mula_ray.launch.probe ADDRESS
"""

from __future__ import annotations

import json
import sys
import time

POLL_S = 0.5


def alive_nodes(address: str) -> list[dict[str, object]]:
    """Address and tiles of every living node."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined,unused-ignore]

    client = GcsClient(address=address)
    nodes = client.get_all_node_info(timeout=5)
    return [
        {"address": info.node_manager_address, "tiles": int(dict(info.resources_total).get("tile", 0))}
        for info in nodes.values()
        if info.state == 0
    ]


def main() -> None:
    """Look until told to stop (stdin closes or SIGTERM)."""
    while True:
        try:
            print(json.dumps({"nodes": alive_nodes(sys.argv[1])}), flush=True)
        except Exception as error:  # the head is not there yet, or refuses us
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
