"""Progress of a job that another process or machine runs, read from the index."""

from __future__ import annotations

import json
import time
from typing import Any

from pipeline.index import JOBS, PROGRESS
from pipeline.index.display import Display
from pipeline.index.monitor import Snapshot
from pipeline.index.reader import Index, open_folder

#: Interval between reads, in seconds.
POLL_SECONDS = 1.0
#: Time without a new snapshot after which the lease is checked, in seconds.
STALE_SECONDS = 30.0


def watch(uri: str, display: Display) -> None:
    """Shows the progress of the job that writes to an index until the job ends.

    Args:
        uri: URI of the index.
        display: Display of the progress.

    Raises:
        SpecError: The index does not exist or is corrupted.
    """
    lease = Index(uri).lease()
    if lease is None:
        display.say(f"no job is writing to {uri}")
        return
    job, last, changed = lease.job, 0.0, time.monotonic()
    while True:
        snapshot = _read(uri, job)
        # Compared with its predecessor only, because the clocks of the machines may differ.
        if snapshot is not None and snapshot.time != last:
            last, changed = snapshot.time, time.monotonic()
            display.show(snapshot)
        is_stale = time.monotonic() - changed > STALE_SECONDS
        if (snapshot is None or is_stale) and not _is_running(uri, job):
            break
        if is_stale:
            display.say(f"job {job} has not reported its progress for {STALE_SECONDS:.0f} s")
            changed = time.monotonic()
        time.sleep(POLL_SECONDS)
    display.say(_ending(uri, job))


def _read(uri: str, job: str) -> Snapshot | None:
    """Returns the state of a job, or None before its first report and after its end."""
    storage, path = open_folder(uri, JOBS, job, PROGRESS)
    try:
        return Snapshot.from_json(storage.cat_file(path).decode())
    except FileNotFoundError:
        return None


def _is_running(uri: str, job: str) -> bool:
    lease = Index(uri).lease()
    return lease is not None and lease.job == job


def _ending(uri: str, job: str) -> str:
    """Describes how a job ended."""
    storage, path = open_folder(uri, JOBS, job, "summary.json")
    try:
        summary: dict[str, Any] = json.loads(storage.cat_file(path))
    except FileNotFoundError:  # it was killed early
        summary = {"kind": "job", "state": "running", "error": ""}
    state = "killed" if summary["state"] == "running" else summary["state"]
    error = f": {summary['error']}" if summary["error"] else ""
    return f"{summary['kind']} {job} {state}{error}"
