"""Bare loops: plain processes that take one file after the other, without Ray."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

#: Reads a file and says how much that brought. A function of a module: it goes to the processes.
Read = Callable[[str, Any], float]


def run_loops(read: Read, paths: Sequence[str], how: Any, processes: int) -> dict[str, Any]:
    """Reads files in as many processes; what they import is imported before the time begins.

    Returns:
        `amount`, what the files brought together, and the `seconds` that reading alone took.
    """
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(processes + 1)
    results = context.Queue()
    taken = context.Value("i", 0)  # files that some loop has begun
    arguments = (read, list(paths), how, taken, ready, results)
    loops = [context.Process(target=_loop, args=arguments) for _ in range(processes)]
    for loop in loops:
        loop.start()
    ready.wait()
    start = time.perf_counter()
    amount = sum(results.get() for _ in loops)
    seconds = time.perf_counter() - start
    for loop in loops:
        loop.join()
    return {"amount": amount, "seconds": seconds}


def _loop(read: Read, paths: list[str], how: Any, taken: Any, ready: Any, results: Any) -> None:
    ready.wait()
    amount = 0.0
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= len(paths):
            break
        amount += read(paths[number], how)
    results.put(amount)
