"""Middleware for authentication, limits on bodies and requests, and the request log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Iterator, Mapping

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.serve.errors import ApiError, error_response
from pipeline.serve.forms import FORM, search_body
from pipeline.serve.front import REQUEST_ID
from pipeline.serve.gateway import Gateway
from pipeline.serve.keys import Key
from pipeline.serve.scheduler import FairSlots
from pipeline.serve.settings import ServeSpec

log = logging.getLogger("ray.serve")


class Guard:
    """Authenticates requests, limits their size and number, and logs them without queries."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gateway: Gateway = scope["app"].state.gateway
        headers = {name: value for name, value in scope["headers"]}
        # `Front` assigns the id of a request, and Ray's proxy adds it to the response.
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not REQUEST_ID.fullmatch(request_id):  # the proxy runs without `Front`
            request_id = str(uuid.uuid4())
        scope["maxray_request_id"] = request_id
        start, status = time.perf_counter(), 0

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admit(scope, receive, send_and_record, headers, gateway)
        except ApiError as error:
            await error_response(Request(scope), error)(scope, receive, send_and_record)
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
        if "/v1/" not in scope["path"]:  # operational routes have no body and need no key
            await self._app(scope, receive, send)
            return
        gateway.check_running()
        key = gateway.auth.key(Request(scope))
        scope.setdefault("state", {})["key"] = key
        with _slot(gateway.bodies, key, "with incomplete bodies"):
            body = await _read_body(receive, headers, gateway.settings)
        if body is None:  # the client has disconnected
            return
        content_type = headers.get(b"content-type", b"").decode("latin-1")
        if content_type.startswith(FORM) and scope["path"].endswith("/v1/search"):
            body = search_body(content_type, body)
            others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
            scope["headers"] = [*others, (b"content-type", b"application/json")]
        is_body_sent = False

        async def receive_body() -> Message:
            nonlocal is_body_sent
            if is_body_sent:
                return await receive()
            is_body_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        with _slot(gateway.in_flight, key, "in progress"):
            gateway.metrics.in_flight(gateway.in_flight.num_acquired)
            try:
                await self._app(scope, receive_body, send)
            finally:
                gateway.metrics.in_flight(gateway.in_flight.num_acquired - 1)


@contextlib.contextmanager
def _slot(slots: FairSlots, key: Key, state: str) -> Iterator[None]:
    """Holds a slot of an access key. `state` describes the holders in the error message."""
    if not slots.acquire(key.name):
        holder = "the server" if slots.num_acquired >= slots.capacity else f"the key {key.name}"
        raise ApiError("unavailable", f"{holder} has too many requests {state}")
    try:
        yield
    finally:
        slots.release(key.name)


async def _read_body(
    receive: Receive, headers: Mapping[bytes, bytes], settings: ServeSpec
) -> bytes | None:
    """Reads a body, or returns None if the client has disconnected.

    A body that is compressed or too large is rejected before all of it has arrived.
    """
    encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip()
    if encoding.lower() not in ("", "identity"):
        problem = f"the body must not be compressed, got Content-Encoding {encoding[:80]!r}"
        raise ApiError("unsupported_media_type", problem, "Content-Encoding")
    max_bytes, timeout_s = settings.limits.max_body_bytes, settings.timeouts.body_s
    too_large = ApiError("too_large", f"the body is larger than {max_bytes:,} bytes")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(timeout_s):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        error = ApiError("bad_request", f"the body took longer than {timeout_s:g} s to arrive")
        raise error from None
    return bytes(body)


def _record(gateway: Gateway, scope: Scope, status: int, seconds: float) -> None:
    route = getattr(scope.get("route"), "path", "none")
    key: Key | None = scope.get("state", {}).get("key")
    status = status or 499  # the client has disconnected
    label = key.label if key else ""
    gateway.metrics.request(route, scope["method"], status, label, seconds)
    fields = {
        "event": "request",
        "request_id": scope["maxray_request_id"],
        "key": key.name if key else "",
        "method": scope["method"],
        "route": route,
        "status": status,
        "milliseconds": round(1e3 * seconds, 1),
        **scope.get("state", {}).get("log_fields", {}),
    }
    log.info("request answered", extra=fields)
