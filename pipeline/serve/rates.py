"""Rate limits of access keys.

Each key has a token bucket, from which a request takes a token. Several gateways share the buckets
of `pipeline.serve.limiter.RateLimiter` and lease several tokens with one call, so that most
requests do not wait for one. While the rate limiter does not respond, each gateway enforces its
share of the rate.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pipeline.serve.keys import Key

log = logging.getLogger("ray.serve")

#: Lifetime of a lease, in seconds. A gateway leases at most the tokens of this period. Afterwards,
#: those that it has not used return to the bucket with its next call. It is also the longest time
#: for which a gateway refuses requests without a call.
LEASE_SECONDS = 1.0
#: Interval of the checks whether an unavailable rate limiter responds again, in seconds.
CHECK_SECONDS = 1.0


class Grant(NamedTuple):
    """Tokens taken from a bucket.

    Attributes:
        delay_s: Delay until the bucket contains a token, in seconds; 0 if `num_tokens` is positive.
    """

    num_tokens: int
    delay_s: float


class LimiterUnavailable(Exception):
    """The shared rate limiter does not respond."""


class Limiter(Protocol):
    """Protocol of the shared rate limiter, as the gateways call it."""

    async def lease(self, name: str, rate: float, max_tokens: int, num_returned: int) -> Grant:
        """Takes tokens from a bucket, see `Buckets.take`, or raises `LimiterUnavailable`."""

    async def ping(self) -> None:
        """Checks that the rate limiter responds, or raises `LimiterUnavailable`."""


class Buckets:
    """Token buckets by name.

    Args:
        num_gateways: Number of gateways that take tokens. If there are several, a call takes at
            most half of the share of a gateway, so that the others find tokens too.
    """

    def __init__(
        self, burst: float, num_gateways: int = 1, clock: Callable[[], float] = time.monotonic
    ):
        self._burst, self._num_gateways, self._clock = float(burst), num_gateways, clock
        self._buckets: dict[str, tuple[float, float]] = {}  # level and time of the last update

    def take(self, name: str, rate: float, max_tokens: int = 1, num_returned: int = 0) -> Grant:
        """Takes tokens from a bucket: at least one if the bucket contains one.

        Args:
            num_returned: Number of unused tokens to put back before.

        >>> buckets = Buckets(burst=12, num_gateways=2, clock=lambda: 0.0)
        >>> [buckets.take("ann", rate=2, max_tokens=9).num_tokens for _ in range(8)]
        [3, 2, 1, 1, 1, 1, 1, 1]
        >>> [buckets.take("ann", rate=2, max_tokens=9).num_tokens for _ in range(2)]
        [1, 0]
        >>> buckets.take("ann", rate=2).delay_s
        0.5
        """
        now = self._clock()
        level, updated_at = self._buckets.get(name, (self._burst, now))
        level = min(level + (now - updated_at) * rate + num_returned, self._burst)
        share = int(level / (2 * self._num_gateways))
        num_tokens = max(1, min(max_tokens, share)) if level >= 1 else 0
        self._buckets[name] = (level - num_tokens, now)
        return Grant(num_tokens, 0.0 if num_tokens else (1 - level) / rate)


class Rates:
    """Rate limiter of a gateway.

    Args:
        default: Rate of keys without a rate limit of their own, in requests per second; None:
            unlimited.
        burst: Capacity of the bucket of a key, in requests.
        limiter: Shared rate limiter. If None, the buckets are in this gateway.
        num_gateways: Number of gateways. While the shared rate limiter is unavailable, the rate and
            the burst of each gateway are divided by it.
    """

    def __init__(
        self,
        default: float | None,
        burst: int,
        limiter: Limiter | None = None,
        num_gateways: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._default, self._limiter, self._clock = default, limiter, clock
        self._num_gateways = num_gateways
        self._local = Buckets(max(1.0, burst / num_gateways), clock=clock)
        self._leases: dict[str, _Lease] = {}
        self._recovery: asyncio.Task | None = None

    async def acquire(self, key: Key) -> float:
        """Takes a token. Returns 0 if the request is allowed, else the delay in seconds."""
        rate = key.requests_per_second or self._default
        if rate is None:
            return 0.0
        if self._limiter is not None and self._recovery is None:
            try:
                return await self._acquire_leased(self._limiter, key.name, rate)
            except LimiterUnavailable as error:
                self._fall_back(self._limiter, error)
        return self._local.take(key.name, rate / self._num_gateways).delay_s

    async def _acquire_leased(self, limiter: Limiter, name: str, rate: float) -> float:
        """Takes a token from the lease of a key, which is renewed if necessary."""
        lease = self._leases.setdefault(name, _Lease())
        lease.num_waiting += 1
        try:
            async with lease.lock:
                delay_s = lease.take(rate, self._clock())
                if delay_s is not None:
                    return delay_s
                if self._recovery is not None:  # a call has failed while this request waited
                    raise LimiterUnavailable
                max_tokens = max(int(rate * LEASE_SECONDS), lease.num_waiting)
                num_returned, lease.num_tokens = lease.num_tokens, 0
                grant = await limiter.lease(name, rate, max_tokens, num_returned)
                lease.renew(grant, rate, self._clock())
                return grant.delay_s
        finally:
            lease.num_waiting -= 1

    def _fall_back(self, limiter: Limiter, error: LimiterUnavailable) -> None:
        """Enforces the share of this gateway until the rate limiter responds again."""
        if self._recovery is not None:
            return
        log.warning(
            "the rate limiter is unavailable (%s); each gateway allows 1/%d of the rates",
            error,
            self._num_gateways,
            extra={"event": "limiter_unavailable"},
        )
        # In the context of the request, a disconnected client would cancel the calls of the task.
        context = contextvars.Context()
        self._recovery = asyncio.create_task(self._recover(limiter), context=context)

    async def _recover(self, limiter: Limiter) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                await limiter.ping()
            except LimiterUnavailable:
                continue
            log.info("the rate limiter is available", extra={"event": "limiter_available"})
            self._recovery = None
            return


class _Lease:
    """Tokens of a key that a gateway holds, or the refusal of its last call.

    Attributes:
        num_waiting: Number of requests that wait for the lock or for a call.
        lock: Held during a call, which serves all waiting requests of the key.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_waiting = 0
        self.lock = asyncio.Lock()
        self._rate = self._expires_at = self._allowed_at = 0.0

    def take(self, rate: float, now: float) -> float | None:
        """Takes a token. Returns 0, or the delay of a refusal, or None if a call is necessary."""
        if now >= self._expires_at or rate != self._rate:  # the file of the keys may have changed
            return None
        if self.num_tokens:
            self.num_tokens -= 1
            return 0.0
        return self._allowed_at - now if now < self._allowed_at else None

    def renew(self, grant: Grant, rate: float, now: float) -> None:
        self.num_tokens = max(grant.num_tokens - 1, 0)
        self._rate, self._allowed_at = rate, now + grant.delay_s
        self._expires_at = now + LEASE_SECONDS
