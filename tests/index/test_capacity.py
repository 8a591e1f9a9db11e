"""Profiles that exceed the cluster are errors before a job waits for resources."""

from __future__ import annotations

import pytest

from pipeline.config import SpecError, parse
from pipeline.index.capacity import check_capacity
from pipeline.index.spec import IndexResources

NODES = [
    {"Alive": True, "Resources": {"CPU": 4.0, "memory": 8e9}},
    {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0, "memory": 16e9}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0, "memory": 512e9}},
]


@pytest.mark.parametrize(
    ("fields", "nodes", "message"),
    [
        (
            {"encode": {"num_gpus": 1}},
            NODES[:1],
            "encode.num_gpus must be at most 0, the number of GPUs of the largest node of the"
            " cluster, got 1.0; set autoscaling: true if the cluster adds nodes on demand",
        ),
        ({"encode": {"num_gpus": 4}}, NODES, "encode.num_gpus must be at most 2, the number"),
        (
            {"encode": {"num_gpus": 1, "min_actors": 3, "max_actors": 3}},
            NODES,
            "encode.num_gpus must be a profile whose pools need at most 2, the number of GPUs",
        ),
        ({"read": {"num_cpus": 16}}, NODES, "read.num_cpus must be at most 8, the number"),
        ({"write": {"memory_bytes": 2 * 10**10}}, NODES, "write.memory_bytes must be at most 1.6"),
        (
            {"encode": {"num_cpus": 4}, "write": {"num_cpus": 1}},
            NODES[:1],
            "write.num_cpus must be a profile whose pools need at most 4, the number of CPUs of"
            " the cluster, got 1.0, which needs 5 with the pools before it",
        ),
    ],
)
def test_rejects_profiles_that_exceed_the_cluster(fields, nodes, message):
    profile = parse(IndexResources, fields)
    with pytest.raises(SpecError) as error:
        check_capacity(profile, nodes)
    assert str(error.value).startswith(message)
    check_capacity(parse(IndexResources, {**fields, "autoscaling": True}), nodes)


def test_accepts_profiles_that_fit():
    fields = {"encode": {"num_gpus": 0.5, "num_cpus": 2, "min_actors": 2, "max_actors": 64}}
    check_capacity(parse(IndexResources, fields), NODES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encode": {"initial_actors": 0}}, "encode.initial_actors must be greater than 0, got 0"),
        (
            {"encode": {"min_actors": 2, "max_actors": 4, "initial_actors": 5}},
            "encode.initial_actors must be from min_actors=2 to max_actors=4, got 5",
        ),
        ({"encode": {"max_in_flight": 0}}, "encode.max_in_flight must be greater than 0, got 0"),
        ({"encode": {"memory_bytes": -1}}, "encode.memory_bytes must be greater than 0, got -1"),
        ({"no_progress_seconds": 0}, "no_progress_seconds must be greater than 0, got 0"),
        ({"block_bytes": 0}, "block_bytes must be greater than 0, got 0"),
        ({"backpressure_ratio": "x"}, "backpressure_ratio must be"),
    ],
)
def test_rejects_invalid_values(fields, message):
    with pytest.raises(SpecError) as error:
        parse(IndexResources, fields)
    assert str(error.value).startswith(message)
