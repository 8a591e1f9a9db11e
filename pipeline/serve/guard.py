"""What holds for every request: authentication, limits of bodies and requests, and the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.serve.errors import ApiError, error_response
from pipeline.serve.front import REQUEST_ID
from pipeline.serve.gateway import Gateway
from pipeline.serve.keys import Key
from pipeline.serve.settings import ServeSpec
from pipeline.serve.turns import Shares

log = logging.getLogger("ray.serve")


class Guard:
    """Middleware that authenticates requests, limits their size and number, and logs them.

    Queries are not logged.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gateway: Gateway = scope["app"].state.gateway
        headers = {name: value for name, value in scope["headers"]}
        # The front gives each request its id, which Ray's proxy sends back.
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not REQUEST_ID.fullmatch(request_id):  # without the front
            request_id = str(uuid.uuid4())
        scope["maxray_request_id"] = request_id
        start, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admit(scope, receive, sending, headers, gateway)
        except ApiError as error:
            await error_response(Request(scope), error)(scope, receive, sending)
        if not scope["path"].endswith(("/healthz", "/readyz", "/metrics")):
            _record(gateway, scope, status, time.perf_counter() - start)

    async def _admit(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
        gateway: Gateway,
    ) -> None:
        """Reads the body of an authenticated request and passes it on.

        Raises:
            ApiError: The request is refused.
        """
        if "/v1/" not in scope["path"]:  # small, without a body and without a key
            await self._app(scope, receive, send)
            return
        gateway.check_running()
        key = gateway.auth.key(Request(scope))
        scope.setdefault("state", {})["key"] = key
        with _place(gateway.bodies, key, "whose body has not arrived"):
            body = await _read_body(receive, headers, gateway.settings)
        if body is None:  # the client has gone
            return
        is_given = False

        async def receiving() -> Message:
            nonlocal is_given
            if is_given:
                return await receive()
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}

        with _place(gateway.in_flight, key, "in progress"):
            gateway.metrics.in_flight(gateway.in_flight.taken)
            try:
                await self._app(scope, receiving, send)
            finally:
                gateway.metrics.in_flight(gateway.in_flight.taken - 1)


@contextlib.contextmanager
def _place(places: Shares, key: Key, what: str) -> Iterator[None]:
    """Holds one of the places that keys share.

    Raises:
        ApiError: There is none for this key at the moment.
    """
    if not places.take(key.name):
        holder = "the server" if places.taken >= places.number else f"the key {key.name}"
        raise ApiError("unavailable", f"{holder} has too many requests {what}")
    try:
        yield
    finally:
        places.give_back(key.name)


async def _read_body(
    receive: Receive, headers: Mapping[bytes, bytes], settings: ServeSpec
) -> bytes | None:
    """Returns the body of a request; None if the client has disconnected.

    Raises:
        ApiError: It is too large, which is reported before all of it has arrived, or too slow.
    """
    most, seconds = settings.limits.max_body_bytes, settings.timeouts.body_s
    too_large = ApiError("too_large", f"the body is larger than {most:,} bytes")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > most:
        raise too_large
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError("bad_request", f"the body took longer than {seconds:g} s to come") from None
    return bytes(body)


def _record(gateway: Gateway, scope: Scope, status: int, seconds: float) -> None:
    """Counts and logs an answered request."""
    route = getattr(scope.get("route"), "path", "none")
    key: Key | None = scope.get("state", {}).get("key")
    status = status or 499  # the client did not wait for the answer
    label = key.label if key else ""
    gateway.metrics.request(route, scope["method"], status, label, seconds)
    entry = {
        "event": "request",
        "request_id": scope["maxray_request_id"],
        "key": key.name if key else "",
        "method": scope["method"],
        "route": route,
        "status": status,
        "milliseconds": round(1e3 * seconds, 1),
        **scope.get("state", {}).get("about", {}),
    }
    log.info(json.dumps(entry))
