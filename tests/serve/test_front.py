"""Tests of the proxy's middleware with real sockets: time limits, connection limit, errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import httpx2
import pytest
import uvicorn
from uvicorn.config import HTTP_PROTOCOLS

from pipeline.serve import front, wire
from pipeline.serve.front import Front, LimitedProtocol, middlewares

#: Time limit for the headers in these tests, in seconds.
HEADER_SECONDS = 0.4


async def proxy(scope, receive, send) -> None:
    """Imitates Ray's proxy; the path selects the response."""
    path, kind, status, body = scope["path"], b"text/plain", 200, b"fine"
    if path == "/lost":  # the gateway died during the request
        return
    if path == "/raises":
        raise RuntimeError("any error")
    if path == "/slow":
        await asyncio.sleep(1.5)
    if path == "/-/routes":
        status, body = proxy.routes_status, b"{}"
    elif path == "/ours":
        status, kind, body = 422, b"application/json", b'{"error": {}}'
    elif path[1:].isdigit():
        status, body = int(path[1:]), b"a plain text"
    ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
    headers = [(b"content-type", kind), *((b"x-request-id", value) for value in ids)]
    headers += [
        (name, value) for name, value in scope["headers"] if name.startswith(b"x-request-t")
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


proxy.routes_status = 200


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[str, int]]]:
    """Returns a function that starts a server and returns its address."""
    with contextlib.ExitStack() as stack:

        def start_server(connections: int = 100) -> tuple[str, int]:
            limits = {
                "header_seconds": HEADER_SECONDS,
                "max_connections": connections,
                "_waiting": OrderedDict(),
            }
            protocol = type("Protocol", (LimitedProtocol,), limits)
            config = uvicorn.Config(
                Front(proxy), http=protocol, lifespan="off", log_level="critical", access_log=False
            )
            server = uvicorn.Server(config)
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            stack.callback(thread.join)
            stack.callback(setattr, server, "should_exit", True)
            while not server.started:
                time.sleep(0.01)
            return listener.getsockname()

        yield start_server


