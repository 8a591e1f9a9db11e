"""Baseline of the benchmarks: plain loops without Ray, in which processes share a list of files."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

#: Reads a file and returns the amount read. It must be a module-level function, to be picklable.
Read = Callable[[str, Any], float]


def run_loops(read: Read, paths: Sequence[str], options: Any, processes: int) -> dict[str, Any]:
    """Reads files in several processes. The time to import modules is not measured.

    Returns:
        `amount`, the sum over all files, and the `seconds` of reading.
    """
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(processes + 1)
    results = context.Queue()
    taken = context.Value("i", 0)  # number of files taken by the processes
    arguments = (read, list(paths), options, taken, ready, results)
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


def _loop(read: Read, paths: list[str], options: Any, taken: Any, ready: Any, results: Any) -> None:
    ready.wait()
    amount = 0.0
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= len(paths):
            break
        amount += read(paths[number], options)
    results.put(amount)
