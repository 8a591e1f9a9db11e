"""Rate limiter that all gateways of a server share."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayError, TaskCancelledError
from ray.serve.exceptions import RayServeException

from pipeline.serve.calls import Handle, Method, cancellable
from pipeline.serve.rates import Buckets, Grant, LimiterUnavailable
from pipeline.serve.replica import bind_to_loopback

#: Time limit of a call, in seconds. Requests wait for it once when the rate limiter fails.
CALL_SECONDS = 0.5


class RateLimiter:
    """Deployment with the token buckets of all keys.

    It has one replica, which starts with full buckets.
    """

    def __init__(self, burst: int, num_gateways: int):
        bind_to_loopback()
        self._buckets = Buckets(burst, num_gateways)

    async def ping(self) -> None:
        """Responds to a check."""

    async def lease(self, name: str, rate: float, max_tokens: int, num_returned: int) -> Grant:
        """Takes tokens from a bucket, see `Buckets.take`."""
        return self._buckets.take(name, rate, max_tokens, num_returned)


class LimiterClient:
    """Calls the shared rate limiter from a gateway."""

    def __init__(self, handle: Handle):
        self._handle = handle

    async def lease(self, name: str, rate: float, max_tokens: int, num_returned: int) -> Grant:
        """Takes tokens from a bucket, see `Buckets.take`."""
        return await _call(self._handle.lease, name, rate, max_tokens, num_returned)

    async def ping(self) -> None:
        """Checks that the rate limiter responds."""
        await _call(self._handle.ping)


async def _call(method: Method, *arguments: Any) -> Any:
    try:
        async with asyncio.timeout(CALL_SECONDS):
            return await cancellable(method.remote(*arguments))
    except TaskCancelledError:  # Ray Serve has cancelled the calls of a disconnected client
        raise asyncio.CancelledError from None
    except (TimeoutError, RayError, RayServeException) as error:
        raise LimiterUnavailable(type(error).__name__) from error
