"""Order of the steps of a table, and their execution one after another or in parallel.

A step needs all steps that write a folder which its spec names. The steps of a row are consecutive,
so that errors surface early and rows are completed one after another, and so are rows of the same
encoder, so that it is loaded once.
"""

from __future__ import annotations

import json
import posixpath
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from examples.papers.tables.plan import Plan, PlannedStep
from pipeline import __version__, config
from pipeline.config import JobError, SpecError, Stopped
from pipeline.index.executor import Executor
from pipeline.runtime.atomic import write_atomic
from pipeline.runtime.progress import duration

#: States of a step. A skipped step needs a failed one.
State = Literal["left", "running", "done", "failed", "skipped"]


@dataclass(eq=False)
class Scheduled:
    """A step with its state.

    Attributes:
        needs: Steps that have to be done before.
        spec: Spec of the step.
        group: Number of the group of steps that share an encoder.
        seconds: Time that the step took, in this run or an earlier one.
        record: Further fields of the file that marks the step as done.
        error: Message of a failed step, or the reason for skipping it.
    """

    step: PlannedStep
    needs: list[Scheduled]
    spec: config.Spec | None = None
    group: int = 0
    state: State = "left"
    seconds: float | None = None
    record: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def title(self) -> str:
        """Name of the step and the folder that it writes."""
        return f"{self.step.name} {self.step.output}"


def schedule(plan: Plan) -> list[Scheduled]:
    """Returns the steps of a table in the order in which they run."""
    steps = list(_with_needs(plan.steps))
    by_target = {scheduled.step.output: scheduled for scheduled in steps}
    measured = dict.fromkeys(
        cell.output for cells in plan.cells for of_cell in cells for cell in of_cell
    )
    last = [by_target[output] for output in measured]
    groups: dict[str, int] = {}
    numbers = [groups.setdefault(_encoder(scheduled), len(groups)) for scheduled in last]
    ordered: dict[Scheduled, None] = {}

    def add(scheduled: Scheduled, group: int) -> None:
        if scheduled in ordered:
            return
        for needed in scheduled.needs:
            add(needed, group)
        scheduled.group = group
        ordered[scheduled] = None

    for group, scheduled in sorted(zip(numbers, last, strict=True), key=lambda pair: pair[0]):
        add(scheduled, group)
    return list(ordered)


def _with_needs(steps: Sequence[PlannedStep]) -> Iterator[Scheduled]:
    writers: dict[str, list[Scheduled]] = {}
    for step in steps:
        needs: dict[Scheduled, None] = {}
        for text in _texts(step.fields):
            for path in (text, *map(str, Path(text).parents)):
                needs |= dict.fromkeys(writers.get(path, ()))
        scheduled = Scheduled(step, list(needs))
        writers.setdefault(step.output, []).append(scheduled)
        yield scheduled


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _encoder(scheduled: Scheduled) -> str:
    """Returns the spec of the encoder with which an evaluated index is made."""
    specs = [needed.step.fields.get("encoder") for needed in scheduled.needs]
    return json.dumps([spec for spec in specs if spec is not None], sort_keys=True)


