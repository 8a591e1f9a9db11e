"""What a stage of the index job is, and how stages become Ray Data operators.

A row of the Ray Data pipeline is a `Unit`: a fixed group of items that is encoded together, written
together and committed together or not at all. Batches are formed inside a unit only, so a resumed
job forms the very batches of an unbroken one, and its vectors are equal bit for bit.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import NonNegativeFloat, PositiveInt, model_validator

from pipeline.config import Spec, SpecError
from pipeline.decoding import Unreadable
from pipeline.schema import REJECT, Reject, detail_in, file_in

if TYPE_CHECKING:
    import ray.data

#: Errors of the machine rather than of the item: the next run tries such items again.
RETRYABLE = (TimeoutError, OSError, MemoryError)


class Resources(Spec):
    """What one actor of a stage takes, and how many actors there may be."""

    num_cpus: NonNegativeFloat = 1.0
    num_gpus: NonNegativeFloat = 0.0
    min_actors: PositiveInt = 1
    max_actors: PositiveInt = 1
    num_threads: PositiveInt = 1  # of torch and BLAS in each actor

    @model_validator(mode="after")
    def _pool(self) -> Resources:
        if self.min_actors > self.max_actors:
            rule = f"at least min_actors={self.min_actors}"
            raise SpecError("max_actors", self.max_actors, rule)
        if self.num_gpus > 1 and self.num_gpus % 1:
            raise SpecError("num_gpus", self.num_gpus, "a whole number or less than 1")
        return self

    @property
    def of_a_task(self) -> dict[str, float]:
        """As options of a Ray task that does the work of one actor."""
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}


@dataclass(frozen=True)
class Unit:
    """A fixed group of items on its way through the stages.

    Attributes:
        name: shard and position in it, for example "00003-0001": equal in every run.
        items: the items still good, one row each; stages add columns.
        rejects: (REJECT) what this unit's items lost on the way.
        seconds: time spent on this unit by stage name.
        extra: small JSON values for the driver (for example the rows that are replaced).
    """

    name: str
    items: pa.Table
    rejects: pa.Table = field(default_factory=REJECT.empty_table)
    seconds: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def reject(self, rejects: Sequence[Reject]) -> Unit:
        """The unit with `rejects` added to its list (the caller has dropped the rows)."""
        added = pa.Table.from_pylist([r.row() for r in rejects], schema=REJECT)
        return replace(self, rejects=pa.concat_tables([self.rejects, added]))

    def pack(self) -> pa.Table:
        """The unit as one row of a Ray Data block: Ray never splits a row."""
        about = {"seconds": self.seconds, "extra": self.extra}
        columns = [
            pa.array([self.name]),
            _one_binary(to_ipc(self.items)),
            _one_binary(to_ipc(self.rejects)),
            pa.array([json.dumps(about)]),
        ]
        return pa.Table.from_arrays(columns, schema=PACKED)

    @classmethod
    def unpack(cls, row: pa.Table, i: int) -> Unit:
        """Row `i` of a block of packed units."""
        about = json.loads(row["about"][i].as_py())
        items, rejects = (from_ipc(_binary_of(row[name], i)) for name in ("items", "rejects"))
        return cls(row["unit"][i].as_py(), items, rejects, about["seconds"], about["extra"])


PACKED = pa.schema(
    [
        pa.field("unit", pa.string()),
        pa.field("items", pa.large_binary()),
        pa.field("rejects", pa.large_binary()),
        pa.field("about", pa.string()),
    ]
)


def packed_table(units: Sequence[Unit]) -> pa.Table:
    """A block of packed units."""
    return pa.concat_tables([unit.pack() for unit in units])


class Processed(NamedTuple):
    """Result of a stage for the items of a unit.

    Attributes:
        items: The items that remain, with the stage's columns.
        rejects: One entry for each item that was left out.
        seconds: Time by step, for stages of several steps; None: all of it is the stage's.
    """

    items: pa.Table
    rejects: list[Reject]
    seconds: dict[str, float] | None = None


class LoadedStage(ABC):
    """A stage inside its actor, with whatever is slow to load.

    It must be retry-safe: processing a unit twice gives the same columns and has no other effect.
    """

    name: ClassVar[str]

    @abstractmethod
    def process(self, items: pa.Table) -> Processed:
        """Adds this stage's columns and leaves out the rows it rejects.

        Args:
            items: At least one row, with the columns in the stage's `needs`.
        """


class Stage(ABC):
    """Description of one step of the pipeline: small, picklable and immutable."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """Columns that the items must have."""

    @property
    @abstractmethod
    def adds(self) -> tuple[str, ...]:
        """Columns that the items have afterwards."""

    @abstractmethod
    def load(self) -> LoadedStage:
        """Loads the stage, once in each actor."""


def run_stage(stage: LoadedStage, unit: Unit) -> Unit:
    """Runs a stage on a unit; an exception costs the items that cause it, not the job.

    After an exception the items are tried one by one. If every one of several items fails then, the
    stage is at fault rather than an item, unless it reports them as unreadable: the exception is
    raised.
    """
    if unit.items.num_rows == 0:
        return unit
    start = time.perf_counter()
    try:
        items, rejects, seconds = stage.process(unit.items)
    except Exception as error:
        seconds = None
        if unit.items.num_rows > 1:
            items, rejects = _one_by_one(stage, unit.items, error)
        else:
            items, rejects = unit.items.slice(0, 0), [_failure(stage, unit.items, error)]
    seconds = seconds or {stage.name: time.perf_counter() - start}
    unit = replace(unit, items=items, seconds={**unit.seconds, **seconds})
    return unit.reject(rejects) if rejects else unit


def _one_by_one(
    stage: LoadedStage, items: pa.Table, first_error: Exception
) -> tuple[pa.Table, list[Reject]]:
    done, rejects, num_failed = [], [], 0
    for i in range(items.num_rows):
        try:
            table, rejected, _ = stage.process(items.slice(i, 1))
            done.append(table)
            rejects += rejected
        except Exception as error:
            rejects.append(_failure(stage, items.slice(i, 1), error))
            num_failed += not isinstance(error, Unreadable)
    if num_failed == items.num_rows:
        raise first_error
    return pa.concat_tables(done), rejects


def _failure(stage: LoadedStage, item: pa.Table, error: Exception) -> Reject:
    if isinstance(error, Unreadable):
        reason, detail = error.reason, error.detail
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = type(error).__name__
        detail = f"{error} ({os.path.basename(last.filename)}:{last.lineno})"
    detail = " ".join(detail.split())[:500]
    holder = file_in(item["modality"][0].as_py(), item["metadata"][0].as_py())
    return Reject(
        item_id=item["item_id"][0].as_py(),
        source=item["source"][0].as_py(),
        stage=stage.name,
        reason=reason,
        detail=detail_in(detail, holder),
        revision=item["revision"][0].as_py(),
        retryable=isinstance(error, RETRYABLE) or "out of memory" in str(error).lower(),
    )


class StageActor:
    """Runs one or more stages in one Ray Data actor: between them nothing is copied."""

    def __init__(self, stages: Sequence[Stage], num_threads: int):
        import torch

        torch.set_num_threads(num_threads)
        self.stages = [stage.load() for stage in stages]

    def __call__(self, block: pa.Table) -> pa.Table:
        """Runs the stages on packed units."""
        units = [Unit.unpack(block, i) for i in range(block.num_rows)]
        for stage in self.stages:
            units = [run_stage(stage, unit) for unit in units]
        return packed_table(units)


def chain(
    dataset: ray.data.Dataset,
    groups: Sequence[tuple[Sequence[Stage], Resources]],
    columns: Sequence[str],
) -> ray.data.Dataset:
    """Maps groups of stages over a dataset of packed units, a pool of actors for each group.

    Args:
        dataset: rows as `Unit.pack` makes them.
        groups: the stages that share an actor, and what such an actor takes.
        columns: the item columns that are there at the start.

    Raises:
        ValueError: a stage needs a column that no earlier one adds; said before any work begins.
    """
    from ray.data import ActorPoolStrategy

    there = set(columns)
    for stages, resources in groups:
        for stage in stages:
            missing = sorted(set(stage.needs) - there)
            if missing:
                raise ValueError(
                    f"stage {stage.name!r} needs columns {missing}; there: {sorted(there)}"
                )
            there |= set(stage.adds)
        dataset = dataset.map_batches(
            StageActor,
            fn_constructor_kwargs={"stages": list(stages), "num_threads": resources.num_threads},
            batch_size=1,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=ActorPoolStrategy(min_size=resources.min_actors, max_size=resources.max_actors),
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
        )
    return dataset


def to_ipc(table: pa.Table) -> pa.Buffer:
    """A table as an Arrow stream, copied once: frames of a video are many bytes."""
    measure = pa.MockOutputStream()
    _write_stream(measure, table)
    buffer = pa.allocate_buffer(measure.size())
    _write_stream(pa.FixedSizeBufferWriter(buffer), table)
    return buffer


def _write_stream(sink: pa.NativeFile, table: pa.Table) -> None:
    with sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def _one_binary(buffer: pa.Buffer) -> pa.Array:
    """A column of one value, which is not copied."""
    ends = pa.py_buffer(np.array([0, buffer.size], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, buffer])


def _binary_of(column: pa.ChunkedArray, i: int) -> pa.Buffer:
    """A value of a binary column where it lies; taking it as a scalar would copy it."""
    array = column.slice(i, 1).chunk(0)
    start, end = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + 2]
    return array.buffers()[2].slice(start, end - start)


def from_ipc(buffer: pa.Buffer | bytes) -> pa.Table:
    """The table that `to_ipc` wrote."""
    with pa.ipc.open_stream(buffer) as reader:
        return reader.read_all()
