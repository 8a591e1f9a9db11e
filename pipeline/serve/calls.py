"""Calls of the stages: deadlines, and a second attempt where a replica died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentResponse

from pipeline.config import SpecError
from pipeline.serve.errors import ApiError, of_spec_error
from pipeline.serve.outcomes import result
from pipeline.serve.turns import Caller, all_of

#: Seconds before the second attempt.
RETRY_SECONDS = 0.2
#: Maximum seconds in which a stage answers a check.
CHECK_SECONDS = 5.0


class Method(Protocol):
    """A method of a stage, as a handle of Ray calls it."""

    def remote(self, *arguments: Any) -> DeploymentResponse:
        """Calls the method; the response is awaited."""


class Handle(Protocol):
    """A handle of Ray to a deployment, whose attributes are the methods of the stage."""

    def __getattr__(self, method: str) -> Method: ...


StageT = TypeVar("StageT")


@dataclass(frozen=True)
class Stages(Generic[StageT]):
    """The stages: applications, which Ray replaces with handles when it deploys them.

    Attributes:
        encoder: The query encoder.
        searchers: The shards of each index, in order.
        rerankers: The reranker of each index.
        edjes: The joint encoder of each index that is served with an EDJE.
        library: The stage that reads items and previews.
    """

    encoder: StageT
    searchers: Mapping[str, Sequence[StageT]]
    rerankers: Mapping[str, StageT]
    edjes: Mapping[str, StageT]
    library: StageT

    def by_name(self) -> list[tuple[str, StageT]]:
        """Returns all handles with the names of their stages."""
        handles = [("encode", self.encoder), ("library", self.library)]
        handles += [(f"edje {name}", handle) for name, handle in self.edjes.items()]
        for name, shards in self.searchers.items():
            handles += [(f"search {name}", shard) for shard in shards]
            handles.append((f"rerank {name}", self.rerankers[name]))
        return handles


class Calls:
    """Calls stages on behalf of a caller.

    Args:
        count: Called with "retry" and the stage before a second attempt.
    """

    def __init__(self, stages: Stages[Handle], count: Callable[[str, str], None]):
        self._stages, self._count = stages, count
        self._checking: asyncio.Task | None = None

    async def ask(self, stage: str, caller: Caller, method: Method, *arguments: Any) -> Any:
        """Returns the result of a stage; a stage whose replica died is asked once more.

        Args:
            stage: Name of the stage in errors and metrics.
            caller: The access key, and the time limit in seconds.
            method: Method of the handle of the stage.
            arguments: Its arguments; the caller with the remaining seconds is added to them.

        Raises:
            ApiError: The request is invalid, or the stage is overloaded, gone or too slow.
        """
        end = time.monotonic() + caller.seconds
        for attempt in (1, 2):
            left = end - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    call = method.remote(*arguments, caller._replace(seconds=left))
                    return result(await _cancellable(call))
            except BackPressureError:
                raise ApiError("unavailable", f"{stage} has too much to do") from None
            except RayTaskError:
                raise
            except TimeoutError as error:
                message = str(error) or f"{stage} took longer than {caller.seconds:g} s"
                raise ApiError("timeout", message) from None
            except SpecError as error:
                raise of_spec_error(error) from None
            except (RayError, DeploymentUnavailableError) as error:
                if attempt == 2:
                    message = f"{stage} is unavailable at the moment"
                    raise ApiError("unavailable", message) from error
                self._count("retry", stage)
                await asyncio.sleep(RETRY_SECONDS)
        raise AssertionError

    async def check(self) -> None:
        """Asks every stage whether it runs, once for all who ask at the same time.

        Raises:
            ApiError: A stage does not answer.
        """
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
        await asyncio.shield(self._checking)

    async def _check(self) -> None:
        caller = Caller("", CHECK_SECONDS)
        await all_of(
            self.ask(stage, caller, handle.is_there) for stage, handle in self._stages.by_name()
        )


async def _cancellable(response: DeploymentResponse) -> Any:
    """Returns the outcome of a stage, whose work is cancelled with the caller."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