class Scheduler:
    """Runs steps and keeps a file for each finished one, so that it is not repeated.

    A step whose target does not exist, or that needs a repeated step, is repeated. If a step fails,
    the steps that do not need it still run.

    Args:
        steps: Steps, in order.
        records: Folder of the files of finished steps.
        execute: Runs a step on an executor and returns further fields of its file.
        changed: Called after each change of the state of a step, by one thread at a time.
    """

    def __init__(
        self,
        steps: Sequence[Scheduled],
        records: str,
        execute: Callable[[Scheduled, Executor], dict[str, Any]],
        changed: Callable[[Scheduled], None],
    ):
        self._steps, self._records, self._execute = steps, records, execute
        self._report = changed
        self._changed = threading.Condition()
        self._groups: dict[int, int] = {}  # by thread
        self._stopped = False
        for scheduled in steps:
            self._read(scheduled)

    def run(self, executors: Sequence[Executor]) -> None:
        """Runs the steps, as many at a time as there are executors."""
        try:
            if len(executors) == 1:  # signals reach the main thread only
                self._work(executors[0])
                return
            threads = ThreadPoolExecutor(len(executors))
            for future in as_completed([threads.submit(self._work, e) for e in executors]):
                future.result()
        finally:
            with self._changed:
                self._stopped = True  # threads end after their step
                self._changed.notify_all()
            for executor in executors:
                executor.release()

    def _work(self, executor: Executor) -> None:
        while (scheduled := self._next(executor)) is not None:
            started = time.monotonic()
            try:
                scheduled.record = self._execute(scheduled, executor)
            except Stopped:
                raise
            except Exception as error:
                if not isinstance(error, SpecError | JobError):  # these are sentences
                    traceback.print_exception(error)
                self._set(scheduled, "failed", config.first_line(error))
                continue
            scheduled.seconds = time.monotonic() - started
            self._write(scheduled)
            self._set(scheduled, "done")

    def _next(self, executor: Executor) -> Scheduled | None:
        """Takes the next step: of the same encoder, or else of one that no other thread has."""
        me = threading.get_ident()
        with self._changed:
            while not self._stopped:
                others = {group for thread, group in self._groups.items() if thread != me}
                ready = [
                    (s.group != self._groups.get(me), s.group in others, number)
                    for number, s in enumerate(self._steps)
                    if s.state == "left" and all(needed.state == "done" for needed in s.needs)
                ]
                if ready:
                    scheduled = self._steps[min(ready)[2]]
                    if self._groups.get(me) != scheduled.group:
                        executor.release()  # memory may not suffice for two encoders
                    self._groups[me] = scheduled.group
                    self._set(scheduled, "running")
                    return scheduled
                self._groups.pop(me, None)
                executor.release()  # the steps of other threads may wait for its resources
                if not any(scheduled.state == "running" for scheduled in self._steps):
                    return None
                self._changed.wait()
        return None

    def _set(self, scheduled: Scheduled, state: State, error: str = "") -> None:
        with self._changed:
            scheduled.state, scheduled.error = state, error
            self._report(scheduled)
            if state in ("failed", "skipped"):
                for other in self._steps:
                    if other.state == "left" and scheduled in other.needs:
                        self._set(other, "skipped", f"needs {scheduled.title}")
            self._changed.notify_all()

    def _file(self, scheduled: Scheduled) -> str:
        digest = config.digest([__version__, scheduled.step.job, scheduled.step.fields])
        return posixpath.join(self._records, f"{digest}.json")

    def _read(self, scheduled: Scheduled) -> None:
        file = Path(self._file(scheduled))
        needs_none = all(needed.state == "done" for needed in scheduled.needs)
        if needs_none and file.exists() and Path(scheduled.step.output).exists():
            scheduled.record = json.loads(file.read_text("utf-8"))
            scheduled.seconds, scheduled.state = scheduled.record["seconds"], "done"

    def _write(self, scheduled: Scheduled) -> None:
        record = {"step": scheduled.title, "seconds": scheduled.seconds, **scheduled.record}
        scheduled.record = record
        write_atomic(self._file(scheduled), json.dumps(record, indent=1))


class Progress:
    """Counts of the steps by name, with the estimated time, on a terminal or as lines."""

    def __init__(self, steps: Sequence[Scheduled], parallel: int, say: Callable[[str], None]):
        self._steps, self._parallel, self._say = steps, parallel, say
        self._started: dict[Scheduled, float] = {}

    def changed(self, scheduled: Scheduled) -> None:
        """Reports a step that begins or ends."""
        self._started.setdefault(scheduled, time.monotonic())
        text = f"{scheduled.title}: {scheduled.state}"
        if scheduled.state == "done":
            text += f" in {duration(scheduled.seconds or 0)}; {self.summary()}"
        self._say(f"{text} ({scheduled.error})" if scheduled.error else text)

    def summary(self) -> str:
        """Returns the counts of all steps and the estimated time in one line."""
        states = [scheduled.state for scheduled in self._steps]
        counts = [f"{n} {state}" for state in ("failed", "skipped") if (n := states.count(state))]
        left = self.seconds_left(self._steps)
        return ", ".join(
            [
                f"{states.count('done')} of {len(states)} steps done",
                *(f"{states.count(state)} {state}" for state in ("running", "left")),
                *counts,
                *([] if left is None else [f"about {duration(left)} left"]),
            ]
        )

    def seconds_left(self, steps: Sequence[Scheduled]) -> float | None:
        """Estimates the time of the unfinished steps from the mean of the finished ones by name."""
        known: dict[str, list[float]] = {}
        for scheduled in self._steps:
            if scheduled.seconds is not None:
                known.setdefault(scheduled.step.name, []).append(scheduled.seconds)
        seconds = 0.0
        for scheduled in steps:
            if scheduled.state in ("left", "running"):
                if scheduled.step.name not in known:
                    return None
                expected = sum(known[scheduled.step.name]) / len(known[scheduled.step.name])
                spent = time.monotonic() - self._started.get(scheduled, time.monotonic())
                seconds += max(0.0, expected - spent)
        return seconds / self._parallel

    def __rich__(self) -> Any:
        """Returns the table of a terminal, a line per kind of step and per running step."""
        from rich.table import Table
        from rich.text import Text

        table = Table("step", "done", "running", "left", "failed", "time left", box=None)
        for name in dict.fromkeys(scheduled.step.name for scheduled in self._steps):
            steps = [scheduled for scheduled in self._steps if scheduled.step.name == name]
            states = [scheduled.state for scheduled in steps]
            counts = [states.count("done"), states.count("running"), states.count("left")]
            failed, left = (
                states.count("failed") + states.count("skipped"),
                self.seconds_left(steps),
            )
            time_left = "" if left is None else duration(left)
            table.add_row(name, *map(str, counts), str(failed), time_left)
        for scheduled in self._steps:
            if scheduled.state == "running":
                spent = duration(time.monotonic() - self._started[scheduled])
                table.add_row(Text(f"  {scheduled.step.output}"), "", spent)
        return table
