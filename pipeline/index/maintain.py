"""Maintenance job: merges small fragments and removes what no reader needs any more."""

from __future__ import annotations

import json
import posixpath
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import cast

from lance import LanceDataset
from lance.optimize import CompactionPlan
from pydantic import Field, NonNegativeFloat, PositiveInt

from pipeline.config import Spec, Uri
from pipeline.index import JOBS
from pipeline.index.compaction import MERGED_BYTES, MERGED_ITEMS, plan_compaction
from pipeline.index.reader import IndexReader, open_dataset, open_folder
from pipeline.index.session import Session

#: Files of a job's folder that are kept. The others are listings, which only the job itself reads.
KEPT = ("summary.json", "spec.yaml")


class MaintainSpec(Spec):
    """Options of `jobs.maintain`."""

    index: Uri
    """URI of the index."""
    fragment_items: PositiveInt = MERGED_ITEMS
    """Maximum number of items per fragment. Smaller neighbouring fragments are merged."""
    fragment_bytes: PositiveInt = MERGED_BYTES
    """Maximum size of a fragment in storage, in bytes, at the mean size of a row. Jobs that add
    columns hold one fragment per actor in memory."""
    deleted: float = Field(0.1, ge=0, le=1)
    """Fraction of deleted rows from which a fragment is rewritten without them."""
    retain_hours: NonNegativeFloat = 24.0
    """Age in hours up to which earlier versions remain readable."""


@dataclass
class Counts:
    """Counts of a maintenance run.

    Attributes:
        fragments_before: Fragments when the job started.
        fragments: Fragments now.
        merged: Fragments that were replaced by larger ones.
        versions: Versions that were removed.
        jobs: Finished jobs whose listings were removed.
    """

    fragments_before: int = 0
    fragments: int = 0
    merged: int = 0
    commits: int = 0
    versions: int = 0
    freed_bytes: int = 0
    jobs: int = 0


def run(
    spec: MaintainSpec,
    *,
    job: str,
    report: Callable[[str], None],
    is_dry: bool = False,
    lease_seconds: float | None = None,
) -> Counts:
    """Maintains an index under its lease.

    1. Fragments smaller than `fragment_items`, and those with many deleted rows, are rewritten, one
       commit per new fragment. Rewritten items follow the others. A job that was stopped resumes
       with the remaining fragments.
    2. Versions older than `retain_hours` are removed with the files that only they need, and so are
       files that no version needs, such as those of a job that was killed. Nothing else can write
       while the lease is held.
    3. The index of the item ids is extended, and listings of finished jobs are removed.

    Raises:
        SpecError: The index does not exist or is corrupted.
        LeaseHeld: Another job is writing to the index.
        Stopped: SIGTERM was received. Finished steps are kept.
    """
    progress = Counts()
    index = IndexReader(spec.index)  # a session would create a missing index
    if is_dry:
        _report_plan(spec, index, report)
        return progress
    with Session(
        spec.index, spec, "maintain", job, lambda: asdict(progress), lease_seconds
    ) as session:
        _compact(spec, session, progress, report)
        _clean(spec, session, progress, report)
        session.writer.index_ids()
        for folder in _finished_jobs(spec):
            progress.freed_bytes += _remove_listing(spec.index, folder)
            progress.jobs += 1
    report(
        f"{progress.fragments_before:,} > {progress.fragments:,} fragments;"
        f" {progress.versions:,} versions and the listings of {progress.jobs:,} jobs removed;"
        f" {progress.freed_bytes / 1e6:,.1f} MB freed"
    )
    return progress


def _plan(spec: MaintainSpec, dataset: LanceDataset) -> CompactionPlan:
    return plan_compaction(
        dataset,
        spec.fragment_items,
        spec.fragment_bytes,
        materialize_deletions_threshold=spec.deleted,
    )


def _compact(
    spec: MaintainSpec, session: Session, progress: Counts, report: Callable[[str], None]
) -> None:
    dataset = open_dataset(spec.index)
    progress.fragments_before = progress.fragments = len(dataset.get_fragments())
    tasks = _plan(spec, dataset).tasks
    start = time.perf_counter()
    with session.monitor.phase("compact", "groups of fragments", len(tasks)):
        for number, task in enumerate(tasks, 1):
            rewritten = session.call(task.execute, dataset)
            metrics = session.writer.commit_compaction([rewritten])
            progress.merged += metrics.fragments_removed
            progress.fragments += metrics.fragments_added - metrics.fragments_removed
            progress.commits += 1
            session.record("running")
            session.monitor.update(number)
            elapsed = time.perf_counter() - start
            report(
                f"{number:,}/{len(tasks):,} groups of fragments merged,"
                f" {progress.fragments:,} fragments, {progress.merged / elapsed:,.1f} fragments/s"
            )
            session.check()


def _clean(
    spec: MaintainSpec, session: Session, progress: Counts, report: Callable[[str], None]
) -> None:
    session.check()
    with session.monitor.phase("remove old versions"):
        stats = session.writer.clean(timedelta(hours=spec.retain_hours))
        session.writer.compact_rejects(timedelta(hours=spec.retain_hours))
    progress.versions = stats.old_versions
    progress.freed_bytes = stats.bytes_removed
    report(f"{stats.old_versions:,} versions removed, {stats.bytes_removed / 1e6:,.1f} MB")
    session.record("running")


def _report_plan(spec: MaintainSpec, index: IndexReader, report: Callable[[str], None]) -> None:
    tasks = _plan(spec, index.dataset).tasks
    merged = sum(len(task.fragments) for task in tasks)
    oldest = datetime.now() - timedelta(hours=spec.retain_hours)
    versions = index.dataset.versions()
    num_old = sum(cast(datetime, version["timestamp"]) < oldest for version in versions[:-1])
    report(
        f"{len(index.fragments()):,} fragments: {merged:,} would be merged into at least"
        f" {len(tasks):,}; {num_old:,} of {len(versions):,} versions and the listings of"
        f" {len(list(_finished_jobs(spec))):,} jobs would be removed"
    )


def _finished_jobs(spec: MaintainSpec) -> Iterator[str]:
    storage, path = open_folder(spec.index, JOBS)
    if not storage.exists(path):
        return
    oldest = time.time() - 3600 * spec.retain_hours
    for entry in storage.ls(path, detail=True):
        summary = posixpath.join(entry["name"], KEPT[0])
        if entry["type"] != "directory" or not storage.exists(summary):
            continue
        record = json.loads(storage.cat_file(summary))
        is_over = record.get("state") != "running" and record.get("updated", oldest) < oldest
        if is_over and len(storage.ls(entry["name"], detail=False)) > len(KEPT):
            yield posixpath.basename(entry["name"])


def _remove_listing(uri: str, folder: str) -> int:
    storage, path = open_folder(uri, JOBS, folder)
    num_bytes = 0
    for name in storage.ls(path, detail=False):
        if posixpath.basename(name) not in KEPT:
            num_bytes += storage.du(name)
            storage.rm(name, recursive=True)
    return num_bytes
