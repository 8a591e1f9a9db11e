"""Pools of actors that keep their encoder."""

from __future__ import annotations

import pytest

from examples.papers.tables.encoder_pool import EncoderPool, max_pools, pool_size
from pipeline.config import SpecError
from pipeline.encoders import shared
from pipeline.encoders.shared import load_encoder
from pipeline.index.spec import IndexResources
from pipeline.index.stage import Resources
from pipeline.registry import ENCODERS

GPUS = IndexResources(
    read=Resources(max_actors=64),
    prepare=Resources(min_actors=2, max_actors=48),
    encode=Resources(num_cpus=2, num_gpus=1, max_actors=8),
    write=Resources(max_actors=8),
)


@pytest.mark.parametrize(
    ("cpus", "gpus", "share", "expected"),
    [(64, 8, 1, 8), (64, 8, 4, 2), (64, 1, 1, 1), (16, 8, 1, 6), (8, 0, 1, 1), (64, 16, 1, 8)],
)
def test_actors_leave_resources_to_the_other_pools(cpus, gpus, share, expected):
    assert pool_size(GPUS, {"CPU": cpus, "GPU": gpus}, share) == expected


@pytest.mark.parametrize(
    ("cpus", "gpus", "expected"), [(64, 8, 8), (64, 16, 10), (12, 8, 2), (4, 8, 0)]
)
def test_each_pool_has_the_other_pools_of_a_job(cpus, gpus, expected):
    assert max_pools(GPUS, {"CPU": cpus, "GPU": gpus}) == expected


def describe(layer: int) -> int:
    """Returns the identity of an encoder in the process of the caller."""
    return id(load_encoder(ENCODERS.resolve({"name": "minilm", "layer": layer})))


def fail() -> None:
    """Raises an error of a job."""
    raise SpecError("index", "x", "an index")


def test_actors_keep_encoders_until_they_are_released(cluster):
    profile = IndexResources(encode=Resources(num_cpus=0.5))
    pool = EncoderPool(profile)

    def call(function, *arguments):
        return pool.submit(profile.encode, function, *arguments).result()

    try:
        first = call(describe, -1)
        assert call(describe, -1) == first != call(describe, -2)
        with pytest.raises(SpecError, match="index must be an index, got 'x'"):
            call(fail)
        actors = pool.actors
        assert pool.actors is actors and len(actors) == 1
    finally:
        pool.release()
    assert pool.actors[0] != actors[0]
    pool.release()


@pytest.mark.heavy
def test_large_models_are_not_kept(cluster):
    profile = IndexResources(encode=Resources(num_cpus=0.5), device_map="auto")
    pool = EncoderPool(profile)
    try:
        numbers = [pool.submit(profile.encode, count).result() for _ in range(2)]
    finally:
        pool.release()
    assert numbers == [0, 0]


def count() -> int:
    """Returns the number of encoders of this process, and loads one."""
    number = len(shared._SHARED.get() or {})
    load_encoder(ENCODERS.resolve("minilm"))
    return number
