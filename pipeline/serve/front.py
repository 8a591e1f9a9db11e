"""The HTTP front: what every connection and request meets in Ray's proxy, before any gateway.

Ray Serve's proxy owns the sockets. It closes no connection whose headers stay incomplete, takes any
number of connections, and answers in plain text (or not at all) when a gateway dies. Ray calls the
function that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names when a proxy starts; `middlewares`
adds there what is missing. `python -m jobs.serve` sets the variable. On a cluster, set it on every
node before `ray start`:

    export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=pipeline.serve.front:middlewares
    export MAXRAY_HEADER_SECONDS=10      # time for the headers of a request
    export MAXRAY_HEADER_BYTES=65536     # size of the headers of a request
    export MAXRAY_CONNECTIONS=1000       # open connections per proxy

The limits are variables, not settings of a server: a proxy serves all applications of its node.
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

#: Valid ids of requests; a request with another one, or with several, gets a new id.
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
#: Recent request ids per proxy: an id that is among them is not given to a second request.
RECENT_IDS = 10_000
#: Headers that steer Ray's proxy (they lift its timeouts, or keep a request alive whose client is
#: gone), not for clients.
REMOVED = frozenset(
    {b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"serve_multiplexed_model_id"}
)


def middlewares() -> list[Middleware]:
    """Sets up a proxy process, and returns the middlewares that Ray is to put before the proxy."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedProtocol.__name__}"
    return [Middleware(Front)]


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP connection with limits on headers and on the number of connections.

    The headers of a request have a deadline and a maximum size; uvicorn limits neither. The size is
    checked after each read of the socket (256 KiB), so that much more may be accepted.

    Connections without a request in progress (new, idle, or with incomplete headers) never lock
    out others: where there are too many connections, the one that has waited longest is closed.
    """

    header_seconds = float(os.environ.get("MAXRAY_HEADER_SECONDS", 10))
    header_bytes = int(os.environ.get("MAXRAY_HEADER_BYTES", 1 << 16))
    max_connections = int(os.environ.get("MAXRAY_CONNECTIONS", 1000))
    #: The connections of this process without a request in progress, longest wait first.
    _waiting: ClassVar[OrderedDict[LimitedProtocol, None]] = OrderedDict()
    _deadline: asyncio.TimerHandle | None = None
    _is_in_headers = False
    _num_header_bytes = 0

    def connection_made(  # type: ignore[override]  # narrowed by uvicorn in the same way
        self, transport: asyncio.Transport
    ) -> None:
        """Counts the connection, and closes one if there are too many."""
        super().connection_made(transport)
        self._waiting[self] = None
        self._start_deadline()
        if len(self.connections) > self.max_connections:
            oldest = next(iter(self._waiting))
            oldest.refuse(ApiError("unavailable", "the server has too many connections"))

    def data_received(self, data: bytes) -> None:
        """Ends the deadline when the headers are complete; the first byte of others starts it."""
        cycle, was_in_headers = self.cycle, self._is_in_headers
        if self._deadline is None and (cycle is None or cycle.response_complete):
            self._start_deadline()
        super().data_received(data)
        if self._is_in_headers:
            # Of the first read, a part may belong to the request before.
            self._num_header_bytes += len(data) if was_in_headers else 1
            if self._num_header_bytes > self.header_bytes:
                message = f"the headers are larger than {self.header_bytes:,} bytes"
                self.refuse(ApiError("too_large", message))
        if self.cycle is not cycle:
            self._end_deadline()
            self._waiting.pop(self, None)

    def on_message_begin(self) -> None:
        """Notes that the headers of a request begin, also of one behind another in progress."""
        self._is_in_headers, self._num_header_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Notes that the headers of a request are complete."""
        self._is_in_headers = False
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Counts the connection among those without a request, unless the next one is there."""
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            self._waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._end_deadline()
        self._waiting.pop(self, None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers malformed HTTP with an error in the form of all others."""
        self.refuse(ApiError("bad_request", msg.removesuffix(".").lower()))

    def refuse(self, error: ApiError) -> None:
        """Sends an error and closes the connection."""
        self._waiting.pop(self, None)
        if self.transport.is_closing():
            return
        status = HTTPStatus(error.status)
        body, headers = _answer(error, None)
        lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
        lines += [name + b": " + value for name, value in headers]
        lines += [b"connection: close", b"", body]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.header_seconds, self._too_late)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        message = f"the headers took longer than {self.header_seconds:g} s to arrive"
        self.refuse(ApiError("bad_request", message))


class Front:
    """Gives each request one id, and puts the errors of Ray's proxy into the form of all errors."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._recent: OrderedDict[str, None] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._request_id(scope)
        headers = [(name, value) for name, value in scope["headers"] if name not in REMOVED]
        headers = [each for each in headers if each[0] != b"x-request-id"]
        scope = {**scope, "headers": [*headers, (b"x-request-id", request_id.encode())]}
        has_started = False
        problem = _DIED  # Ray sends nothing where a gateway died with the request

        async def sending(message: Message) -> None:
            nonlocal has_started, problem
            if message["type"] == "http.response.start":
                found = _problem(message)
                has_started, problem = found is None, found or problem
            if has_started:
                await send(message)

        with contextlib.suppress(Exception):  # of the proxy
            await self._app(scope, receive, sending)
        if has_started:
            return
        if problem.code == "not_found" and not await self._has_routes(scope, receive):
            problem = _DIED
        await _send(problem, request_id, send)

    async def _has_routes(self, scope: Scope, receive: Receive) -> bool:
        """Returns whether the proxy, which may just have started, knows the applications."""
        statuses = []

        async def noting(message: Message) -> None:
            statuses.append(message.get("status"))

        await self._app({**scope, "path": "/-/routes"}, receive, noting)
        return 200 in statuses

    def _request_id(self, scope: Scope) -> str:
        """The client's id of the request if it is valid and new, else another one."""
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        request_id = given[0].decode("latin-1") if len(given) == 1 else ""
        if not REQUEST_ID.fullmatch(request_id):
            request_id = str(uuid.uuid4())
        elif request_id in self._recent:
            request_id = f"{request_id[:95]}.{uuid.uuid4().hex}"
        self._recent[request_id] = None
        if len(self._recent) > RECENT_IDS:
            self._recent.popitem(last=False)
        return request_id


_DIED = ApiError("unavailable", "the server is restarting")


def _problem(start: Message) -> ApiError | None:
    """The error of a response that Ray's proxy made; None for one of a gateway, or a success."""
    status = start["status"]
    kinds = [value for name, value in start.get("headers", ()) if name.lower() == b"content-type"]
    if status < 400 or kinds[:1] == [b"application/json"]:
        return None
    if status == HTTPStatus.NOT_FOUND:
        return ApiError("not_found", "no application is served at this path")
    if status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.GATEWAY_TIMEOUT):
        return ApiError("timeout", "the request took too long")
    if status >= 500 or status == HTTPStatus.TOO_MANY_REQUESTS:
        return _DIED if status == 500 else ApiError("unavailable", "the server has too much to do")
    return ApiError("bad_request", HTTPStatus(status).phrase.lower())


def _answer(error: ApiError, request_id: str | None) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The body of an error, and its headers."""
    body = error.answer(request_id).model_dump_json().encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    headers |= error.headers()
    if request_id:
        headers["X-Request-ID"] = request_id
    return body, [(name.lower().encode(), value.encode()) for name, value in headers.items()]


async def _send(error: ApiError, request_id: str, send: Send) -> None:
    body, headers = _answer(error, request_id)
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
