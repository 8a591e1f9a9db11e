"""Job under test: a child process that reports its progress as JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.index import ITEMS, JOBS
from tests.chaos.processes import Process, process

#: Manifests are named by the complement of their version to this number.
LAST_VERSION = 2**64 - 1


class Driver:
    """Running job.

    Args:
        arguments: Module and arguments of `python -m`.
        environment: Environment variables in addition to those of this process.

    Attributes:
        phases: Start of each phase so far, by name, in seconds of `time.time`.
        job: Identifier of the job, or "" before it holds the lease.
    """

    def __init__(
        self, arguments: Sequence[str], index: Path, log: Path, environment: Mapping[str, str]
    ):
        self.index, self._log = index, log
        self.phase, self.job, self.phases = "", "", dict[str, float]()
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as errors:
            self._child = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.process: Process = process(self._child.pid)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            try:
                record = json.loads(line)
            except ValueError:  # a line that was truncated by a kill
                continue
            if record.get("event") == "progress":
                self.job = record["job"] or self.job
                if record["phase"] != self.phase:
                    self.phases[record["phase"]] = time.time()
                    self.phase = record["phase"]

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative after a signal, or None while the job runs."""
        return self._child.poll()

    def wait(self, seconds: float) -> int | None:
        """Waits until the job ends. Returns its exit code, or None after `seconds`."""
        try:
            return self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if self._child.poll() is not None:
                self._reader.join(timeout=5)

    def error(self) -> str:
        """Returns what the job wrote to its standard error."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def abort(self) -> None:
        """Ends a job that hangs. It writes the stacks of its threads to its standard error."""
        self.process.send(signal.SIGABRT)
        if self.wait(10) is None:
            self.process.send(signal.SIGKILL)
            self.wait(10)

    def kill(self) -> None:
        """Kills the job and waits for its end."""
        self.process.send(signal.SIGKILL)
        self.wait(10)

    def last_commit(self) -> tuple[int, float]:
        """Returns the number of commits so far and the time of the last, from its summary."""
        path = self.index / JOBS / self.job / "summary.json"
        try:
            summary: dict[str, Any] = json.loads(path.read_text())
            return summary.get("commits", 0), path.stat().st_mtime
        except (OSError, ValueError):
            return 0, 0.0

    def changed(self, folder: str) -> int:
        """Returns the time of the last change of a folder of the items, in nanoseconds."""
        try:
            return (self.index / ITEMS / folder).stat().st_mtime_ns
        except OSError:
            return 0

    def is_inside_commit(self) -> bool:
        """Returns True if the newest transaction has been written, but not its version."""
        items = self.index / ITEMS
        read = [int(path.name.partition("-")[0]) for path in items.glob("_transactions/*.txn")]
        manifest = f"{LAST_VERSION - max(read, default=0) - 1}.manifest"
        return bool(read) and not (items / "_versions" / manifest).exists()
