"""Execution of Ray Data's actor pools as tasks, which start no processes."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
from ray.data import ActorPoolStrategy, Dataset, TaskPoolStrategy


@functools.lru_cache(maxsize=2)
def _actor(pickled: bytes, pool: str) -> Callable[[Any], Any]:
    actor, arguments = cloudpickle.loads(pickled)
    return actor(**arguments)


def call_actor(block: Any, pickled: bytes, pool: str) -> Any:
    """Calls an actor on a block; a process constructs one actor for each pool."""
    return _actor(pickled, pool)(block)


def as_tasks(map_batches: Callable[..., Dataset]) -> Callable[..., Dataset]:
    """Returns a `Dataset.map_batches` that runs actor pools as tasks in idle processes.

    The processes of actors end with their pool. An index job starts at least two and imports its
    packages in each, which takes about 4 s of CPU time.
    """

    @functools.wraps(map_batches)
    def mapped(dataset: Dataset, function: Any, **options: Any) -> Dataset:
        pool = options.get("compute")
        if isinstance(pool, ActorPoolStrategy):
            arguments = options.pop("fn_constructor_kwargs", {})
            pickled = cloudpickle.dumps((function, arguments))
            options["fn_kwargs"] = {"pickled": pickled, "pool": uuid.uuid4().hex}
            options["compute"] = TaskPoolStrategy(size=pool.max_size)
            function = call_actor
        return map_batches(dataset, function, **options)

    return mapped


@contextlib.contextmanager
def actor_pools() -> Iterator[None]:
    """Runs actor pools as actors, as outside of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dataset, "map_batches", Dataset.map_batches.__wrapped__)
        yield
