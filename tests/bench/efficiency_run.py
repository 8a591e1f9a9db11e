"""Process of `tests.bench efficiency` that builds, searches or times one system.

    python -m tests.bench.efficiency_run STEP SYSTEM DATA FOLDER

Prints the measurements as JSON on the last line. `search` writes `found.npz` to the folder: the
rows of the results (Q, K) of each setting, padded with -1.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.efficiency_systems import SYSTEMS, Data, K, System, version
from tests.bench.harness import cpu_seconds, peak_bytes, seconds_of

#: Number of queries that are timed one at a time, and of those in a batch.
TIMED, BATCH = 64, 32


def build(system: System, data: Data, folder: Path) -> dict[str, Any]:
    """Builds the index."""
    memory, cpu = peak_bytes(), cpu_seconds()
    seconds = seconds_of(lambda: system.build(data, folder))
    files = [path for path in folder.rglob("*") if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in files) / len(data)
    if system.is_rescored:  # int8 vectors have a scale of four bytes
        num_bytes += (data.vectors.shape[1] + 4) * len(data.vectors) / len(data)
    return {
        "version": version(system.package),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds() - cpu,
        "memory": peak_bytes() - memory,
        "bytes": num_bytes,
    }


def search(system: System, data: Data, folder: Path) -> dict[str, Any]:
    """Searches all queries with each setting, and measures the memory for it."""
    memory = peak_bytes()
    found: dict[str, Any] = {}
    for label, find in system.open(data, folder):
        rows = np.full((len(data.queries), K), -1)
        for batch in batches(len(data.queries)):
            for number, hits in zip(batch, find(batch), strict=True):
                rows[number, : len(hits)] = hits
        found[label] = rows
    np.savez(folder / "found.npz", **found)
    return {"memory": peak_bytes() - memory}


def timing(system: System, data: Data, folder: Path) -> dict[str, Any]:
    """Measures latency and CPU time of single queries (medians), and the rate in batches."""
    timed: dict[str, Any] = {}
    chosen = np.linspace(0, len(data.queries), min(TIMED, len(data.queries)), False, dtype=int)
    numbers = chosen.tolist()
    for label, find in system.open(data, folder):
        find(numbers[:1]), find(numbers[:BATCH])  # warm-up
        single = [costs(functools.partial(find, [number])) for number in numbers]
        start = time.perf_counter()
        for batch in batches(len(numbers)):
            find([numbers[i] for i in batch])
        rate = len(numbers) / (time.perf_counter() - start)
        p50, cpu = (1000 * float(np.median(values)) for values in zip(*single, strict=True))
        timed[label] = [p50, rate, cpu]
    return timed


def costs(call: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of a call, and those of the CPU in all threads."""
    cpu = time.process_time()
    return seconds_of(call), time.process_time() - cpu


def batches(num: int) -> list[Sequence[int]]:
    """Returns the numbers below `num` in batches.

    >>> batches(33)
    [range(0, 32), range(32, 33)]
    """
    return [range(first, min(first + BATCH, num)) for first in range(0, num, BATCH)]


STEPS: dict[str, Callable[[System, Data, Path], dict[str, Any]]] = {
    "build": build,
    "search": search,
    "time": timing,
}

if __name__ == "__main__":
    step, name, *paths = sys.argv[1:]
    importlib.import_module("torch")  # is not counted as memory of a system
    data, folder = Data(Path(paths[0])), Path(paths[1])
    print(json.dumps(STEPS[step](SYSTEMS[name], data, folder)))
    sys.stdout.flush()
    os._exit(0)  # some systems do not end their threads
