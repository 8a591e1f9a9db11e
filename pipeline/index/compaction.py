"""Merges small fragments into larger ones, because each commit rewrites the list of fragments."""

from __future__ import annotations

import logging
from concurrent import futures
from functools import partial
from typing import Any, cast

import lance
from lance import LanceDataset
from lance.optimize import (
    Compaction,
    CompactionOptions,
    CompactionPlan,
    CompactionTask,
    RewriteResult,
)

from pipeline.config import JobError, SpecError, Stopped
from pipeline.index.session import Session
from pipeline.index.stage import Resources

log = logging.getLogger("maxray.index")

#: Limits of merged fragments. Jobs that add columns hold one fragment per actor in memory.
MERGED_ITEMS, MERGED_BYTES = 65_536, 512 << 20
#: Number of fragments of a job from which it merges them.
MERGE_FRAGMENTS = 256
#: Rows that are read at the same time. A row may have thousands of vectors.
BATCH_ROWS = 64


def plan_compaction(
    dataset: LanceDataset, max_items: int, max_bytes: int, **options: Any
) -> CompactionPlan:
    """Plans to merge neighbouring fragments that are smaller than the limits."""
    num_bytes = num_rows = 0
    for fragment in dataset.get_fragments():
        num_bytes += sum(file.file_size_bytes or 0 for file in fragment.data_files())
        num_rows += fragment.physical_rows
    rows_of_bytes = max_bytes * num_rows // num_bytes if num_bytes else max_items
    options |= {
        "target_rows_per_fragment": max(1, min(max_items, rows_of_bytes)),
        "batch_size": BATCH_ROWS,
    }
    return Compaction.plan(dataset, cast(CompactionOptions, options))


def _merge(task: CompactionTask, uri: str, version: int) -> RewriteResult:
    return task.execute(lance.dataset(uri, version=version))


class FragmentMerger:
    """Merges the fragments that an index job has committed, while it continues.

    Fragments of earlier jobs remain: the job may still replace rows in them.
    """

    def __init__(self, session: Session, pool: Resources):
        self._session, self._writer, self._pool = session, session.writer, pool
        self._earlier = [f.fragment_id for f in self._writer.dataset.get_fragments()]
        self._num_planned = len(self._earlier)
        self._running: list[futures.Future[RewriteResult]] = []

    def step(self) -> None:
        """Commits finished merges, or starts merges if there are enough fragments."""
        if not all(merge.done() for merge in self._running):
            return
        self.finish()
        num_fragments = len(self._writer.dataset.get_fragments())
        if num_fragments - self._num_planned < MERGE_FRAGMENTS:
            return
        dataset = self._writer.dataset
        plan = plan_compaction(
            dataset,
            MERGED_ITEMS,
            MERGED_BYTES,
            excluded_fragment_ids=self._earlier,
            materialize_deletions=False,
            num_threads=1,
        )
        # The last group may be small: it is merged again with later fragments.
        arguments = dataset.uri, dataset.version
        submit = partial(self._session.executor.submit, self._pool, _merge)
        self._running = [submit(task, *arguments) for task in plan.tasks]
        self._num_planned = num_fragments

    def finish(self) -> None:
        """Waits for running merges and commits them."""
        merges, self._running = self._running, []
        if not merges:
            return
        try:
            rewritten = [self._session.wait(merge) for merge in merges]
        except (JobError, SpecError, Stopped):
            raise
        except Exception as error:  # such as a lost worker: the fragments remain as they are
            log.warning("Could not merge fragments: %s", error)
            return
        metrics = self._writer.commit_compaction(rewritten)
        self._num_planned -= metrics.fragments_removed - metrics.fragments_added
