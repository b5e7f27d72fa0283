"""The classic sharded optimizer, kept as the baseline: state sharded over DP alone, dense state repeated over EP.

The same buffers, buckets and update as EPSO; only the dense family's shard group is smaller than the group over which
its gradients are summed.
"""

from __future__ import annotations

from mula_ray.optim.epso import Sharding, epso_sharding
from mula_ray.parallel.groups import Groups
from mula_ray.plan.layout import Family
from mula_ray.plan.topology import Topology


def zero1_sharding(family: Family, topology: Topology, groups: Groups) -> Sharding:
    """Dense: summed over dp x ep, sharded over dp. Experts as in EPSO."""
    if family == "expert":
        return epso_sharding(family, topology, groups)
    return Sharding(topology.dp, groups.dp, groups.ddp, counted=topology.coords(groups.rank).ep == 0)
