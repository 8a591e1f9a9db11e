"""Executor on Ray that keeps encoders loaded for several index jobs and evaluations.

An index job loads its encoder to describe it, to fit representations and in each of its actors, and
an evaluation loads it to encode queries. Here, all of these run in actors that outlive the job.
"""

from __future__ import annotations

import functools
import gc
import random
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import ray
import ray.data
from ray import cloudpickle

from pipeline.encoders.shared import Encoders, shared_encoders
from pipeline.index.ray_data import OnRay
from pipeline.index.spec import IndexResources
from pipeline.index.stage import Resources
from pipeline.runtime.waiting import call_in_thread

#: Concurrent calls of an actor. While one runs, the arguments of the next ones are fetched.
MAX_CALLS = 4


class EncoderActor:
    """Actor that keeps its encoders. It runs one call at a time.

    Args:
        keeps: Whether encoders are kept from one function or stage to the next one.
    """

    def __init__(self, num_threads: int, keeps: bool):
        import torch

        torch.set_num_threads(num_threads)
        self._keeps = keeps
        self._encoders: Encoders = {}
        self._lock = threading.Lock()
        self._stages = ""
        self._function: Any = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function."""
        with self._lock, shared_encoders(self._encoders):
            self._clear()
            try:
                return function(*arguments)
            finally:
                gc.collect()

    def map(self, batch: Any, pickled: bytes, stages: str, waits: bool) -> Any:
        """Constructs the pickled object once per `stages` and calls it on a batch.

        Returns None if the actor is busy, unless it waits.
        """
        if not self._lock.acquire(blocking=waits):
            return None
        try:
            with shared_encoders(self._encoders):
                if self._function is None or self._stages != stages:
                    self._clear()
                    function_class, arguments = cloudpickle.loads(pickled)
                    self._function, self._stages = function_class(**arguments), stages
                return self._function(batch)
        finally:
            self._lock.release()

    def _clear(self) -> None:
        self._function = None
        if not self._keeps:
            self._encoders.clear()


class EncoderPool(OnRay):
    """Executor with actors for the functions and stages with the resources `encode` of a profile.

    The actors start on first use. With `device_map`, they keep no encoder.

    Args:
        profile: Profile of the index jobs.
        num_pools: Number of pools among which the cluster is divided.
    """

    def __init__(self, profile: IndexResources, num_pools: int = 1):
        self._profile, self._num_pools = profile, num_pools
        self._actors: list[Any] = []

    @property
    def actors(self) -> Sequence[Any]:
        """Handles of the actors."""
        if not self._actors:
            encode = self._profile.encode
            options = {**encode.task_options, "max_concurrency": MAX_CALLS}
            options |= {"max_restarts": -1, "max_task_retries": -1}
            start = ray.remote(EncoderActor).options(**options).remote
            size = pool_size(self._profile, ray.cluster_resources(), self._num_pools)
            keeps = self._profile.device_map is None
            self._actors = [start(encode.num_threads, keeps) for _ in range(size)]
        return self._actors

    def release(self) -> None:
        """Ends the actors. The next use starts others."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def submit(
        self, pool: Resources, function: Callable[..., Any], *arguments: Any
    ) -> futures.Future[Any]:
        """Starts a function in the first actor, or in a Ray task with other resources."""
        if pool is not self._profile.encode:
            return super().submit(pool, function, *arguments)
        return call_in_thread(_get, self.actors[0].call.remote(function, *arguments))

    def map_batches(
        self,
        dataset: ray.data.Dataset,
        function_class: type[Any],
        arguments: Mapping[str, Any],
        pool: Resources,
        **options: Any,
    ) -> ray.data.Dataset:
        """Maps the batches of a dataset with an object that each actor constructs."""
        if pool is not self._profile.encode:
            return super().map_batches(dataset, function_class, arguments, pool, **options)
        pickled = ray.put(cloudpickle.dumps((function_class, dict(arguments))))
        call = functools.partial(_map, actors=self.actors, pickled=pickled, stages=uuid.uuid4().hex)
        # Tasks reserve nothing, as they wait for the actors, which have the next batch in advance.
        compute = ray.data.TaskPoolStrategy(size=2 * len(self.actors))
        warnings.filterwarnings("ignore", "The maximum number of concurrent tasks", UserWarning)
        return dataset.map_batches(call, compute=compute, num_cpus=0, **options)


def pool_size(profile: IndexResources, available: Mapping[str, float], num_pools: int = 1) -> int:
    """Returns the number of actors: as many of the profile's as fit beside its other pools."""
    encode, pools = profile.encode, profile.pools.values()
    size = float(encode.max_actors)
    for field, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        if needed := getattr(encode, field):
            others = sum(getattr(p, field) * p.min_actors for p in pools if p is not encode)
            size = min(size, (available.get(resource, 0) / num_pools - others) / needed)
    return max(int(size), encode.min_actors)


def max_pools(profile: IndexResources, available: Mapping[str, float]) -> int:
    """Returns the number of jobs for whose actors a cluster has resources at the same time."""
    numbers = [available.get("CPU", 0)]
    for field, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        if needed := sum(getattr(p, field) * p.min_actors for p in profile.pools.values()):
            numbers.append(available.get(resource, 0) / needed)
    return int(min(numbers))


def _map(batch: Any, actors: Sequence[Any], pickled: Any, stages: str) -> Any:
    """Calls an actor that is idle, or else waits for a random one."""
    stored = ray.put(batch)
    for actor in random.sample(actors, len(actors)):
        if (result := _get(actor.map.remote(stored, pickled, stages, False))) is not None:
            return result
    return _get(random.choice(actors).map.remote(stored, pickled, stages, True))


def _get(reference: Any) -> Any:
    """Returns the result of a call, or raises its error, whose message has no traceback."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
