"""Tests of the scheduler: fairness among keys, batching, and dropping of abandoned requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest

from pipeline.search.pauses import pause
from pipeline.serve import scheduler as scheduler_module
from pipeline.serve.scheduler import Caller, Dropped, FairScheduler

SLICE = 0.02


class Sleeper:
    """Work that takes as many slices as its largest value, and records its calls.

    Attributes:
        seconds: Total duration of the slices. Each slice counts as `SLICE` seconds.
        max_running: Maximum number of slices that ran at the same time.
    """

    def __init__(self):
        self.started, self.slices, self.closed = [], [], 0
        self.seconds, self.max_running, self._num_running = 0.0, 0, 0

    def __call__(self, group, values):
        self.started.append((group, list(values)))
        try:
            for slice in range(max(values)):
                if slice:
                    pause()
                self.slices.append(group)
                self._num_running += 1
                self.max_running = max(self.max_running, self._num_running)
                time.sleep(SLICE)
                self._num_running -= 1
                self.seconds += SLICE
            return [f"{group}:{value}" for value in values]
        except Dropped:
            self.closed += 1
            raise

    async def wait(self, num_slices):
        """Waits until a number of slices have started."""
        while len(self.slices) < num_slices:
            await asyncio.sleep(SLICE / 4)


@pytest.fixture
def work(monkeypatch):
    """Work whose slices define the time of the scheduler, because a busy machine delays some."""
    work = Sleeper()
    clock = SimpleNamespace(perf_counter=lambda: work.seconds)
    monkeypatch.setattr(scheduler_module, "time", clock)
    return work


def test_large_requests_delay_other_keys_by_one_slice(work):
    scheduler = FairScheduler(work)

    async def scenario():
        greedy = [
            asyncio.create_task(scheduler.run(Caller("greedy", 30), f"g{i}", [50]))
            for i in range(4)
        ]
        await work.wait(3)
        first = len(work.slices)
        for i in range(5):
            assert await scheduler.run(Caller("small", 30), f"s{i}", [1]) == [f"s{i}:1"]
        slices = work.slices[first:]
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
        return slices

    slices = asyncio.run(scenario())
    # First-come, first-served order would be 200 slices.
    assert sum(group.startswith("g") for group in slices) <= 2 * 5


def test_keys_get_equal_time_regardless_of_number_of_requests(work):
    scheduler = FairScheduler(work)

    async def scenario():
        many = [scheduler.run(Caller("many", 30), f"m{i}", [100]) for i in range(10)]
        few = scheduler.run(Caller("few", 30), "f", [100])
        tasks = [asyncio.create_task(request) for request in (*many, few)]
        await work.wait(40)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    few = work.slices.count("f")
    assert 0.35 < few / len(work.slices) < 0.65


def test_idle_key_accumulates_no_credit(work):
    scheduler = FairScheduler(work)

    async def scenario():
        first = asyncio.create_task(scheduler.run(Caller("first", 30), "a", [40]))
        await work.wait(15)
        second = asyncio.create_task(scheduler.run(Caller("second", 30), "b", [40]))
        await work.wait(31)
        first.cancel(), second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)

    asyncio.run(scenario())
    since = work.slices[work.slices.index("b") :]
    assert since.count("a") >= 0.3 * len(since)


@pytest.mark.parametrize("reason", ["deadline", "cancelled"])
def test_drops_abandoned_requests(work, reason):
    scheduler = FairScheduler(work)

    async def scenario():
        seconds = 0.5 if reason == "deadline" else 30
        tasks = [
            asyncio.create_task(scheduler.run(Caller("k", seconds), f"r{i}", [500]))
            for i in range(6)
        ]
        await work.wait(3)
        if reason == "cancelled":
            for task in tasks:
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        error = TimeoutError if reason == "deadline" else asyncio.CancelledError
        assert [type(result) for result in results] == [error] * 6
        slices = len(work.slices)
        await asyncio.sleep(10 * SLICE)
        assert len(work.slices) <= slices + 1

    asyncio.run(scenario())
    assert len(work.started) == 1 and work.closed == 1


def test_batches_requests_of_a_group_up_to_a_size(work):
    scheduler = FairScheduler(work, size=lambda value: value, max_batch_size=4)

    async def scenario():
        busy = asyncio.create_task(scheduler.run(Caller("a", 30), "other", [1]))
        await asyncio.sleep(0)
        runs = [scheduler.run(Caller("ab"[i % 2], 30), "g", [1, 1]) for i in range(3)]
        results = await asyncio.gather(*runs, scheduler.run(Caller("a", 30), "g", [9]))
        assert results == [["g:1", "g:1"]] * 3 + [["g:9"]]
        await busy

    asyncio.run(scenario())
    assert sorted(len(values) for _, values in work.started[1:]) == [1, 2, 4]


def test_failing_request_does_not_fail_others_of_its_batch():
    def work(group, values):
        pause()
        return [1 / value for value in values]

    scheduler = FairScheduler(work, max_batch_size=100)

    async def scenario():
        runs = [scheduler.run(Caller("k", 30), "g", values) for values in ([1, 2], [1, 0], [4])]
        return await asyncio.gather(*runs, return_exceptions=True)

    first, second, third = asyncio.run(scenario())
    assert first == [1.0, 0.5] and third == [0.25] and isinstance(second, ZeroDivisionError)


def test_multiple_workers(work):
    scheduler = FairScheduler(work, workers=3)

    async def scenario():
        await asyncio.gather(*(scheduler.run(Caller("k", 30), i, [5]) for i in range(3)))
        assert work.max_running > 1
        with contextlib.suppress(TimeoutError):
            await scheduler.run(Caller("k", SLICE), "maxsim", [50])
        assert await scheduler.run(Caller("k", 30), "x", [1]) == ["x:1"]

    asyncio.run(scenario())


def test_accepts_requests_while_worker_loop_ends():
    def work(group, values):
        return values

    scheduler = FairScheduler(work)

    async def scenario():
        for i in range(100):
            assert await scheduler.run(Caller("k", 5), i, [i]) == [i]
            for _ in range(i % 4):
                await asyncio.sleep(0)

    asyncio.run(scenario())


def test_measures_queueing_delay_and_utilisation(work):
    async def run() -> None:
        scheduler = FairScheduler(work)
        first = asyncio.create_task(scheduler.run(Caller("a", 60), "x", [3]))
        await work.wait(1)
        second = asyncio.create_task(scheduler.run(Caller("a", 60), "y", [1]))
        third = asyncio.create_task(scheduler.run(Caller("a", 60), "z", [1]))
        await asyncio.gather(first, second, third)
        delay, utilisation = scheduler.measure_load()
        # The second and the third request wait for the three slices before them, and for four.
        assert 2 * SLICE / 3 <= delay <= 7 * SLICE / 3 and delay > 0
        assert utilisation == pytest.approx(1)
        work.seconds += 10
        assert scheduler.measure_load() == (0, 0)
        waiting = asyncio.create_task(scheduler.run(Caller("a", 60), "x", [5]))
        await work.wait(len(work.slices) + 1)
        stuck = asyncio.create_task(scheduler.run(Caller("a", 60), "y", [1]))
        await asyncio.sleep(0)
        work.seconds += 1
        assert scheduler.measure_load().queueing_delay_s > 0.4  # the mean of 0 and a second
        await asyncio.gather(waiting, stuck)

    asyncio.run(run())
