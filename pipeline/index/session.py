"""Session of a job that writes to an index. It holds the lease and handles signals."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any

from pipeline.config import JobError, Spec, SpecError, Stopped, dump_yaml
from pipeline.index import JOBS, PROGRESS
from pipeline.index.reader import open_dataset, open_folder, part_uri
from pipeline.index.writer import IndexWriter, LeaseLost
from pipeline.paths import is_uri
from pipeline.runtime import logs, tracing
from pipeline.runtime.atomic import write_atomic
from pipeline.runtime.progress import Monitor, Snapshot, ray_is_connected
from pipeline.runtime.waiting import call_in_thread, wait

if TYPE_CHECKING:  # these import torch, which deletions do not need
    from pipeline.index.executor import Executor
    from pipeline.index.stage import Resources

log = logging.getLogger("maxray.session")

#: Interval at which the progress is stored in a local index, and in one in object storage, in
#: seconds.
SAVE_SECONDS, REMOTE_SAVE_SECONDS = 1.0, 10.0
#: Environment variable with the lifetime of the lease, and its default, in seconds.
LEASE_VARIABLE, LEASE_SECONDS = "MAXRAY_LEASE_SECONDS", 60.0


class Session:
    """Context of a job that writes to an index and is recorded in `<index>/jobs/<job>/`.

    Args:
        kind: Type of the job, such as "index", for the record.
        summary: Returns the counts to record. Called for each write of the record.
        lease_seconds: Lifetime of the lease in seconds, renewed after a quarter of it. The default
            is the environment variable `MAXRAY_LEASE_SECONDS`, or 60.
        executor: Executor of the job. The default is that of this process.

    Attributes:
        folder: URI of the record.
        monitor: Monitor to which the job reports its phases and counts.
        writer: Writer of the index.
    """

    def __init__(
        self,
        index: str,
        spec: Spec,
        kind: str,
        job: str,
        summary: Callable[[], dict[str, Any]],
        lease_seconds: float | None = None,
        executor: Executor | None = None,
    ):
        self.index, self.spec, self.kind, self.job = index, spec, kind, job
        self._summary, self._executor = summary, executor
        self.folder = part_uri(index, JOBS, job)
        self._progress_file = part_uri(self.folder, PROGRESS)
        is_local = not is_uri(index) or index.startswith("file:")
        record: Callable[[Snapshot], None] = lambda snapshot: None  # noqa: E731
        if ray_is_connected():
            from pipeline.index.metrics import JobMetrics

            record = JobMetrics(kind, index).record
        self.monitor = Monitor(
            Snapshot(job, kind, index),
            record,
            lambda text: write_atomic(self._progress_file, text),
            SAVE_SECONDS if is_local else REMOTE_SAVE_SECONDS,
        )
        self._lease_seconds = _default_lease() if lease_seconds is None else lease_seconds
        self._signal: int | None = None
        self._ended = threading.Event()
        self._lost: Exception | None = None

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as observers:
            observers.enter_context(logs.bound(job=self.job, index=self.index))
            observers.enter_context(tracing.job_span(self.kind, self.job, self.index))
            self._start()
            self._observers = observers.pop_all()
        return self

    def _start(self) -> None:
        self.writer = IndexWriter(self.index, self.job, self._lease_seconds)
        self._renewer = threading.Thread(target=self._renew, daemon=True)
        self._renewer.start()
        self._old_handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old_handlers[number] = signal.signal(number, self._on_signal)
        try:
            logs.event(log, "job_started", kind=self.kind)
            write_atomic(f"{self.folder}/spec.yaml", dump_yaml(self.spec))
            self.record("running")
        except BaseException:
            self._end()
            raise
        self.monitor.start()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        try:
            self._finish(kind, error)
        finally:
            self._observers.__exit__(kind, error, trace)

    def _finish(self, kind: type | None, error: BaseException | None) -> None:
        if isinstance(error, Exception) and self._is_deleted():
            # The deletion is the cause, whichever error it raised here or in a task.
            with contextlib.suppress(OSError, ValueError):
                self._end()
            problem = "was deleted while the job was writing to it; rerun the job to rebuild it"
            raise JobError(f"the index {self.index} {problem}") from None
        self._end()
        stopped = kind in (Stopped, KeyboardInterrupt)
        state = "done" if kind is None else "stopped" if stopped else "failed"
        with contextlib.suppress(OSError):
            self.record(state, str(error) if error else "")
        level = logging.ERROR if state == "failed" else logging.INFO
        logs.event(log, "job_ended", level, state=state, error=str(error) if error else "")

    def _is_deleted(self) -> bool:
        """Checks whether the index was deleted.

        Writes of this job may have recreated its folder.
        """
        try:
            open_dataset(self.index)
            storage, path = open_folder(self.index, JOBS, self.job, "spec.yaml")
            return not storage.exists(path)
        except SpecError:
            return True

    def _end(self) -> None:
        self.monitor.stop()
        with contextlib.suppress(OSError, ValueError):
            storage, path = open_folder(self._progress_file)
            if storage.exists(path):
                storage.rm_file(path)
        self._ended.set()
        self._renewer.join(timeout=5)
        try:
            self.writer.release()
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Stops the job at the next `check`, so that no signal interrupts a commit."""
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # pressed again
        self._signal = number

    def _renew(self) -> None:
        while not self._ended.wait(self._lease_seconds / 4):
            try:
                self.writer.renew()
            except LeaseLost as error:  # raised by the next `check` in the main thread
                self._lost = error
                logs.event(log, "lease_lost", logging.ERROR)
                return
            except (OSError, ValueError) as error:  # retried before the lease expires
                fields = {"event": "lease_renewal_failed"}
                log.warning("Could not renew the lease, retrying: %s", error, extra=fields)

    @property
    def may_commit(self) -> bool:
        """True unless another job has taken the lease."""
        return self._lost is None

    def check(self) -> None:
        """Raises an error if the job has to stop.

        Raises:
            Stopped: SIGTERM was received.
            KeyboardInterrupt: SIGINT was received.
            LeaseLost: Another job has taken the lease.
        """
        if self._lost:
            raise self._lost
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            raise Stopped(
                "stopped by SIGTERM; finished work is committed and the lease is released"
            )

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function that only reads in a thread. It may outlive the session."""
        return self.wait(call_in_thread(function, *arguments))

    def wait(self, future: futures.Future[Any]) -> Any:
        """Returns the result of a future, unless the job has to stop."""
        return wait(future, self.check)

    def run(self, pool: Resources, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function with the resources of an actor of a pool, and returns its result."""
        return self.wait(self.executor.submit(pool, function, *arguments))

    @functools.cached_property
    def executor(self) -> Executor:
        """Executor of the job."""
        from pipeline.index.in_process import current

        return self._executor or current()

    def record(self, state: str, error: str = "") -> None:
        """Writes the summary of the job, which can be viewed with `jobs.status`.

        Args:
            state: "running", "done", "stopped" or "failed".
        """
        job = {"job": self.job, "kind": self.kind, "state": state, "error": error}
        record = {**job, "updated": time.time(), **self._summary()}
        write_atomic(f"{self.folder}/summary.json", json.dumps(record, indent=1))


def _default_lease() -> float:
    text = os.environ.get(LEASE_VARIABLE)
    if text is None:
        return LEASE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SpecError(LEASE_VARIABLE, text, "a positive number of seconds")
    return seconds
