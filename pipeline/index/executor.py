"""Executor: runs the functions, stages and actors of a job in this process or on a Ray cluster.

Both executors run the same stages and return the same rows. A job uses Ray if this process is
connected to a cluster.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.index.fragments import Pending
from pipeline.index.stage import Profile, Resources, Stage, Unit
from pipeline.index.units import UnitRange
from pipeline.runtime.progress import Totals, meter
from pipeline.runtime.waiting import Check

if TYPE_CHECKING:
    from pipeline.index.filling import FilledFragment, FragmentActor
    from pipeline.index.spec import IndexResources


@dataclass(frozen=True)
class Stream:
    """Stream of an index job.

    Attributes:
        read: Yields the units of a range.
        groups: Stages that run in one process, and the resources of the process.
        columns: Names of the columns of the units.
        units_per_fragment: Number of units per written fragment.
        fragment_bytes: Maximum size of a fragment in memory, in bytes.
    """

    index: str
    read: Callable[[UnitRange], Iterator[Unit]]
    ranges: Sequence[UnitRange]
    groups: Sequence[tuple[Sequence[Stage], Resources]]
    columns: Sequence[str]
    units_per_fragment: int
    fragment_bytes: int
    job: str | None = None

    def check(self) -> None:
        """Raises `ValueError` if a stage needs a column that no earlier stage adds."""
        available = set(self.columns)
        for stages, _ in self.groups:
            for stage in stages:
                if missing := sorted(set(stage.needs) - available):
                    raise ValueError(
                        f"stage {stage.name!r} needs the columns {missing}, "
                        f"but only {sorted(available)} are available"
                    )
                available |= set(stage.adds)


class Executor(ABC):
    """Runs the functions, the stages and the actors of jobs."""

    @abstractmethod
    def check(self, profile: Profile) -> None:
        """Raises `SpecError` if the actors of a profile cannot start."""

    def release(self) -> None:  # noqa: B027 - OnRay keeps nothing
        """Removes encoders and actors that are kept for the next job."""

    @property
    @abstractmethod
    def num_cpus(self) -> float:
        """Number of CPUs."""

    @abstractmethod
    def submit(
        self, pool: Resources, function: Callable[..., Any], *arguments: Any
    ) -> futures.Future[Any]:
        """Starts a function with the resources of an actor of a pool."""

    @abstractmethod
    def map(
        self,
        pool: Resources,
        function: Callable[..., Any],
        arguments: Iterable[Sequence[Any]],
        check: Check,
    ) -> Iterator[Any]:
        """Calls a function with each of the arguments and yields the results as they arrive.

        At most `pool.max_actors` calls run at the same time.
        """

    @abstractmethod
    def iterate(
        self, function: Callable[..., Iterator[Any]], arguments: Sequence[Any], check: Check
    ) -> Iterator[Any]:
        """Yields what a generator function yields. It may be a few values ahead."""

    @abstractmethod
    def written(
        self, stream: Stream, profile: IndexResources
    ) -> Generator[Pending | None, None, None]:
        """Runs a stream and yields fragments as they are written, and None while waiting."""

    @abstractmethod
    def filled(
        self,
        actor: type[FragmentActor],
        arguments: Mapping[str, Any],
        fragments: Sequence[int],
        pool: Resources,
        profile: Profile,
    ) -> Generator[FilledFragment | None, None, None]:
        """Fills fragments and yields them as they are completed, and None while waiting."""

    @abstractmethod
    def totals(self, job: str) -> dict[str, Totals]:
        """Returns the counts of a job by step."""


def measured(units: Iterator[Unit], job: str | None) -> Iterator[Unit]:
    """Yields units with the time that reading them took, and counts them."""
    started, start = time.time(), time.perf_counter()
    for unit in units:
        unit.starts["read"], unit.seconds["read"] = started, time.perf_counter() - start
        if job is not None:
            meter(job).add("read", unit.num_entries, 1, unit.seconds["read"])
        yield unit
        started, start = time.time(), time.perf_counter()
