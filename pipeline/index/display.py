"""Displays of a running job: a live display on a terminal, plain lines, or JSON lines.

`Live` owns the terminal while it is open. Everything else that this process writes to its standard
output and standard error, including libraries in C++ and child processes, passes through a pipe and
appears above the display, so that no log line or foreign progress bar can damage it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

from pipeline import logs
from pipeline.config import SpecError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pipeline.index.monitor import Snapshot

log = logging.getLogger("maxray.jobs")

#: Modes of the option `--progress`. "auto" is live on a terminal and plain elsewhere.
Mode = Literal["auto", "live", "plain", "json"]
MODES: tuple[Mode, ...] = get_args(Mode)
#: Interval between plain lines, and between JSON lines of one phase, in seconds.
PLAIN_SECONDS, JSON_SECONDS = 5.0, 1.0
#: Refreshes of the live display per second.
REFRESH_RATE = 4


class Display(ABC):
    """Display of a job. Its methods can be called from any thread."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Shows a sentence, which remains visible."""

    @abstractmethod
    def show(self, snapshot: Snapshot) -> None:
        """Shows the state of the job in place of the previous state."""

    def phase(self, name: str) -> None:
        """Shows what the process is doing before the job reports its state."""
        from pipeline.index.monitor import Snapshot

        self.show(Snapshot(phase=name))

    def close(self) -> None:
        """Ends the display."""
        sys.stdout.flush()


