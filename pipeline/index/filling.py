"""Actors that compute new columns of the stored rows of fragments."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata

from pipeline.index.reader import IndexReader, get_fragment


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

    def __init__(self, index: str, version: int):
        self.index = IndexReader(index, version)

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
