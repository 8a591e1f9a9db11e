"""Progress of jobs: counts of all processes, rates, the time left, and their display.

1. Each process of a job adds to the totals of its steps with `meter(job)`, which sends them once
   per second to the `Board`, an actor without reserved resources. Nothing waits for the board:
   without it, a job runs as before and only lacks these counts. Ray Data's own metrics count the
   blocks of an operator, but not its steps or the items of a unit in progress.
2. The driver reports its phases and counts to a `Monitor`, whose background thread turns them and
   the totals into a `Snapshot` several times per second, also while the job waits for a task.
3. The display of this process shows snapshots and sentences: in place on a terminal, as plain lines
   or as JSON lines. A job also stores its snapshots, so that other machines can show them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pipeline.config import SpecError
from pipeline.runtime import logs
from pipeline.runtime.tracing import span

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import RenderableType

log = logging.getLogger("maxray.jobs")

#: Name of the board in the namespace of the driver.
BOARD = "maxray-board"
#: Interval at which a process sends changed totals, in seconds.
SEND_SECONDS = 1.0
#: Interval at which a process sends unchanged totals, and after which it counts as ended, in
#: seconds.
ALIVE_SECONDS, ENDED_SECONDS = 5.0, 15.0
#: Number of jobs whose totals the board keeps.
MAX_JOBS = 8
#: Steps in the order of the stream.
STEPS = ("read", "prepare", "encode", "compress", "write")
#: Interval of the snapshots, in seconds.
TICK_SECONDS = 0.5
#: Period over which rates and utilisation are averaged, in seconds, and the number of changes that
#: it must contain. With fewer, they are averaged over the phase.
WINDOW_SECONDS, MIN_CHANGES = 30.0, 4
#: Modes of the option `--progress`. "auto" is live on a terminal and plain elsewhere.
Mode = Literal["auto", "live", "plain", "json"]
MODES: tuple[Mode, ...] = get_args(Mode)
#: Interval between plain lines, and between JSON lines of one phase, in seconds.
PLAIN_SECONDS, JSON_SECONDS = 5.0, 1.0


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
        while job not in self._jobs and len(self._jobs) >= MAX_JOBS:
            del self._jobs[next(iter(self._jobs))]
        steps = {step: Totals(*values) for step, values in totals.items()}
        self._jobs.setdefault(job, {})[process] = (time.monotonic(), steps)

    def read(self, job: str) -> dict[str, Totals]:
        """Returns the totals of a job by step."""
        now, sums = time.monotonic(), dict[str, Totals]()
        for seen, steps in self._jobs.get(job, {}).values():
            for step, totals in steps.items():
                alive = int(now - seen < ENDED_SECONDS)
                sums[step] = sums.get(step, Totals()).plus(totals._replace(processes=alive))
        return sums


def ray_is_connected() -> bool:
    """Returns True if this process is connected to a Ray cluster. Does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


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
    """Counts of one process of a job."""

    def __init__(self, job: str):
        self.job = job
        self._process = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._totals: dict[str, Totals] = {}
        # Busy time by item of the unit in progress, by step that the unit has not passed.
        self._unfinished: dict[str, dict[str, float]] = {}
        self._changed, self._closed = threading.Event(), threading.Event()
        if ray_is_connected():
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
            if not ray.is_initialized():  # Ray was shut down; `get_actor` would start it again
                continue
            totals = {step: tuple(values[:3]) for step, values in self.totals().items()}
            try:
                board = board or ray.get_actor(BOARD)
                board.put.remote(self.job, self._process, totals)
            except Exception:  # the job ends, or the board is being restarted: sent again later
                board = None


_meter: Meter | None = None
_meter_lock = threading.Lock()


