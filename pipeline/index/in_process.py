"""Executor of jobs in this process, and the choice of the executor."""

from __future__ import annotations

import contextvars
import itertools
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any

from pipeline.config import SpecError
from pipeline.encoders.shared import Encoders, shared_encoders
from pipeline.extras import require
from pipeline.index import EXECUTOR
from pipeline.index.executor import Executor, Stream, measured
from pipeline.index.fragments import Pending, WriteFragments
from pipeline.index.stage import Profile, Resources, Unit, run_stages
from pipeline.runtime import logs
from pipeline.runtime.progress import Totals, meter, ray_is_connected
from pipeline.runtime.waiting import Check, polled, wait

if TYPE_CHECKING:
    from pipeline.index.filling import FilledFragment, FragmentActor
    from pipeline.index.spec import IndexResources

log = logging.getLogger("maxray.stage")

#: Values of the environment variable that names the executor of jobs.
EXECUTORS = ("ray", "process")


class InProcess(Executor):
    """Runs everything in this process, with the number of threads that torch has.

    Units are read while earlier ones are processed.

    Args:
        encoders: Loaded encoders by their settings, which this executor uses and completes.
    """

    num_cpus = float(os.cpu_count() or 1)

    def __init__(self, encoders: Encoders | None = None):
        self._encoders: Encoders = {} if encoders is None else encoders
        self._thread = futures.ThreadPoolExecutor(1, "maxray")

    def check(self, profile: Profile) -> None:
        """Accepts all profiles, because nothing is reserved."""

    def release(self) -> None:
        """Removes the encoders from memory."""
        self._encoders.clear()

    def submit(
        self, pool: Resources, function: Callable[..., Any], *arguments: Any
    ) -> futures.Future[Any]:
        """Calls a function in a thread, after those that were submitted before."""
        context = contextvars.copy_context()
        return self._thread.submit(context.run, self._call, function, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with shared_encoders(self._encoders):
            return function(*arguments)

    def map(
        self,
        pool: Resources,
        function: Callable[..., Any],
        arguments: Iterable[Sequence[Any]],
        check: Check,
    ) -> Iterator[Any]:
        """Calls a function with one of the arguments after another."""
        for values in arguments:
            yield wait(self.submit(pool, function, *values), check)

    def iterate(
        self, function: Callable[..., Iterator[Any]], arguments: Sequence[Any], check: Check
    ) -> Iterator[Any]:
        """Yields what a generator function yields."""
        for value in function(*arguments):
            check()
            yield value

    def written(
        self, stream: Stream, profile: IndexResources
    ) -> Generator[Pending | None, None, None]:
        """Runs a stream. The rows of each fragment are written before others are processed."""
        return polled(self._run(stream), daemon=False)

    def _run(self, stream: Stream) -> Iterator[Pending | None]:
        stream.check()
        with shared_encoders(self._encoders):
            stages = [stage.load() for stages, _ in stream.groups for stage in stages]
            writer = WriteFragments(stream.index, stream.fragment_bytes, stream.job)
            units: list[Unit] = []
            read = itertools.chain.from_iterable(map(stream.read, stream.ranges))
            for unit in _ahead(measured(read, stream.job)):
                logs.event(log, "unit_started", job=stream.job, unit=unit.name)
                units.append(run_stages(stages, unit, stream.job, is_last=True))
                yield None  # the thread ends here if the job stops
                if len(units) >= stream.units_per_fragment:
                    yield writer.write(units)
                    units = []
            if units:
                yield writer.write(units)

    def filled(
        self,
        actor: type[FragmentActor],
        arguments: Mapping[str, Any],
        fragments: Sequence[int],
        pool: Resources,
        profile: Profile,
    ) -> Generator[FilledFragment | None, None, None]:
        """Fills one fragment after another."""

        def fill() -> Iterator[FilledFragment]:
            with shared_encoders(self._encoders):
                filler = actor(**arguments)
                yield from map(filler.fill, fragments)

        return polled(fill(), daemon=False)

    def totals(self, job: str) -> dict[str, Totals]:
        """Returns the counts of this process."""
        return {step: totals._replace(processes=1) for step, totals in meter(job).totals().items()}


def current() -> Executor:
    """Returns the executor of jobs: Ray if this process is connected to a cluster.

    The environment variable `MAXRAY_EXECUTOR` (`ray` or `process`) overrides it.
    """
    name = os.environ.get(EXECUTOR) or ("ray" if ray_is_connected() else "process")
    if name == "process":
        return InProcess()
    if name != "ray":
        raise SpecError(EXECUTOR, name, " or ".join(EXECUTORS))
    require("ray")
    from pipeline.index.ray_data import OnRay

    return OnRay()


def _ahead(units: Iterator[Unit]) -> Iterator[Unit]:
    """Yields units. The next one is read while one is processed."""
    with futures.ThreadPoolExecutor(1, "maxray-read") as reader:
        following = reader.submit(next, units, None)
        while (unit := following.result()) is not None:
            following = reader.submit(next, units, None)
            yield unit
