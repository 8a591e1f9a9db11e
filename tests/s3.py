"""S3-compatible servers for tests: moto, and a proxy that disturbs the requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import aiohttp
import boto3
from aiohttp import web
from moto.server import ThreadedMotoServer
from multidict import CIMultiDict
from yarl import URL

#: Headers of a connection, which a proxy does not forward.
HOP_HEADERS = frozenset(("connection", "keep-alive", "transfer-encoding"))
#: Response of S3 to clients that send too many requests.
SLOW_DOWN = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    "<Message>Please reduce your request rate.</Message></Error>"
)


def environment(url: str) -> dict[str, str]:
    """Returns the environment variables with which clients use the server at a URL."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def moto_server(address: str = "127.0.0.1") -> Iterator[str]:
    """Context that starts an empty server at an IP address and returns its URL."""
    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def create_bucket(url: str, name: str) -> None:
    """Creates a bucket on the server at a URL."""
    client = boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=name)


@dataclass
class Faults:
    """Random disturbances of the requests to a server.

    Attributes:
        seconds: Maximum latency that is added to each request.
        throttled: Share of the requests that are answered with 503 SlowDown.
        failed: Share that is answered with 500.
        refused: Share whose connection is closed before the request reaches the server.
        lost: Share whose connection is closed after the request has been executed.
        seed: Seed of the disturbances.
        counts: Number of disturbances so far, by type, and of all `requests`.
    """

    seconds: float = 0.0
    throttled: float = 0.0
    failed: float = 0.0
    refused: float = 0.0
    lost: float = 0.0
    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def draw(self) -> tuple[float, str | None]:
        """Returns the latency of the next request, in seconds, and its disturbance, if any."""
        self.counts["requests"] += 1
        latency, number = self._random.uniform(0, self.seconds), self._random.random()
        for kind in ("throttled", "failed", "refused", "lost"):
            number -= getattr(self, kind)
            if number < 0:
                self.counts[kind] += 1
                return latency, kind
        return latency, None


@contextlib.contextmanager
def disturbed(url: str, faults: Faults) -> Iterator[str]:
    """Context that starts a proxy of the server at a URL, and returns the URL of the proxy."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    proxy = _Proxy(url, faults)
    try:
        yield asyncio.run_coroutine_threadsafe(proxy.start(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(proxy.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class _Proxy:
    """HTTP server that forwards requests to another one, or disturbs them."""

    def __init__(self, url: str, faults: Faults):
        self._url, self._faults = url, faults

    async def start(self) -> str:
        """Starts the server and returns its URL."""
        self._client = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self._client.close()

    async def _answer(self, request: web.Request) -> web.Response:
        latency, fault = self._faults.draw()
        body = await request.read()
        await asyncio.sleep(latency)
        if fault == "throttled":
            return web.Response(status=503, text=SLOW_DOWN, content_type="application/xml")
        if fault == "failed":
            return web.Response(status=500)
        if fault == "refused":
            return _closed(request)
        url = URL(self._url + request.raw_path, encoded=True)
        headers = _end_to_end(request.headers)
        async with self._client.request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False
        ) as response:
            content = await response.read()
        if fault == "lost":
            return _closed(request)
        headers = _end_to_end(response.headers)
        return web.Response(status=response.status, body=content, headers=headers)


def _closed(request: web.Request) -> web.Response:
    """Closes the connection of a request without a response."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Returns the headers that a proxy forwards."""
    pairs = ((name, value) for name, value in headers.items() if name.lower() not in HOP_HEADERS)
    return CIMultiDict(pairs)
