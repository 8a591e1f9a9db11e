"""Job that adds columns to the rows of an index.

Columns are added empty and filled fragment by fragment: actors write a file per fragment and the
driver commits these files. An interrupted job resumes with the fragments that lack data.
"""

from __future__ import annotations

import logging
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import lance
import numpy as np
import pyarrow as pa
import ray
import torch
from lance.fragment import FragmentMetadata

from pipeline.config import Spec
from pipeline.index.capacity import check_capacity
from pipeline.index.reader import Index, get_fragment, part_uri
from pipeline.index.session import Session, configure_ray_data, iter_rows
from pipeline.index.stage import Profile, Resources, consecutive_starts, map_batches
from pipeline.runtime import logs, tracing
from pipeline.runtime.progress import Totals

log = logging.getLogger("maxray.index")


class Work(NamedTuple):
    """Fragments that lack the same columns, with the arguments of the actor that fills them."""

    fragments: Sequence[int]
    arguments: dict[str, Any]


class AddedColumns(ABC):
    """Columns that a job adds. Subclasses check the spec in their constructor.

    Args:
        pool: Pool of the profile whose actors fill the columns.
        commit_fragments: Number of fragments per commit.

    Attributes:
        kind: Type of the job, for its record.
        title: Name of the data, for reports.
    """

    kind: ClassVar[str]
    actor: ClassVar[type[FragmentActor]]
    title: str

    def __init__(
        self, index: str, spec: Spec, resources: Profile, pool: Resources, commit_fragments: int = 8
    ):
        self.index, self.spec, self.resources, self.pool = index, spec, resources, pool
        self.commit_fragments = commit_fragments

    @abstractmethod
    def prepare(self, session: Session, report: Callable[[str], None]) -> list[Work]:
        """Adds the columns that the index lacks, and finds the fragments without their data."""

    @abstractmethod
    def finish(self, session: Session, progress: Progress, report: Callable[[str], None]) -> None:
        """Reports remarks about the data after all fragments have been filled."""


def run(
    columns: AddedColumns,
    *,
    job: str,
    report: Callable[[str], None] = log.info,
    lease_seconds: float | None = None,
) -> Progress:
    """Adds columns and fills all fragments. Ray must be connected to a cluster.

    Raises:
        SpecError: The columns cannot be added, or are stored with other settings.
        LeaseHeld: Another job is writing to the index.
        Stopped: SIGTERM was received. Finished work is committed and the lease is released.
    """
    check_capacity(columns.resources)
    progress = Progress(seconds=dict.fromkeys(("read", columns.actor.step, "write"), 0.0))
    settings = (columns.index, columns.spec, columns.kind, job, progress.summary)
    with Session(*settings, lease_seconds) as session:
        incomplete = columns.prepare(session, report)
        progress.fragments = len(session.writer.dataset.get_fragments())
        num_incomplete = sum(len(work.fragments) for work in incomplete)
        progress.done_before = progress.fragments - num_incomplete
        report(f"{num_incomplete} of {progress.fragments} fragments to fill with {columns.title}")
        for work in incomplete:
            filled = fill_fragments(columns, work, session.writer.dataset.version)
            commit_filled(session, columns, filled, progress, report)
        columns.finish(session, progress, report)
    return progress


@dataclass
class Progress:
    """Counts and times of a running job.

    Attributes:
        done_before: Fragments that were complete when the job started.
        done: Fragments that the job has filled.
        rows: Rows that received data.
        seconds: Time by step, summed over actors.
    """

    fragments: int = 0
    done_before: int = 0
    done: int = 0
    rows: int = 0
    empty: int = 0
    commits: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Returns all counts and rates, which are recorded in the summary of the job."""
        rates = {name: self.rows / spent for name, spent in self.seconds.items() if spent}
        return {**vars(self), "rates": rates}

    def line(self, elapsed: float) -> str:
        """Formats the progress line after `elapsed` seconds."""
        rates = "  ".join(f"{name} {r:,.0f}/s" for name, r in self.summary()["rates"].items())
        return (
            f"{self.done}/{self.fragments - self.done_before} fragments  {self.rows:,} rows"
            f"  {self.rows / elapsed:,.1f}/s  [{rates}]  commits {self.commits}"
        )


class FilledFragment(NamedTuple):
    """Result of filling the new columns of one fragment.

    Attributes:
        fragment: Fragment metadata with the new data file, or None if nothing was written.
        rows: Number of rows that received data.
        empty: Number of rows that were processed and received no data.
        seconds: Time by step, in the order of the steps.
        ended: End of the last step, in seconds since 1970.
    """

    fragment: FragmentMetadata | None
    fields: list[int]
    rows: int
    empty: int
    seconds: dict[str, float]
    number: int
    ended: float


class FragmentActor(ABC):
    """Actor that computes the new columns of fragments and writes them.

    Attributes:
        step: Name of the step that computes the columns.
        columns: Names of the columns.
    """

    step: ClassVar[str]
    columns: Sequence[str]

    def __init__(self, index: str, version: int, num_threads: int):
        torch.set_num_threads(num_threads)  # sums of products are rounded by their number
        self.index = Index(index, version)

    @abstractmethod
    def read(self, fragment: lance.LanceFragment) -> pa.Table:
        """Reads the rows to fill, with their `_rowid`. Other rows remain null."""

    @abstractmethod
    def compute(self, number: int, table: pa.Table) -> tuple[pa.Table, int]:
        """Computes the columns of the rows, with `_rowid`, and the number of rows without data."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of the columns with the `_rowid` of their rows."""
        columns = map(self.index.schema.field, self.columns)
        return pa.schema([pa.field("_rowid", pa.uint64()), *columns])

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[bytes]]:
        """Fills the fragments of a batch. Returns a pickled `FilledFragment` for each."""
        return {"filled": [pickle.dumps(self.fill(int(n))) for n in batch["fragment"]]}

    def fill(self, number: int) -> FilledFragment:
        """Fills one fragment. The result depends on the stored rows and their order only."""
        times = [time.perf_counter()]
        fragment = get_fragment(self.index.dataset, number)
        with self.index.corruption_errors():
            table = self.read(fragment)
        times.append(time.perf_counter())
        filled, num_empty = self.compute(number, table) if table.num_rows else (table, 0)
        num_rows = filled.num_rows
        if not table.num_rows:  # an explicit null in one row marks the fragment as complete
            lacks_data = f"`{self.columns[0]}` IS NULL"
            filled = fragment.to_table(columns=[], filter=lacks_data, with_row_id=True, limit=1)
            for name in self.columns:
                filled = filled.append_column(name, pa.nulls(filled.num_rows))
        filled = filled.select(self.schema.names).cast(self.schema)
        times.append(time.perf_counter())
        metadata, modified = fragment.update_columns(filled) if filled.num_rows else (None, [])
        times.append(time.perf_counter())
        seconds = dict(zip(("read", self.step, "write"), np.diff(times).tolist(), strict=True))
        return FilledFragment(metadata, modified, num_rows, num_empty, seconds, number, time.time())