def connect(address: tuple[str, int], sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(address, timeout=5)
    connection.sendall(sent)
    return connection


def receive(connection: socket.socket) -> bytes:
    """Receives until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            data += chunk
    return data


def get(address: tuple[str, int], path: str = "/", **headers: str) -> httpx2.Response:
    return httpx2.get(f"http://127.0.0.1:{address[1]}{path}", headers=headers, timeout=5)


def problem(response: httpx2.Response) -> wire.Problem:
    assert response.headers["content-type"] == "application/json"
    error = wire.ErrorResponse.model_validate_json(response.content).error
    assert response.headers.get_list("x-request-id") == [error.request_id]
    return error


INCOMPLETE = b"GET / HTTP/1.1\r\nHost: here\r\nX-Part"


@pytest.mark.parametrize("sent", [b"", b"GE", INCOMPLETE])
def test_closes_connections_with_incomplete_headers(start, sent):
    with connect(start(), sent) as connection:
        begin = time.monotonic()
        response = receive(connection)
        assert HEADER_SECONDS - 0.1 < time.monotonic() - begin < HEADER_SECONDS + 1
        assert b"400 Bad Request" in response and b"headers took longer" in response


def test_slow_headers_do_not_extend_time_limit(start):
    with connect(start(), b"GET / HTTP/1.1\r\n") as connection:
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begin < 3 * HEADER_SECONDS:
                connection.sendall(b"X: y\r\n")
                time.sleep(0.05)
        assert time.monotonic() - begin < 3 * HEADER_SECONDS


def test_time_limit_applies_to_each_request_of_a_connection(start):
    request = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
    with connect(start(), request) as connection:
        assert b"200 OK" in connection.recv(1 << 16)
        time.sleep(1.5 * HEADER_SECONDS)  # idle connections stay open
        connection.sendall(request)
        assert b"200 OK" in connection.recv(1 << 16)
        connection.sendall(INCOMPLETE)
        assert b"headers took longer" in receive(connection)


@pytest.mark.parametrize("line", [b"A: b\r\n", b"A" * 100_000])
@pytest.mark.parametrize("before", [b"", b"GET /slow HTTP/1.1\r\nHost: here\r\n\r\n"])
def test_limits_size_of_headers(start, line, before):
    with connect(start(), before + b"GET / HTTP/1.1\r\nHost: here\r\n") as connection:
        sent = 0
        with contextlib.suppress(OSError):  # the server closes the connection
            while sent < 100 << 20:
                connection.sendall(line * (100_000 // len(line)))
                sent += 100_000
        assert sent < 20 << 20  # size of the socket buffers


def test_large_bodies_do_not_count_as_headers(start):
    head = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 2000000\r\n\r\n"
    with connect(start(), (head + bytes(2_000_000)) * 2) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert receive(connection).count(b"200 OK") == 2


def test_time_limit_does_not_apply_to_request_in_progress(start):
    assert get(start(), "/slow").text == "fine"


def test_incomplete_headers_do_not_exhaust_connections(start):
    """With three times the maximum, the oldest connections are closed first, and finally all."""
    address = start(20)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(address, INCOMPLETE)) for _ in range(60)]
        for _ in range(5):
            assert get(address).status_code == 200
        begin = time.monotonic()
        responses = [receive(connection) for connection in slow]
        assert time.monotonic() - begin < HEADER_SECONDS + 1
    assert any(b"too many connections" in response for response in responses)
    assert get(address).status_code == 200


def test_rejects_new_connection_if_all_have_requests_in_progress(start):
    address = start(5)
    with contextlib.ExitStack() as stack:
        request = b"GET /slow HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
        busy = [stack.enter_context(connect(address, request)) for _ in range(5)]
        time.sleep(0.2)
        with connect(address, request) as rejected:
            assert b"503 Service Unavailable" in receive(rejected)
        assert all(b"fine" in receive(connection) for connection in busy)


def test_rejects_malformed_http(start):
    with connect(start(), b"\x16\x03\x01 nonsense\r\n\r\n") as connection:
        response = receive(connection)
    assert b"400 Bad Request" in response and b"application/json" in response


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/lost", 503, "unavailable"),
        ("/raises", 503, "unavailable"),
        ("/500", 503, "unavailable"),
        ("/503", 503, "unavailable"),
        ("/429", 503, "unavailable"),
        ("/408", 504, "timeout"),
        ("/404", 404, "not_found"),
        ("/410", 400, "bad_request"),
    ],
)
def test_converts_errors_of_proxy(start, path, status, code):
    response = get(start(), path)
    assert (response.status_code, problem(response).code) == (status, code)
    assert ("retry-after" in response.headers) == (status == 503)
    assert "plain" not in response.text


def test_not_found_is_unavailable_until_proxy_has_routes(start, monkeypatch):
    monkeypatch.setattr(proxy, "routes_status", 503)
    response = get(start(), "/404")
    assert response.status_code == 503 and response.headers["retry-after"] == "1"


def test_forwards_errors_of_application(start):
    response = get(start(), "/ours")
    assert response.status_code == 422 and response.text == '{"error": {}}'


def test_request_ids(start, monkeypatch):
    monkeypatch.setattr(front, "RECENT_IDS", 3)
    address = start()

    def ids(*headers: bytes) -> list[str]:
        lines = b"".join(b"X-Request-ID: %s\r\n" % value for value in headers)
        request = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n%s\r\n" % lines
        with connect(address, request) as connection:
            response = receive(connection).decode().lower()
        return [line[14:] for line in response.split("\r\n") if line.startswith("x-request-id: ")]

    assert ids(b"mine-1") == ["mine-1"]
    (second,) = ids(b"mine-1")  # duplicate id
    assert second.startswith("mine-1.") and len(second) > 20
    for values in ((b"not valid",), (b"x" * 129,), (b"a", b"b"), (b"\xff",), ()):
        (new_id,) = ids(*values)
        assert len(new_id) == 36
    assert ids(b"mine-1") == ["mine-1"]  # no longer among the recent ids


def test_removes_headers_that_control_the_proxy(start):
    response = get(start(), **{"X-Request-Timeout-Seconds": "0"})
    assert "x-request-timeout-seconds" not in response.headers


def test_uvicorn_uses_limited_protocol(monkeypatch):
    """Ray does not set a protocol, so uvicorn uses the one registered as "auto"."""
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    (middleware,) = middlewares()
    assert middleware.cls is Front
    config = uvicorn.Config(lambda: None, factory=True)
    config.load()
    assert config.http_protocol_class is LimitedProtocol
