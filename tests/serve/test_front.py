"""The front of Ray's proxy, by real sockets: deadlines, a limit on connections, errors."""

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

#: Seconds for the headers in these tests.
SECONDS = 0.4


async def proxy(scope, receive, send) -> None:
    """Answers as Ray's proxy does; the path says what."""
    path, kind, status, body = scope["path"], b"text/plain", 200, b"fine"
    if path == "/lost":  # the gateway died with the request
        return
    if path == "/raises":
        raise RuntimeError("no matter")
    if path == "/slow":
        await asyncio.sleep(1.5)
    if path == "/-/routes":
        status, body = proxy.routes_status, b"{}"
    elif path == "/ours":
        status, kind, body = 422, b"application/json", b'{"error": {}}'
    elif path[1:].isdigit():
        status, body = int(path[1:]), b"a plain text"
    ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
    headers = [(b"content-type", kind), *((b"x-request-id", each) for each in ids)]
    headers += [
        (name, value) for name, value in scope["headers"] if name.startswith(b"x-request-t")
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


proxy.routes_status = 200


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[str, int]]]:
    """Starts a server with limits; gives its address."""
    with contextlib.ExitStack() as stack:

        def starting(connections: int = 100) -> tuple[str, int]:
            limits = {
                "header_seconds": SECONDS,
                "max_connections": connections,
                "_waiting": OrderedDict(),
            }
            protocol = type("Protocol", (LimitedProtocol,), limits)
            config = uvicorn.Config(
                Front(proxy), http=protocol, lifespan="off", log_level="critical", access_log=False
            )
            server = uvicorn.Server(config)
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            thread.start()
            stack.callback(thread.join)
            stack.callback(setattr, server, "should_exit", True)
            while not server.started:
                time.sleep(0.01)
            return listening.getsockname()

        yield starting


