"""Authentication: the access key of a request, and how many requests it may send."""

from __future__ import annotations

import logging
import os

from fastapi import Request

from pipeline.config import SpecError
from pipeline.serve.errors import ApiError, of_spec_error
from pipeline.serve.keys import ANYBODY, VARIABLE, Key, Keys, Rates
from pipeline.serve.settings import ServeSpec, is_loopback

log = logging.getLogger("ray.serve")

#: Headers of requests that a proxy relays for somebody else.
RELAYED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class Auth:
    """Authenticates requests and limits their rate.

    Attributes:
        has_keys: Whether requests need an access key.
    """

    def __init__(self, settings: ServeSpec):
        self._keys = Keys(settings.keys) if settings.keys or VARIABLE in os.environ else None
        self._rates = Rates(settings.limits.requests_per_second, settings.limits.burst)
        self.has_keys = self._keys is not None

    def key(self, request: Request) -> Key:
        """Returns the access key of a request.

        Raises:
            ApiError: It has none that is valid.
        """
        if self._keys is None:
            _check_local(request)
            return ANYBODY
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise ApiError("unauthenticated", "an access key is needed: Authorization: Bearer KEY")
        try:
            key = self._keys.of(given.strip())
        except SpecError as error:
            log.error("access keys: %s", error)
            raise of_spec_error(error) from None
        if key is None:
            raise ApiError("unauthenticated", "the access key is unknown or has expired")
        return key

    def limit(self, key: Key) -> None:
        """Counts a request of a key.

        Raises:
            ApiError: It has sent too many.
        """
        if waits := self._rates.take(key):
            message = f"the key {key.name} has sent too many requests"
            raise ApiError("rate_limited", message, retry_after=waits)


def _check_local(request: Request) -> None:
    """Raises `ApiError` unless a request comes from this machine, for this machine.

    A proxy on this machine relays requests of others and names them in headers. A page in a browser
    on this machine may reach the server under a foreign name that resolves to it.
    """
    server = (request.scope.get("server") or ("",))[0]
    client = (request.scope.get("client") or ("",))[0]
    names = [server, client, request.url.hostname]
    is_relayed = any(name in request.headers for name in RELAYED)
    if is_relayed or not all(map(is_loopback, names)):
        message = "this server has no access keys and only answers requests from its own machine"
        raise ApiError("forbidden", message)