def meter(job: str) -> Meter:
    """Returns the meter of this process for a job. That of an earlier job is closed."""
    global _meter
    with _meter_lock:
        if _meter is None or _meter.job != job:
            if _meter is not None:
                _meter.close()
            _meter = Meter(job)
        return _meter


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
        if _step is not None and _meter is not None:
            item_id = items["item_id"][row].as_py()
            _meter.add_item(_step, item_id, time.perf_counter() - start)


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
        """Parses a stored snapshot. Unknown fields of later versions are ignored."""
        fields = json.loads(text)
        steps = tuple(StepState(**step) for step in fields.pop("steps"))
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        return cls(**known, steps=steps)

    def describe(self) -> str:
        """Formats the snapshot as one line."""
        steps = "  ".join(f"{s.name} {s.rate:,.1f}/s {s.utilisation:.0%}" for s in self.steps)
        parts = [self.phase, *self.numbers(), steps and f"[{steps}]", self.further_counts]
        return "  ".join(filter(None, parts))

    @property
    def further_counts(self) -> str:
        """Names and numbers of `counts`."""
        return "  ".join(f"{name} {number:,}" for name, number in self.counts.items())

    def numbers(self, since: float = 0.0) -> Iterator[str]:
        """Yields the number done, the rate and the time left, `since` seconds after the snapshot.

        Until the first unit has passed all steps, they include the progress of the slowest step.
        """
        if self.total is not None:
            share = self.done / self.total if self.total else 1.0
            yield f"{self.done:,}/{self.total:,} {self.unit} ({share:.0%})"
        elif self.done:
            yield f"{self.done:,} {self.unit}"
        step = min(reversed(self.steps), key=lambda step: step.items, default=None)
        if step is not None and not self.done and 0 < step.items < (self.total or 0):
            yield f"{step.name} {step.items:,}/{self.total:,}"
        if self.rate is not None:
            yield f"{self.rate:,.1f}/s"
        if self.seconds_left is not None:
            yield f"{duration(max(0.0, self.seconds_left - since))} left"
        elif self.total:
            yield "estimating the time left"


def duration(seconds: float) -> str:
    """Formats a duration.

    >>> duration(47.3), duration(3725)
    ('0:47', '1:02:05')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


#: Returns the totals by step, or None while the processes are starting.
ReadSteps = Callable[[], Mapping[str, Totals] | None]


class _Sample(NamedTuple):
    """Counts at one time, from which rates are computed."""

    seconds: float
    done: int
    steps: Mapping[str, Totals]


class Monitor:
    """Keeps the state of a job and shows snapshots of it on the display of this process.

    Args:
        first: Snapshot with the fields that do not change.
        record: Called with each snapshot.
        save: Called with a snapshot as JSON.
        save_seconds: Interval between calls of `save`, in seconds.

    Attributes:
        phases: Time by phase that has ended, in seconds.
    """

    def __init__(
        self,
        first: Snapshot,
        record: Callable[[Snapshot], None],
        save: Callable[[str], None],
        save_seconds: float,
    ):
        self.phases: dict[str, float] = {}
        self._state, self._record, self._save = first, record, save
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
        """Shows a phase and its progress until the end of the block, and records its time.

        `unit` is what `update` counts. Until `steps` returns totals, no rates are computed.
        """
        start = time.monotonic()
        with self._lock:
            self._state = replace(self._state, phase=name, unit=unit, done=0, total=total)
            self._steps, self._first = steps, None
            self._samples.clear()
        self.tick()
        with span(name):
            yield
        with self._lock:
            self._steps = None
        self.phases[name] = time.monotonic() - start
        self.tick()

    def update(self, done: int | None = None, total: int | None = None, **counts: int) -> None:
        """Updates counts of the current phase."""
        with self._lock:
            state = self._state
            self._state = replace(
                state,
                done=state.done if done is None else done,
                total=state.total if total is None else total,
                counts={**state.counts, **counts},
            )

    def tick(self) -> Snapshot:
        """Computes a snapshot, and shows and records it."""
        read = self._steps
        steps: Mapping[str, Totals] | None = {}
        if read is not None:
            try:
                steps = read()
            except Exception as error:  # progress must not end a job
                log.debug("progress cannot be read: %s", error)
        with self._lock:
            snapshot = self._snapshot(steps)
        if _display is not None:
            _display.show(snapshot)
        self._record(snapshot)
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
            _step_state(name, totals, start.steps.get(name, Totals()), elapsed)
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


def _step_state(name: str, totals: Totals, before: Totals, elapsed: float) -> StepState:
    rate = (totals.items - before.items) / elapsed if elapsed else 0.0
    busy = (totals.seconds - before.seconds) / elapsed if elapsed else 0.0
    utilisation = min(1.0, busy / max(1, totals.processes))
    return StepState(name, totals.items, rate, utilisation, totals.processes, totals.seconds)


def _position(step: str) -> float:
    return STEPS.index(step) if step in STEPS else STEPS.index("encode") + 0.5


def say(line: str, is_timed: bool = True) -> None:
    """Prints a sentence, by default with the current time, or logs it as JSON."""
    if logs.is_json():
        log.info(line)
    else:
        print(f"{time.strftime('%H:%M:%S')} {line}" if is_timed else line, flush=True)


class Display:
    """Display of a job as lines, for log files. Its methods can be called from any thread."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._phase: str | None = None

    def say(self, line: str) -> None:
        """Shows a sentence, which remains visible."""
        say(line)

    def show(self, snapshot: Snapshot) -> None:
        """Shows the state of the job, here if the last one was shown five seconds ago."""
        if time.monotonic() - self._last >= PLAIN_SECONDS and (line := snapshot.describe()):
            self._last = time.monotonic()
            self.say(line)

    def phase(self, name: str) -> None:
        """Shows what the process is doing before the job reports its state."""
        self.show(Snapshot(phase=name))

    def close(self) -> None:
        """Ends the display."""
        sys.stdout.flush()