def connect(address: tuple[str, int], sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(address, timeout=5)
    connection.sendall(sent)
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while some := connection.recv(1 << 16):
            found += some
    return found


def get(address: tuple[str, int], path: str = "/", **headers: str) -> httpx2.Response:
    return httpx2.get(f"http://127.0.0.1:{address[1]}{path}", headers=headers, timeout=5)


def problem(response: httpx2.Response) -> wire.Problem:
    assert response.headers["content-type"] == "application/json"
    found = wire.ErrorAnswer.model_validate_json(response.content).error
    assert response.headers.get_list("x-request-id") == [found.request_id]
    return found


HALF = b"GET / HTTP/1.1\r\nHost: here\r\nX-Part"


@pytest.mark.parametrize("sent", [b"", b"GE", HALF])
def test_connections_without_complete_headers_are_closed(start, sent):
    with connect(start(), sent) as connection:
        begun = time.monotonic()
        said = received(connection)
        assert SECONDS - 0.1 < time.monotonic() - begun < SECONDS + 1
        assert b"400 Bad Request" in said and b"headers took longer" in said


def test_headers_that_trickle_are_no_reason_to_wait(start):
    with connect(start(), b"GET / HTTP/1.1\r\n") as connection:
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begun < 3 * SECONDS:
                connection.sendall(b"X: y\r\n")
                time.sleep(0.05)
        assert time.monotonic() - begun < 3 * SECONDS


def test_a_second_request_on_a_connection_has_the_same_time(start):
    request = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
    with connect(start(), request) as connection:
        assert b"200 OK" in connection.recv(1 << 16)
        time.sleep(1.5 * SECONDS)  # idle is not slow
        connection.sendall(request)
        assert b"200 OK" in connection.recv(1 << 16)
        connection.sendall(HALF)
        assert b"headers took longer" in received(connection)


@pytest.mark.parametrize("line", [b"A: b\r\n", b"A" * 100_000])
@pytest.mark.parametrize("before", [b"", b"GET /slow HTTP/1.1\r\nHost: here\r\n\r\n"])
def test_headers_are_limited_in_size(start, line, before):
    with connect(start(), before + b"GET / HTTP/1.1\r\nHost: here\r\n") as connection:
        sent = 0
        with contextlib.suppress(OSError):  # the server closes the connection
            while sent < 100 << 20:
                connection.sendall(line * (100_000 // len(line)))
                sent += 100_000
        assert sent < 20 << 20  # what the sockets' buffers hold


def test_large_bodies_are_not_taken_for_headers(start):
    head = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 2000000\r\n\r\n"
    with connect(start(), (head + bytes(2_000_000)) * 2) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert received(connection).count(b"200 OK") == 2


def test_a_request_in_progress_is_not_cut(start):
    assert get(start(), "/slow").text == "fine"


def test_half_open_connections_lock_nobody_out(start):
    """Three times as many as there may be: the oldest make room, and all end."""
    address = start(20)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(address, HALF)) for _ in range(60)]
        for _ in range(5):
            assert get(address).status_code == 200
        begun = time.monotonic()
        said = [received(connection) for connection in slow]
        assert time.monotonic() - begun < SECONDS + 1
    assert any(b"too many connections" in each for each in said)
    assert get(address).status_code == 200


def test_connections_with_requests_are_not_closed_for_new_ones(start):
    address = start(5)
    with contextlib.ExitStack() as stack:
        request = b"GET /slow HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
        busy = [stack.enter_context(connect(address, request)) for _ in range(5)]
        time.sleep(0.2)
        with connect(address, request) as refused:
            assert b"503 Service Unavailable" in received(refused)
        assert all(b"fine" in received(connection) for connection in busy)


def test_what_is_no_http(start):
    with connect(start(), b"\x16\x03\x01 nonsense\r\n\r\n") as connection:
        said = received(connection)
    assert b"400 Bad Request" in said and b"application/json" in said


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
def test_errors_of_the_proxy_have_the_form_of_all(start, path, status, code):
    response = get(start(), path)
    assert (response.status_code, problem(response).code) == (status, code)
    assert ("retry-after" in response.headers) == (status == 503)
    assert "plain" not in response.text


def test_a_proxy_that_does_not_know_its_applications_yet(start, monkeypatch):
    monkeypatch.setattr(proxy, "routes_status", 503)
    response = get(start(), "/404")
    assert response.status_code == 503 and response.headers["retry-after"] == "1"


def test_errors_of_the_application_pass(start):
    response = get(start(), "/ours")
    assert response.status_code == 422 and response.text == '{"error": {}}'


def test_request_ids(start, monkeypatch):
    monkeypatch.setattr(front, "RECENT_IDS", 3)
    address = start()

    def ids(*headers: bytes) -> list[str]:
        lines = b"".join(b"X-Request-ID: %s\r\n" % each for each in headers)
        request = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n%s\r\n" % lines
        with connect(address, request) as connection:
            said = received(connection).decode().lower()
        return [line[14:] for line in said.split("\r\n") if line.startswith("x-request-id: ")]

    assert ids(b"mine-1") == ["mine-1"]
    (second,) = ids(b"mine-1")  # of another request
    assert second.startswith("mine-1.") and len(second) > 20
    for given in ((b"not valid",), (b"x" * 129,), (b"a", b"b"), (b"\xff",), ()):
        (made,) = ids(*given)
        assert len(made) == 36
    assert ids(b"mine-1") == ["mine-1"]  # so long ago


def test_headers_that_steer_the_proxy_are_removed(start):
    response = get(start(), **{"X-Request-Timeout-Seconds": "0"})
    assert "x-request-timeout-seconds" not in response.headers


def test_it_is_what_uvicorn_uses_in_a_proxy(monkeypatch):
    """Ray gives uvicorn no protocol, which then takes the one it calls auto."""
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    (middleware,) = middlewares()
    assert middleware.cls is Front
    config = uvicorn.Config(lambda: None, factory=True)
    config.load()
    assert config.http_protocol_class is LimitedProtocol
