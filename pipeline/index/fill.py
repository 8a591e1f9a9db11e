"""Filling of new columns: actors write them fragment by fragment, the driver commits them.

`recompress` and `backfill` define the actors. A fragment is done when one of its data files holds
the column, so that an interrupted job resumes with the fragments that are left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from lance.fragment import FragmentMetadata

from pipeline.index.session import Session, configure_ray_data, rows_of
from pipeline.stage import Resources


@dataclass
class Progress:
    """Counts of a running job."""

    fragments: int = 0
    done_before: int = 0
    done: int = 0
    rows: int = 0
    empty: int = 0  # rows that were tried and got nothing
    commits: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"read": 0, "compress": 0, "write": 0}
    )

    def summary(self) -> dict[str, Any]:
        """Everything, for the job's record."""
        rates = {name: self.rows / spent for name, spent in self.seconds.items() if spent}
        return {**vars(self), "rates": rates}

    def line(self, elapsed: float) -> str:
        """The progress line."""
        rates = "  ".join(f"{name} {r:,.0f}/s" for name, r in self.summary()["rates"].items())
        return (
            f"{self.done}/{self.fragments - self.done_before} fragments  {self.rows:,} rows"
            f"  {self.rows / elapsed:,.1f}/s  [{rates}]  commits {self.commits}"
        )


class Filled(NamedTuple):
    """The new columns of a fragment.

    Attributes:
        fragment: JSON value of its metadata with the new data file; None if nothing was written.
        fields: Field ids of the columns in that file.
        rows: Number of rows that got data.
        empty: Number of rows that were tried and got none.
        seconds: Time by step.
    """

    fragment: Any
    fields: list[int]
    rows: int
    empty: int
    seconds: dict[str, float]

    @classmethod
    def from_json(cls, text: str) -> Filled:
        """Parses what `to_json` returned."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Returns the JSON in which actors hand it to the driver."""
        return json.dumps(self._asdict())


def fill_fragments(
    actor: type, given: dict[str, Any], left: list[dict[str, Any]], pool: Resources
) -> ray.data.Dataset:
    """Returns the dataset of the results that actors return for fragments, one row each.

    Args:
        actor: Class whose calls fill a fragment.
        given: Arguments of its constructor.
        left: Arguments of the calls, one row per fragment.
        pool: Number of actors, and the resources of each.
    """
    configure_ray_data()
    return ray.data.from_items(left, override_num_blocks=len(left)).map_batches(
        actor,
        fn_constructor_kwargs=given,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(min_size=pool.min_actors, max_size=pool.max_actors),
        num_cpus=pool.num_cpus,
        num_gpus=pool.num_gpus,
    )


def commit_filled(
    session: Session,
    filled: ray.data.Dataset,
    commit_fragments: int,
    progress: Progress,
    report: Callable[[str], None],
) -> None:
    """Commits the columns that actors have written, some fragments at a time.

    Args:
        session: Session of the job.
        filled: Rows with `filled`, the JSON of a `Filled`.
        commit_fragments: Number of fragments per commit.
        progress: Counts, updated in place.
        report: Called with one progress line at a time.
    """
    pending: list[tuple[FragmentMetadata, list[int]]] = []
    start = reported = time.perf_counter()

    def commit() -> None:
        session.writer.commit_columns(pending)
        pending.clear()
        progress.commits += 1
        session.record("running")

    try:
        for row in rows_of(filled):
            if row is not None:
                done = Filled.from_json(row["filled"])
                if done.fragment is not None:
                    fragment = FragmentMetadata.from_json(json.dumps(done.fragment))
                    pending.append((fragment, done.fields))
                progress.done += 1
                progress.rows += done.rows
                progress.empty += done.empty
                for name, spent in done.seconds.items():
                    progress.seconds[name] += spent
                if len(pending) >= commit_fragments:
                    commit()
            if time.perf_counter() - reported > 5:
                reported = time.perf_counter()
                report(progress.line(reported - start))
            session.check()
    finally:
        if pending and session.may_commit:
            commit()
    report(progress.line(time.perf_counter() - start))
