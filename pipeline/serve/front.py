"""Middleware of Ray Serve's HTTP proxy: limits on connections and headers, and error responses.

Ray Serve's proxy owns the sockets. It does not time out incomplete headers, accepts any number of
connections, and sends plain text (or nothing) when a gateway dies. `middlewares` adds the missing
limits and error responses. Ray calls it when a proxy starts if the environment variable
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it. `maxray serve` sets this variable. On a
cluster, set it on every node before `ray start`:

    export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=pipeline.serve.front:middlewares
    export MAXRAY_HEADER_SECONDS=10      # time limit for the headers of a request
    export MAXRAY_HEADER_BYTES=65536     # maximum size of the headers of a request
    export MAXRAY_CONNECTIONS=1000       # maximum number of open connections per proxy

The limits are environment variables rather than settings of a server because a proxy serves all
applications of its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import uuid
from collections import OrderedDict
from http import HTTPStatus
from typing import ClassVar

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.serve.errors import ApiError

#: Pattern of valid request ids. A request with an invalid id or several ids is assigned a new one.
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
#: Number of recent request ids that a proxy remembers to keep ids unique.
RECENT_IDS = 10_000
#: Request headers that control Ray's proxy: they override its timeouts, or keep a request running
#: after its client has disconnected. Clients must not set them.
REMOVED_HEADERS = frozenset(
    {b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"serve_multiplexed_model_id"}
)


def middlewares() -> list[Middleware]:
    """Configures the proxy process and returns the middleware that Ray adds to its proxy."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedProtocol.__name__}"
    return [Middleware(Front)]


class LimitedProtocol(HttpToolsProtocol):
    """Connection of uvicorn with limits on the headers and on the number of connections.

    Uvicorn provides neither. The size is checked after each read from the socket (256 KiB), so it
    may be exceeded by one read. If there are too many connections, the one that has waited longest
    without a request in progress is closed.
    """

    header_seconds = float(os.environ.get("MAXRAY_HEADER_SECONDS", 10))
    header_bytes = int(os.environ.get("MAXRAY_HEADER_BYTES", 1 << 16))
    max_connections = int(os.environ.get("MAXRAY_CONNECTIONS", 1000))
    #: Connections of this process without a request in progress, longest wait first.
    _waiting: ClassVar[OrderedDict[LimitedProtocol, None]] = OrderedDict()
    _deadline: asyncio.TimerHandle | None = None
    _is_in_headers = False
    _num_header_bytes = 0

    def connection_made(  # type: ignore[override]  # narrowed by uvicorn in the same way
        self, transport: asyncio.Transport
    ) -> None:
        """Registers the connection. Above the limit, closes the one that has waited longest."""
        super().connection_made(transport)
        self._waiting[self] = None
        self._start_deadline()
        if len(self.connections) > self.max_connections:
            oldest = next(iter(self._waiting))
            oldest.reject(ApiError("unavailable", "the server has too many connections"))

    def data_received(self, data: bytes) -> None:
        """Starts the time limit when the headers begin and stops it when they end."""
        cycle, was_in_headers = self.cycle, self._is_in_headers
        if self._deadline is None and (cycle is None or cycle.response_complete):
            self._start_deadline()
        super().data_received(data)
        if self._is_in_headers:
            # Part of the first read may belong to the previous request.
            self._num_header_bytes += len(data) if was_in_headers else 1
            if self._num_header_bytes > self.header_bytes:
                message = f"the headers are larger than {self.header_bytes:,} bytes"
                self.reject(ApiError("too_large", message))
        if self.cycle is not cycle:
            self._stop_deadline()
            self._waiting.pop(self, None)

    def on_message_begin(self) -> None:
        """Records that the headers of a request have begun. The request may be pipelined."""
        self._is_in_headers, self._num_header_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Records that the headers of a request have been received completely."""
        self._is_in_headers = False
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Marks the connection as waiting, unless the next request has already been pipelined."""
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            self._waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection."""
        self._stop_deadline()
        self._waiting.pop(self, None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers a request that is not valid HTTP with a JSON error."""
        self.reject(ApiError("bad_request", msg.removesuffix(".").lower()))

    def reject(self, error: ApiError) -> None:
        """Sends an error and closes the connection."""
        self._waiting.pop(self, None)
        if self.transport.is_closing():
            return
        status = HTTPStatus(error.status)
        body, headers = _error_content(error, None)
        lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
        lines += [name + b": " + value for name, value in headers]
        lines += [b"connection: close", b"", body]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.header_seconds, self._time_out)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _time_out(self) -> None:
        message = f"the headers took longer than {self.header_seconds:g} s to arrive"
        self.reject(ApiError("bad_request", message))


