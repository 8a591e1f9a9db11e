"""Fair turns: one key never holds up the others, and what nobody waits for is not computed."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from pipeline.serve.turns import Caller, Turns

SLICE = 0.02


class Sleeper:
    """Work whose values are numbers of slices; it notes what it computes."""

    def __init__(self):
        self.started, self.slices, self.closed = [], [], 0

    def __call__(self, group, values):
        self.started.append((group, list(values)))
        try:
            for slice in range(max(values)):
                if slice:
                    yield
                self.slices.append(group)
                time.sleep(SLICE)
            return [f"{group}:{value}" for value in values]
        except GeneratorExit:
            self.closed += 1
            raise


def test_a_key_with_large_requests_delays_others_by_a_slice():
    work = Sleeper()
    turns = Turns(work)

    async def scenario():
        greedy = [
            asyncio.create_task(turns.ask(Caller("greedy", 30), f"g{i}", [50])) for i in range(4)
        ]
        await asyncio.sleep(3 * SLICE)
        start = time.monotonic()
        for i in range(5):
            assert await turns.ask(Caller("small", 30), f"s{i}", [1]) == [f"s{i}:1"]
        waited = time.monotonic() - start
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
        return waited

    assert asyncio.run(scenario()) < 5 * 4 * SLICE  # behind the others: 200 slices
    assert sum(group.startswith("g") for group in work.slices) < 20


def test_two_keys_get_equal_time_whatever_their_number_of_requests():
    work = Sleeper()
    turns = Turns(work)

    async def scenario():
        many = [turns.ask(Caller("many", 0.8), f"m{i}", [100]) for i in range(10)]
        few = turns.ask(Caller("few", 0.8), "f", [100])
        await asyncio.gather(*many, few, return_exceptions=True)

    asyncio.run(scenario())
    few = work.slices.count("f")
    assert 0.35 < few / len(work.slices) < 0.65


def test_an_idle_key_saves_up_nothing():
    work = Sleeper()
    turns = Turns(work)

    async def scenario():
        first = asyncio.create_task(turns.ask(Caller("first", 30), "a", [40]))
        await asyncio.sleep(15 * SLICE)
        second = asyncio.create_task(turns.ask(Caller("second", 30), "b", [40]))
        await asyncio.sleep(16 * SLICE)
        first.cancel(), second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)

    asyncio.run(scenario())
    since = work.slices[work.slices.index("b") :]
    assert since.count("a") >= 0.3 * len(since)


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_what_nobody_waits_for_is_not_begun_and_not_gone_on_with(how):
    work = Sleeper()
    turns = Turns(work)

    async def scenario():
        seconds = 3 * SLICE if how == "deadline" else 30
        asked = [
            asyncio.create_task(turns.ask(Caller("k", seconds), f"r{i}", [500])) for i in range(6)
        ]
        await asyncio.sleep(3 * SLICE)
        if how == "cancelled":
            for task in asked:
                task.cancel()
        found = await asyncio.gather(*asked, return_exceptions=True)
        kind = TimeoutError if how == "deadline" else asyncio.CancelledError
        assert [type(each) for each in found] == [kind] * 6
        slices = len(work.slices)
        await asyncio.sleep(10 * SLICE)
        assert len(work.slices) <= slices + 1

    asyncio.run(scenario())
    assert len(work.started) == 1 and work.closed == 1


def test_requests_alike_are_computed_together_up_to_a_size():
    work = Sleeper()
    turns = Turns(work, size=lambda value: value, portion=4)

    async def scenario():
        busy = asyncio.create_task(turns.ask(Caller("a", 30), "other", [1]))
        await asyncio.sleep(0)
        asked = [turns.ask(Caller("ab"[i % 2], 30), "g", [1, 1]) for i in range(3)]
        found = await asyncio.gather(*asked, turns.ask(Caller("a", 30), "g", [9]))
        assert found == [["g:1", "g:1"]] * 3 + [["g:9"]]
        await busy

    asyncio.run(scenario())
    assert sorted(len(values) for _, values in work.started[1:]) == [1, 2, 4]


def test_a_request_that_fails_spoils_no_other():
    def work(group, values):
        yield
        return [1 / value for value in values]

    turns = Turns(work, portion=100)

    async def scenario():
        asked = [turns.ask(Caller("k", 30), "g", values) for values in ([1, 2], [1, 0], [4])]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second, third = asyncio.run(scenario())
    assert first == [1.0, 0.5] and third == [0.25] and isinstance(second, ZeroDivisionError)


def test_several_workers():
    work = Sleeper()
    turns = Turns(work, workers=3)

    async def scenario():
        start = time.monotonic()
        await asyncio.gather(*(turns.ask(Caller("k", 30), i, [5]) for i in range(3)))
        assert time.monotonic() - start < 12 * SLICE
        with contextlib.suppress(TimeoutError):
            await turns.ask(Caller("k", SLICE), "late", [50])
        assert await turns.ask(Caller("k", 30), "x", [1]) == ["x:1"]

    asyncio.run(scenario())


def test_no_request_is_overlooked_when_the_work_has_just_run_out():
    def work(group, values):
        yield from ()
        return values

    turns = Turns(work)

    async def scenario():
        for i in range(100):
            assert await turns.ask(Caller("k", 5), i, [i]) == [i]
            for _ in range(i % 4):
                await asyncio.sleep(0)

    asyncio.run(scenario())
