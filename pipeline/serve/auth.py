"""Authentication of requests by access keys, and rate limits."""

from __future__ import annotations

import logging
import os

from fastapi import Request

from pipeline.config import SpecError
from pipeline.serve.errors import ApiError, from_spec_error
from pipeline.serve.keys import ANONYMOUS, KEYS_VARIABLE, Key, Keys
from pipeline.serve.rates import Limiter, Rates
from pipeline.serve.settings import ServeSpec, is_loopback

log = logging.getLogger("ray.serve")

#: Headers that a proxy adds to the requests that it forwards.
FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class Auth:
    """Authenticates requests by their access keys and limits the rate of each key.

    Args:
        limiter: Rate limiter that the gateways share, or None if there is only one gateway.

    Attributes:
        has_keys: Whether requests require an access key.
    """

    def __init__(self, settings: ServeSpec, limiter: Limiter | None = None):
        self._keys = Keys(settings.keys) if settings.keys or KEYS_VARIABLE in os.environ else None
        limits, num_gateways = settings.limits, settings.gateway.max_num_replicas
        self._rates = Rates(limits.requests_per_second, limits.burst, limiter, num_gateways)
        self.has_keys = self._keys is not None

    def key(self, request: Request) -> Key:
        """Returns the access key of a request, which must be valid."""
        if self._keys is None:
            _check_local(request)
            return ANONYMOUS
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            message = "an access key is required: set the header Authorization: Bearer KEY"
            raise ApiError("unauthenticated", message)
        try:
            key = self._keys.find(secret.strip())
        except SpecError as error:
            log.error("access keys: %s", error)
            raise from_spec_error(error) from None
        if key is None:
            raise ApiError("unauthenticated", "the access key is unknown or has expired")
        return key

    async def limit(self, key: Key) -> None:
        """Counts a request towards the rate limit of a key."""
        if delay_s := await self._rates.acquire(key):
            message = f"the key {key.name} has sent too many requests"
            raise ApiError("rate_limited", message, retry_after=delay_s)


def _check_local(request: Request) -> None:
    """Rejects requests from or for other machines.

    The address of the sender is not sufficient: a proxy on this machine marks forwarded requests by
    headers, and a web page in a browser may use a foreign host name that resolves to this machine
    (DNS rebinding).
    """
    server = (request.scope.get("server") or ("",))[0]
    client = (request.scope.get("client") or ("",))[0]
    hosts = [server, client, request.url.hostname]
    is_forwarded = any(name in request.headers for name in FORWARDING_HEADERS)
    if is_forwarded or not all(map(is_loopback, hosts)):
        message = "this server has no access keys and only answers requests from its own machine"
        raise ApiError("forbidden", message)
