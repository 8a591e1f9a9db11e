"""Executor of jobs on Ray: functions are tasks, and Ray Data streams units through actors."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
import torch
from ray.data.block import DataBatch
from ray.data.context import (
    DEFAULT_DOWNSTREAM_CAPACITY_BACKPRESSURE_RATIO,
    DEFAULT_EXECUTION_NO_PROGRESS_TIMEOUT_S,
)
from ray.data.exceptions import ExecutionTimeoutError

from pipeline.config import JobError
from pipeline.data.decode.process import keep_memory
from pipeline.index.capacity import check_capacity
from pipeline.index.executor import Executor, Stream, measured
from pipeline.index.fragments import WRITTEN, Pending, WriteFragments
from pipeline.index.stage import (
    FINISHED,
    Profile,
    Resources,
    Stage,
    Unit,
    packed_table,
    run_stages,
)
from pipeline.index.units import UnitRange
from pipeline.runtime.progress import Totals, meter, read_board, start_board
from pipeline.runtime.waiting import Check, call_in_thread, polled, wait

if TYPE_CHECKING:
    from pipeline.index.filling import FilledFragment, FragmentActor
    from pipeline.index.spec import IndexResources

log = logging.getLogger("maxray.stage")
logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors are also raised

#: Tasks that read units: several per reader, which balances their load, and at least as many.
TASKS_PER_READER, MIN_READ_TASKS = 16, 1024
#: Values of a generator that wait for the driver.
WAITING_VALUES = 16


class OnRay(Executor):
    """Runs jobs on the Ray cluster to which this process is connected."""

    def check(self, profile: Profile) -> None:
        """Raises `SpecError` if the actors of a profile cannot start. See `check_capacity`."""
        check_capacity(profile, ray.nodes())

    @property
    def num_cpus(self) -> float:
        """Number of CPUs of the cluster."""
        return ray.cluster_resources().get("CPU", 1.0)

    def submit(
        self, pool: Resources, function: Callable[..., Any], *arguments: Any
    ) -> futures.Future[Any]:
        """Starts a Ray task."""
        task = _task(function, pool)
        return call_in_thread(ray.get, task.remote(*arguments))

    def map(
        self,
        pool: Resources,
        function: Callable[..., Any],
        arguments: Iterable[Sequence[Any]],
        check: Check,
    ) -> Iterator[Any]:
        """Runs a Ray task for each of the arguments.

        Each concurrent task starts a process, which on a small machine takes longer than listing a
        shard.
        """
        task = _task(function, pool)
        running: list[ray.ObjectRef] = []
        arguments = iter(arguments)
        while True:
            while len(running) < pool.max_actors and (values := next(arguments, None)) is not None:
                running.append(task.remote(*values))
            if not running:
                return
            ready, running = ray.wait(running, timeout=1.0)
            check()
            yield from ray.get(ready)

    def iterate(
        self, function: Callable[..., Iterator[Any]], arguments: Sequence[Any], check: Check
    ) -> Iterator[Any]:
        """Runs the generator in a Ray task."""
        # The task waits for tasks that use its values, so it must not occupy their resources.
        options: dict[str, Any] = {"num_cpus": 0, "num_returns": "streaming"}
        options["_generator_backpressure_num_objects"] = WAITING_VALUES
        values: Any = ray.remote(function).options(**options).remote(*arguments)
        try:
            while (value := wait(call_in_thread(next, values, None), check)) is not None:
                yield ray.get(value)
        except GeneratorExit:
            ray.cancel(values)
            raise

    def written(
        self, stream: Stream, profile: IndexResources
    ) -> Generator[Pending | None, None, None]:
        """Streams units through pools of actors."""
        stream.check()
        start_board()
        configure(profile)
        units = unit_dataset(stream.read, stream.ranges, profile.read, stream.job)
        processed = chain(units, stream.groups, stream.job, self.map_batches)
        for row in rows_of(write_units(processed, stream, profile.write)):
            yield None if row is None else pickle.loads(row["written"])

    def map_batches(
        self,
        dataset: ray.data.Dataset,
        function_class: type[Any],
        arguments: Mapping[str, Any],
        pool: Resources,
        **options: Any,
    ) -> ray.data.Dataset:
        """Maps the batches of a dataset with the stages of a pool."""
        return map_batches(dataset, function_class, arguments, pool, **options)

    def filled(
        self,
        actor: type[FragmentActor],
        arguments: Mapping[str, Any],
        fragments: Sequence[int],
        pool: Resources,
        profile: Profile,
    ) -> Generator[FilledFragment | None, None, None]:
        """Fills the fragments in a pool of actors."""
        configure(profile)
        rows = [{"fragment": number} for number in fragments]
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
        settings = {"actor": actor, "arguments": arguments, "num_threads": pool.num_threads}
        for row in rows_of(map_batches(dataset, _FillActor, settings, pool, batch_size=1)):
            yield None if row is None else pickle.loads(row["filled"])

    def totals(self, job: str) -> dict[str, Totals]:
        """Returns the counts of all processes."""
        return read_board(job)


def _task(function: Callable[..., Any], pool: Resources) -> Any:
    """Returns a function as a Ray task with the resources of an actor of a pool."""

    def task(*arguments: Any) -> Any:
        if torch := sys.modules.get("torch"):  # sums of products are rounded by their number
            torch.set_num_threads(pool.num_threads)
        return function(*arguments)

    return ray.remote(task).options(name=function.__name__, **pool.task_options)


class StageActor:
    """Actor that runs one or more stages in sequence.

    Items are not serialised between the stages of an actor.

    Args:
        is_last: Whether units that leave this actor count as finished.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        num_threads: int,
        job: str | None = None,
        is_last: bool = False,
    ):
        torch.set_num_threads(num_threads)
        self.stages = [stage.load() for stage in stages]
        self._job, self._is_last = job, is_last
        self._log_start()
        if job is not None and is_last:  # the models are loaded
            meter(job).add(FINISHED)

    def __call__(self, block: pa.Table) -> pa.Table:
        """Runs all stages on a block of packed units."""
        return packed_table([self._run(Unit.unpack(block, i)) for i in range(block.num_rows)])

    def _run(self, unit: Unit) -> Unit:
        # A unit that is repeated because its worker died has two of these lines.
        fields = {"event": "unit_started", "job": self._job, "unit": unit.name}
        log.info("unit started", extra=fields)
        return run_stages(self.stages, unit, self._job, self._is_last)

    def _log_start(self) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        context = ray.get_runtime_context()
        is_restart = bool(context.get_actor_id() and context.was_current_actor_reconstructed)
        name = "actor_restarted" if is_restart else "actor_started"
        fields = {"event": name, "job": self._job, "stages": [stage.name for stage in self.stages]}
        log.log(logging.WARNING if is_restart else logging.INFO, "actor is ready", extra=fields)


