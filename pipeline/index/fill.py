"""Filling of new columns: actors write them fragment by fragment and the driver commits them.

`recompress` and `backfill` define the actors. A fragment is complete when one of its data files
contains the column. An interrupted job resumes with the incomplete fragments.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from lance.fragment import FragmentMetadata

from pipeline import logs, tracing
from pipeline.index.session import Session, configure_ray_data, iter_rows
from pipeline.progress import Totals
from pipeline.stage import Profile, Resources, consecutive_starts, map_batches

log = logging.getLogger("maxray.index")


@dataclass
class Progress:
    """Counts and times of a running job.

    Attributes:
        fragments: Fragments of the index.
        done_before: Fragments that were complete when the job started.
        done: Fragments that the job has filled.
        rows: Rows that received data.
        empty: Rows that were processed and received no data.
        commits: Commits of the job.
        seconds: Time by step, summed over actors.
    """

    fragments: int = 0
    done_before: int = 0
    done: int = 0
    rows: int = 0
    empty: int = 0
    commits: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"read": 0, "compress": 0, "write": 0}
    )

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
        fragment: Fragment metadata with the new data file, as parsed JSON, or None if nothing was
            written.
        fields: Field ids of the columns in that file.
        rows: Number of rows that received data.
        empty: Number of rows that were processed and received no data.
        seconds: Time by step, in the order of the steps.
        number: Id of the fragment.
        ended: End of the last step, in seconds since 1970.
    """

    fragment: Any
    fields: list[int]
    rows: int
    empty: int
    seconds: dict[str, float]
    number: int
    ended: float = 0.0

    @classmethod
    def from_json(cls, text: str) -> FilledFragment:
        """Parses the result of `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Converts the result to JSON. Actors pass it to the driver in this form, at its end."""
        return json.dumps(self._replace(ended=time.time())._asdict())


def fill_fragments(
    actor: type,
    constructor_kwargs: dict[str, Any],
    rows: list[dict[str, Any]],
    pool: Resources,
    profile: Profile,
) -> ray.data.Dataset:
    """Fills fragments with a pool of actors.

    Args:
        actor: Callable class that fills the fragments of a batch.
        constructor_kwargs: Arguments of its constructor.
        rows: Arguments of the calls, one row per fragment.
        pool: Number of actors and resources per actor.
        profile: Resources profile of the job.

    Returns:
        Lazy dataset with one row per fragment.
    """
    configure_ray_data(profile)
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    return map_batches(dataset, actor, constructor_kwargs, pool, batch_size=1)


def commit_filled(
    session: Session,
    filled: ray.data.Dataset,
    pool: Resources,
    commit_fragments: int,
    progress: Progress,
    report: Callable[[str], None],
) -> None:
    """Commits columns as actors complete them.

    Args:
        session: Session of the job.
        filled: Dataset with a column `filled`, the JSON of a `FilledFragment`.
        pool: Number of actors and resources per actor.
        commit_fragments: Number of fragments per commit.
        progress: Counts, updated in place.
        report: Called with each sentence about the job.
    """
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
            name: Totals(progress.rows, progress.done, spent, pool.max_actors)
            for name, spent in progress.seconds.items()
        }

    total = progress.fragments - progress.done_before
    with session.monitor.phase(session.kind, "fragments", total, steps):
        try:
            for row in iter_rows(filled):
                if row is not None:
                    done = FilledFragment.from_json(row["filled"])
                    if done.fragment is not None:
                        fragment = FragmentMetadata.from_json(json.dumps(done.fragment))
                        pending.append((fragment, done.fields))
                    _observe(session, done)
                    progress.done += 1
                    progress.rows += done.rows
                    progress.empty += done.empty
                    for name, spent in done.seconds.items():
                        progress.seconds[name] += spent
                    session.monitor.update(
                        progress.done, items=progress.rows, commits=progress.commits
                    )
                    if len(pending) >= commit_fragments:
                        commit()
                session.check()
        finally:
            if pending and session.may_commit:
                commit()
    report(progress.line(time.perf_counter() - start))


def _observe(session: Session, done: FilledFragment) -> None:
    """Logs and traces a fragment that was filled."""
    starts = consecutive_starts(done.ended - sum(done.seconds.values()), done.seconds)
    steps = {step: (start, done.seconds[step]) for step, start in starts.items()}
    tracing.record_steps("fragment", steps, job=session.job, fragment=done.number, rows=done.rows)
    logs.event(log, "fragment_filled", fragment=done.number, rows=done.rows)
