"""Comparison of an index with that of an undisturbed run, and accounting of its items."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipeline.config import SpecError
from pipeline.index import LEASE
from pipeline.index.artefacts import load_artefact
from pipeline.index.lease import Lease
from pipeline.index.reader import IndexReader, open_folder

#: Rows that are read at the same time.
BATCH_ROWS = 256


@dataclass(frozen=True)
class Contents:
    """Contents of an index, independent of the order and the fragments in which it stores them.

    Attributes:
        rows: Digest of each value by item id and column. Ids with several rows have the first.
        copies: Number of rows by item id.
        rejects: Rejects in the order of their text.
        artefacts: Names of the artefacts that columns refer to; each is a hash of the content.
    """

    columns: dict[str, str]
    rows: dict[str, dict[str, str]]
    copies: Counter[str]
    rejects: list[str]
    artefacts: frozenset[str]
    damages: tuple[str, ...] = ()


@dataclass
class Differences:
    """Differences of an index from the undisturbed one.

    Attributes:
        duplicated: Ids of items with several rows, or with a row and a reject.
        changed: Values that differ, as `item.column`, and items that should not exist.
        others: Sentences about columns, rejects, artefacts, counts and the lease.
    """

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def sentences(self) -> list[str]:
        """Describes the differences, with up to five examples of each type."""
        lists = {name: ids for name, ids in vars(self).items() if name != "others" and ids}
        found = [f"{name}: {len(ids):,} ({', '.join(ids[:5])})" for name, ids in lists.items()]
        return found + self.others


def contents(uri: str) -> Contents:
    """Reads an index completely."""
    index = IndexReader(uri)
    columns, artefacts = {}, set()
    for column in index.schema:
        metadata = column.metadata or {}
        columns[column.name] = f"{column.type} {sorted(metadata.items())}"
        for text in metadata.values():
            artefacts.update(_artefacts(text))
    rows: dict[str, dict[str, str]] = {}
    copies: Counter[str] = Counter()
    for batch in index.batches(index.schema.names, batch_rows=BATCH_ROWS):
        digests = {name: _digests(batch[name]) for name in batch.schema.names}
        for number, item_id in enumerate(batch["item_id"].to_pylist()):
            copies[item_id] += 1
            rows.setdefault(item_id, {name: d[number] for name, d in digests.items()})
    damages = []
    for name in sorted(artefacts):
        try:
            load_artefact(uri, name, {})
        except SpecError as error:
            damages.append(str(error))
    rejects = sorted(map(repr, index.rejects().to_pylist()))
    return Contents(columns, rows, copies, rejects, frozenset(artefacts), tuple(damages))


def _artefacts(metadata: bytes) -> set[str]:
    try:
        values = json.loads(metadata)
    except ValueError:
        return set()
    if not isinstance(values, dict):
        return set()
    return {values[key] for key in ("artefact", "codec_artefact") if values.get(key)}


def _digests(column: pa.Array) -> list[str]:
    """Computes a digest of each value, which distinguishes all floats, also 0.0 and -0.0."""
    texts = (repr(value).encode() for value in column.to_pylist())
    return [hashlib.blake2b(text, digest_size=12).hexdigest() for text in texts]


def differences(actual: Contents, expected: Contents) -> Differences:
    """Compares an index with the undisturbed one.

    Args:
        actual: Index after faults.
        expected: Index of an undisturbed run of the same jobs.
    """
    found = Differences()
    found.lost = sorted(expected.rows.keys() - actual.rows.keys())
    found.duplicated = sorted(item_id for item_id, n in actual.copies.items() if n > 1)
    found.changed = sorted(actual.rows.keys() - expected.rows.keys())
    for item_id in sorted(expected.rows.keys() & actual.rows.keys()):
        row, other = actual.rows[item_id], expected.rows[item_id]
        names = sorted(row.keys() & other.keys())
        found.changed += [f"{item_id}.{name}" for name in names if row[name] != other[name]]
    for name in sorted(expected.columns.keys() | actual.columns.keys()):
        if actual.columns.get(name) != expected.columns.get(name):
            stored = actual.columns.get(name, "missing")
            found.others.append(f"column {name} is {stored}, expected {expected.columns.get(name)}")
    if actual.rejects != expected.rejects:
        found.others.append(f"rejects are {actual.rejects}, expected {expected.rejects}")
    found.others += actual.damages
    return found


def accounting(uri: str, listed: Collection[str]) -> Differences:
    """Checks that each listed item is indexed or rejected exactly once."""
    index, found = IndexReader(uri), Differences()
    indexed = Counter(
        item_id for batch in index.batches(["item_id"]) for item_id in batch["item_id"].to_pylist()
    )
    rejected = Counter(index.rejects()["item_id"].to_pylist())
    total = indexed + rejected
    found.lost = sorted(set(listed) - total.keys())
    found.duplicated = sorted(item_id for item_id, number in total.items() if number > 1)
    found.changed = sorted(total.keys() - set(listed))
    return found


def accounting_of_job(summary: Mapping[str, Any]) -> list[str]:
    """Returns sentences about counts of the last job that do not add up."""
    found = []
    if summary["state"] != "done":
        found.append(f"the last job is recorded as {summary['state']}")
    if "listed" in summary:
        rejected = summary["rejected"] + summary["rejected_before"]
        if summary["listed"] != summary["indexed"] + rejected + summary["gone"]:
            counts = f"indexed {summary['indexed']} + rejected {rejected} + gone {summary['gone']}"
            found.append(f"listed {summary['listed']} != {counts}")
    elif "done_before" in summary:
        done = summary["done_before"] + summary["done"]
        if summary["fragments"] != done:
            found.append(f"{done} of {summary['fragments']} fragments are filled")
    return found


def orphaned_leases(uri: str) -> list[str]:
    """Returns sentences about leases that remain although no job is running."""
    lease, found = Lease.from_dataset(IndexReader(uri).dataset), []
    if lease is not None and lease.owner:
        found.append(f"the lease is held by {lease.describe()}")
    storage, path = open_folder(uri, LEASE)
    files: Sequence[str] = storage.ls(path, detail=False) if storage.exists(path) else ()
    return found + [f"the file {name} of a lease remains" for name in files]