class Plain(Display):
    """Lines of text with the time, for log files. The state is shown every five seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def say(self, line: str) -> None:
        """Prints a line."""
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def show(self, snapshot: Snapshot) -> None:
        """Prints the state if the last one was printed five seconds ago."""
        if time.monotonic() - self._last >= PLAIN_SECONDS and (line := describe(snapshot)):
            self._last = time.monotonic()
            self.say(line)


class JsonLines(Display):
    """One JSON object per line: `{"event": "message", ...}` or `{"event": "progress", ...}`."""

    def __init__(self) -> None:
        self._last, self._phase = 0.0, ""

    def say(self, line: str) -> None:
        """Prints a message."""
        self._print({"event": "message", "time": time.time(), "text": line})

    def show(self, snapshot: Snapshot) -> None:
        """Prints the state once per second and at the beginning of a phase."""
        now = time.monotonic()
        if now - self._last >= JSON_SECONDS or snapshot.phase != self._phase:
            self._last, self._phase = now, snapshot.phase
            self._print({"event": "progress", **snapshot.to_dict()})

    def _print(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), flush=True)


class Logged(Plain):
    """JSON lines of the log, see `pipeline.logs`. The state is logged every five seconds."""

    def say(self, line: str) -> None:
        """Logs a message."""
        log.info(line)


class Live(Display):
    """Display that is redrawn in place: a bar for the phase and a line per step of the stream."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._started = self._shown = time.monotonic()
        self._snapshot: Snapshot | None = None
        self._lock, self._is_closed = threading.Lock(), False
        sys.stdout.flush()
        sys.stderr.flush()
        self._terminal = os.fdopen(
            os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace"
        )
        self._console = Console(file=self._terminal, force_terminal=True, highlight=False)
        self._fit()
        # A stream that is redirected to a file stays redirected.
        self._saved = {fd: os.dup(fd) for fd in (1, 2) if os.isatty(fd)}
        output, end = os.pipe()
        for fd in self._saved:
            os.dup2(end, fd)
        os.close(end)
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._forward, args=(output,), daemon=True)
        self._live = RichLive(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=REFRESH_RATE,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._reader.start()
        self._live.start()

    def say(self, line: str) -> None:
        """Prints a line above the display."""
        self._print(f"{time.strftime('%H:%M:%S')} {line}")

    def show(self, snapshot: Snapshot) -> None:
        """Shows the state at the next refresh, or at once if a phase begins."""
        self._fit()
        begins = self._snapshot is None or self._snapshot.phase != snapshot.phase
        self._snapshot, self._shown = snapshot, time.monotonic()
        if begins and not self._is_closed:  # the phase may block the thread that refreshes
            self._live.refresh()

    def close(self) -> None:
        """Removes the display and restores the standard output and standard error."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
            os.close(saved)
        self._closing.set()
        self._reader.join(timeout=5)
        self._live.stop()
        self._terminal.close()

    def _fit(self) -> None:
        """Adapts the display to the size of the terminal."""
        with contextlib.suppress(OSError, ValueError):  # the terminal has been closed
            size = os.get_terminal_size(self._terminal.fileno())
            if all(size):
                self._console.size = (size.columns, size.lines)

    def _forward(self, output: int) -> None:
        """Prints what arrives in the pipe above the display, line by line."""
        rest = b""
        while True:
            # Child processes may keep the pipe open after `close`, so its end is not awaited.
            if not select.select([output], [], [], 0.1)[0]:
                if self._closing.is_set():
                    break
                continue
            if not (chunk := os.read(output, 1 << 16)):
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._print(_last_state(line))
        if rest:
            self._print(_last_state(rest))
        os.close(output)

    def _print(self, line: str) -> None:
        from rich.text import Text

        with contextlib.suppress(ValueError):  # a thread that outlives the display
            self._console.print(Text.from_ansi(line), soft_wrap=True)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        snapshot = self._snapshot
        if snapshot is None:
            return Text()
        since = time.monotonic() - self._shown
        # A watched job has started before this display, and a job of this process after it.
        seconds = max(snapshot.seconds + since, time.monotonic() - self._started)
        total = snapshot.total
        bar = ProgressBar(total=total, completed=snapshot.done, pulse=total is None)
        overall = Table.grid(padding=(0, 1), expand=True)
        overall.add_column(no_wrap=True)
        overall.add_column(ratio=1, min_width=10)
        overall.add_column(no_wrap=True, justify="right")
        done = (_done(snapshot), _first_items(snapshot))
        parts = [*done, *_speed(snapshot, since), f"{duration(seconds)} elapsed"]
        overall.add_row(Text(snapshot.phase, "bold"), bar, Text("  ".join(filter(None, parts))))
        steps = Table.grid(padding=(0, 1))
        steps.add_column(no_wrap=True, min_width=10)
        steps.add_column(width=20)
        for _ in range(3):
            steps.add_column(no_wrap=True, justify="right")
        for step in snapshot.steps:
            steps.add_row(
                f"  {step.name}",
                ProgressBar(total=1.0, completed=step.utilisation, width=20),
                f"{step.utilisation:.0%} busy",
                f"{step.rate:,.1f} {snapshot.unit}/s",
                _plural(step.processes, "process", "processes"),
            )
        counts = "  ".join(f"{name} {number:,}" for name, number in snapshot.counts.items())
        return Group(overall, steps, Text(f"  {counts}", "dim") if counts else Text())


def _last_state(line: bytes) -> str:
    """Returns a line as a terminal would leave it after carriage returns."""
    return line.decode(sys.stdout.encoding or "utf-8", "replace").rstrip("\r").rpartition("\r")[2]


def describe(snapshot: Snapshot) -> str:
    """Formats a snapshot as one line."""
    steps = "  ".join(
        f"{step.name} {step.rate:,.1f}/s {step.utilisation:.0%}" for step in snapshot.steps
    )
    counts = "  ".join(f"{name} {number:,}" for name, number in snapshot.counts.items())
    done = (_done(snapshot), _first_items(snapshot))
    parts = [snapshot.phase, *done, *_speed(snapshot), steps and f"[{steps}]", counts]
    return "  ".join(filter(None, parts))


def _done(snapshot: Snapshot) -> str:
    if snapshot.total is None:
        return f"{snapshot.done:,} {snapshot.unit}" if snapshot.done else ""
    share = snapshot.done / snapshot.total if snapshot.total else 1.0
    return f"{snapshot.done:,}/{snapshot.total:,} {snapshot.unit} ({share:.0%})"


def _first_items(snapshot: Snapshot) -> str:
    """Returns the progress of the slowest step, until the first unit has passed all steps."""
    step = min(reversed(snapshot.steps), key=lambda step: step.items, default=None)
    if step is None or snapshot.done or not 0 < step.items < (snapshot.total or 0):
        return ""
    return f"{step.name} {step.items:,}/{snapshot.total:,}"


def _speed(snapshot: Snapshot, since: float = 0.0) -> tuple[str, str]:
    """Returns the rate and the time left, `since` seconds after the snapshot."""
    rate = "" if snapshot.rate is None else f"{snapshot.rate:,.1f}/s"
    if snapshot.seconds_left is not None:
        return rate, f"{duration(max(0.0, snapshot.seconds_left - since))} left"
    return rate, "estimating the time left" if snapshot.total else ""


def duration(seconds: float) -> str:
    """Formats a duration.

    >>> duration(47.3), duration(3725)
    ('0:47', '1:02:05')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _plural(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


@contextlib.contextmanager
def open_display(mode: Mode = "auto") -> Iterator[Display]:
    """Opens a display on the standard output and closes it at the end of the block.

    Raises:
        SpecError: The mode is "live" and the standard output is not a terminal.
    """
    global _open
    is_terminal = os.isatty(1) and sys.stdout.isatty()
    if mode == "live" and not is_terminal:
        rule = "auto, plain or json unless the standard output is a terminal"
        raise SpecError("--progress", mode, rule)
    if mode == "auto":
        mode = "live" if is_terminal and os.environ.get("TERM", "dumb") != "dumb" else "plain"
        mode = "plain" if logs.is_json() else mode
    plain = Logged if logs.is_json() else Plain
    displays: dict[str, Callable[[], Display]] = {"live": Live, "plain": plain, "json": JsonLines}
    display = _open = displays[mode]()
    try:
        yield display
    finally:
        close_display()


_open: Display | None = None


def close_display() -> None:
    """Closes the open display, if there is one, before this process prints an error or exits."""
    global _open
    if _open is not None:
        _open.close()
        _open = None
