"""Results of stages, in which errors are returned as values, and the log of the stages."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from pipeline.config import SpecError
from pipeline.runtime.tracing import span

log = logging.getLogger("ray.serve")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """Error that a stage returns, because Ray would log a raised one with its traceback."""

    error: Exception


def unwrap(outcome: T | Failure) -> T:
    """Returns the result of a stage. If the stage returned an error, raises it."""
    if isinstance(outcome, Failure):
        raise outcome.error
    return outcome


def returns_errors(
    method: Callable[P, Awaitable[T]],
) -> Callable[P, Awaitable[T | Failure]]:
    """Decorates a method of a stage to return `SpecError` and `TimeoutError` as a `Failure`."""

    @functools.wraps(method)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | Failure:
        try:
            return await method(*args, **kwargs)
        except (SpecError, TimeoutError) as error:
            return Failure(error)

    return wrapped


@contextlib.contextmanager
def logged(stage: str, **details: Any) -> Iterator[None]:
    """Logs and traces how long a stage took for a request. Ray adds the request id to both."""
    start = time.perf_counter()
    done = "failed"
    try:
        with span(stage, **details):
            yield
        done = "ok"
    finally:
        milliseconds = round(1e3 * (time.perf_counter() - start), 1)
        fields = {"event": "stage", "stage": stage, "done": done, "milliseconds": milliseconds}
        log.info("stage called", extra={**fields, **details})
