"""Turns: worker threads that the requests of all keys share fairly.

A stage computes a request in slices, each a fraction of a second. Between slices it turns to the
key that has used the least time, so a key with large requests delays the others by one slice at a
time. What nobody waits for any more (the deadline is over, or the caller has gone) is dropped:
before it starts, or at the end of the slice under way.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Caller(NamedTuple):
    """On whose behalf a stage is called.

    Attributes:
        key: Name of the access key.
        seconds: How long the answer is waited for.
    """

    key: str
    seconds: float


class Shares:
    """Places that keys hold, of which no key gets all.

    A key gets another place while it holds fewer than are free (dynamic thresholds: Choudhury and
    Hahne, 1998). One key holds half of the places at most, two keys a third each, and there is
    always a place for a key that holds none yet.

    >>> shares = Shares(8)
    >>> [shares.take("a") for _ in range(5)], [shares.take("b") for _ in range(3)]
    ([True, True, True, True, False], [True, True, False])
    """

    def __init__(self, number: int, *, are_shared: bool = True):
        self.number, self.taken = number, 0
        self._are_shared = are_shared
        self._by_key: Counter[str] = Counter()

    def has_room(self, key: str) -> bool:
        """Returns whether the key gets a place."""
        held = self._by_key[key] if self._are_shared else 0
        return held < self.number - self.taken

    def take(self, key: str) -> bool:
        """Takes a place if there is one for the key; returns whether there is."""
        if not self.has_room(key):
            return False
        self._by_key[key] += 1
        self.taken += 1
        return True

    def give_back(self, key: str) -> None:
        """Gives a place back."""
        self.taken -= 1
        self._by_key[key] -= 1
        if not self._by_key[key]:
            del self._by_key[key]


#: Computes a result per value, for values of one group; yields between slices.
Work = Callable[[Any, list[Any]], Generator[None, None, Sequence[Any]]]


@dataclass(eq=False)
class _Request:
    key: str
    group: Hashable
    values: Sequence[Any]
    answer: asyncio.Future
    results: list[Any] = field(default_factory=list)
    num_started: int = 0
    is_busy: bool = False  # some of its values are in a portion
    is_alone: bool = False  # it shares no portion: one that it was in failed


@dataclass(eq=False)
class _Portion:
    """Values of one group that are computed together, of one request or of several."""

    members: list[tuple[_Request, int]]  # with the number of its values
    work: Generator[None, None, Sequence[Any]]

    @property
    def key(self) -> str:
        return self.members[0][0].key


class Turns:
    """Computes the requests of a stage.

    Args:
        work: What computes a portion. It runs in a worker thread, never twice at once for one
            portion.
        size: Size of a value.
        portion: Maximum size of the values that are computed together; a larger value is computed
            by itself.
        workers: Number of threads, of which a key takes half at most.
        observe: Called with the number of requests of each portion.
    """

    def __init__(
        self,
        work: Work,
        size: Callable[[Any], float] = lambda value: 1,
        portion: float = 1,
        *,
        workers: int = 1,
        observe: Callable[[int], None] = lambda number: None,
    ):
        self._work, self._size, self._most = work, size, portion
        self._workers, self._observe = workers, observe
        self._threads = ThreadPoolExecutor(workers, "turns")
        self._open: set[_Request] = set()  # all that are waited for
        self._waiting: list[_Request] = []  # with values that are in no portion yet
        self._paused: list[_Portion] = []
        self._tasks: set[asyncio.Task] = set()
        self._num_running = 0  # tasks that will look for more to do, one per worker
        self._used: dict[str, float] = {}  # seconds by key, since this was last idle
        self._shares = Shares(workers)

    async def ask(self, caller: Caller, group: Hashable, values: Sequence[Any]) -> list[Any]:
        """Returns a result per value.

        Args:
            caller: The access key, and the time limit in seconds.
            group: Values of equal groups may be computed together.
            values: The values to compute.

        Raises:
            TimeoutError: It is not done within the caller's time.
        """
        if not values:
            return []
        active = {request.key for request in self._open}
        if not active:
            self._used.clear()
        elif caller.key not in active:  # time in which it asked for nothing is not saved up
            least = min(self._used.get(key, 0.0) for key in active)
            self._used[caller.key] = max(self._used.get(caller.key, 0.0), least)
        answer = asyncio.get_running_loop().create_future()
        request = _Request(caller.key, group, values, answer)
        self._waiting.append(request)
        self._open.add(request)
        if self._num_running < self._workers:
            self._num_running += 1
            task = asyncio.create_task(self._run())
            self._tasks.add(task)  # or it might be collected
            task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(caller.seconds):
                return await answer  # cancelled with the waiting, which is how it is given up
        finally:
            self._open.discard(request)

    async def _run(self) -> None:
        try:
            while (portion := self._next()) is not None:
                await self._slice(portion)
        finally:
            self._num_running -= 1  # now, and not when the task is done: requests may come before

    async def _slice(self, portion: _Portion) -> None:
        """Computes a slice of a portion."""
        self._shares.take(portion.key)
        start, loop = time.perf_counter(), asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._threads, _step, portion.work)
        except Exception as error:
            self._fail(portion, error)
        else:
            if results is None:
                self._paused.append(portion)
            else:
                self._finish(portion, results)
        self._shares.give_back(portion.key)
        seconds = time.perf_counter() - start
        total = sum(number for _, number in portion.members)
        for request, number in portion.members:
            used = self._used.get(request.key, 0.0)
            self._used[request.key] = used + seconds * number / total

    def _next(self) -> _Portion | None:
        """The portion whose turn it is; None if there is nothing to do."""
        self._waiting = [r for r in self._waiting if not r.answer.done()]
        for portion in list(self._paused):
            if all(request.answer.done() for request, _ in portion.members):
                self._paused.remove(portion)
                portion.work.close()
        ready = [r for r in self._waiting if not r.is_busy]
        waiting = dict.fromkeys([p.key for p in self._paused] + [r.key for r in ready])
        keys = [key for key in waiting if self._shares.has_room(key)]
        if not keys:
            return None
        key = min(keys, key=lambda key: self._used.get(key, 0.0))
        for portion in self._paused:
            if portion.key == key:
                self._paused.remove(portion)
                return portion
        return self._portion(next(r for r in ready if r.key == key), ready)

    def _portion(self, first: _Request, ready: Sequence[_Request]) -> _Portion:
        """The next values of a request, and of others of its group, in turn, as far as they fit."""
        alike = [first]
        if not first.is_alone:
            others = [r for r in ready if r is not first and r.group == first.group]
            alike += [r for r in others if not r.is_alone]
        numbers, size, has_room = dict.fromkeys(alike, 0), 0.0, True
        while has_room:
            has_room = False
            for request in alike:
                place = request.num_started + numbers[request]
                if place == len(request.values):
                    continue
                added = self._size(request.values[place])
                if size and size + added > self._most:
                    break
                numbers[request] += 1
                size += added
                has_room = True
        members = [(request, number) for request, number in numbers.items() if number]
        values: list[Any] = []
        for request, number in members:
            values += request.values[request.num_started : request.num_started + number]
            request.num_started += number
            request.is_busy = True
            if request.num_started == len(request.values):
                self._waiting.remove(request)
        self._observe(len(members))
        return _Portion(members, self._work(first.group, values))

    def _finish(self, portion: _Portion, results: Sequence[Any]) -> None:
        place = 0
        for request, number in portion.members:
            request.is_busy = False
            request.results += results[place : place + number]
            place += number
            if len(request.results) == len(request.values) and not request.answer.done():
                request.answer.set_result(request.results)

    def _fail(self, portion: _Portion, error: Exception) -> None:
        """Gives an error to the request it is of; of several each is computed by itself again."""
        for request, number in portion.members:
            request.is_busy = False
            if request.answer.done():
                continue
            if len(portion.members) == 1:
                request.answer.set_exception(error)
                continue
            request.is_alone = True
            request.num_started -= number
            if request not in self._waiting:
                self._waiting.append(request)


def _step(work: Generator[None, None, Sequence[Any]]) -> Sequence[Any] | None:
    """The results of a portion; None if there is more to do."""
    try:
        next(work)
    except StopIteration as stop:
        return stop.value
    return None


async def all_of(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Returns all results in order; where one fails, the others are cancelled."""
    started = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return await asyncio.gather(*started)
    finally:
        for each in started:
            each.cancel()