class Front:
    """Middleware that assigns request ids and converts errors of Ray's proxy to JSON errors."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._recent: OrderedDict[str, None] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._request_id(scope)
        headers = [(name, value) for name, value in scope["headers"] if name not in REMOVED_HEADERS]
        headers = [header for header in headers if header[0] != b"x-request-id"]
        scope = {**scope, "headers": [*headers, (b"x-request-id", request_id.encode())]}
        has_started = False
        error = _RESTARTING  # Ray sends no response if the gateway dies during the request

        async def send_unless_error(message: Message) -> None:
            nonlocal has_started, error
            if message["type"] == "http.response.start":
                proxy_error = _proxy_error(message)
                has_started, error = proxy_error is None, proxy_error or error
            if has_started:
                await send(message)

        with contextlib.suppress(Exception):  # an error of the proxy
            await self._app(scope, receive, send_unless_error)
        if has_started:
            return
        if error.code == "not_found" and not await self._has_routes(scope, receive):
            error = _RESTARTING
        await _send(error, request_id, send)

    async def _has_routes(self, scope: Scope, receive: Receive) -> bool:
        """Checks whether the proxy has received its routes. It starts without them."""
        statuses = []

        async def record_status(message: Message) -> None:
            statuses.append(message.get("status"))

        await self._app({**scope, "path": "/-/routes"}, receive, record_status)
        return 200 in statuses

    def _request_id(self, scope: Scope) -> str:
        """Returns the client's id of the request if it is valid and new, else a new id."""
        values = [value for name, value in scope["headers"] if name == b"x-request-id"]
        request_id = values[0].decode("latin-1") if len(values) == 1 else ""
        if not REQUEST_ID.fullmatch(request_id):
            request_id = str(uuid.uuid4())
        elif request_id in self._recent:
            request_id = f"{request_id[:95]}.{uuid.uuid4().hex}"
        self._recent[request_id] = None
        if len(self._recent) > RECENT_IDS:
            self._recent.popitem(last=False)
        return request_id


_RESTARTING = ApiError("unavailable", "the server is restarting")


def _proxy_error(start: Message) -> ApiError | None:
    """Returns the error if Ray's proxy failed a request, or None if a gateway has answered it."""
    status = start["status"]
    types = [value for name, value in start.get("headers", ()) if name.lower() == b"content-type"]
    if status < 400 or types[:1] == [b"application/json"]:
        return None
    if status == HTTPStatus.NOT_FOUND:
        return ApiError("not_found", "no application is served at this path")
    if status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.GATEWAY_TIMEOUT):
        return ApiError("timeout", "the request took too long")
    if status >= 500 or status == HTTPStatus.TOO_MANY_REQUESTS:
        return _RESTARTING if status == 500 else ApiError("unavailable", "the server is overloaded")
    return ApiError("bad_request", HTTPStatus(status).phrase.lower())


def _error_content(
    error: ApiError, request_id: str | None
) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    body = error.response(request_id).model_dump_json().encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    headers |= error.headers()
    if request_id:
        headers["X-Request-ID"] = request_id
    return body, [(name.lower().encode(), value.encode()) for name, value in headers.items()]


async def _send(error: ApiError, request_id: str, send: Send) -> None:
    body, headers = _error_content(error, request_id)
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
