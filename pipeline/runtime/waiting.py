"""Waiting for slow functions and generators, while a job checks whether it has to stop."""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent import futures
from typing import Any

#: Interval at which a waiting job checks whether it has to stop, in seconds.
CHECK_SECONDS = 0.5
#: Values that a producing thread holds while its consumer is busy.
WAITING_VALUES = 8

#: Raises an error to stop the job.
Check = Callable[[], None]


def call_in_thread(function: Callable[..., Any], *arguments: Any) -> futures.Future[Any]:
    """Calls a function in a thread, which does not keep this process alive."""
    result: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            result.set_result(function(*arguments))
        except BaseException as error:  # re-raised in the thread of the caller
            result.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), daemon=True).start()
    return result


def wait(future: futures.Future[Any], check: Check) -> Any:
    """Returns the result of a future, and calls `check` every half second until it is there."""
    while not futures.wait([future], CHECK_SECONDS).done:
        check()
    return future.result()


def polled(values: Iterable[Any], daemon: bool = True) -> Generator[Any, None, None]:
    """Yields values that a thread produces, and None after half a second without a value.

    The thread ends after the value in progress if the generator is closed.

    Args:
        daemon: Allows the process to exit before that. A thread that runs PyTorch would abort it.
    """
    results: queue.Queue = queue.Queue(maxsize=WAITING_VALUES)
    closed = threading.Event()

    def put(value: Any) -> None:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                results.put(value, timeout=CHECK_SECONDS)
                return

    def produce() -> None:
        try:
            for value in values:
                put(value)
                if closed.is_set():
                    return
            put(StopIteration)
        except BaseException as error:  # re-raised in the thread of the caller
            put(error)
        finally:
            if isinstance(values, Generator):
                values.close()  # in the context of its other steps

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(produce,), daemon=daemon).start()
    try:
        while True:
            try:
                value = results.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                yield None
                continue
            if value is StopIteration:
                return
            if isinstance(value, BaseException):
                raise value
            yield value
    finally:
        closed.set()