class JsonLines(Display):
    """One JSON object per line: `{"event": "message", ...}` or `{"event": "progress", ...}`.

    What Python code prints meanwhile, such as Ray's messages about processes that died, goes to the
    standard error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._output, sys.stdout = sys.stdout, sys.stderr

    def say(self, line: str) -> None:
        """Prints a message."""
        self._print({"event": "message", "time": time.time(), "text": line})

    def show(self, snapshot: Snapshot) -> None:
        """Prints the state once per second and at the beginning of a phase."""
        now = time.monotonic()
        if now - self._last >= JSON_SECONDS or snapshot.phase != self._phase:
            self._last, self._phase = now, snapshot.phase
            self._print({"event": "progress", **snapshot.to_dict()})

    def close(self) -> None:
        """Ends the display."""
        sys.stdout = self._output

    def _print(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self._output, flush=True)


class Live(Display):
    """Display that is redrawn in place: a bar for the phase and a line per step of the stream.

    What Python code writes meanwhile to `sys.stdout` or `sys.stderr` appears above it.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        super().__init__()
        self._started = self._last
        self._snapshot = Snapshot()
        self._live = RichLive(
            console=Console(highlight=False, markup=False, emoji=False),
            get_renderable=self._render,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        """Shows the state at the next refresh, or at once if a phase begins."""
        begins = self._snapshot.phase != snapshot.phase
        self._snapshot, self._last = snapshot, time.monotonic()
        if begins:  # the phase may block the thread that refreshes
            self._live.refresh()

    def close(self) -> None:
        """Removes the display."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        state, since = self._snapshot, time.monotonic() - self._last
        if not state.phase:
            return Text()
        # A watched job has started before this display, and a job of this process after it.
        seconds = max(state.seconds + since, time.monotonic() - self._started)
        overall = Table.grid(padding=(0, 1), expand=True)
        overall.add_column(no_wrap=True)
        overall.add_column(ratio=1, min_width=10)
        overall.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=state.total, completed=state.done, pulse=state.total is None)
        numbers = [*state.numbers(since), f"{duration(seconds)} elapsed"]
        overall.add_row(Text(state.phase, "bold"), bar, "  ".join(numbers))
        steps = Table.grid(padding=(0, 1))
        steps.add_column(no_wrap=True, min_width=10)
        steps.add_column(width=20)
        for _ in range(3):
            steps.add_column(no_wrap=True, justify="right")
        for step in state.steps:
            steps.add_row(
                f"  {step.name}",
                ProgressBar(total=1.0, completed=step.utilisation),
                f"{step.utilisation:.0%} busy",
                f"{step.rate:,.1f} {state.unit}/s",
                f"{step.processes:,} process" + "es" * (step.processes != 1),
            )
        return Group(overall, steps, Text(f"  {state.further_counts}", "dim"))


_display: Display | None = None


@contextlib.contextmanager
def open_display(mode: Mode = "auto") -> Iterator[Display]:
    """Opens the display of this process and closes it at the end of the block.

    Raises:
        SpecError: The mode is "live" and the standard output is not a terminal.
    """
    global _display
    is_terminal = sys.stdout.isatty()
    if mode == "live" and not is_terminal:
        rule = "auto, plain or json unless the standard output is a terminal"
        raise SpecError("--progress", mode, rule)
    if mode == "auto" and is_terminal and not logs.is_json():
        mode = "plain" if os.environ.get("TERM", "dumb") == "dumb" else "live"
    _display = {"live": Live, "json": JsonLines}.get(mode, Display)()
    try:
        yield _display
    finally:
        close_display()


def close_display() -> None:
    """Closes the open display, if there is one, before this process prints an error or exits."""
    global _display
    if _display is not None:
        _display.close()
        _display = None