def fill_fragments(columns: AddedColumns, work: Work, version: int) -> ray.data.Dataset:
    """Returns a lazy dataset with one row per fragment, which a pool of actors fills."""
    configure_ray_data(columns.resources)
    rows = [{"fragment": number} for number in work.fragments]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    common = {"index": part_uri(columns.index), "version": version}
    common["num_threads"] = columns.pool.num_threads
    arguments = {**common, **work.arguments}
    return map_batches(dataset, columns.actor, arguments, columns.pool, batch_size=1)


def commit_filled(
    session: Session,
    columns: AddedColumns,
    filled: ray.data.Dataset,
    progress: Progress,
    report: Callable[[str], None],
) -> None:
    """Commits columns as actors complete them. `filled` contains pickled `FilledFragment`s."""
    pending: list[tuple[FragmentMetadata, list[int]]] = []
    start = time.perf_counter()

    def commit() -> None:
        with tracing.span("commit", job=session.job, fragments=len(pending)):
            version = session.writer.commit_columns(pending)
        logs.event(log, "committed", version=version, fragments=len(pending))
        pending.clear()
        progress.commits += 1
        session.record("running")

    def steps() -> dict[str, Totals]:
        return {
            name: Totals(progress.rows, progress.done, spent, columns.pool.max_actors)
            for name, spent in progress.seconds.items()
        }

    total = progress.fragments - progress.done_before
    with session.monitor.phase(session.kind, "fragments", total, steps):
        try:
            for row in iter_rows(filled):
                if row is not None:
                    done: FilledFragment = pickle.loads(row["filled"])
                    if done.fragment is not None:
                        pending.append((done.fragment, done.fields))
                    _observe(session, done)
                    progress.done += 1
                    progress.rows += done.rows
                    progress.empty += done.empty
                    for name, spent in done.seconds.items():
                        progress.seconds[name] += spent
                    session.monitor.update(
                        progress.done, items=progress.rows, commits=progress.commits
                    )
                    if len(pending) >= columns.commit_fragments:
                        commit()
                session.check()
        finally:
            if pending and session.may_commit:
                commit()
    report(progress.line(time.perf_counter() - start))


def _observe(session: Session, done: FilledFragment) -> None:
    starts = consecutive_starts(done.ended - sum(done.seconds.values()), done.seconds)
    steps = {step: (start, done.seconds[step]) for step, start in starts.items()}
    tracing.record_steps("fragment", steps, job=session.job, fragment=done.number, rows=done.rows)
    logs.event(log, "fragment_filled", fragment=done.number, rows=done.rows)


def incomplete_fragments(
    dataset: lance.LanceDataset, columns: Sequence[str]
) -> dict[tuple[str, ...], list[int]]:
    """Finds the fragments that lack data of some columns. Groups them by these columns."""
    ids = {
        f.name(): {c.id() for c in f.children()} | {f.id()} for f in dataset.lance_schema.fields()
    }
    incomplete: dict[tuple[str, ...], list[int]] = {}
    for fragment in dataset.get_fragments():
        present = {field for file in fragment.data_files() for field in file.fields}
        if missing := tuple(name for name in columns if not ids[name] & present):
            incomplete.setdefault(missing, []).append(fragment.fragment_id)
    return incomplete
