"""Stages in the process of the gateway, with the interface of deployment handles."""

from __future__ import annotations

import asyncio
from typing import Any

from pipeline.serve.settings import Scale


class LocalHandle:
    """Handle of a stage in this process."""

    def __init__(self, stage: Any):
        self._stage = stage

    def __getattr__(self, method: str) -> LocalMethod:
        return LocalMethod(getattr(self._stage, method))

    def broadcast(self, method: str, *arguments: Any) -> LocalBroadcast:
        """Calls a method of the stage, as of all replicas of a deployment."""
        return LocalBroadcast(getattr(self, method).remote(*arguments))


class LocalMethod:
    """Method of a stage in this process."""

    def __init__(self, method: Any):
        self._method = method

    def remote(self, *arguments: Any) -> asyncio.Future:
        """Calls the method. The result can be awaited and cancelled."""
        return asyncio.ensure_future(self._method(*arguments))


class LocalBroadcast:
    """Result of a broadcast to one stage."""

    def __init__(self, response: asyncio.Future):
        self._response = response

    async def results_async(self, *, return_exceptions: bool = False) -> list[Any]:
        """Returns the result of the call, in a list."""
        results = await asyncio.gather(self._response, return_exceptions=return_exceptions)
        return list(results)


def run_locally(
    stage: type, name: str, scale: Scale, *arguments: Any, gang_size: int = 1
) -> LocalHandle:
    """Creates a stage in this process. See `pipeline.serve.deployments.Place`."""
    return LocalHandle(stage(*arguments))
