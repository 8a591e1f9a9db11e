"""Stages of the index job.

Stages process units. A `Unit` is a fixed group of items that is encoded,
written and committed atomically. Because batches never span units, a resumed job forms the same
batches as an uninterrupted one and produces bit-identical vectors.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from pipeline.config import Spec, SpecError
from pipeline.data.decode import Unreadable
from pipeline.runtime.progress import meter
from pipeline.schema import REJECT, Reject, detail_with_file, metadata_file

#: Errors that are caused by the machine rather than by the item. The next run retries the item.
RETRYABLE = (TimeoutError, OSError, MemoryError)
#: Step under which the units that have passed all stages are counted.
FINISHED = "finished"


class Resources(Spec):
    """Resources of the actors that run a stage."""

    num_cpus: NonNegativeFloat = 1.0
    """Number of CPUs that each actor reserves."""
    num_gpus: NonNegativeFloat = 0.0
    """Number of GPUs that each actor reserves. With a fraction, several actors share one GPU."""
    min_actors: PositiveInt = 1
    """Minimum number of actors in the pool."""
    max_actors: PositiveInt = 1
    """Maximum number of actors in the pool."""
    initial_actors: PositiveInt | None = None
    """Number of actors that start at once. By default `min_actors`; Ray adds others when units
    wait."""
    max_in_flight: PositiveInt | None = None
    """Number of blocks that an actor has received and not finished, including the one in progress.
    With more, an actor does not wait for its next block; with fewer, other actors get it. The
    default is Ray's."""
    memory_bytes: PositiveInt | None = None
    """Memory that each actor reserves, in bytes. Ray starts no more actors than fit on a node."""
    num_threads: PositiveInt = 1
    """Number of threads that torch and BLAS use in each actor."""

    @model_validator(mode="after")
    def _check_resources(self) -> Resources:
        if self.min_actors > self.max_actors:
            rule = f"at least min_actors={self.min_actors}"
            raise SpecError("max_actors", self.max_actors, rule)
        initial = self.initial_actors
        if initial is not None and not self.min_actors <= initial <= self.max_actors:
            rule = f"from min_actors={self.min_actors} to max_actors={self.max_actors}"
            raise SpecError("initial_actors", initial, rule)
        if self.num_gpus > 1 and self.num_gpus % 1:
            raise SpecError("num_gpus", self.num_gpus, "a whole number or less than 1")
        return self

    @property
    def task_options(self) -> dict[str, Any]:
        """Options of a Ray task that needs the resources of one actor."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        if self.memory_bytes is not None:
            options["memory"] = self.memory_bytes
        return options


INDEX_JOBS = "jobs.index and jobs.add tokens"
#: Jobs whose resources profiles have a field that not all profiles have.
PROFILE_JOBS = {
    **dict.fromkeys(("read", "prepare", "write", "device_map", "object_store_bytes"), INDEX_JOBS),
    "encode": "jobs.index, jobs.add tokens and jobs.add candidates",
    "compress": "jobs.index, jobs.add tokens and jobs.add representations",
    "fit": "jobs.add candidates",
    **dict.fromkeys(("num_workers", "max_failures"), "jobs.train"),
}


def profile_note(field: str) -> str:
    """Returns the end of the message about a field that a resources profile does not have."""
    known = PROFILE_JOBS.get(field)
    return f"; {field!r} is a field of the profiles of {known}" if known else ""


class Profile(Spec):
    """Settings that the resources profiles of all jobs with actor pools have in common."""

    no_progress_seconds: PositiveFloat | None = None
    """Time after which a job fails if no block has moved, in seconds. It must exceed the time that
    the slowest unit takes. The default is Ray's (1800)."""
    block_bytes: PositiveInt = 1
    """Size up to which consecutive units are sent to an actor together, in bytes. The driver
    schedules each block, which limits the rate of tiny units; larger blocks are distributed less
    evenly. By default each unit is a block."""
    backpressure_ratio: PositiveFloat | None = None
    """Ratio of waiting to running input of a stage above which the previous stage pauses. The
    default is Ray's (2)."""
    autoscaling: bool = False
    """Whether the cluster adds nodes on demand. Otherwise a profile that exceeds the cluster is an
    error."""

    @classmethod
    def unknown_field_note(cls, name: str) -> str:
        """Names the jobs whose profiles have the field."""
        return profile_note(name)

    @property
    def pools(self) -> dict[str, Resources]:
        """The pools of the profile by the name of their field."""
        values = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: value for name, value in values if isinstance(value, Resources)}


