"""Load generator of `bench serve`, which runs in a separate process and prints JSON.

In a closed loop, each client sends the next request when the previous one is answered. In an open
loop, requests arrive at a given rate, independent of the server, and latency counts from the time
at which a request was due.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from pipeline.serve.client import Client, ServerError

#: Maximum number of concurrent calls of the retrying client.
MAX_CALLS = 256
#: Status of a request without a response.
BROKEN = 0


class Load:
    """Sends searches and records their outcomes."""

    def __init__(self, url: str, body: dict[str, Any], queries: list[str], retries: bool):
        self._body, self._queries, self._retries = body, queries, retries
        self._random = random.Random(0)
        self._start = time.perf_counter()
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(base_url=url, timeout=60, limits=limits)
        self._client, self._threads = Client(url), ThreadPoolExecutor(MAX_CALLS)
        #: Due time in seconds, status and milliseconds of each request.
        self.answers: list[tuple[float, int, float]] = []
        #: `durations_ms` of each successful response, unless sent through the client.
        self.durations: list[dict[str, float]] = []

    async def one(self, due: float | None = None) -> None:
        """Sends one search.

        Args:
            due: Time at which it was due, by `time.perf_counter`, or None for now.
        """
        start = time.perf_counter() if due is None else due
        query = self._random.choice(self._queries)
        try:
            if self._retries:
                search = functools.partial(self._client.search, query, **self._body)
                await asyncio.get_running_loop().run_in_executor(self._threads, search)
                status = 200
            else:
                sent = {"query": query, **self._body}
                response = await self._http.post("/v1/search", json=sent)
                status = response.status_code
        except ServerError as error:
            status = error.status
        except httpx2.TransportError:
            status = BROKEN
        end = time.perf_counter()
        self.answers.append((start - self._start, status, 1e3 * (end - start)))
        if not self._retries and status == 200:
            self.durations.append(response.json()["durations_ms"])

    async def closed(self, clients: int, seconds: float) -> None:
        """Runs a closed loop of clients."""
        end = time.perf_counter() + seconds

        async def ask() -> None:
            while time.perf_counter() < end:
                await self.one()

        await asyncio.gather(*(ask() for _ in range(clients)))

    async def open(self, rate: float, seconds: float) -> None:
        """Runs an open loop in which the gaps between requests are exponentially distributed.

        Args:
            rate: Requests per second.
        """
        due, end = time.perf_counter(), time.perf_counter() + seconds
        sent = []
        while due < end:
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            sent.append(asyncio.create_task(self.one(due)))
            due += self._random.expovariate(rate)
        await asyncio.gather(*sent)


def main(fields: dict[str, Any]) -> dict[str, Any]:
    """Runs a load and returns the responses, the durations of their stages and its own."""

    async def run() -> dict[str, Any]:
        load = Load(fields["url"], fields["body"], fields["queries"], fields["retries"])
        start = time.perf_counter()
        if "clients" in fields:
            await load.closed(fields["clients"], fields["seconds"])
        else:
            await load.open(fields["rate"], fields["seconds"])
        seconds = time.perf_counter() - start
        return {"answers": load.answers, "seconds": seconds, "durations": load.durations}

    return asyncio.run(run())


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
