"""Tests of the autoscaling policy."""

from __future__ import annotations

import itertools

import pytest
from ray.serve.config import AutoscalingContext

from pipeline.serve.autoscaling import DELAY, UTILISATION, QueueingDelayPolicy

TARGET_S = 0.1


@pytest.fixture
def policy() -> QueueingDelayPolicy:
    return QueueingDelayPolicy(TARGET_S)


def context(delays: list[float], utilisations: list[float], queued: float) -> AutoscalingContext:
    metrics = {DELAY: dict(enumerate(delays)), UTILISATION: dict(enumerate(utilisations))}
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="Encoder",
        app_name=None,
        current_num_replicas=len(delays),
        target_num_replicas=7,
        running_replicas=[],
        total_num_requests=0,
        total_queued_requests=queued,
        aggregated_metrics=metrics if delays else {},
        raw_metrics=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=None,
    )


def test_follows_reported_values_of_all_replicas(policy):
    assert policy(context([], [], 5))[0] == 7  # keeps the number until replicas have reported
    assert policy(context([0.05, 0.25], [1, 1], 0))[0] == 3  # their mean is 1.5 times the target
    assert policy(context([0.0, 0.0], [0.9, 0.9], 3))[0] == 4  # calls that no replica accepts
    assert policy(context([0.0] * 4, [0.3] * 4, 0))[0] == 3


def test_direction_and_bounds(policy):
    for number, delay_s, share in itertools.product(
        range(1, 20), (0.0, 0.04, 0.06, 0.11, 3.0), (0.0, 0.2, 0.5, 1.0)
    ):
        desired = policy.num_replicas(number, delay_s, share * number)
        assert 1 <= desired <= 2 * number
        if delay_s > TARGET_S:
            assert desired > number
        elif delay_s > TARGET_S / 2:
            assert desired == number
        else:  # the work of all replicas keeps the remaining ones at most half busy
            assert desired <= number and share * number / desired <= max(0.5, share)


def test_converges_for_constant_load(policy):
    """For a queue with random arrivals (M/M/c), the number of replicas settles without cycles."""
    work = 3.2  # replicas' worth of work
    number, history = 1, []
    for _ in range(20):
        utilisation = work / number
        # Delay of an M/M/1 queue per replica with a service time of 50 ms.
        delay_s = 60.0 if utilisation >= 1 else 0.05 * utilisation / (1 - utilisation)
        number = policy.num_replicas(number, delay_s, min(work, number))
        history.append(number)
    assert len(set(history[-10:])) == 1 and 4 <= history[-1] <= 7
