"""Counts of finished items and busy time per step, collected from all processes of a job.

Each process counts on its own and sends its totals once per second to the `Board`, an actor without
reserved resources. The driver reads their sums from it. Nothing waits for the board: without it, a
job runs as before and only lacks these counts.
"""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any, NamedTuple

#: Name of the board in the namespace of the driver.
BOARD = "maxray-board"
#: Interval at which a process sends changed totals, in seconds.
SEND_SECONDS = 1.0
#: Interval at which a process sends unchanged totals, and after which it counts as ended, in
#: seconds.
ALIVE_SECONDS, ENDED_SECONDS = 5.0, 15.0
#: Number of jobs whose totals the board keeps.
MAX_JOBS = 8


class Totals(NamedTuple):
    """Totals of one step.

    Attributes:
        items: Items that have passed the step.
        units: Units that have passed the step.
        seconds: Busy time, summed over processes.
        processes: Number of processes that run the step.
    """

    items: int = 0
    units: int = 0
    seconds: float = 0.0
    processes: int = 0

    def plus(self, other: Totals) -> Totals:
        """Returns the sums of both."""
        return Totals(
            self.items + other.items,
            self.units + other.units,
            self.seconds + other.seconds,
            self.processes + other.processes,
        )


class Board:
    """Actor that holds the totals of all processes of the jobs of a driver."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, tuple[float, dict[str, Totals]]]] = {}

    def put(self, job: str, process: str, totals: dict[str, tuple[int, int, float]]) -> None:
        """Replaces the totals of a process. They are sums since its start, so none is lost."""
        if job not in self._jobs:
            while len(self._jobs) >= MAX_JOBS:
                del self._jobs[next(iter(self._jobs))]
            self._jobs[job] = {}
        steps = {step: Totals(*values) for step, values in totals.items()}
        self._jobs[job][process] = (time.monotonic(), steps)

    def read(self, job: str) -> dict[str, Totals]:
        """Returns the totals of a job by step."""
        now, sums = time.monotonic(), dict[str, Totals]()
        for seen, steps in self._jobs.get(job, {}).values():
            for step, totals in steps.items():
                alive = int(now - seen < ENDED_SECONDS)
                sums[step] = sums.get(step, Totals()).plus(totals._replace(processes=alive))
        return sums


_board: Any = None  # the first handle, without which Ray ends the actor


def start_board() -> None:
    """Starts the board unless it exists. It ends with the driver."""
    global _board
    import ray

    try:
        ray.get_actor(BOARD)
    except ValueError:  # the first job of this driver
        options = {"name": BOARD, "num_cpus": 0, "max_restarts": -1}
        _board = ray.remote(Board).options(**options).remote()


def read_board(job: str, timeout_s: float = 5.0) -> dict[str, Totals]:
    """Returns the totals of a job by step, from the board that this process has started."""
    import ray

    return ray.get(_board.read.remote(job), timeout=timeout_s)


class Meter:
    """Counts of one process of a job.

    Args:
        job: Identifier of the job.
    """

    def __init__(self, job: str):
        self.job = job
        self._process = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._totals: dict[str, Totals] = {}
        self._changed, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._send_all, daemon=True, name="maxray-meter").start()

    def add(self, step: str, items: int = 0, units: int = 0, seconds: float = 0.0) -> None:
        """Adds to the totals of a step. Without counts, reports that the process is ready."""
        with self._lock:
            totals = self._totals.get(step, Totals())
            self._totals[step] = totals.plus(Totals(items, units, seconds))
        self._changed.set()

    def close(self) -> None:
        """Stops sending."""
        self._closed.set()

    def _send_all(self) -> None:
        import ray

        board = None
        while not self._closed.wait(SEND_SECONDS):
            self._changed.wait(ALIVE_SECONDS)
            self._changed.clear()
            with self._lock:
                totals = {step: tuple(values[:3]) for step, values in self._totals.items()}
            try:
                board = board or ray.get_actor(BOARD)
                board.put.remote(self.job, self._process, totals)
            except Exception:  # the job ends, or the board is being restarted: sent again later
                board = None


_current: Meter | None = None
_current_lock = threading.Lock()


def meter(job: str) -> Meter:
    """Returns the meter of this process for a job. That of an earlier job is closed."""
    global _current
    with _current_lock:
        if _current is None or _current.job != job:
            if _current is not None:
                _current.close()
            _current = Meter(job)
        return _current
