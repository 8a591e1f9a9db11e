"""Listing of a source: determines shard by shard which items are new, changed, done or rejected.

A job *plans* (divides the source into numbered shards), *lists* each shard (scans it and looks up
its ids in the index) and finally marks duplicate ids. The tasks write their results to small files
in the folder of the job; the driver holds only a few counts per shard.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from pipeline.config import ComponentSpec
from pipeline.data.base import ItemSize, Source
from pipeline.index.reader import ITEMS, REJECTS, corruption_errors, id_filter, part_uri, quote
from pipeline.index.units import UnitLimits, UnitRange, unit_ranges
from pipeline.paths import open_file
from pipeline.registry import SOURCES
from pipeline.schema import REJECT, Item, Reject

#: Statuses of a listed item.
STATUSES = ("new", "changed", "done", "rejected", "duplicate", "foreign")
NEW, CHANGED, DONE, REJECTED, DUPLICATE, FOREIGN = range(len(STATUSES))

LISTED = pa.schema(
    [
        pa.field("position", pa.int32()),  # position in the scan of its shard
        pa.field("hash", pa.uint64()),  # hash of the item id
        pa.field("status", pa.int8()),  # index into `STATUSES`
        pa.field("fragment", pa.int64()),  # fragment of its row, of any revision; -1 without a row
        pa.field("unit", pa.int64()),  # number of its unit in the shard
    ]
)
#: Key of the description of a shard in the metadata of its table.
SHARD_KEY = b"maxray.shard"

#: Number of ids per query of the index.
LOOKUP = 1024
#: Number of files that are read at the same time.
READ_THREADS = 16


@dataclass(frozen=True)
class ListingJob:
    """Settings that all listing tasks of a job share. They can be pickled.

    Attributes:
        spec_digest: Digest of the settings that determine whether an item is rejected.
        retry_rejects: Present names of the reasons whose rejects are retried although nothing
            changed.
        wants: Item fields that the encoder reads.
    """

    index: str
    folder: str
    source: ComponentSpec
    spec_digest: str
    retry_rejects: tuple[str, ...] = ()
    wants: tuple[str, ...] = ("text",)
    limits: UnitLimits = field(default_factory=UnitLimits)

    def build_source(self) -> Source:
        """Builds the source, which is restricted to the inputs that the encoder reads."""
        return SOURCES.build(self.source, self.wants)

    def file(self, kind: str, shard: int) -> str:
        """Returns the URI of a file of a shard. The kind of the file is, for example, "listed"."""
        return f"{self.folder}/{kind}/{shard:06d}"

    def read_items(
        self, shard: int, rows: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Item]]:
        """Yields the positions and the items that the listing of a shard stores.

        Args:
            rows: Rows of the table of the listing. If None, all.
        """
        with open_file(self.file("items", shard), "r") as file:
            lines = file.read().splitlines()
        for row in range(len(lines)) if rows is None else rows:
            position, fields = json.loads(lines[row])
            yield position, Item(**{**fields, "span": fields["span"] and tuple(fields["span"])})

    def read_table(self, kind: str, shard: int) -> pa.Table:
        """Reads an Arrow file of a shard."""
        uri = self.file(kind, shard)
        with open_file(uri) as file, pa.ipc.open_file(io.BytesIO(file.read())) as reader:
            return reader.read_all()

    def rejects_table(self, rejects: Sequence[Reject]) -> pa.Table:
        """Converts rejects to rows of `REJECT`, including the digest of the spec."""
        rows = [{**reject.row(), "spec": self.spec_digest} for reject in rejects]
        return pa.Table.from_pylist(rows, schema=REJECT)


@dataclass(frozen=True)
class ShardTally:
    """Counts of a listed shard.

    Attributes:
        shard: Number of the shard.
        counts: Number of items by status.
        num_unlisted: Number of entries that could not be listed.
        num_unreadable: Number of unreadable parts of the source, which may contain more items.
        solved: Ids of indexed items that are still among the rejects.
        ranges: Units to process, divided into tasks.
    """

    shard: int
    counts: dict[str, int]
    num_unlisted: int
    num_unreadable: int
    solved: list[str]
    ranges: list[UnitRange]

    @property
    def num_entries(self) -> int:
        """Number of entries of the shard."""
        return sum(self.counts.values()) + self.num_unlisted


def plan(job: ListingJob) -> Iterator[dict[str, Any]]:
    """Yields the shards of the source."""
    yield from job.build_source().shards()


def is_small(source: Source) -> bool:
    """Checks whether a source has one shard, or one per part: it is indexed without Ray then."""
    num_parts = source.num_parts
    return sum(1 for _ in itertools.islice(source.shards(), num_parts + 1)) <= num_parts


def list_source(job: ListingJob, limit: int | None = None) -> list[ShardTally]:
    """Plans and lists a source in this process. See `tasks.list_shards` for jobs."""
    tallies: list[ShardTally] = []
    for shard, value in enumerate(plan(job)):
        left = None if limit is None else limit - sum(tally.num_entries for tally in tallies)
        if left == 0:
            break
        tallies.append(list_shard(job, shard, {"shard": value, "limit": left}))
    return tallies


def list_shard(job: ListingJob, shard: int, description: dict[str, Any]) -> ShardTally:
    """Scans a shard, determines the status of each item and writes it to a file.

    Args:
        description: The `shard` of the source, and the `limit` of its number of entries or None.
    """
    source = job.build_source()
    dataset = _dataset(part_uri(job.index, ITEMS))
    rejected = _dataset(part_uri(job.index, REJECTS))
    columns: dict[str, list] = {name: [] for name in LISTED.names if name != "unit"}
    listed_items: list[list[Any]] = []
    unlisted: list[tuple[int, Reject]] = []
    solved: list[str] = []
    sizes: list[ItemSize] = []
    parents: list[str] = []
    for chunk in chunks(scan(source, description), LOOKUP):
        items = [(position, entry) for position, entry in chunk if isinstance(entry, Item)]
        unlisted += [(p, entry) for p, entry in chunk if isinstance(entry, Reject)]
        stored = stored_rows(dataset, [item.item_id for _, item in items])
        known = _known_rejects(rejected, [item.item_id for _, item in items], job)
        done: list[str] = []
        for position, item in items:
            status, fragment = _status(item, stored.get(item.item_id), known)
            if status == DONE:
                done.append(item.item_id)
            if source.stores_listing:
                listed_items.append([position, vars(item)])
            columns["position"].append(position)
            columns["hash"].append(id_hash(item.item_id))
            columns["status"].append(status)
            columns["fragment"].append(fragment)
            sizes.append(source.item_size(description["shard"], item))
            parents.append(item.parent_id)
        parents_of_items = {item.parent_id for _, item in items if item.parent_id != item.item_id}
        malformed = {entry.item_id for _, entry in unlisted}
        solved += _ids_among(rejected, [*done, *sorted(parents_of_items - malformed)])
    limits = job.limits.with_items(source.unit_limit(description["shard"]))
    units_N = limits.unit_numbers(columns["position"], sizes)
    metadata = {SHARD_KEY: json.dumps(description)}
    table = pa.table({**columns, "unit": units_N}, schema=LISTED.with_metadata(metadata))
    _write_table(job.file("listed", shard), table)
    if source.stores_listing:
        with open_file(job.file("items", shard), "w") as file:
            file.writelines(f"{json.dumps(item, default=str)}\n" for item in listed_items)
    rejects = job.rejects_table([reject for _, reject in unlisted])
    hashes = [id_hash(reject.item_id) for _, reject in unlisted]
    for name, values, type in (
        ("hash", hashes, pa.uint64()),
        ("position", [position for position, _ in unlisted], pa.int32()),
        ("taken", [False] * len(unlisted), pa.bool_()),
    ):
        rejects = rejects.append_column(name, pa.array(values, type))
    _write_table(job.file("unlisted", shard), rejects)
    num_unreadable = sum(source.hides_items(reject) for _, reject in unlisted)
    counts = _count(table)
    to_do_N = ~np.isin(np.array(columns["status"], np.int8), (DONE, REJECTED))
    may_cut_N = np.ones(len(sizes), bool)
    if not source.stores_listing:
        may_cut_N[:] = False  # each task would list the shard again
    elif source.copies_files:
        may_cut_N[1:] = [a != b for a, b in itertools.pairwise(parents)]
    ranges = unit_ranges(shard, units_N, sizes, to_do_N, may_cut_N)
    return ShardTally(shard, counts, len(unlisted), num_unreadable, solved, ranges)


def shard_description(listed: pa.Table) -> dict[str, Any]:
    """Returns the description of a shard that `list_shard` stored with its table."""
    return json.loads(listed.schema.metadata[SHARD_KEY])


def unlisted_rejects(job: ListingJob, shard: int) -> tuple[pa.Table, int]:
    """Returns the rejects of entries that could not be listed, and the number already recorded.

    The table of rejects has one row per id: an entry whose id is taken gets a distinct id.
    """
    table = job.read_table("unlisted", shard)
    ids = [
        disambiguated_id(item_id, shard, position) if taken else item_id
        for item_id, position, taken in zip(
            *(table[name].to_pylist() for name in ("item_id", "position", "taken")), strict=True
        )
    ]
    table = table.select(REJECT.names).set_column(0, REJECT.field("item_id"), pa.array(ids))
    known = _known_rejects(_dataset(part_uri(job.index, REJECTS)), ids, job)
    revisions = table["revision"].to_pylist()
    is_fresh = [known.get(i) != revision for i, revision in zip(ids, revisions, strict=True)]
    fresh = table.filter(pa.array(is_fresh, pa.bool_()))
    return fresh, table.num_rows - fresh.num_rows


def _status(
    item: Item, stored: tuple[str, str, int] | None, known: dict[str, str]
) -> tuple[int, int]:
    if stored is not None:
        revision, source, fragment = stored
        if source != item.source:
            return FOREIGN, -1
        if revision == item.revision:
            return DONE, fragment
    if known.get(item.item_id) == item.revision:
        return REJECTED, -1  # a row of an older revision remains
    return (NEW, -1) if stored is None else (CHANGED, fragment)


def mark_duplicates(job: ListingJob, num_shards: int) -> dict[int, dict[str, int]]:
    """Marks repeated ids and returns the new counts by status of the shards that changed.

    Run it in a task, not in the driver: it holds 8 bytes per item.
    """
    hashes = _hashes(job, "listed", num_shards)
    all_hashes = np.concatenate([np.zeros(0, np.uint64), *hashes])
    _mark_taken(job, num_shards, all_hashes)
    values, first, counts = np.unique(all_hashes, return_index=True, return_counts=True)
    if len(values) == len(all_hashes):
        return {}
    is_repeated = np.isin(all_hashes, values[counts > 1])
    is_repeated[first] = False
    changed, start = {}, 0
    for shard, shard_hashes in enumerate(hashes):
        is_duplicate = is_repeated[start : start + len(shard_hashes)]
        start += len(shard_hashes)
        if is_duplicate.any():
            table = job.read_table("listed", shard)
            status = np.where(is_duplicate, DUPLICATE, table["status"].to_numpy()).astype(np.int8)
            table = table.set_column(2, LISTED.field("status"), pa.array(status))
            _write_table(job.file("listed", shard), table)
            changed[shard] = _count(table)
    return changed


def _mark_taken(job: ListingJob, num_shards: int, listed: np.ndarray) -> None:
    hashes = _hashes(job, "unlisted", num_shards)
    unlisted = np.concatenate([np.zeros(0, np.uint64), *hashes])
    taken = np.ones(len(unlisted), bool)
    taken[np.unique(unlisted, return_index=True)[1]] = False
    taken |= np.isin(unlisted, listed)
    ends = np.cumsum([len(shard_hashes) for shard_hashes in hashes])
    for shard, shard_taken in enumerate(np.split(taken, ends[:-1]) if hashes else []):
        if shard_taken.any():
            table = job.read_table("unlisted", shard)
            column = table.schema.get_field_index("taken")
            table = table.set_column(column, "taken", pa.array(shard_taken))
            _write_table(job.file("unlisted", shard), table)


def disambiguated_id(item_id: str, shard: int, position: int) -> str:
    """Returns a unique id for an entry whose id is already in use."""
    return f"{item_id}~{shard:06d}:{position}"


def id_hash(item_id: str) -> int:
    """Returns a stable 64-bit hash of an item id."""
    return int.from_bytes(hashlib.blake2b(item_id.encode(), digest_size=8).digest(), "little")


#: Columns that `content_hashes` reads.
CONTENT = ("revision", "span")


def content_hashes(items: pa.Table | pa.RecordBatch) -> np.ndarray:
    """Returns the content hashes of items, (N,) uint64, which include spans but no ids."""
    rows = zip(items["revision"].to_pylist(), items["span"].to_pylist(), strict=True)
    hashes = (id_hash(f"{revision} {span and tuple(span.values())}") for revision, span in rows)
    return np.fromiter(hashes, np.uint64, items.num_rows)


def stale_rows(
    job: ListingJob, num_shards: int, collections: Sequence[str]
) -> dict[int, list[str]]:
    """Returns the rows of `collections` that the source no longer lists, as item ids by fragment.

    Items keep their rows if they or their parents were rejected. Run it in a task, not in the
    driver: it holds 8 bytes per listed item.
    """
    listed, unlisted = (
        np.unique(np.concatenate([np.zeros(0, np.uint64), *_hashes(job, kind, num_shards)]))
        for kind in ("listed", "unlisted")
    )
    stale: dict[int, list[str]] = {}
    source = job.build_source()
    scanner = lance.dataset(part_uri(job.index, ITEMS)).scanner(
        columns=["item_id", "parent_id"],
        filter=f"source IN ({', '.join(map(quote, collections))})",
        with_row_address=True,
    )
    for batch in scanner.to_batches():
        ids, parents = batch["item_id"].to_pylist(), batch["parent_id"].to_pylist()
        hashes, parent_hashes = (
            np.array([id_hash(name) for name in names], dtype=np.uint64) for names in (ids, parents)
        )
        is_present = np.isin(hashes, listed) | np.isin(hashes, unlisted)
        is_present |= np.isin(parent_hashes, unlisted)
        fragments = batch["_rowaddr"].to_numpy() >> 32
        for i in np.flatnonzero(~is_present):
            if source.covers(parents[i]):
                stale.setdefault(int(fragments[i]), []).append(ids[i])
    return stale


def scan(source: Source, description: dict[str, Any]) -> Iterator[tuple[int, Item | Reject]]:
    """Yields the entries of a shard and their positions, up to the limit of the shard."""
    for position, entry in enumerate(source.scan(description["shard"])):
        if description["limit"] is not None and position >= description["limit"]:
            return
        yield position, entry


def stored_rows(
    dataset: lance.LanceDataset | None, item_ids: Sequence[str]
) -> dict[str, tuple[str, str, int]]:
    """Looks up the revision, source and fragment of all ids that have a row."""
    if dataset is None or not item_ids:
        return {}
    scanner = dataset.scanner(
        columns=["item_id", "revision", "source"],
        filter=id_filter(item_ids),
        with_row_address=True,
    )
    with corruption_errors(dataset.uri):
        table = scanner.to_table()
    fragments = (table["_rowaddr"].to_numpy() >> 32).tolist()
    columns = (table[name].to_pylist() for name in ("item_id", "revision", "source"))
    return {
        item_id: (revision, source, fragment)
        for item_id, revision, source, fragment in zip(*columns, fragments, strict=True)
    }


def _known_rejects(
    dataset: lance.LanceDataset | None, item_ids: Sequence[str], job: ListingJob
) -> dict[str, str]:
    """Looks up the revision of all ids that the same spec rejected permanently."""
    if dataset is None or not item_ids:
        return {}
    table = dataset.scanner(
        columns=["item_id", "revision", "reason"],
        filter=f"spec = {quote(job.spec_digest)} AND NOT retryable AND {id_filter(item_ids)}",
    ).to_table()
    return {
        row["item_id"]: row["revision"]
        for row in table.to_pylist()
        if row["reason"] not in job.retry_rejects
    }


def _hashes(job: ListingJob, kind: str, num_shards: int) -> list[np.ndarray]:
    """Returns the id hashes in the "listed" or "unlisted" file of each shard, (N,) uint64."""
    return [table["hash"].to_numpy() for table in read_tables(job, kind, num_shards)]


def read_tables(job: ListingJob, kind: str, num_shards: int) -> Iterator[pa.Table]:
    """Yields the "listed" or "unlisted" table of each shard, reading several at the same time."""
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for first in range(0, num_shards, READ_THREADS):
            shards = range(first, min(first + READ_THREADS, num_shards))
            yield from pool.map(lambda shard: job.read_table(kind, shard), shards)


def _ids_among(rejected: lance.LanceDataset | None, item_ids: Sequence[str]) -> list[str]:
    if rejected is None or not item_ids:
        return []
    table = rejected.scanner(columns=["item_id"], filter=id_filter(item_ids)).to_table()
    return table["item_id"].to_pylist()


def _count(listed: pa.Table) -> dict[str, int]:
    counts = Counter(listed["status"].to_numpy().tolist())
    return {name: counts.get(code, 0) for code, name in enumerate(STATUSES)}


def _dataset(uri: str) -> lance.LanceDataset | None:
    try:
        return lance.dataset(uri)
    except (ValueError, OSError):
        return None


def chunks(entries: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Splits entries into lists of at most `size` consecutive entries."""
    chunk = []
    for entry in entries:
        chunk.append(entry)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _write_table(uri: str, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with open_file(uri, "wb") as file:
        file.write(sink.getvalue())
