"""Fragments that actors have written. They become visible when the driver commits them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import lance
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import FragmentMetadata, write_fragments

from pipeline.data.base import ItemSize
from pipeline.index.positions import encode_positions
from pipeline.index.reader import ITEMS, part_uri
from pipeline.index.stage import Unit
from pipeline.index.units import UnitLimits
from pipeline.runtime.progress import meter
from pipeline.schema import REJECT

#: Result of a write: a pickled `Pending`, which the driver needs for the commit.
WRITTEN = pa.schema([pa.field("written", pa.large_binary())])


class WriteFragments:
    """Writes units to Lance fragments. The driver commits the fragments later.

    Args:
        max_bytes: Maximum size of the rows of a fragment in memory, unless it has a single unit.
    """

    def __init__(self, index: str, max_bytes: int, job: str | None = None):
        self.uri, self.max_bytes, self._job = part_uri(index, ITEMS), max_bytes, job

    def write(self, units: Sequence[Unit]) -> Pending:
        """Writes units to one or more fragments."""
        started, start = time.time(), time.perf_counter()
        written = Pending()
        for group in self._groups([unit.items for unit in units if unit.items.num_rows]):
            # Units lack the columns of a field that none of their items has.
            table = pa.concat_tables(group, promote_options="default")
            written.item_ids += table["item_id"].to_pylist()
            written.num_bytes += table.nbytes
            written.fragments += write_table(table, self.uri)
        written_ids = set(written.item_ids)  # a rejected new revision does not replace the old row
        for unit in units:
            for fragment, ids in unit.extra["replaces"].items():
                if replaced := [item_id for item_id in ids if item_id in written_ids]:
                    written.replaced.setdefault(int(fragment), []).extend(replaced)
            written.rejects.append(unit.rejects)
            written.gone += unit.extra["gone"]
            written.add_seconds(unit.seconds)
        seconds = time.perf_counter() - start
        written.add_seconds({"write": seconds})
        if self._job is not None:
            num_entries = sum(unit.num_entries for unit in units)
            meter(self._job).add("write", num_entries, len(units), seconds)
        for unit in units:
            unit.starts["write"], unit.seconds["write"] = started, seconds
            written.units.append(WrittenUnit.from_unit(unit))
        return written

    def _groups(self, tables: list[pa.Table]) -> Iterator[list[pa.Table]]:
        limits = UnitLimits(max(1, len(tables)), self.max_bytes)
        return limits.split((table, ItemSize(table.nbytes)) for table in tables)


def write_table(table: pa.Table, uri: str) -> list[FragmentMetadata]:
    """Writes rows as one uncommitted fragment. Missing columns are null."""
    schema = lance.dataset(uri).schema
    schema = pa.schema([column for column in schema if column.name in table.column_names])
    table = encode_positions(table.select(schema.names), schema)
    return write_fragments(table, uri, schema=schema, max_rows_per_file=max(1, table.num_rows))


class WrittenUnit(NamedTuple):
    """Outcome of a unit, for the log and the trace of the job.

    Attributes:
        rejects: Number of rejected items by reason.
        steps: Start, in seconds since 1970, and duration in seconds of each step.
    """

    name: str
    items: int
    rejects: dict[str, int]
    steps: dict[str, tuple[float, float]]

    @classmethod
    def from_unit(cls, unit: Unit) -> WrittenUnit:
        """Describes a unit that is being written."""
        steps = {step: (start, unit.seconds[step]) for step, start in unit.starts.items()}
        return cls(unit.name, unit.items.num_rows, reason_counts(unit.rejects), steps)


def reason_counts(rejects: pa.Table) -> dict[str, int]:
    """Counts rejects by their reason."""
    return dict(Counter(rejects["reason"].to_pylist()))


@dataclass
class Pending:
    """Fragments that have been written but not committed.

    Attributes:
        replaced: Ids of the items whose older revision is replaced, by fragment.
        rejects: Tables of rejects.
        gone: Number of listed items that no longer exist.
        seconds: Time by stage.
        num_bytes: Size of the rows in memory.
    """

    units: list[WrittenUnit] = field(default_factory=list)
    fragments: list[FragmentMetadata] = field(default_factory=list)
    replaced: dict[int, list[str]] = field(default_factory=dict)
    rejects: list[pa.Table] = field(default_factory=lambda: [REJECT.empty_table()])
    item_ids: list[str] = field(default_factory=list)
    gone: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def num_items(self) -> int:
        """Number of items in the fragments."""
        return len(self.item_ids)

    @property
    def num_done(self) -> int:
        """Number of items that have been processed, including rejected and deleted ones."""
        return self.num_items + self.gone + sum(table.num_rows for table in self.rejects)

    @property
    def num_replaced(self) -> int:
        """Number of items whose previous revision is replaced."""
        return sum(map(len, self.replaced.values()))

    def rejects_with(self, spec_digest: str) -> pa.Table:
        """Returns the rejects and fills in the digest of the spec where a stage has not set it."""
        rejects = pa.concat_tables(self.rejects)
        spec = pc.fill_null(rejects["spec"], spec_digest)
        return rejects.set_column(REJECT.get_field_index("spec"), REJECT.field("spec"), spec)

    def add(self, other: Pending) -> None:
        """Adds fragments that were written since."""
        self.units += other.units
        self.fragments += other.fragments
        for fragment, ids in other.replaced.items():
            self.replaced.setdefault(fragment, []).extend(ids)
        self.rejects += other.rejects
        self.item_ids += other.item_ids
        self.gone += other.gone
        self.num_bytes += other.num_bytes
        self.add_seconds(other.seconds)

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Adds times by stage."""
        for name, spent in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
