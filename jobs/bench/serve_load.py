"""The load of `bench serve`, from a process of its own: prints what came back as JSON.

Closed loop: so many clients, each of which asks again when it is answered. Open loop: requests come
at a rate, whatever the server does, as users do; latency counts from when a request was due.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import httpx2

from pipeline.serve.client import AsyncClient, ServerError

#: What stands for a status where no answer came.
BROKEN = 0


class Load:
    """Sends searches and notes what became of each.

    Args:
        url: of the server.
        body: of a search, but for the query.
        queries: texts, drawn at random.
        retries: whether they go through the client with its retries, or once.
    """

    def __init__(self, url: str, body: dict[str, Any], queries: list[str], retries: bool):
        self._body, self._queries, self._retries = body, queries, retries
        self._random = random.Random(0)
        self._start = time.perf_counter()
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(base_url=url, timeout=60, limits=limits)
        self._client = AsyncClient(url)
        #: When each was due (seconds), its status, its milliseconds.
        self.answers: list[tuple[float, int, float]] = []

    async def one(self, due: float | None = None) -> None:
        """Sends one search; `due`: when it should have been sent."""
        start = time.perf_counter() if due is None else due
        query = self._random.choice(self._queries)
        try:
            if self._retries:
                await self._client.search(query, **self._body)
                status = 200
            else:
                sent = {"query": query, **self._body}
                status = (await self._http.post("/v1/search", json=sent)).status_code
        except ServerError as error:
            status = error.status
        except httpx2.TransportError:
            status = BROKEN
        end = time.perf_counter()
        self.answers.append((start - self._start, status, 1e3 * (end - start)))

    async def closed(self, clients: int, seconds: float) -> None:
        """So many clients ask one request after the other."""
        end = time.perf_counter() + seconds

        async def ask() -> None:
            while time.perf_counter() < end:
                await self.one()

        await asyncio.gather(*(ask() for _ in range(clients)))

    async def open(self, rate: float, seconds: float) -> None:
        """Requests come at a rate, with the gaps of independent users."""
        due, end = time.perf_counter(), time.perf_counter() + seconds
        sent = []
        while due < end:
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            sent.append(asyncio.create_task(self.one(due)))
            due += self._random.expovariate(rate)
        await asyncio.gather(*sent)


def main(fields: dict[str, Any]) -> dict[str, Any]:
    """Runs a load; the answers, and the seconds it took."""

    async def run() -> dict[str, Any]:
        load = Load(fields["url"], fields["body"], fields["queries"], fields["retries"])
        start = time.perf_counter()
        if "clients" in fields:
            await load.closed(fields["clients"], fields["seconds"])
        else:
            await load.open(fields["rate"], fields["seconds"])
        return {"answers": load.answers, "seconds": time.perf_counter() - start}

    return asyncio.run(run())


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