class _WriteActor(WriteFragments):
    """Actor that writes packed units."""

    def __call__(self, block: pa.Table) -> pa.Table:
        """Returns a row of `WRITTEN` with a pickled `Pending`, which the driver commits."""
        written = self.write([Unit.unpack(block, i) for i in range(block.num_rows)])
        return pa.Table.from_pylist([{"written": pickle.dumps(written)}], schema=WRITTEN)


class _FillActor:
    """Actor that fills fragments."""

    def __init__(self, actor: type[FragmentActor], arguments: Mapping[str, Any], num_threads: int):
        torch.set_num_threads(num_threads)  # sums of products are rounded by their number
        self._actor = actor(**arguments)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[bytes]]:
        """Returns a pickled `FilledFragment` for each fragment of a batch."""
        return {"filled": [pickle.dumps(self._actor.fill(int(n))) for n in batch["fragment"]]}


def map_batches(
    dataset: ray.data.Dataset,
    function_class: type[Any],
    arguments: Mapping[str, Any],
    pool: Resources,
    **options: Any,
) -> ray.data.Dataset:
    """Maps the batches of a dataset in a pool of actors."""
    return dataset.map_batches(
        function_class,
        fn_constructor_kwargs=dict(arguments),
        compute=ray.data.ActorPoolStrategy(
            min_size=pool.min_actors,
            max_size=pool.max_actors,
            initial_size=pool.initial_actors,
            max_tasks_in_flight_per_actor=pool.max_in_flight,
        ),
        **options,
        **pool.task_options,
    )


