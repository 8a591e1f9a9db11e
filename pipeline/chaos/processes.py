"""Processes and shared-memory segments of this machine, from `/proc` (Linux only)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Process:
    """Process of this machine.

    Attributes:
        pid: Process id.
        start: Start time in clock ticks, which distinguishes it from later processes with its id.
    """

    pid: int
    start: str

    @property
    def title(self) -> str:
        """Command line, or the title that a Ray worker has set; empty if it has ended."""
        try:
            text = Path(f"/proc/{self.pid}/cmdline").read_text(errors="replace")
        except OSError:
            return ""
        return " ".join(text.rstrip("\0").split("\0")) if self.is_alive else ""

    @property
    def is_alive(self) -> bool:
        """True unless the process has ended. Zombies have ended."""
        state, start = _state(self.pid)
        return start == self.start and state not in ("Z", "X")

    def send(self, number: signal.Signals) -> bool:
        """Sends a signal. Returns False if the process has ended."""
        if not self.is_alive:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def _state(pid: int) -> tuple[str, str]:
    """Returns the state of a process and its start time, or empty strings if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def process(pid: int) -> Process:
    """Returns the running process with an id."""
    return Process(pid, _state(pid)[1])


def children(pid: int) -> list[Process]:
    """Returns the child processes of a process, in the order of their ids."""
    pids: set[int] = set()
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids.update(map(int, tasks.read_text().split()))
    return [process(child) for child in sorted(pids)]


def descendants(pid: int) -> list[Process]:
    """Returns the child processes of a process, and theirs."""
    found = children(pid)
    return [*found, *(process for child in found for process in descendants(child.pid))]


def wait_until(condition: Callable[[], bool], seconds: float, interval: float = 0.05) -> bool:
    """Waits for a condition. Returns False if it is not met within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def survivors(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Waits for processes to end. Returns those that are alive after `seconds`."""
    left = list(processes)
    wait_until(lambda: not any(process.is_alive for process in left), seconds)
    return [process for process in left if process.is_alive]


def segments() -> set[str]:
    """Returns the names of the shared-memory segments of this machine."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def unused_segments(names: Iterable[str]) -> list[str]:
    """Returns the segments that exist and that no process has mapped or opened."""
    left = {name for name in names if (SHARED_MEMORY / name).exists()}
    for folder in Path("/proc").iterdir() if left else ():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                maps = (folder / "maps").read_text(errors="replace")
                opened = " ".join(os.readlink(fd) for fd in (folder / "fd").iterdir())
                left = {n for n in left if f"{SHARED_MEMORY}/{n}" not in maps + opened}
    return sorted(left)
