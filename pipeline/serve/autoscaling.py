"""Autoscaling of the stages by the time that calls wait in their queues.

Ray Serve pickles this module by value for its controller, so it must not import other modules of
the project.
"""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

from ray.serve.config import AutoscalingContext

#: Utilisation of the remaining replicas up to which replicas are removed. Calls hardly wait below.
MAX_UTILISATION = 0.5
#: Maximum factor by which the number of replicas grows in one step.
MAX_GROWTH = 2.0
#: Names of the statistics that replicas report.
DELAY, UTILISATION = "queueing_delay_s", "utilisation"


class QueueingDelayPolicy:
    """Adds replicas while calls wait longer than a target, and removes idle ones.

    Ray Serve applies the limits and delays of the autoscaling configuration to the result.

    Args:
        target_s: Target for the mean queueing delay, in seconds.
    """

    def __init__(self, target_s: float):
        self._target_s = target_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Returns the desired number of replicas, and an empty state."""
        reported = context.aggregated_metrics or {}
        delays = list(reported.get(DELAY, {}).values())
        if not delays:
            return context.target_num_replicas, {}
        utilisation = sum(reported.get(UTILISATION, {}).values())
        is_full = context.total_queued_requests >= 1  # calls that no replica has accepted
        return self.num_replicas(len(delays), mean(delays), utilisation, is_full), {}

    def num_replicas(
        self, num_running: int, delay_s: float, utilisation: float, is_full: bool = False
    ) -> int:
        """Returns the desired number of replicas.

        >>> policy = QueueingDelayPolicy(target_s=0.1)
        >>> policy.num_replicas(4, 0.15, 3.9), policy.num_replicas(4, 2.0, 4.0)
        (6, 8)
        >>> policy.num_replicas(4, 0.08, 3.0), policy.num_replicas(4, 0.01, 0.9)
        (4, 2)
        """
        if is_full or delay_s > self._target_s:
            growth = MAX_GROWTH if is_full else min(delay_s / self._target_s, MAX_GROWTH)
            return max(num_running + 1, math.ceil(num_running * growth))
        if delay_s > self._target_s / 2:
            return num_running
        return min(num_running, max(1, math.ceil(utilisation / MAX_UTILISATION)))
