"""Calls to the stages with deadlines. A call is retried once if the replica dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from pipeline.config import SpecError
from pipeline.serve.errors import ApiError, from_spec_error
from pipeline.serve.outcomes import unwrap
from pipeline.serve.scheduler import Caller, gather_or_cancel
from pipeline.serve.settings import ServedIndex

log = logging.getLogger("ray.serve")

#: Delay before the retry, in seconds.
RETRY_SECONDS = 0.2
#: Time limit of a readiness check of a stage, in seconds.
CHECK_SECONDS = 5.0


class Response(Protocol):
    """Protocol of the result of a call."""

    def __await__(self) -> Generator[Any, Any, Any]: ...

    def cancel(self) -> Any:
        """Cancels the call."""


class Broadcast(Protocol):
    """Protocol of the results of a call to all replicas."""

    async def results_async(self, *, return_exceptions: bool) -> list[Any]:
        """Returns the results, and exceptions instead of raising them if requested."""


class Method(Protocol):
    """Protocol of a method of a stage, as its handle exposes it."""

    def remote(self, *arguments: Any) -> Response:
        """Calls the method and returns a response that can be awaited."""


class Handle(Protocol):
    """Deployment handle or `LocalHandle` of a stage, whose attributes are its methods."""

    def __getattr__(self, method: str) -> Method: ...

    def broadcast(self, method: str, *arguments: Any) -> Broadcast:
        """Calls a method of all replicas."""


StageT = TypeVar("StageT")


@dataclass(frozen=True)
class Stages(Generic[StageT]):
    """Stages of the application.

    They are bound applications, which Ray replaces with handles. Before `with_shards`, an index
    with gangs has one deployment of all its `searchers`.
    """

    encoder: StageT
    searchers: Mapping[str, Sequence[StageT]]
    rerankers: Mapping[str, StageT]
    models: Mapping[str, StageT]
    library: StageT

    def with_shards(self: Stages[Handle], indexes: Mapping[str, ServedIndex]) -> Stages[Handle]:
        """Replaces the handle of the gangs of an index by a handle per shard."""
        searchers = dict(self.searchers)
        for name, served in indexes.items():
            if served.gang:
                gangs: Any = searchers[name][0]
                searchers[name] = [
                    gangs.options(session_id=str(shard)) for shard in range(served.num_shards)
                ]
        return replace(self, searchers=searchers)

    def by_name(self) -> list[tuple[str, StageT]]:
        """Returns the handles of all stages with their names."""
        handles = [("encode", self.encoder), ("library", self.library)]
        handles += [(f"models {name}", handle) for name, handle in self.models.items()]
        for name, shards in self.searchers.items():
            handles += [(f"search {name}", shard) for shard in shards]
            handles.append((f"rerank {name}", self.rerankers[name]))
        return handles


class StageClient:
    """Client of the stages.

    Args:
        count: Called with "retry" and the name of the stage before a retry.
    """

    def __init__(self, stages: Stages[Handle], count: Callable[[str, str], None]):
        self._stages, self._count = stages, count
        self._checking: asyncio.Task | None = None

    async def call(self, stage: str, caller: Caller, method: Method, *arguments: Any) -> Any:
        """Calls a method of a stage and returns its result. Retries once if the replica dies.

        Raises:
            ApiError: The request is invalid, or the stage is overloaded, unavailable or too slow.
        """
        end = time.monotonic() + caller.timeout_s
        for attempt in (1, 2):
            remaining = end - time.monotonic()
            try:
                async with asyncio.timeout(remaining):
                    response = method.remote(*arguments, caller._replace(timeout_s=remaining))
                    return unwrap(await cancellable(response))
            except BackPressureError:
                raise ApiError("unavailable", f"{stage} is overloaded") from None
            except RayTaskError:
                raise
            except TimeoutError as error:
                message = str(error) or f"{stage} took longer than {caller.timeout_s:g} s"
                raise ApiError("timeout", message) from None
            except SpecError as error:
                raise from_spec_error(error) from None
            except (RayError, DeploymentUnavailableError) as error:
                if attempt == 2:
                    message = f"{stage} is temporarily unavailable"
                    raise ApiError("unavailable", message) from error
                self._count("retry", stage)
                log.warning("stage is retried", extra={"event": "retry", "stage": stage})
                await asyncio.sleep(RETRY_SECONDS)
        raise AssertionError

    async def check(self) -> None:
        """Checks that all stages respond. Concurrent checks share one call per stage."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
        await asyncio.shield(self._checking)

    async def _check(self) -> None:
        caller = Caller("", CHECK_SECONDS)
        await gather_or_cancel(
            self.call(stage, caller, handle.ping) for stage, handle in self._stages.by_name()
        )


async def cancellable(response: Response) -> Any:
    """Awaits a response. If the awaiting task is cancelled, so is the call to the stage."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
