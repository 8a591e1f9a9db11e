"""Job that adds columns to the rows of an index.

Columns are added empty and filled fragment by fragment: actors write a file per fragment and the
driver commits these files. An interrupted job resumes with the fragments that lack data.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import lance
from lance.fragment import FragmentMetadata

from pipeline.config import Spec
from pipeline.index.executor import Executor
from pipeline.index.filling import FilledFragment, FragmentActor
from pipeline.index.in_process import current
from pipeline.index.reader import IndexReader, part_uri
from pipeline.index.session import Session
from pipeline.index.stage import Profile, Resources, consecutive_starts
from pipeline.runtime import logs, tracing
from pipeline.runtime.progress import Totals

log = logging.getLogger("maxray.index")

#: Number of items up to which columns are added without Ray, unless it is asked for.
SMALL_ITEMS = 10_000


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

    @property
    def is_small(self) -> bool:
        """True if the index has at most `SMALL_ITEMS` items."""
        return len(IndexReader(self.index)) <= SMALL_ITEMS

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
    executor: Executor | None = None,
) -> Progress:
    """Adds columns and fills all fragments.

    Raises:
        SpecError: The columns cannot be added, or are stored with other settings.
        LeaseHeld: Another job is writing to the index.
        Stopped: SIGTERM was received. Finished work is committed and the lease is released.
    """
    executor = executor or current()
    executor.check(columns.resources)
    progress = Progress(seconds=dict.fromkeys(("read", columns.actor.step, "write"), 0.0))
    settings = (columns.index, columns.spec, columns.kind, job, progress.summary)
    with Session(*settings, lease_seconds, executor) as session:
        incomplete = columns.prepare(session, report)
        progress.fragments = len(session.writer.dataset.get_fragments())
        num_incomplete = sum(len(work.fragments) for work in incomplete)
        progress.done_before = progress.fragments - num_incomplete
        report(f"{num_incomplete} of {progress.fragments} fragments to fill with {columns.title}")
        for work in incomplete:
            commit_filled(session, columns, work, progress, report)
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


def commit_filled(
    session: Session,
    columns: AddedColumns,
    work: Work,
    progress: Progress,
    report: Callable[[str], None],
) -> None:
    """Commits columns as actors complete them."""
    pending: list[tuple[FragmentMetadata, list[int]]] = []
    start = time.perf_counter()
    location = {"index": part_uri(columns.index), "version": session.writer.dataset.version}
    arguments = {**location, **work.arguments}
    filled = closing(
        session.executor.filled(
            columns.actor, arguments, work.fragments, columns.pool, columns.resources
        )
    )

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
    with session.monitor.phase(session.kind, "fragments", total, steps), filled as parts:
        try:
            for done in parts:
                if done is not None:
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
