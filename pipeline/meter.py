"""Counts of finished items and busy time per step, collected from all processes of a job.

Each process counts on its own and sends its totals once per second to the `Board`, an actor without
reserved resources. The driver reads their sums from it. Nothing waits for the board: without it, a
job runs as before and only lacks these counts.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

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
        # Busy time by item of the unit in progress, by step that the unit has not passed.
        self._unfinished: dict[str, dict[str, float]] = {}
        self._changed, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._send_all, daemon=True, name="maxray-meter").start()

    def add(self, step: str, items: int = 0, units: int = 0, seconds: float = 0.0) -> None:
        """Adds to the totals of a step. Without counts, reports that the process is ready.

        Units replace the items that were counted while they were in progress.
        """
        with self._lock:
            if units:
                self._unfinished.pop(step, None)
            totals = self._totals.get(step, Totals())
            self._totals[step] = totals.plus(Totals(items, units, seconds))
        self._changed.set()

    def add_item(self, step: str, item_id: str, seconds: float) -> None:
        """Counts an item of the unit in progress. An item that is repeated counts once."""
        with self._lock:
            spent = self._unfinished.setdefault(step, {})
            spent[item_id] = spent.get(item_id, 0.0) + seconds
        self._changed.set()

    def end_unit(self) -> None:
        """Ends the unit in progress. Its items remain counted."""
        totals = self.totals()
        with self._lock:
            self._totals, self._unfinished = totals, {}

    def totals(self) -> dict[str, Totals]:
        """Returns the totals by step, including items of the unit in progress."""
        with self._lock:
            totals = dict(self._totals)
            for step, spent in self._unfinished.items():
                items = Totals(len(spent), 0, sum(spent.values()))
                totals[step] = totals.get(step, Totals()).plus(items)
            return totals

    def close(self) -> None:
        """Stops sending."""
        self._closed.set()

    def _send_all(self) -> None:
        import ray

        board = None
        while not self._closed.wait(SEND_SECONDS):
            self._changed.wait(ALIVE_SECONDS)
            self._changed.clear()
            totals = {step: tuple(values[:3]) for step, values in self.totals().items()}
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


_step: str | None = None


@contextlib.contextmanager
def counting(step: str) -> Iterator[None]:
    """Lets `counted_rows` count items in a step while the block runs, if this process counts."""
    global _step
    _step = step
    try:
        yield
    finally:
        _step = None


def counted_rows(items: pa.Table) -> Iterator[int]:
    """Yields the row numbers of items, and counts each item when its row has been processed."""
    for row in range(items.num_rows):
        start = time.perf_counter()
        yield row
        if _step is not None and _current is not None:
            item_id = items["item_id"][row].as_py()
            _current.add_item(_step, item_id, time.perf_counter() - start)
