"""Comparison of a resources profile with the nodes of the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config import SpecError
from pipeline.index.stage import Profile

#: Pools that consist of tasks.
TASKS = ("read", "fit")
#: Resources of Ray by the field of a pool that reserves them, and their descriptions.
RESERVED = {
    "num_gpus": ("GPU", "the number of GPUs"),
    "num_cpus": ("CPU", "the number of CPUs"),
    "memory_bytes": ("memory", "the memory"),
}


def check_capacity(profile: Profile, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Checks that the actors of a profile can start. Otherwise the job would wait for ever.

    Args:
        nodes: Nodes of the cluster, as `ray.nodes()` returns them.

    Raises:
        SpecError: An actor needs more than any node has, or the smallest pools need more than the
            cluster has.
    """
    if profile.autoscaling:
        return
    available = [node["Resources"] for node in nodes if node["Alive"]]
    note = "; set autoscaling: true if the cluster adds nodes on demand"
    for field, (resource, description) in RESERVED.items():
        largest = max((node.get(resource, 0) for node in available), default=0)
        total = sum(node.get(resource, 0) for node in available)
        left = total
        for name, pool in profile.pools.items():
            needed = getattr(pool, field) or 0
            if needed > largest:
                rule = f"at most {largest:g}, {description} of the largest node of the cluster"
                raise SpecError(f"{name}.{field}", needed, rule, note=note)
            # Tasks release their resources, actors keep them.
            if name in TASKS:
                continue
            left -= needed * pool.min_actors
            if left < 0:
                rule = f"a profile whose pools need at most {total:g}, {description} of the cluster"
                problem = f"needs {total - left:g} with the pools before it"
                raise SpecError(f"{name}.{field}", needed, rule, problem, note)
