"""Merges small fragments into larger ones, because each commit rewrites the list of fragments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import lance
import ray
from lance import LanceDataset
from lance.optimize import (
    Compaction,
    CompactionOptions,
    CompactionPlan,
    CompactionTask,
    RewriteResult,
)

from pipeline.index.session import checked_call
from pipeline.index.stage import Resources
from pipeline.index.writer import IndexWriter

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


@ray.remote
def _merge(task: CompactionTask, uri: str, version: int) -> RewriteResult:
    return task.execute(lance.dataset(uri, version=version))


class FragmentMerger:
    """Merges the fragments that an index job has committed, in Ray tasks, while it continues.

    Fragments of earlier jobs remain: the job may still replace rows in them.

    Args:
        check: Called while waiting. Raises an error to stop the job.
    """

    def __init__(self, writer: IndexWriter, resources: Resources, check: Callable[[], None]):
        self._writer, self._check = writer, check
        self._task = _merge.options(**resources.task_options)
        self._earlier = [f.fragment_id for f in writer.dataset.get_fragments()]
        self._num_planned = len(self._earlier)
        self._running: list[ray.ObjectRef] = []

    def step(self) -> None:
        """Commits finished merges, or starts merges if there are enough fragments."""
        if self._running:
            count = len(self._running)
            if len(ray.wait(self._running, num_returns=count, timeout=0)[0]) < count:
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
        self._running = [self._task.remote(task, *arguments) for task in plan.tasks]
        self._num_planned = num_fragments

    def finish(self) -> None:
        """Waits for running merges and commits them."""
        merges, self._running = self._running, []
        if not merges:
            return
        try:
            metrics = self._writer.commit_compaction(checked_call(self._check, ray.get, merges))
            self._num_planned -= metrics.fragments_removed - metrics.fragments_added
        except ray.exceptions.RayError as error:  # the fragments remain as they are
            log.warning("Could not merge fragments: %s", error)
