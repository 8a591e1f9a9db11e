"""A writing job from lease to release: keeps the lease, heeds SIGTERM, records what it did."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from pipeline.atomic import write_atomic
from pipeline.config import JobError, Spec, SpecError, Stopped, dump_yaml
from pipeline.index import JOBS
from pipeline.index.reader import open_dataset, open_folder, part
from pipeline.index.writer import IndexWriter, LeaseLost

log = logging.getLogger("maxray.session")


class Session:
    """Holds an index's lease while a job writes, and records the job under `<index>/jobs/<job>/`.

    Args:
        index: URI of the index.
        spec: Spec of the job, for the record.
        kind: Verb that names the job, for the record.
        job: Identifier of the job.
        summary: Returns the counts to record; called whenever the record is written.
        lease_seconds: Lifetime of the lease without renewal; it is renewed four times as often.
    """

    def __init__(
        self,
        index: str,
        spec: Spec,
        kind: str,
        job: str,
        summary: Callable[[], dict[str, Any]],
        lease_seconds: float,
    ):
        self.index, self.spec, self.kind, self.job = index, spec, kind, job
        self._summary = summary
        self.folder = part(index, JOBS, job)
        self._lease_seconds = lease_seconds
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._lost: Exception | None = None

    def __enter__(self) -> Session:
        self.writer = IndexWriter(self.index, self.job, self._lease_seconds)
        self._renewer = threading.Thread(target=self._renew, daemon=True)
        self._renewer.start()
        self._old_handler = None
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        try:
            write_atomic(f"{self.folder}/spec.yaml", dump_yaml(self.spec))
            self.record("running")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and self._is_deleted():
            # Whatever failed first, in this process or in a task: this is the cause.
            with contextlib.suppress(OSError, ValueError):
                self._end()
            problem = "was deleted while the job was writing to it; rerun the job to rebuild it"
            raise JobError(f"the index {self.index} {problem}") from None
        self._end()
        with contextlib.suppress(OSError):
            stopped = kind in (Stopped, KeyboardInterrupt)
            state = "done" if kind is None else "stopped" if stopped else "failed"
            self.record(state, str(error) if error else "")

    def _is_deleted(self) -> bool:
        """Whether the index is gone or was deleted meanwhile; the job's own writes recreate it."""
        try:
            open_dataset(self.index)
            storage, path = open_folder(self.index, JOBS, self.job, "spec.yaml")
            return not storage.exists(path)
        except SpecError:
            return True

    def _end(self) -> None:
        self._ended.set()
        self._renewer.join(timeout=5)
        try:
            self.writer.release()
        finally:
            if self._old_handler is not None:
                signal.signal(signal.SIGTERM, self._old_handler)

    def _renew(self) -> None:
        while not self._ended.wait(self._lease_seconds / 4):
            try:
                self.writer.renew()
            except LeaseLost as error:  # the main thread raises it at its next check
                self._lost = error
                return
            except (OSError, ValueError) as error:  # storage: tries are left before it expires
                log.warning("the lease could not be renewed: %s", error)

    @property
    def may_commit(self) -> bool:
        """Whether the lease was still this job's when it was last renewed."""
        return self._lost is None

    def check(self) -> None:
        """Raises what ends the job: `Stopped` after SIGTERM, `LeaseLost` after a takeover."""
        if self._lost:
            raise self._lost
        if self._stop.is_set():
            raise Stopped("stopped by SIGTERM: what was finished is committed, the lease is free")

    def record(self, state: str, error: str = "") -> None:
        """Writes the job's summary, which `jobs.status` shows."""
        about = {"job": self.job, "kind": self.kind, "state": state, "error": error}
        text = json.dumps({**about, "updated": time.time(), **self._summary()}, indent=1)
        write_atomic(f"{self.folder}/summary.json", text)


def configure_ray_data() -> None:
    """Settings of Ray Data for the streams of jobs."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # A row (a unit, or a fragment's number) a block: it is what is scheduled, and what is lost when
    # a process dies.
    context.target_max_block_size = 1
    context.raise_original_map_exception = True  # a `SpecError` of a stage stays one


def rows_of(dataset: ray.data.Dataset) -> Iterator[dict[str, Any] | None]:
    """The rows of a dataset as they come; None when none came for half a second.

    The stream is consumed in a thread: the caller can keep time and stop at once between rows.
    """
    rows: queue.Queue = queue.Queue(maxsize=8)

    def consume() -> None:
        try:
            for row in dataset.iter_rows():
                rows.put(row)
            rows.put(StopIteration)
        except BaseException as error:  # raised again in the caller's thread
            rows.put(error)

    threading.Thread(target=consume, daemon=True).start()
    while True:
        try:
            row = rows.get(timeout=0.5)
        except queue.Empty:
            yield None
            continue
        if row is StopIteration:
            return
        if isinstance(row, BaseException):
            raise row
        yield row
