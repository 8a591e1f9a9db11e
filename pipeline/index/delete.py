"""Deletion job: removes items from an index by id or by condition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from pydantic import model_validator

from pipeline.config import Spec, Uri
from pipeline.index.filters import filtering
from pipeline.index.listing import chunks
from pipeline.index.reader import IndexReader, id_filter
from pipeline.index.session import Session

#: Maximum number of rows that a commit removes, and of ids in a filter.
COMMIT_ROWS, FILTER_IDS = 100_000, 5_000


class DeleteSpec(Spec):
    """Options of `maxray maintain delete`. Exactly one of `ids` and `filter` must be given."""

    index: Uri
    """URI of the index."""
    ids: list[str] | None = None
    """Ids of the items."""
    filter: str | None = None
    """SQL condition on the item columns."""

    @model_validator(mode="after")
    def _check_selection(self) -> DeleteSpec:
        rule = "a condition unless ids are given, else null"
        self.require((self.ids is None) != (self.filter is None), "filter", rule)
        return self


@dataclass
class Counts:
    """Counts of a deletion. `unknown` are given ids that the index does not contain."""

    selected: int = 0
    unknown: int = 0
    removed: int = 0
    commits: int = 0


def run(
    spec: DeleteSpec,
    *,
    job: str,
    report: Callable[[str], None],
    is_dry: bool = False,
    lease_seconds: float | None = None,
) -> Counts:
    """Removes the selected items, in commits of at most `COMMIT_ROWS` rows.

    Readers of earlier versions still see the items, and their data remain on disk until
    `jobs.maintain` compacts the index. `jobs.index` adds an item again if its source lists it.

    Raises:
        SpecError: The index does not exist, or the filter is invalid.
        LeaseHeld: Another job is writing to the index.
        Stopped: SIGTERM was received. Rows that were removed before remain removed.
    """
    progress = Counts()
    if is_dry:
        _select(IndexReader(spec.index), spec, progress)
        report(_selection(progress))
        return progress
    IndexReader(spec.index)  # a session would create a missing index
    with Session(
        spec.index, spec, "delete", job, lambda: asdict(progress), lease_seconds
    ) as session:
        rows = session.call(_select, IndexReader(spec.index), spec, progress)
        report(_selection(progress))
        pairs = ((fragment, item_id) for fragment, ids in rows.items() for item_id in ids)
        with session.monitor.phase("delete", total=progress.selected):
            for batch in chunks(pairs, COMMIT_ROWS):
                grouped: dict[int, list[str]] = {}
                for fragment, item_id in batch:
                    grouped.setdefault(fragment, []).append(item_id)
                session.writer.remove(grouped)
                progress.removed += len(batch)
                progress.commits += 1
                session.record("running")
                session.monitor.update(progress.removed)
                report(f"{progress.removed:,}/{progress.selected:,} items removed")
                session.check()
        if progress.removed:
            session.writer.index_ids()
    return progress


def _selection(progress: Counts) -> str:
    unknown = f"; {progress.unknown:,} ids are not in the index" if progress.unknown else ""
    return f"{progress.selected:,} items are selected{unknown}"


def _select(index: IndexReader, spec: DeleteSpec, progress: Counts) -> dict[int, list[str]]:
    rows: dict[int, list[str]] = {}
    for condition in _conditions(index, spec):
        scanner = index.dataset.scanner(
            columns=["item_id"], filter=condition, with_row_address=True
        )
        for batch in scanner.to_batches():
            fragments = (batch["_rowaddr"].to_numpy() >> 32).tolist()
            for fragment, item_id in zip(fragments, batch["item_id"].to_pylist(), strict=True):
                rows.setdefault(fragment, []).append(item_id)
    progress.selected = sum(map(len, rows.values()))
    if spec.ids is not None:
        progress.unknown = len(set(spec.ids)) - progress.selected
    return rows


def _conditions(index: IndexReader, spec: DeleteSpec) -> Iterator[str]:
    if spec.filter is not None:
        with filtering(index, spec.filter) as condition:
            assert condition is not None
            yield condition
        return
    with index.corruption_errors():
        for ids in chunks(dict.fromkeys(spec.ids or []), FILTER_IDS):
            yield id_filter(ids)