def unit_dataset(
    read: Callable[[UnitRange], Iterator[Unit]],
    ranges: Sequence[UnitRange],
    pool: Resources,
    job: str | None = None,
) -> ray.data.Dataset:
    """Returns a lazy dataset of the units that a function reads, in a Ray task per few ranges."""

    def read_block(block: DataBatch) -> Iterator[pa.Table]:
        keep_memory()
        for values in zip(*(block[name].tolist() for name in UnitRange._fields), strict=True):
            for unit in measured(read(UnitRange(*values)), job):
                yield packed_table([unit])

    rows = [units._asdict() for units in ranges]
    # The driver needs about a millisecond per block, before anything is read.
    num_blocks = min(len(rows), max(MIN_READ_TASKS, TASKS_PER_READER * pool.max_actors))
    return ray.data.from_items(rows, override_num_blocks=num_blocks).map_batches(
        read_block,
        batch_size=None,
        compute=ray.data.TaskPoolStrategy(size=min(pool.max_actors, len(rows))),
        **pool.task_options,
    )


def chain(
    dataset: ray.data.Dataset,
    groups: Sequence[tuple[Sequence[Stage], Resources]],
    job: str | None = None,
    map_all: Callable[..., ray.data.Dataset] = map_batches,
) -> ray.data.Dataset:
    """Applies groups of stages to packed units, each in a separate pool of actors.

    Args:
        map_all: Maps the batches of a dataset with the actors of a pool.
    """
    for number, (stages, pool) in enumerate(groups, 1):
        arguments = {"stages": list(stages), "num_threads": pool.num_threads, "job": job}
        arguments["is_last"] = number == len(groups)
        options = {"batch_size": 1, "batch_format": "pyarrow", "zero_copy_batch": True}
        dataset = map_all(dataset, StageActor, arguments, pool, **options)
    return dataset


def write_units(units: ray.data.Dataset, stream: Stream, pool: Resources) -> ray.data.Dataset:
    """Returns a lazy dataset with one row (`fragments.WRITTEN`) per group of units."""
    return map_batches(
        units,
        _WriteActor,
        {"index": stream.index, "max_bytes": stream.fragment_bytes, "job": stream.job},
        pool,
        batch_size=max(1, stream.units_per_fragment),
        batch_format="pyarrow",
        zero_copy_batch=True,
    )


def configure(profile: Profile = Profile()) -> None:  # noqa: B008 - immutable
    """Configures Ray Data for the streams of jobs."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # By default one row (a unit or a fragment number) per block, the granularity of scheduling and
    # of the work lost when a process dies.
    context.target_max_block_size = profile.block_bytes
    context.execution_no_progress_timeout_s = (
        profile.no_progress_seconds or DEFAULT_EXECUTION_NO_PROGRESS_TIMEOUT_S
    )
    context.downstream_capacity_backpressure_ratio = (
        profile.backpressure_ratio or DEFAULT_DOWNSTREAM_CAPACITY_BACKPRESSURE_RATIO
    )
    context.raise_original_map_exception = True  # preserves a `SpecError` of a stage


def rows_of(dataset: ray.data.Dataset) -> Iterator[dict[str, Any] | None]:
    """Yields the rows of a dataset as they arrive, and None after half a second without a row."""
    try:
        yield from polled(dataset.iter_rows())
    except ExecutionTimeoutError:
        seconds = dataset.context.execution_no_progress_timeout_s
        problem = f"no stage has made progress for {seconds:g} s"
        advice = "set no_progress_seconds of the profile if units take longer"
        raise JobError(f"{problem}; {advice}, or look for a stage without actors") from None
