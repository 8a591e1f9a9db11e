"""Scheduling of requests that shares the threads of a stage fairly between access keys.

A stage processes a request in slices that take a fraction of a second. Each slice ends with a call
of `pipeline.search.pauses.pause`, at which the scheduler continues with the key that has used the
least time. A key can therefore delay others by at most one slice at a time. Requests that have
timed out or have been cancelled are dropped before they start or at the end of a slice.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from pipeline.search import pauses

T = TypeVar("T")

#: Maximum number of batches that are paused at a time. Each holds a thread.
MAX_PAUSED = 64
#: Interval at which the thread of a paused batch checks whether the event loop has ended, in
#: seconds.
CHECK_SECONDS = 5.0


class Caller(NamedTuple):
    """Access key and time limit, in seconds, with which a stage is called."""

    key: str
    timeout_s: float


class FairSlots:
    """Slots that access keys share such that no key can occupy all of them.

    A key gets another slot as long as it holds fewer slots than are free (dynamic thresholds,
    Choudhury and Hahne, 1998). A single key can hold at most half of the slots, and two keys can
    hold a third each. A key that holds no slot can always get one.

    >>> slots = FairSlots(8)
    >>> [slots.acquire("a") for _ in range(5)], [slots.acquire("b") for _ in range(3)]
    ([True, True, True, True, False], [True, True, False])

    Args:
        are_shared: If False, the only limit is the capacity.
    """

    def __init__(self, capacity: int, *, are_shared: bool = True):
        self.capacity, self.num_acquired = capacity, 0
        self._are_shared = are_shared
        self._by_key: Counter[str] = Counter()

    def is_available(self, key: str) -> bool:
        """Checks whether the key can acquire a slot."""
        held = self._by_key[key] if self._are_shared else 0
        return held < self.capacity - self.num_acquired

    def acquire(self, key: str) -> bool:
        """Tries to acquire a slot without blocking. Returns True on success."""
        if not self.is_available(key):
            return False
        self._by_key[key] += 1
        self.num_acquired += 1
        return True

    def release(self, key: str) -> None:
        """Releases a slot."""
        self.num_acquired -= 1
        self._by_key[key] -= 1
        if not self._by_key[key]:
            del self._by_key[key]


class Load(NamedTuple):
    """Load of a scheduler since it was last measured.

    Attributes:
        queueing_delay_s: Mean time that requests waited before their computation started, in
            seconds. Includes the requests that are waiting.
        utilisation: Fraction of the time in which the worker threads were busy.
    """

    queueing_delay_s: float
    utilisation: float


#: Computes one result per value, given a group and its values. Calls `pause` between slices.
Work = Callable[[Any, list[Any]], Sequence[Any]]


class Dropped(Exception):
    """Raised by `pause` if nobody waits for the result any more."""


@dataclass(eq=False)
class _Request:
    key: str
    group: Hashable
    values: Sequence[Any]
    future: asyncio.Future
    context: contextvars.Context  # of the caller, with its trace
    start: float
    results: list[Any] = field(default_factory=list)
    num_started: int = 0
    is_running: bool = False  # some of its values are in a batch
    is_isolated: bool = False  # it is not batched with others because such a batch has failed


@dataclass(eq=False)
class _Batch:
    """Values from one or more requests of the same group that are computed together.

    The work runs in the context of the first request, so its spans belong to that trace.

    Attributes:
        paused: Future that completes at the next pause.
        turn: Released when the work may continue after a pause.
        is_dropped: Whether the work ends at its next turn.
    """

    members: list[tuple[_Request, int]]
    values: list[Any]
    context: contextvars.Context
    results: asyncio.Future[Sequence[Any]] | None = None
    paused: asyncio.Future[None] | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_dropped: bool = False

    @property
    def key(self) -> str:
        return self.members[0][0].key

    @property
    def group(self) -> Hashable:
        return self.members[0][0].group

    def pause(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self.paused is not None
        loop.call_soon_threadsafe(self.paused.set_result, None)
        while not self.turn.acquire(timeout=CHECK_SECONDS):
            if not loop.is_running():
                raise Dropped
        if self.is_dropped:
            raise Dropped

    def drop(self) -> None:
        assert self.results is not None
        self.results.add_done_callback(asyncio.Future.exception)  # `Dropped`, which nobody awaits
        self.is_dropped = True
        self.turn.release()


class FairScheduler:
    """Batches requests and shares the worker threads of a stage fairly between access keys.

    Args:
        work: Computes a batch. It runs in a thread of its own.
        size: Returns the size of a value.
        max_batch_size: Maximum total size of the values of a batch. A larger value forms a batch
            of its own.
    """

    def __init__(
        self,
        work: Work,
        size: Callable[[Any], float] = lambda value: 1,
        max_batch_size: float = 1,
        *,
        workers: int = 1,
        observe: Callable[[int], None] = lambda number: None,
    ):
        self._work, self._size, self._max_batch_size = work, size, max_batch_size
        self._workers, self._observe = workers, observe
        self._threads = ThreadPoolExecutor(MAX_PAUSED + workers, "scheduler")
        self._open: set[_Request] = set()  # all requests with a caller that waits
        self._waiting: list[_Request] = []  # requests with values that are not in a batch yet
        self._paused: list[_Batch] = []
        self._tasks: set[asyncio.Task] = set()
        self._num_running = 0  # running worker loops, at most one per worker
        self._used: dict[str, float] = {}  # seconds used per key since the scheduler was idle
        self._slots = FairSlots(workers)
        # Delays of requests that have started, and time of computation, since the last measurement.
        self._delay_s, self._num_delays, self._busy_s = 0.0, 0, 0.0
        self._measured = time.perf_counter()

    def measure_load(self) -> Load:
        """Returns the load since the last call of this method."""
        now = time.perf_counter()
        waiting = [now - request.start for request in self._waiting if not request.num_started]
        num_delays = self._num_delays + len(waiting)
        elapsed = max(now - self._measured, 1e-9)
        load = Load(
            (self._delay_s + sum(waiting)) / max(num_delays, 1),
            self._busy_s / elapsed / self._workers,
        )
        self._delay_s, self._num_delays, self._busy_s = 0.0, 0, 0.0
        self._measured = now
        return load

    async def run(self, caller: Caller, group: Hashable, values: Sequence[Any]) -> list[Any]:
        """Returns one result per value. Values of equal groups may be batched."""
        if not values:
            return []
        active = {request.key for request in self._open}
        if not active:
            self._used.clear()
        elif caller.key not in active:  # a key does not accumulate credit while it is idle
            least = min(self._used.get(key, 0.0) for key in active)
            self._used[caller.key] = max(self._used.get(caller.key, 0.0), least)
        future = asyncio.get_running_loop().create_future()
        context, start = contextvars.copy_context(), time.perf_counter()
        request = _Request(caller.key, group, values, future, context, start)
        self._waiting.append(request)
        self._open.add(request)
        if self._num_running < self._workers:
            self._num_running += 1
            task = asyncio.create_task(self._work_loop())
            self._tasks.add(task)  # the event loop holds only a weak reference
            task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(caller.timeout_s):
                return await future  # a timeout cancels the future, which drops the request
        finally:
            self._open.discard(request)

    async def _work_loop(self) -> None:
        try:
            while (batch := self._next()) is not None:
                await self._run_slice(batch)
        finally:
            # Not in a done callback of the task: a request could arrive before it is called.
            self._num_running -= 1

    async def _run_slice(self, batch: _Batch) -> None:
        self._slots.acquire(batch.key)
        start, loop = time.perf_counter(), asyncio.get_running_loop()
        batch.paused = loop.create_future()
        if batch.results is None:
            batch.context.run(pauses.action.set, functools.partial(batch.pause, loop))
            run = functools.partial(batch.context.run, self._work, batch.group, batch.values)
            batch.results = loop.run_in_executor(self._threads, run)
        else:
            batch.turn.release()
        futures: set[asyncio.Future[Any]] = {batch.results, batch.paused}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not batch.results.done():
            self._paused.append(batch)
        elif error := batch.results.exception():
            self._fail(batch, error)
        else:
            self._finish(batch, batch.results.result())
        self._slots.release(batch.key)
        seconds = time.perf_counter() - start
        self._busy_s += seconds
        total = sum(number for _, number in batch.members)
        for request, number in batch.members:
            used = self._used.get(request.key, 0.0)
            self._used[request.key] = used + seconds * number / total

    def _next(self) -> _Batch | None:
        self._waiting = [r for r in self._waiting if not r.future.done()]
        for batch in list(self._paused):
            if all(request.future.done() for request, _ in batch.members):
                self._paused.remove(batch)
                batch.drop()
        can_start = len(self._paused) < MAX_PAUSED
        ready = [r for r in self._waiting if not r.is_running] if can_start else []
        waiting = dict.fromkeys([p.key for p in self._paused] + [r.key for r in ready])
        keys = [key for key in waiting if self._slots.is_available(key)]
        if not keys:
            return None
        key = min(keys, key=lambda key: self._used.get(key, 0.0))
        for batch in self._paused:
            if batch.key == key:
                self._paused.remove(batch)
                return batch
        return self._batch(next(r for r in ready if r.key == key), ready)

    def _batch(self, first: _Request, ready: Sequence[_Request]) -> _Batch:
        """Returns a batch of values, taken in turn from `first` and other requests of its group."""
        requests = [first]
        if not first.is_isolated:
            others = [r for r in ready if r is not first and r.group == first.group]
            requests += [r for r in others if not r.is_isolated]
        numbers, size, has_grown = dict.fromkeys(requests, 0), 0.0, True
        while has_grown:
            has_grown = False
            for request in requests:
                index = request.num_started + numbers[request]
                if index == len(request.values):
                    continue
                value_size = self._size(request.values[index])
                if size and size + value_size > self._max_batch_size:
                    break
                numbers[request] += 1
                size += value_size
                has_grown = True
        members = [(request, number) for request, number in numbers.items() if number]
        values: list[Any] = []
        for request, number in members:
            if not request.num_started:
                self._delay_s += time.perf_counter() - request.start
                self._num_delays += 1
            values += request.values[request.num_started : request.num_started + number]
            request.num_started += number
            request.is_running = True
            if request.num_started == len(request.values):
                self._waiting.remove(request)
        self._observe(len(members))
        return _Batch(members, values, first.context.copy())

    def _finish(self, batch: _Batch, results: Sequence[Any]) -> None:
        start = 0
        for request, number in batch.members:
            request.is_running = False
            request.results += results[start : start + number]
            start += number
            if len(request.results) == len(request.values) and not request.future.done():
                request.future.set_result(request.results)

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        """Handles an error of a batch, whose requests are retried separately."""
        for request, number in batch.members:
            request.is_running = False
            if request.future.done():
                continue
            if len(batch.members) == 1:
                request.future.set_exception(error)
                continue
            request.is_isolated = True
            request.num_started -= number
            if request not in self._waiting:
                self._waiting.append(request)


def busiest(*schedulers: FairScheduler) -> dict[str, float]:
    """Measures the load of the schedulers of a stage. Returns the maximum of each value by name."""
    loads = [scheduler.measure_load() for scheduler in schedulers]
    return {name: max(getattr(load, name) for load in loads) for name in Load._fields}


async def gather_or_cancel(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Waits for all results and returns them in order. If one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
