"""Reads listed items in units, either for indexing or for samples and previews."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.data.base import Source, items_table
from pipeline.index.listing import (
    CHANGED,
    DONE,
    DUPLICATE,
    FOREIGN,
    LOOKUP,
    NEW,
    REJECTED,
    ListingJob,
    disambiguated_id,
    id_hash,
    read_tables,
    scan,
    shard_description,
)
from pipeline.index.stage import Unit
from pipeline.index.units import UnitLimits, UnitRange
from pipeline.schema import MEDIA, Item, Reject, detail_with_file

#: Shard of a source, and the positions and entries of some of its items.
Chosen = tuple[dict[str, Any], list[tuple[int, Item]]]


def read_units(job: ListingJob, units: UnitRange) -> Iterator[Unit]:
    """Yields the items of a range of units that remain to be processed.

    The listing divides all items of a shard into units, also finished ones, so that a resumed job
    forms the same units. If listed entries no longer exist, a final unit without items counts them.
    """
    source, shard = job.build_source(), units.shard
    listed = job.read_table("listed", shard)
    description = shard_description(listed)
    positions, hashes = listed["position"].to_numpy(), listed["hash"].to_numpy()
    status, fragment = listed["status"].to_numpy(), listed["fragment"].to_numpy()
    numbers = listed["unit"].to_numpy()
    is_in_range = (numbers >= units.first) & ((numbers < units.end) | (units.end < 0))
    to_do = np.flatnonzero(~np.isin(status, (DONE, REJECTED)) & is_in_range)
    # By id, not by position: an entry that has become unreadable shifts all later positions.
    rows_by_hash: dict[int, list[int]] = {}
    for row in to_do[::-1].tolist():
        rows_by_hash.setdefault(int(hashes[row]), []).append(row)
    # Entries that were added after the listing are left to the next run.
    entries = [
        (rows.pop(), position, entry)
        for position, entry in _entries(job, source, shard, description, to_do.tolist())
        if isinstance(entry, Item) and (rows := rows_by_hash.get(id_hash(entry.item_id)))
    ]
    wanted = [(p, entry) for row, p, entry in entries if status[row] in (NEW, CHANGED)]
    decoded = source.decode(description["shard"], wanted) if wanted else iter(())
    for number, group in itertools.groupby(entries, lambda e: numbers[e[0]]):
        items: list[Item] = []
        rejects: list[Reject] = []
        replaces: dict[str, list[str]] = {}
        for row, _, entry in group:
            if status[row] in (DUPLICATE, FOREIGN):
                new_id = disambiguated_id(entry.item_id, shard, positions[row])
                rejects.append(_id_reject(entry, status[row], new_id))
                continue
            result = next(decoded)
            assert result.item_id == entry.item_id, (
                "decode must yield one result per item, in order"
            )
            if isinstance(result, Item):
                items.append(result)
            else:
                rejects.append(result)
            if status[row] == CHANGED:
                replaces.setdefault(str(fragment[row]), []).append(entry.item_id)
        yield Unit(
            f"{shard:06d}-{number:06d}",
            items_table(items, source.payload),
            job.rejects_table(rejects),
            extra={"replaces": replaces, "gone": 0},
        )
    if gone := len(to_do) - len(entries):
        extra = {"replaces": {}, "gone": gone}
        yield Unit(f"{shard:06d}-gone", items_table([], source.payload), extra=extra)


def stored_fragments(job: ListingJob, shard: int) -> list[int]:
    """Returns the fragments that contain unchanged rows of a shard."""
    listed = job.read_table("listed", shard)
    return np.unique(listed["fragment"].to_numpy()[listed["status"].to_numpy() == DONE]).tolist()


def stored_units(
    job: ListingJob, shard: int, fragment: int, item_ids: Container[str]
) -> Iterator[tuple[Unit, int]]:
    """Yields the stored items of a fragment, read again in the units of the index job.

    They have the units of the index job, which are smaller if items are not requested or gone. The
    number counts the items of a unit that are no longer readable.
    """
    source = job.build_source()
    listed = job.read_table("listed", shard)
    description = shard_description(listed)
    is_stored = (listed["status"].to_numpy() == DONE) & (listed["fragment"].to_numpy() == fragment)
    hashes, numbers = (listed[name].to_numpy()[is_stored].tolist() for name in ("hash", "unit"))
    # Reversed, so that the first of repeated ids prevails.
    unit_by_hash = dict(zip(hashes[::-1], numbers[::-1], strict=True))
    entries = [
        (number, position, entry)
        for position, entry in _entries(job, source, shard, description)
        if isinstance(entry, Item)
        and entry.item_id in item_ids
        and (number := unit_by_hash.pop(id_hash(entry.item_id), None)) is not None
    ]
    wanted = [(position, entry) for _, position, entry in entries]
    decoded = source.decode(description["shard"], wanted) if wanted else iter(())
    for number, group in itertools.groupby(entries, lambda e: e[0]):
        results = [next(decoded) for _ in group]
        items = [result for result in results if isinstance(result, Item)]
        unit = Unit(f"{shard:06d}-{number:06d}", items_table(items, source.payload))
        yield unit, len(results) - len(items)


def sample_items(job: ListingJob, num_shards: int, size: int, seed: int) -> Iterator[pa.Table]:
    """Yields tables of the items with the smallest hashes, within the memory limit of a unit."""
    salt = np.uint64(id_hash(f"sample {seed}"))
    ranked = []
    for shard, table in enumerate(read_tables(job, "listed", num_shards)):
        usable = table["status"].to_numpy() != DUPLICATE
        keys = (table["hash"].to_numpy() ^ salt)[usable]
        positions = table["position"].to_numpy()[usable]
        best = np.argsort(keys, kind="stable")[:size]
        ranked += [(int(keys[i]), shard, int(positions[i])) for i in best]
        ranked = sorted(ranked)[:size]
    source = job.build_source()
    for shard in sorted({shard for _, shard, _ in ranked}):
        chosen = {position for _, s, position in ranked if s == shard}
        description = shard_description(job.read_table("listed", shard))
        wanted = [
            (p, entry)
            for p, entry in _entries(job, source, shard, description)
            if p in chosen and isinstance(entry, Item)
        ]
        for unit in _split(source, description["shard"], wanted, replace(job.limits, items=LOOKUP)):
            decoded = source.decode(description["shard"], unit)
            if items := [result for result in decoded if isinstance(result, Item)]:
                yield items_table(items, source.payload)


def choose(source: Source, limit: int | None, size: int) -> tuple[list[Chosen], int, list[Reject]]:
    """Lists a source without writing anything, and draws a random sample of its items.

    Returns:
        The sample in the order of the listing, the number of items, and the rejects.
    """
    ranked: list[tuple[int, int, int, Item]] = []
    shards: dict[int, dict[str, Any]] = {}
    rejects: list[Reject] = []
    num_items = 0
    for number, shard in enumerate(source.shards()):
        left = None if limit is None else limit - num_items - len(rejects)
        if left == 0:
            break
        shards[number] = shard
        for position, entry in scan(source, {"shard": shard, "limit": left}):
            if isinstance(entry, Reject):
                rejects.append(entry)
            else:
                num_items += 1
                ranked.append((id_hash(entry.item_id), number, position, entry))
        ranked = sorted(ranked, key=lambda row: row[:3])[:size]
        shards = {number: shards[number] for _, number, _, _ in ranked}
    sample: dict[int, list[tuple[int, Item]]] = {}
    for _, number, position, item in sorted(ranked, key=lambda row: row[1:3]):
        sample.setdefault(number, []).append((position, item))
    return [(shards[number], wanted) for number, wanted in sample.items()], num_items, rejects


def decode_units(
    source: Source, sample: Sequence[Chosen], limits: UnitLimits
) -> Iterator[tuple[pa.Table, list[Reject]]]:
    """Yields the items of a sample and their rejects in units, which may contain several shards."""
    entries = [
        ((shard, *entry), source.item_size(shard, entry[1])) for shard, w in sample for entry in w
    ]
    limits = limits.with_items(min((source.unit_limit(shard) for shard, _ in sample), default=1))
    for unit in limits.split(entries):
        results: list[Item | Reject] = []
        for _, group in itertools.groupby(unit, lambda entry: id(entry[0])):
            rows = list(group)
            results += source.decode(rows[0][0], [(p, item) for _, p, item in rows])
        items = [result for result in results if isinstance(result, Item)]
        rejects = [result for result in results if isinstance(result, Reject)]
        yield items_table(items, source.payload), rejects


def _split(
    source: Source, shard: dict[str, Any], entries: Sequence[tuple[int, Item]], limits: UnitLimits
) -> Iterator[list[tuple[int, Item]]]:
    sized = ((entry, source.item_size(shard, entry[1])) for entry in entries)
    return limits.with_items(source.unit_limit(shard)).split(sized)


def _entries(
    job: ListingJob,
    source: Source,
    shard: int,
    description: dict[str, Any],
    rows: Sequence[int] | None = None,
) -> Iterator[tuple[int, Item | Reject]]:
    """Yields the entries of a shard from its file, or by scanning the shard again.

    Of a file, only the given rows are parsed: each task reads a few of the items of a shard.
    """
    if source.stores_listing:
        yield from job.read_items(shard, rows)
    else:
        yield from scan(source, description)


def _id_reject(item: Item, status: int, reject_id: str) -> Reject:
    if status == DUPLICATE:
        reason, detail = "duplicate id", f"{item.item_id} was listed before; the first is kept"
    else:
        reason, detail = "id of another source", f"{item.item_id} is indexed from another source"
    file = (item.metadata or {}).get("file") if item.modality in MEDIA else None
    detail = detail_with_file(detail, file)
    return Reject(reject_id, item.source, "list", reason, detail, item.revision)