@dataclass(frozen=True)
class Unit:
    """Fixed group of items that passes through all stages together.

    Attributes:
        name: Name of the shard and position of the unit within it, for example "00003-0001". Every
            run assigns the same names.
        starts: Start of the processing by the name of the stage, in seconds since 1970.
        extra: Small JSON values for the driver, for example the rows to replace.
    """

    name: str
    items: pa.Table
    rejects: pa.Table = field(default_factory=REJECT.empty_table)
    seconds: dict[str, float] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def num_entries(self) -> int:
        """Number of items and rejects, which no stage changes."""
        return self.items.num_rows + self.rejects.num_rows

    def reject(self, rejects: Sequence[Reject]) -> Unit:
        """Returns the unit with additional rejects. The caller must remove them from `items`."""
        table = pa.Table.from_pylist([r.row() for r in rejects], schema=REJECT)
        return replace(self, rejects=pa.concat_tables([self.rejects, table]))

    def pack(self) -> pa.Table:
        """Serialises the unit to one row, because Ray may split a block between rows."""
        info = {"seconds": self.seconds, "starts": self.starts, "extra": self.extra}
        columns = [
            pa.array([self.name]),
            _binary_array(to_ipc(self.items)),
            _binary_array(to_ipc(self.rejects)),
            pa.array([json.dumps(info)]),
        ]
        return pa.Table.from_arrays(columns, schema=PACKED)

    @classmethod
    def unpack(cls, row: pa.Table, i: int) -> Unit:
        """Restores the unit in row `i` of a block."""
        info = json.loads(row["info"][i].as_py())
        items, rejects = (from_ipc(_binary_value(row[name], i)) for name in ("items", "rejects"))
        return cls(row["unit"][i].as_py(), items, rejects, **info)


PACKED = pa.schema(
    [
        pa.field("unit", pa.string()),
        pa.field("items", pa.large_binary()),
        pa.field("rejects", pa.large_binary()),
        pa.field("info", pa.string()),
    ]
)


def packed_table(units: Sequence[Unit]) -> pa.Table:
    """Serialises several units to one Ray Data block."""
    return pa.concat_tables([unit.pack() for unit in units])


class Processed(NamedTuple):
    """Output of a stage for the items of one unit.

    Attributes:
        seconds: Processing time by step for stages that consist of several steps, else None.
    """

    items: pa.Table
    rejects: list[Reject]
    seconds: dict[str, float] | None = None


class Stage(ABC):
    """Step of the pipeline.

    Actors load its models with `load`. Processing must be idempotent and must not have side
    effects, because units may be retried.
    """

    name: ClassVar[str]

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the columns that the stage reads."""
        return ()

    @property
    def adds(self) -> tuple[str, ...]:
        """Names of the columns that the stage adds."""
        return ()

    def load(self) -> Stage:
        """Loads the models of the stage, once per actor, and returns the stage."""
        return self

    @abstractmethod
    def process(self, items: pa.Table) -> Processed:
        """Adds the columns of the stage to a table of at least one row, and rejects rows."""


def consecutive_starts(started: float, seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the start of each step. Steps that alternate count as consecutive.

    >>> consecutive_starts(100.0, {"encode": 2.0, "compress": 0.5})
    {'encode': 100.0, 'compress': 102.0}
    """
    starts = itertools.accumulate(seconds.values(), initial=started)
    return dict(zip(seconds, starts, strict=False))


