"""State of a running job for displays, `jobs.status --watch` and Prometheus.

A job reports its phase and its counts to a `Monitor`. A background thread of the monitor turns them
into snapshots several times per second, also while the job waits for a task, and passes them on. A
snapshot is stored in the folder of the job, so that other processes and machines can show it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from pipeline.meter import Totals
from pipeline.tracing import span

log = logging.getLogger("maxray.monitor")

#: Interval of the snapshots, in seconds.
TICK_SECONDS = 0.5
#: Period over which rates and utilisation are averaged, in seconds, and the number of changes that
#: it must contain. With fewer, they are averaged over the phase.
WINDOW_SECONDS, MIN_CHANGES = 30.0, 4
#: Steps in the order of the stream.
STEPS = ("read", "prepare", "encode", "compress", "write")


@dataclass(frozen=True)
class StepState:
    """Step of the stream at one time.

    Attributes:
        name: Name of the step.
        items: Items that have passed it.
        rate: Items per second.
        utilisation: Fraction of the time in which its processes were busy with it, from 0 to 1.
        processes: Number of processes that run it.
        seconds: Busy time so far, summed over processes.
    """

    name: str
    items: int
    rate: float
    utilisation: float
    processes: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """State of a job at one time.

    Attributes:
        job: Identifier of the job.
        kind: Type of the job, such as "index".
        index: URI of the index.
        phase: What the job is doing.
        unit: What `done` and `total` count in this phase, such as "items" or "shards".
        done: Number that has been done.
        total: Number to do, or None if it is not known yet.
        rate: Number done per second, or None if it is not known yet.
        seconds_left: Estimated time until the end of the phase, in seconds, if it is known.
        seconds: Time since the start of the job, in seconds.
        counts: Further counts by name, such as "rejected".
        steps: Steps of the stream.
        time: Time of the snapshot, in seconds since 1970.
    """

    job: str = ""
    kind: str = ""
    index: str = ""
    phase: str = ""
    unit: str = "items"
    done: int = 0
    total: int | None = None
    rate: float | None = None
    seconds_left: float | None = None
    seconds: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)
    steps: tuple[StepState, ...] = ()
    time: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Converts the snapshot to JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """Parses a stored snapshot. Unknown fields are ignored."""
        fields = json.loads(text)
        steps = tuple(StepState(**step) for step in fields.pop("steps"))
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        return cls(**known, steps=steps)


#: Shows a snapshot.
Show = Callable[[Snapshot], None]


def ignore(snapshot: Snapshot) -> None:
    """Shows nothing."""


#: Returns the totals by step, or None while the processes are starting.
ReadSteps = Callable[[], Mapping[str, Totals] | None]


class _Sample(NamedTuple):
    """Counts at one time, from which rates are computed."""

    seconds: float
    done: int
    steps: Mapping[str, Totals]


class Monitor:
    """Keeps the state of a job and passes snapshots of it on.

    Args:
        first: Snapshot with the fields that do not change.
        shows: Called with each snapshot.
        save: Called with a snapshot as JSON.
        save_seconds: Interval between calls of `save`, in seconds.
    """

    def __init__(
        self,
        first: Snapshot,
        shows: Sequence[Show],
        save: Callable[[str], None],
        save_seconds: float,
    ):
        self._state, self._shows, self._save = first, shows, save
        self._save_seconds = save_seconds
        self._started = time.monotonic()
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._steps: ReadSteps | None = None
        self._first: _Sample | None = None
        self._samples: deque[_Sample] = deque()
        self._thread = threading.Thread(target=self._run, daemon=True, name="maxray-monitor")

    def start(self) -> None:
        """Starts the background thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the background thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    @contextlib.contextmanager
    def phase(
        self,
        name: str,
        unit: str = "items",
        total: int | None = None,
        steps: ReadSteps | None = None,
    ) -> Iterator[None]:
        """Shows a phase and its progress until the end of the block.

        Args:
            name: Name of the phase.
            unit: What `update` counts in this phase.
            total: Number to do.
            steps: Returns the totals by step. Until it returns totals, no rates are computed.
        """
        with self._lock:
            self._state = replace(self._state, phase=name, unit=unit, done=0, total=total)
            self._steps, self._first = steps, None
            self._samples.clear()
        self.tick()
        with span(name):
            yield
        with self._lock:
            self._steps = None
        self.tick()

    def update(self, done: int | None = None, total: int | None = None, **counts: int) -> None:
        """Updates counts of the current phase.

        Args:
            done: Number that has been done.
            total: Number to do.
            counts: Further counts.
        """
        with self._lock:
            state = self._state
            self._state = replace(
                state,
                done=state.done if done is None else done,
                total=state.total if total is None else total,
                counts={**state.counts, **counts},
            )

    def tick(self) -> Snapshot:
        """Computes a snapshot and shows it."""
        read = self._steps
        steps: Mapping[str, Totals] | None = {}
        if read is not None:
            try:
                steps = read()
            except Exception as error:  # progress must not end a job
                log.debug("progress cannot be read: %s", error)
        with self._lock:
            snapshot = self._snapshot(steps)
        for show in self._shows:
            show(snapshot)
        return snapshot

    def _snapshot(self, steps: Mapping[str, Totals] | None) -> Snapshot:
        now, state = time.monotonic(), self._state
        state = replace(state, seconds=now - self._started, time=time.time())
        if steps is None:
            return state
        sample = _Sample(now, state.done, steps)
        self._first = self._first or sample
        self._samples.append(sample)
        while len(self._samples) > 2 and now - self._samples[1].seconds > WINDOW_SECONDS:
            self._samples.popleft()
        # A window with few changes says little, as when a unit takes longer than the window.
        has_changes = len({s.done for s in self._samples}) > MIN_CHANGES
        start = self._samples[0] if has_changes else self._first
        elapsed, done = now - start.seconds, state.done - start.done
        rate = left = None
        if elapsed > 0 and done > 0:
            rate = done / elapsed
            left = None if state.total is None else max(0, state.total - state.done) / rate
        states = (
            _step(name, totals, start.steps.get(name, Totals()), elapsed)
            for name, totals in sorted(steps.items(), key=lambda item: _position(item[0]))
        )
        return replace(state, rate=rate, seconds_left=left, steps=tuple(states))

    def _run(self) -> None:
        saved = -self._save_seconds
        while True:
            try:
                snapshot = self.tick()
                if time.monotonic() - saved >= self._save_seconds:
                    saved = time.monotonic()
                    self._save(json.dumps(snapshot.to_dict()))
            except Exception as error:  # such as a full disk, which the job itself reports
                log.debug("progress cannot be shown: %s", error)
            if self._ended.wait(TICK_SECONDS):
                return


def _step(name: str, totals: Totals, before: Totals, elapsed: float) -> StepState:
    rate = (totals.items - before.items) / elapsed if elapsed else 0.0
    busy = (totals.seconds - before.seconds) / elapsed if elapsed else 0.0
    utilisation = min(1.0, busy / max(1, totals.processes))
    return StepState(name, totals.items, rate, utilisation, totals.processes, totals.seconds)


def _position(step: str) -> float:
    return STEPS.index(step) if step in STEPS else STEPS.index("encode") + 0.5
