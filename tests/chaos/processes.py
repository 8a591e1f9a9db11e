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
#: Positions of fields in `/proc/PID/stat`, counted behind the name of the process.
STATE, PARENT, START = 0, 1, 19


@dataclass(frozen=True)
class Process:
    """Process of this machine.

    Attributes:
        start: Start time in clock ticks, which distinguishes it from later processes with its id;
            empty for a process that has ended.
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
        return start == self.start != "" and state not in ("Z", "X")

    def send(self, number: signal.Signals) -> bool:
        """Sends a signal. Returns False if the process has ended.

        The ids 0 (a process group) and 1 (the init process) are refused.
        """
        if self.pid <= 1 or not self.is_alive:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def _state(pid: int) -> tuple[str, str]:
    """Returns the state of a process and its start time, or empty strings if it has ended."""
    fields = _fields(pid)
    return (fields[STATE], fields[START]) if fields else ("", "")


def _fields(pid: int) -> list[str]:
    """Returns the fields of a process behind its name, or none if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def process(pid: int) -> Process:
    """Returns the running process with an id."""
    return Process(pid, _state(pid)[1])


def children(parent: Process) -> list[Process]:
    """Returns the child processes of a process, in the order of their ids.

    Fast enough to be polled, but the kernel may omit some while others start and end. A process
    that has ended has none: its id may be that of another by now.
    """
    pids: set[int] = set()
    for tasks in Path(f"/proc/{parent.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids.update(map(int, tasks.read_text().split()))
    found = [process(pid) for pid in sorted(pids)]
    return found if parent.is_alive else []


def descendants(ancestor: Process) -> list[Process]:
    """Returns the child processes of a process, and theirs. Reads all processes."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and len(fields := _fields(int(folder.name))) > PARENT:
            parents.setdefault(int(fields[PARENT]), []).append(int(folder.name))
    found, waiting = [], [ancestor.pid]
    while waiting:
        pids = parents.get(waiting.pop(), [])
        found += [process(pid) for pid in pids]
        waiting += pids
    return found if ancestor.is_alive else []


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
            used = _used_files(folder)
            left = {name for name in left if f"{SHARED_MEMORY}/{name}" not in used}
    return sorted(left)


def _used_files(folder: Path) -> str:
    """Returns the files that a process has mapped or opened, as text."""
    files = []
    with contextlib.suppress(OSError):
        files.append((folder / "maps").read_text(errors="replace"))
        for descriptor in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                files.append(os.readlink(descriptor))
    return "\n".join(files)
