"""Write access to an index, protected by a lease and a fence.

The lease is a config entry of the dataset (holder, epoch, expiry). It is taken by `update_config`,
which succeeds for only one of two concurrent writers. Taking it ends with a no-op `Project` commit,
the *fence*: Lance rejects any append or update whose read version is older. A holder always commits
with the version of its last commit as read version, so that a driver that was suspended beyond the
expiry of its lease cannot add rows when it resumes.

Renewals write a file (`lease.LeaseFile`) and do not commit. They only delay other jobs: the fence
protects the index also if a renewal is lost or late.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import lance
import pyarrow as pa
from lance import LanceDataset, LanceOperation
from lance.commit import CommitConflictError
from lance.dataset import CleanupStats
from lance.fragment import FragmentMetadata
from lance.optimize import Compaction, CompactionMetrics, RewriteResult

from pipeline.config import JobError, SpecError
from pipeline.index import LEASE
from pipeline.index.lease import Lease, LeaseFile
from pipeline.index.reader import (
    ITEMS,
    REJECTS,
    check_contents,
    check_data_files,
    check_location,
    exists,
    first_line,
    get_fragment,
    id_filter,
    open_dataset,
    part_uri,
)
from pipeline.runtime import logs
from pipeline.schema import ITEM

log = logging.getLogger("maxray.writer")

STORAGE_VERSION: Final = "2.2"


class LeaseHeld(SpecError):
    """Another job is writing to the index."""


class LeaseLost(JobError):
    """The lease of this job expired and another job took it, so that it cannot commit."""


class IndexWriter:
    """Exclusive writer of an index.

    Args:
        uri: URI of the index. The dataset is created if it does not exist.
        job: Identifier of the job, which other writers report.
        ttl: Time in seconds after which another job can take a lease that was not renewed.

    Raises:
        SpecError: The URI cannot be written, or contains a corrupted index or other files.
        LeaseHeld: Another job is writing to the index.
    """

    def __init__(self, uri: str, job: str, ttl: float = 60.0):
        self.uri, self.job, self.ttl = uri, job, ttl
        self._owner = f"{job}-{secrets.token_hex(4)}"
        self._lock = threading.RLock()
        self._rejected: set[str] | None = None
        self.dataset = open_or_create(uri)
        check_data_files(uri, self.dataset)
        self._take()

    # -- the lease ---------------------------------------------------------------------------

    def _take(self) -> None:
        held = Lease.from_dataset(self.dataset)
        folder = part_uri(self.uri, LEASE)
        held = held.renewed(folder) if held and held.owner else held
        if held and not held.is_free(time.time()):
            problem, note = f"is being written by {held.describe()}", "; wait for it or stop it"
            raise LeaseHeld("index", self.uri, "an index without a writer", problem, note)
        epoch = held.epoch + 1 if held else 1
        lease = Lease.for_this_process(self._owner, epoch, time.time() + self.ttl, self.job)
        try:
            self.dataset.update_config(lease.entry())
        except (OSError, CommitConflictError) as error:
            if not _is_conflict(error):
                raise _unwritable(self.uri, error) from None
            winner = Lease.from_dataset(open_dataset(self.uri))  # its first expiry
            holder = winner.describe() if winner else "another job"
            problem, note = f"is being written by {holder}", "; wait for it or stop it"
            raise LeaseHeld("index", self.uri, "an index without a writer", problem, note) from None
        self._lease, self._file = lease, LeaseFile(folder, self._owner)
        self._file.write(lease.expires)
        self._apply(self._fence)
        interrupted = held.job if held and held.owner else None  # it did not release the lease
        logs.event(log, "lease_taken", epoch=epoch, interrupted_job=interrupted)
        if held and held.owner:
            LeaseFile(folder, held.owner).remove()

    def _fence(self) -> None:
        no_op = LanceOperation.Project(self.dataset.lance_schema)
        self.dataset = LanceDataset.commit(self.dataset, no_op, read_version=self.dataset.version)

    def renew(self) -> None:
        """Extends the lease without waiting for commits, or raises `LeaseLost`."""
        if not self._file.exists():
            self._check_lease(open_dataset(self.uri))
        self._file.write(time.time() + self.ttl)

    def release(self) -> None:
        """Releases the lease, unless another job has taken it."""
        free = replace(self._lease, owner="", expires=0.0)

        def change() -> None:
            self.dataset.update_config(free.entry())
            logs.event(log, "lease_released")

        with self._lock, contextlib.suppress(LeaseLost):
            self._apply(change)
        self._file.remove()

    def _apply(self, change: Callable[[], Any]) -> None:
        """Applies a change to the version of this writer's last commit.

        After a conflict with a change that keeps the lease, the change is retried on top of it. The
        lease is checked again afterwards: changes of scalar indices pass the fence and would give
        a writer that lost its lease a newer read version.
        """
        while True:
            self._check_lease()
            try:
                change()
                break
            except (OSError, CommitConflictError) as error:
                if not _is_conflict(error):
                    raise
                self.dataset = open_dataset(self.uri)
        self._check_lease()

    def _check_lease(self, dataset: LanceDataset | None = None) -> None:
        held = Lease.from_dataset(dataset or self.dataset)
        if held is None or held.owner != self._owner:
            holder = held.describe() if held and held.owner else "another job, which has ended"
            raise LeaseLost(f"the lease on {self.uri} was taken by {holder}")

    # -- commits -----------------------------------------------------------------------------

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Adds columns with their metadata, null in all existing rows."""
        with self._lock:
            if fields:
                self._apply(lambda: self.dataset.add_columns(pa.schema(fields)))

    def set_metadata(self, column: pa.Field) -> None:
        """Replaces the metadata of a column."""
        metadata = {key.decode(): value.decode() for key, value in column.metadata.items()}
        with self._lock:
            self._apply(lambda: self.dataset.update_field_metadata({column.name: metadata}))

    def drop_columns(self, names: Sequence[str] | None = None) -> None:
        """Drops columns in a single commit. Defaults to all columns except those of the items."""
        if names is None:
            names = [name for name in self.dataset.schema.names if name not in ITEM.names]
        with self._lock:
            if names:
                self._apply(lambda: self.dataset.drop_columns(list(names)))

    def commit(
        self, fragments: Sequence[FragmentMetadata], replaced: dict[int, list[str]] | None = None
    ) -> int:
        """Adds rows and removes the rows that they replace in a single commit.

        Args:
            replaced: Ids of the items whose rows are removed, by fragment.
        """
        with self._lock:
            self._apply(lambda: self._commit(fragments, replaced or {}))
            return self.dataset.version

    def _commit(
        self, fragments: Sequence[FragmentMetadata], replaced: dict[int, list[str]]
    ) -> None:
        operation: LanceOperation.BaseOperation
        if not replaced:
            operation = LanceOperation.Append(list(fragments))
        else:
            updated, removed = self._without(replaced)
            operation = LanceOperation.Update(
                removed_fragment_ids=removed,
                updated_fragments=updated,
                new_fragments=list(fragments),
            )
        self.dataset = LanceDataset.commit(
            self.dataset, operation, read_version=self.dataset.version, max_retries=0
        )

    def _without(self, rows: dict[int, list[str]]) -> tuple[list[FragmentMetadata], list[int]]:
        updated, removed = [], []
        for fragment_id, item_ids in rows.items():
            metadata = get_fragment(self.dataset, fragment_id).delete(id_filter(item_ids))
            if metadata is None:
                removed.append(fragment_id)
            else:
                updated.append(metadata)
        return updated, removed

    def remove(self, rows: dict[int, list[str]]) -> int:
        """Removes rows, given as item ids by fragment, in one commit and returns its version."""
        return self.commit([], rows) if rows else self.dataset.version

    def commit_columns(self, fragments: Iterable[tuple[FragmentMetadata, list[int]]]) -> int:
        """Commits the results of `LanceFragment.update_columns` and returns the version."""
        fragments = list(fragments)
        modified = sorted({field for _, fields in fragments for field in fields})
        operation = LanceOperation.Update(
            updated_fragments=[metadata for metadata, _ in fragments], fields_modified=modified
        )

        def change() -> None:
            self.dataset = LanceDataset.commit(
                self.dataset, operation, read_version=self.dataset.version, max_retries=0
            )

        with self._lock:
            self._apply(change)
            return self.dataset.version

    def commit_compaction(self, rewritten: list[RewriteResult]) -> CompactionMetrics:
        """Commits rewritten fragments. Their rows do not change, and follow those of the others."""
        metrics: list[CompactionMetrics] = []
        with self._lock:
            self._apply(lambda: metrics.append(Compaction.commit(self.dataset, rewritten)))
        return metrics[-1]

    def clean(self, older_than: timedelta) -> CleanupStats:
        """Removes versions except the latest, and files that no version needs."""
        with self._lock:
            self._check_lease()
            return self.dataset.cleanup_old_versions(
                older_than, delete_unverified=True, error_if_tagged_old_versions=False
            )

    def index_ids(self) -> None:
        """Creates or extends the B-tree index on `item_id`, which resumed jobs use."""
        with self._lock:
            if self.dataset.count_rows() == 0:
                return
            if self.dataset.has_index:
                self._apply(lambda: self.dataset.optimize.optimize_indices())
            else:
                self._apply(lambda: self.dataset.create_scalar_index("item_id", "BTREE"))

    def set_rejects(self, rejects: pa.Table, solved: Sequence[str] = ()) -> None:
        """Records one reject per item id, and deletes the rejects of items that are now indexed.

        New rejects are appended. Only items that were rejected before cause a search: their ids are
        read once per job.
        """
        uri = part_uri(self.uri, REJECTS)
        dataset = _rejects(uri)
        if self._rejected is None:
            ids = dataset.to_table(columns=["item_id"])["item_id"].to_pylist() if dataset else []
            self._rejected = set(ids)
        last = {item_id: i for i, item_id in enumerate(rejects["item_id"].to_pylist())}
        obsolete = self._rejected.intersection([*solved, *last])
        if obsolete and dataset is not None:
            dataset.delete(id_filter(sorted(obsolete)))
        if last:
            mode = "create" if dataset is None else "append"
            rows = rejects.take(list(last.values()))
            lance.write_dataset(rows, uri, mode=mode, data_storage_version=STORAGE_VERSION)
        self._rejected -= obsolete
        self._rejected.update(last)

    def compact_rejects(self, older_than: timedelta) -> None:
        """Merges the fragments of the rejects and removes their old versions."""
        with self._lock:
            self._check_lease()
            if (dataset := _rejects(part_uri(self.uri, REJECTS))) is not None:
                dataset.optimize.compact_files()
                dataset.cleanup_old_versions(older_than, delete_unverified=True)


def _rejects(uri: str) -> LanceDataset | None:
    try:
        return lance.dataset(uri)
    except (ValueError, OSError):
        return None


def _is_conflict(error: Exception) -> bool:
    """Returns True after a conflict. A process suspended during Lance's retries gets a timeout."""
    message = str(error).lower()
    return "conflict" in message or "concurrent writers" in message


def open_or_create(uri: str) -> LanceDataset:
    """Opens the dataset of an index, or creates it with the item columns."""
    check_location(uri)
    try:
        if not exists(uri):
            try:
                return lance.write_dataset(
                    ITEM.empty_table(),
                    part_uri(uri, ITEMS),
                    mode="create",
                    data_storage_version=STORAGE_VERSION,
                )
            except OSError:
                if not exists(uri):
                    raise
                # Another job created it first.
        check_contents(uri)
        for _ in range(10):  # another job may be creating it
            with contextlib.suppress(SpecError):
                return open_dataset(uri)
            time.sleep(0.1)
        return open_dataset(uri)
    except OSError as error:
        raise _unwritable(uri, error) from None


def _unwritable(uri: str, error: Exception) -> SpecError:
    return SpecError("index", uri, "a writable URI", f"cannot be written ({first_line(error)})")
