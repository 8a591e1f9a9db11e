"""Outcomes of the stages: errors as results, and the log."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from pipeline.config import SpecError

log = logging.getLogger("ray.serve")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Failed:
    """An error as a stage returns it; a raised one Ray would log as a fault of the stage."""

    error: Exception


def result(outcome: T | Failed) -> T:
    """Returns the result of a stage, or raises its error."""
    if isinstance(outcome, Failed):
        raise outcome.error
    return outcome


def returns_errors(
    method: Callable[P, Awaitable[T]],
) -> Callable[P, Awaitable[T | Failed]]:
    """Decorates a method of a stage: invalid requests and timeouts are returned as `Failed`."""

    @functools.wraps(method)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | Failed:
        try:
            return await method(*args, **kwargs)
        except (SpecError, TimeoutError) as error:
            return Failed(error)

    return wrapped


@contextlib.contextmanager
def logged(stage: str, **details: Any) -> Iterator[None]:
    """Logs the time that a stage takes for a request; Ray adds the id of the request."""
    start = time.perf_counter()
    done = "failed"
    try:
        yield
        done = "ok"
    finally:
        milliseconds = round(1e3 * (time.perf_counter() - start), 1)
        entry = {"event": "stage", "stage": stage, "done": done, "milliseconds": milliseconds}
        log.info(json.dumps({**entry, **details}))
