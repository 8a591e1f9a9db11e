"""Tests of rate limits: of one gateway, of several, and while the shared rate limiter is down."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

import httpx2
import pytest

from pipeline.serve import rates
from pipeline.serve.keys import ANONYMOUS, Key
from pipeline.serve.rates import Buckets, Grant, LimiterUnavailable, Rates
from tests.serve.conftest import write_keys

SLOW = Key(name="slow", sha256="0" * 64, requests_per_second=1)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class InProcess:
    """Shared rate limiter in this process, which can be unavailable and counts its calls."""

    def __init__(self, buckets: Buckets):
        self._buckets = buckets
        self.is_available, self.num_calls = True, 0

    async def lease(self, name: str, rate: float, max_tokens: int, num_returned: int) -> Grant:
        await self.ping()
        self.num_calls += 1
        await asyncio.sleep(0)  # a call: other requests arrive in the meantime
        return self._buckets.take(name, rate, max_tokens, num_returned)

    async def ping(self) -> None:
        if not self.is_available:
            raise LimiterUnavailable("stopped by the test")


def gateways(rate: float, burst: int, number: int = 2) -> tuple[Clock, InProcess, list[Rates]]:
    """Returns the rate limiters of some gateways, with their clock and the shared one."""
    clock = Clock()
    limiter = InProcess(Buckets(burst, number, clock=clock))
    return clock, limiter, [Rates(rate, burst, limiter, number, clock) for _ in range(number)]


async def num_allowed(limiter: Rates, key: Key, number: int) -> int:
    """Sends requests at the same time and returns the number that is allowed."""
    delays = await asyncio.gather(*(limiter.acquire(key) for _ in range(number)))
    return delays.count(0)


async def num_allowed_over_time(
    clock: Clock, limiters: list[Rates], seconds: float, requests_per_second: float
) -> int:
    """Sends requests to all gateways in turn and returns the number that is allowed."""
    allowed = 0
    for number in range(round(seconds * requests_per_second)):
        clock.now += 1 / requests_per_second
        allowed += await limiters[number % len(limiters)].acquire(ANONYMOUS) == 0
    return allowed


def test_one_gateway():
    async def check() -> None:
        clock = Clock()
        limiter = Rates(10, burst=3, clock=clock)
        delays = [await limiter.acquire(ANONYMOUS) for _ in range(4)]
        assert delays == [0, 0, 0, pytest.approx(0.1)]
        clock.now += 0.1
        assert await limiter.acquire(ANONYMOUS) == 0 and await limiter.acquire(ANONYMOUS) > 0
        for _ in range(2):
            assert [await limiter.acquire(SLOW) for _ in range(4)] == [0, 0, 0, pytest.approx(1)]
            clock.now += 100
        assert await num_allowed(Rates(None, 1), ANONYMOUS, 100) == 100

    asyncio.run(check())


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("burst", [1, 5, 20])
@pytest.mark.parametrize("rate", [2, 10, 50, 400])
def test_gateways_share_rate_and_burst(rate, burst, number):
    async def check() -> None:
        clock, _, limiters = gateways(rate, burst, number)
        allowed = await num_allowed_over_time(clock, limiters, 10, 4 * rate)
        clock = Clock()
        single = await num_allowed_over_time(clock, [Rates(rate, burst, clock=clock)], 10, 4 * rate)
        # A gateway can hold unused tokens of a lease at the end.
        unused = number * max(1, burst / (2 * number))
        assert single - unused <= allowed <= single
        assert 0.8 * 10 * rate <= allowed <= 10 * rate + burst

    asyncio.run(check())


@pytest.mark.parametrize("rate", [2, 10, 50, 400])
def test_requests_below_the_rate_are_allowed(rate):
    """Tokens that a gateway has leased and does not use are not lost."""

    async def check() -> None:
        clock, _, limiters = gateways(rate, burst=20)
        num_requests = round(30 * 0.9 * rate)
        assert await num_allowed_over_time(clock, limiters, 30, 0.9 * rate) == num_requests

    asyncio.run(check())


def test_most_requests_need_no_call():
    async def check() -> None:
        clock, limiter, limiters = gateways(1000, burst=1000)
        assert await num_allowed_over_time(clock, limiters, 10, 800) == 8000
        assert limiter.num_calls <= 100
        assert await num_allowed(limiters[0], SLOW, 1000) == 1000  # waiting requests share a call
        assert limiter.num_calls <= 120
        num_calls = limiter.num_calls
        allowed = await num_allowed_over_time(clock, limiters, 1, 20_000)
        assert 2000 <= allowed <= 2500  # up to half of the burst was leased before
        assert limiter.num_calls - num_calls < 4000  # most requests are refused without a call

    asyncio.run(check())


def test_delay_of_refused_requests():
    async def check() -> None:
        clock, limiter, (one, other) = gateways(0.01, burst=2)
        assert [await r.acquire(ANONYMOUS) for r in (one, other)] == [0, 0]
        assert await one.acquire(ANONYMOUS) == pytest.approx(100)
        num_calls = limiter.num_calls
        clock.now += 0.5
        assert await one.acquire(ANONYMOUS) == pytest.approx(99.5)
        assert limiter.num_calls == num_calls
        clock.now += 99.5
        assert await other.acquire(ANONYMOUS) == 0 and await one.acquire(ANONYMOUS) > 0

    asyncio.run(check())


def test_changed_rate_of_a_key():
    async def check() -> None:
        _, _, (one, _) = gateways(5, burst=1)
        assert await one.acquire(SLOW) == 0
        assert await one.acquire(SLOW) == pytest.approx(1)
        changed = SLOW.model_copy(update={"requests_per_second": 4})
        assert await one.acquire(changed) == pytest.approx(0.25)

    asyncio.run(check())


def test_gateways_enforce_their_share_without_the_rate_limiter(monkeypatch, caplog):
    monkeypatch.setattr(rates, "CHECK_SECONDS", 0.01)

    async def check() -> None:
        clock, limiter, limiters = gateways(10, burst=4)
        limiter.is_available = False
        allowed = await num_allowed_over_time(clock, limiters, 10, 40)
        assert 100 <= allowed <= 104
        await asyncio.sleep(0.1)
        assert [r.event for r in caplog.records] == ["limiter_unavailable"] * 2  # one per gateway
        assert "stopped by the test" in caplog.text
        limiter.is_available = True
        await asyncio.sleep(0.1)
        num_calls = limiter.num_calls
        assert 0 < await num_allowed_over_time(clock, limiters, 10, 40) <= 104
        assert limiter.num_calls > num_calls

    asyncio.run(check())


# -- a server with two gateways --------------------------------------------------------------------

RATE, BURST, SECONDS = 20, 4, 5


@pytest.fixture(scope="module")
def shared_url(serving_here, index_uri, tmp_path_factory) -> str:
    keys = tmp_path_factory.mktemp("rates") / "keys.yaml"
    names = ("even", "outage")
    write_keys(keys, {f"mr_{n}": {"name": n, "requests_per_second": RATE} for n in names})
    settings = {
        "indexes": {"i": {"uri": index_uri}},
        "keys": str(keys),
        "limits": {"burst": BURST},
        "gateway": {"num_replicas": 2},
    }
    return serving_here(settings, "rates")


def send(url: str, key: str, seconds: float) -> Counter[int]:
    """Sends requests from eight clients and returns the number of each status."""

    async def client(http: httpx2.AsyncClient, end: float) -> list[int]:
        statuses = []
        while time.monotonic() < end:
            statuses.append((await http.get(f"{url}/v1/indexes")).status_code)
            await asyncio.sleep(0.02)
        return statuses

    async def send_all() -> list[list[int]]:
        headers, end = {"Authorization": f"Bearer {key}"}, time.monotonic() + seconds
        async with httpx2.AsyncClient(headers=headers, timeout=30) as http:
            return await asyncio.gather(*(client(http, end) for _ in range(8)))

    return Counter(status for statuses in asyncio.run(send_all()) for status in statuses)


def gateway_logs() -> list[list[dict]]:
    """Returns the lines of the log of each gateway."""
    from ray._private.worker import global_worker

    folder = Path(global_worker.node.get_session_dir_path(), "logs/serve")
    files = folder.glob("replica_rates_Gateway_*.log")
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.heavy
def test_two_gateways_allow_the_rate_once(shared_url):
    statuses = send(shared_url, "mr_even", SECONDS)
    assert statuses.keys() == {200, 429}
    assert 0.7 * RATE * SECONDS <= statuses[200] <= 1.1 * RATE * SECONDS + BURST
    allowed = [
        sum(line.get("key") == "even" and line["status"] == 200 for line in lines)
        for lines in gateway_logs()
    ]
    assert len(allowed) == 2 and min(allowed) > 0.2 * sum(allowed)


@pytest.mark.heavy
def test_rate_limit_while_the_rate_limiter_restarts(shared_url):
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if "rates#RateLimiter#" in actor["name"]:
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
    statuses = send(shared_url, "mr_outage", SECONDS)
    assert statuses.keys() == {200, 429}
    # The buckets of the gateways and of the restarted rate limiter are full.
    assert 0.5 * RATE * SECONDS <= statuses[200] <= 1.1 * RATE * SECONDS + 3 * BURST
    end = time.monotonic() + 60
    while True:
        events = Counter(line.get("event") for lines in gateway_logs() for line in lines)
        if events["limiter_available"] == events["limiter_unavailable"] > 0:
            break
        assert time.monotonic() < end, events
        time.sleep(0.5)