def run_stage(stage: Stage, unit: Unit) -> Unit:
    """Runs a stage on a unit and rejects the items that cause exceptions.

    If processing the unit raises an exception, its items are processed one by one to find out which
    of them are responsible. If all of several items fail with an error other than `Unreadable` or
    `MemoryError`, the stage itself is considered faulty and the first exception is raised.
    """
    if unit.items.num_rows == 0:
        return unit
    started, start = time.time(), time.perf_counter()
    try:
        items, rejects, seconds = stage.process(unit.items)
    except Exception as error:
        seconds = None
        if unit.items.num_rows > 1:
            items, rejects = _process_individually(stage, unit.items, error)
        else:
            items, rejects = unit.items.slice(0, 0), [_failure(stage, unit.items, error)]
    seconds = seconds or {stage.name: time.perf_counter() - start}
    starts = consecutive_starts(started, seconds)
    unit = replace(
        unit,
        items=items,
        seconds={**unit.seconds, **seconds},
        starts={**unit.starts, **starts},
    )
    return unit.reject(rejects) if rejects else unit


def _process_individually(
    stage: Stage, items: pa.Table, first_error: Exception
) -> tuple[pa.Table, list[Reject]]:
    done, rejects, num_failed = [], [], 0
    for i in range(items.num_rows):
        try:
            table, rejected, _ = stage.process(items.slice(i, 1))
            if table.num_rows:  # a rejected item has no columns of the stage
                done.append(table)
            rejects += rejected
        except Exception as error:
            rejects.append(_failure(stage, items.slice(i, 1), error))
            num_failed += not isinstance(error, (Unreadable, MemoryError))
    if num_failed == items.num_rows:
        raise first_error
    if not done:
        return items.slice(0, 0), rejects
    # An item without a caption lacks the columns of captions, which are then null.
    return pa.concat_tables(done, promote_options="default"), rejects


def _failure(stage: Stage, item: pa.Table, error: Exception) -> Reject:
    if isinstance(error, Unreadable):
        reason, detail = error.reason, error.detail
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = type(error).__name__
        detail = f"{error} ({os.path.basename(last.filename)}:{last.lineno})"
    detail = " ".join(detail.split())[:500]
    file = metadata_file(item["modality"][0].as_py(), item["metadata"][0].as_py())
    return Reject(
        item_id=item["item_id"][0].as_py(),
        source=item["source"][0].as_py(),
        stage=stage.name,
        reason=reason,
        detail=detail_with_file(detail, file),
        revision=item["revision"][0].as_py(),
        retryable=isinstance(error, RETRYABLE) or "out of memory" in str(error).lower(),
    )


def run_stages(stages: Sequence[Stage], unit: Unit, job: str | None, is_last: bool) -> Unit:
    """Runs loaded stages on a unit in sequence and counts what they did.

    Args:
        is_last: Whether the unit then counts as finished.
    """
    for stage in stages:
        before = unit.seconds
        unit = run_stage(stage, unit)
        if job is not None:
            for step, seconds in unit.seconds.items():
                if step not in before:
                    meter(job).add(step, unit.num_entries, 1, seconds)
    if job is not None:
        if is_last:
            meter(job).add(FINISHED, unit.num_entries, 1)
        meter(job).end_unit()
    return unit


def to_ipc(table: pa.Table) -> pa.Buffer:
    """Serialises a table to an Arrow stream with a single copy: video frames can be large."""
    counter = pa.MockOutputStream()
    _write_stream(counter, table)
    buffer = pa.allocate_buffer(counter.size())
    _write_stream(pa.FixedSizeBufferWriter(buffer), table)
    return buffer


def _write_stream(sink: pa.NativeFile, table: pa.Table) -> None:
    with sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def _binary_array(buffer: pa.Buffer) -> pa.Array:
    offsets = pa.py_buffer(np.array([0, buffer.size], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, buffer])


def _binary_value(column: pa.ChunkedArray, i: int) -> pa.Buffer:
    """Returns a view of one value, which `column[i].as_buffer()` would copy."""
    array = column.slice(i, 1).chunk(0)
    start, end = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + 2]
    return array.buffers()[2].slice(start, end - start)


def from_ipc(buffer: pa.Buffer | bytes) -> pa.Table:
    """Restores a table that was serialised by `to_ipc`."""
    with pa.ipc.open_stream(buffer) as reader:
        return reader.read_all()
