"""Metrics of the jobs that write to an index, which Ray exports for Prometheus."""

from __future__ import annotations

import functools

from ray.util.metrics import Counter, Gauge, Histogram

from pipeline.runtime.progress import Snapshot

COMMIT_SECONDS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]


class JobMetrics:
    """Metrics of one job."""

    def __init__(self, kind: str, index: str):
        self._tags = {"kind": kind, "index": index}
        tags = tuple(self._tags)
        self._done = Gauge("maxray_job_done", "Number done in the phase.", (*tags, "unit"))
        self._total = Gauge("maxray_job_total", "Number to do in the phase.", (*tags, "unit"))
        self._left = Gauge("maxray_job_left_seconds", "Estimated time left in the phase.", tags)
        self._counts = Gauge("maxray_job_count", "Counts of the job.", (*tags, "count"))
        steps = (*tags, "step")
        self._items = Counter("maxray_step_items", "Items that passed a step.", steps)
        self._busy = Counter("maxray_step_busy_seconds", "Busy time of a step.", steps)
        self._processes = Gauge("maxray_step_processes", "Processes that run a step.", steps)
        self._before: dict[str, tuple[int, float]] = {}

    def record(self, snapshot: Snapshot) -> None:
        """Sets the metrics to the state of a snapshot."""
        unit = {**self._tags, "unit": snapshot.unit}
        self._done.set(snapshot.done, unit)
        if snapshot.total is not None:
            self._total.set(snapshot.total, unit)
        self._left.set(snapshot.seconds_left or 0.0, self._tags)
        for name, number in snapshot.counts.items():
            self._counts.set(number, {**self._tags, "count": name})
        for step in snapshot.steps:
            tags = {**self._tags, "step": step.name}
            items, seconds = self._before.get(step.name, (0, 0.0))
            self._before[step.name] = (step.items, step.seconds)
            if step.items > items:
                self._items.inc(step.items - items, tags)
            if step.seconds > seconds:
                self._busy.inc(step.seconds - seconds, tags)
            self._processes.set(step.processes, tags)


@functools.cache
def commit_seconds() -> Histogram:
    """Returns the histogram of the time that commits of the index job take."""
    return Histogram("maxray_commit_seconds", "Time of a commit.", boundaries=COMMIT_SECONDS)
