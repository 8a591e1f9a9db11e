"""Writing an index: one writer at a time, and no commit by one that has lost its lease.

The lease is a config entry of the dataset (holder, epoch, expiry), taken by `update_config`: of two
racing takers one wins. Taking it ends with a no-op `Project` commit, the *fence*: Lance refuses any
append or update whose read version is older than that commit. A holder commits with the version of
its own last commit as read version, never a fresh one; so a driver that was frozen past its lease
cannot add a row when it wakes up.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import lance
import pyarrow as pa
from lance import LanceDataset, LanceOperation
from lance.commit import CommitConflictError
from lance.fragment import FragmentMetadata

from pipeline.config import JobError, SpecError
from pipeline.index.lease import Lease
from pipeline.index.reader import (
    ITEMS,
    REJECTS,
    check_location,
    check_whole,
    exists,
    first_line,
    get_fragment,
    holds_parts,
    open_dataset,
    part,
    with_ids,
)
from pipeline.schema import ITEM, REJECT

STORAGE_VERSION: Final = "2.2"


class LeaseHeld(SpecError):
    """Another job writes to the index at present."""


class LeaseLost(JobError):
    """This job's lease expired and was taken by another: it must stop and commits nothing more."""


class IndexWriter:
    """The one writer of an index.

    Args:
        uri: the index; its dataset is made if there is none.
        job: this job's id, told to others who want to write.
        ttl: seconds after which a lease that is not renewed may be taken by another job.

    Raises:
        SpecError: the URI cannot be written, or holds something that is not a whole index.
        LeaseHeld: another job writes to it.
    """

    def __init__(self, uri: str, job: str, ttl: float = 60.0):
        self.uri, self.job, self.ttl = uri, job, ttl
        self._owner = f"{job}-{secrets.token_hex(4)}"
        self._lock = threading.RLock()
        self.dataset = open_or_create(uri)
        check_whole(uri, self.dataset)
        self._take()

    # -- the lease ---------------------------------------------------------------------------

    def _take(self) -> None:
        held = Lease.of(self.dataset)
        if held and not held.is_free(time.time()):
            problem, note = f"is being written by {held.describe()}", "; wait for it or stop it"
            raise LeaseHeld("index", self.uri, "an index without a writer", problem, note)
        epoch = held.epoch + 1 if held else 1
        lease = Lease.for_this_process(self._owner, epoch, time.time() + self.ttl, self.job)
        try:
            self.dataset.update_config(lease.entry())
        except (OSError, CommitConflictError) as error:
            if not _overtaken(error):
                raise SpecError(
                    "index", self.uri, "a writable URI", f"cannot be written ({first_line(error)})"
                ) from None
            winner = Lease.of(open_dataset(self.uri))
            who = winner.describe() if winner else "another job"
            raise LeaseHeld(
                "index", self.uri, "one writer at a time", f"was just taken by {who}"
            ) from None
        self._lease = lease
        self._own(self._fence)

    def _fence(self) -> None:
        nothing = LanceOperation.Project(self.dataset.lance_schema)
        self.dataset = LanceDataset.commit(self.dataset, nothing, read_version=self.dataset.version)

    def renew(self) -> None:
        """Moves the lease's expiry.

        Raises:
            LeaseLost: another job took it meanwhile.
        """
        with self._lock:
            lease = replace(self._lease, expires=time.time() + self.ttl)
            self._own(lambda: self.dataset.update_config(lease.entry()))
            self._lease = lease

    def release(self) -> None:
        """Gives the lease back; does nothing if another job has it by now."""
        with self._lock, contextlib.suppress(LeaseLost):  # it is lost in the end, either way
            free = replace(self._lease, owner="", expires=0.0)
            self._own(lambda: self.dataset.update_config(free.entry()))

    def _own(self, change: Callable[[], Any]) -> None:
        """Runs a change against this writer's own last version.

        After a conflict with somebody else's harmless change it tries again on top of that. The
        lease is looked at once more behind the change: some changes (of indices) pass the fence,
        and whoever makes one stands behind it from then on.

        Raises:
            LeaseLost: another job has the lease.
        """
        while True:
            self._check_own()
            try:
                change()
                break
            except (OSError, CommitConflictError) as error:
                if not _overtaken(error):
                    raise
                self.dataset = open_dataset(self.uri)
        self._check_own()

    def _check_own(self) -> None:
        held = Lease.of(self.dataset)
        if held is None or held.owner != self._owner:
            who = held.describe() if held and held.owner else "another job that has ended"
            raise LeaseLost(f"the lease on {self.uri} went to {who}")

    # -- commits -----------------------------------------------------------------------------

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Adds columns, null in every row there is; their metadata is committed with them."""
        with self._lock:
            if fields:
                self._own(lambda: self.dataset.add_columns(pa.schema(fields)))

    def drop_columns(self) -> None:
        """Drops every column but those of the items themselves."""
        names = [name for name in self.dataset.schema.names if name not in ITEM.names]
        with self._lock:
            if names:
                self._own(lambda: self.dataset.drop_columns(names))

    def commit(
        self, fragments: Sequence[FragmentMetadata], replaced: dict[int, list[str]] | None = None
    ) -> int:
        """Adds rows, and takes out in the same commit the rows they replace.

        Args:
            fragments: what `write_fragments` returned.
            replaced: by fragment id, the item ids whose rows go.

        Returns:
            The version of the commit.
        """
        with self._lock:
            self._own(lambda: self._commit(fragments, replaced or {}))
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
            metadata = get_fragment(self.dataset, fragment_id).delete(with_ids(item_ids))
            if metadata is None:
                removed.append(fragment_id)
            else:
                updated.append(metadata)
        return updated, removed

    def remove(self, rows: dict[int, list[str]]) -> int:
        """Takes out rows, given by fragment id and item id, in one commit; returns the version."""
        return self.commit([], rows) if rows else self.dataset.version

    def commit_columns(self, fragments: Iterable[tuple[FragmentMetadata, list[int]]]) -> int:
        """Commits columns that were filled by `fragment.update_columns` (metadata, field ids)."""
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
            self._own(change)
            return self.dataset.version

    def index_ids(self) -> None:
        """Builds or extends the B-tree over `item_id`, by which a resume finds what is done."""
        with self._lock:
            if self.dataset.count_rows() == 0:
                return
            if self.dataset.has_index:
                self._own(lambda: self.dataset.optimize.optimize_indices())
            else:
                self._own(lambda: self.dataset.create_scalar_index("item_id", "BTREE"))

    def set_rejects(self, rejects: pa.Table, solved: Sequence[str] = ()) -> None:
        """Records rejects, one row an item id, and forgets those of items that are indexed now."""
        uri = part(self.uri, REJECTS)
        try:
            dataset = lance.dataset(uri)
        except (ValueError, OSError):
            if rejects.num_rows == 0:
                return
            dataset = lance.write_dataset(
                REJECT.empty_table(), uri, data_storage_version=STORAGE_VERSION
            )
        if solved:
            dataset.delete(with_ids(solved))
        if rejects.num_rows:
            last = {item_id: i for i, item_id in enumerate(rejects["item_id"].to_pylist())}
            merge = (
                dataset.merge_insert("item_id")
                .when_matched_update_all()
                .when_not_matched_insert_all()
            )
            merge.execute(rejects.take(list(last.values())))


def _overtaken(error: Exception) -> bool:
    """Whether a commit failed because somebody else committed, not for the storage's sake.

    A process that slept inside Lance's own retries wakes to their time-out, not to a conflict.
    """
    said = str(error).lower()
    return "conflict" in said or "concurrent writers" in said


def open_or_create(uri: str) -> LanceDataset:
    """The dataset of an index, made with the item columns alone if there is nothing at the URI.

    Raises:
        SpecError: the URI cannot be written, or holds something else or a damaged index.
    """
    check_location(uri)
    try:
        if not exists(uri):
            try:
                return lance.write_dataset(
                    ITEM.empty_table(),
                    part(uri, ITEMS),
                    mode="create",
                    data_storage_version=STORAGE_VERSION,
                )
            except OSError:
                if not exists(uri):
                    raise
                # Another job was the first.
        elif not holds_parts(uri):
            raise SpecError(
                "index", uri, "an index, or a new or empty folder", "has other contents"
            )
        for _ in range(10):  # another job may be making it at this moment
            with contextlib.suppress(SpecError):
                return open_dataset(uri)
            time.sleep(0.1)
        return open_dataset(uri)
    except OSError as error:
        raise SpecError(
            "index", uri, "a writable URI", f"cannot be written ({first_line(error)})"
        ) from None
