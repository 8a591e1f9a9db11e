"""Listing of a source: finds shard by shard what is new, changed, done, rejected or gone.

A job first *plans* (splits the source into numbered shards), then *lists* each shard in a task
(scans it and looks its ids up in the index), then finds ids that are listed twice. All of it is
kept as small files under the job's folder; the driver holds a few counts per shard. `unit_reader`
reads the listed items.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import lance
import numpy as np
import pyarrow as pa

from pipeline.config import ComponentSpec
from pipeline.index.reader import ITEMS, REJECTS, part, quote, reading, with_ids
from pipeline.registry import SOURCES
from pipeline.schema import REJECT, Item, Reject
from pipeline.sources import Source

#: What the listing says of an item.
STATUSES = ("new", "changed", "done", "rejected", "duplicate", "foreign")
NEW, CHANGED, DONE, REJECTED, DUPLICATE, FOREIGN = range(len(STATUSES))

LISTED = pa.schema(
    [
        pa.field("position", pa.int32()),  # in the scan of its shard
        pa.field("hash", pa.uint64()),  # of the item id
        pa.field("status", pa.int8()),
        pa.field("fragment", pa.int64()),  # where its row lies, of any revision; -1: nowhere
    ]
)

#: Ids looked up in one query of the index.
LOOKUP = 1024


@dataclass(frozen=True)
class ListingJob:
    """What the listing tasks of one job share; picklable."""

    index: str
    folder: str  # of the job, under the index
    source: ComponentSpec
    spec_digest: str  # of all that decides whether an item is rejected
    retry_rejects: tuple[str, ...] = ()  # reasons to try again although nothing changed
    wants: tuple[str, ...] = ("text",)  # what the encoder reads

    def build_source(self) -> Source:
        """The source, which reads what the encoder wants."""
        return SOURCES.build(self.source, self.wants)

    def file(self, kind: str, shard: int) -> str:
        """Returns the URI of a shard's file of one kind."""
        return f"{self.folder}/{kind}/{shard:06d}"

    def read_json(self, kind: str, shard: int) -> Any:
        """Reads a shard's JSON file of one kind."""
        with fsspec.open(self.file(kind, shard), "r") as file:
            return json.load(file)

    def read_table(self, kind: str, shard: int) -> pa.Table:
        """Reads a shard's Arrow file of one kind."""
        uri = self.file(kind, shard)
        with fsspec.open(uri, "rb") as file, pa.ipc.open_file(io.BytesIO(file.read())) as reader:
            return reader.read_all()

    def rejects_table(self, rejects: Sequence[Reject]) -> pa.Table:
        """Returns rejects as rows of `REJECT`, with the digest of the spec."""
        rows = [{**reject.row(), "spec": self.spec_digest} for reject in rejects]
        return pa.Table.from_pylist(rows, schema=REJECT)


@dataclass(frozen=True)
class ShardTally:
    """What listing a shard came to."""

    shard: int
    counts: dict[str, int]  # by status, over items
    num_unlisted: int  # what could not be listed
    num_unreadable: int  # parts of the source that may hold more items, could they be read
    solved: list[str]  # ids that have a row and were rejected at some time in between


def plan(job: ListingJob, limit: int | None) -> int:
    """Writes the description of each shard to a file and returns the number of shards.

    Args:
        job: Settings of the listing.
        limit: Maximum number of items, in listing order. With a limit, shards are scanned here one
            after the other, as far as needed.
    """
    source = job.build_source()
    num_shards, left = 0, limit
    for shard in source.shards():
        if left is not None:
            if left <= 0:
                break
            shard = {"shard": shard, "limit": left}
            left -= sum(1 for _ in scan(source, shard))
        else:
            shard = {"shard": shard, "limit": None}
        with fsspec.open(job.file("shards", num_shards), "w", auto_mkdir=True) as file:
            json.dump(shard, file)
        num_shards += 1
    return num_shards


def list_shard(job: ListingJob, shard: int) -> ShardTally:
    """Scans a shard and writes for each item what is to be done with it."""
    source = job.build_source()
    dataset = _dataset(part(job.index, ITEMS))
    rejected = _dataset(part(job.index, REJECTS))
    columns: dict[str, list] = {name: [] for name in LISTED.names}
    kept: list[list[Any]] = []
    unlisted: list[tuple[int, Reject]] = []
    solved: list[str] = []
    for chunk in chunks(scan(source, job.read_json("shards", shard)), LOOKUP):
        items = [(position, entry) for position, entry in chunk if isinstance(entry, Item)]
        unlisted += [(p, entry) for p, entry in chunk if isinstance(entry, Reject)]
        stored = _stored(dataset, [item.item_id for _, item in items])
        known = _known_rejects(rejected, [item.item_id for _, item in items], job)
        done: list[str] = []
        for position, item in items:
            status, fragment = _status(item, stored.get(item.item_id), known)
            if status == DONE:
                done.append(item.item_id)
            if source.stores_listing:
                kept.append([position, vars(item)])
            columns["position"].append(position)
            columns["hash"].append(id_hash(item.item_id))
            columns["status"].append(status)
            columns["fragment"].append(fragment)
        solved += _ids_among(rejected, done)
    table = pa.table(columns, schema=LISTED)
    _write_table(job.file("listed", shard), table)
    if source.stores_listing:
        with fsspec.open(job.file("items", shard), "w", auto_mkdir=True) as file:
            json.dump(kept, file, default=str)
    rejects = job.rejects_table([reject for _, reject in unlisted])
    hashes = [id_hash(reject.item_id) for _, reject in unlisted]
    for name, values, kind in (
        ("hash", hashes, pa.uint64()),
        ("position", [position for position, _ in unlisted], pa.int32()),
        ("taken", [False] * len(unlisted), pa.bool_()),
    ):
        rejects = rejects.append_column(name, pa.array(values, kind))
    _write_table(job.file("unlisted", shard), rejects)
    num_unreadable = sum(reject.retryable for _, reject in unlisted)
    return ShardTally(shard, _count(table), len(unlisted), num_unreadable, solved)


def unlisted_rejects(job: ListingJob, shard: int) -> tuple[pa.Table, int]:
    """Returns the rejects of what could not be listed, once ids listed twice are marked.

    The table of rejects has one row an id. An entry whose id is taken, by an item or by an entry
    before it, therefore gets an id of its own, as an item that is listed twice does.

    Returns:
        (Rejects that are not known yet, number of those that are.)
    """
    table = job.read_table("unlisted", shard)
    ids = [
        own_id(item_id, shard, position) if taken else item_id
        for item_id, position, taken in zip(
            *(table[name].to_pylist() for name in ("item_id", "position", "taken")), strict=True
        )
    ]
    table = table.select(REJECT.names).set_column(0, REJECT.field("item_id"), pa.array(ids))
    known = _known_rejects(_dataset(part(job.index, REJECTS)), ids, job)
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
        return REJECTED, -1  # a row of an older revision, if there is one, stays
    return (NEW, -1) if stored is None else (CHANGED, fragment)


def mark_duplicates(job: ListingJob, num_shards: int) -> dict[int, dict[str, int]]:
    """Finds ids listed more than once; all but the first get the status "duplicate".

    Of what could not be listed it marks entries whose id is taken, for `unlisted_rejects`. Holds
    8 bytes per item (run it in a task, not in the driver).

    Returns:
        The new counts by status of the shards that changed.
    """
    hashes = _hashes(job, "listed", num_shards)
    every = np.concatenate([np.zeros(0, np.uint64), *hashes])
    _mark_taken(job, num_shards, every)
    values, first, counts = np.unique(every, return_index=True, return_counts=True)
    if len(values) == len(every):
        return {}
    again = np.isin(every, values[counts > 1])
    again[first] = False
    changed, start = {}, 0
    for shard, shard_hashes in enumerate(hashes):
        mine = again[start : start + len(shard_hashes)]
        start += len(shard_hashes)
        if mine.any():
            table = job.read_table("listed", shard)
            status = np.where(mine, DUPLICATE, table["status"].to_numpy()).astype(np.int8)
            table = table.set_column(2, LISTED.field("status"), pa.array(status))
            _write_table(job.file("listed", shard), table)
            changed[shard] = _count(table)
    return changed


def _mark_taken(job: ListingJob, num_shards: int, listed: np.ndarray) -> None:
    """Marks what could not be listed and has the id of an item or of an entry before it."""
    hashes = _hashes(job, "unlisted", num_shards)
    unlisted = np.concatenate([np.zeros(0, np.uint64), *hashes])
    taken = np.ones(len(unlisted), bool)
    taken[np.unique(unlisted, return_index=True)[1]] = False
    taken |= np.isin(unlisted, listed)
    ends = np.cumsum([len(own) for own in hashes])
    for shard, own in enumerate(np.split(taken, ends[:-1]) if hashes else []):
        if own.any():
            table = job.read_table("unlisted", shard)
            place = table.schema.get_field_index("taken")
            table = table.set_column(place, "taken", pa.array(own))
            _write_table(job.file("unlisted", shard), table)


def own_id(item_id: str, shard: int, position: int) -> str:
    """Returns an id for an entry whose id is taken, which keeps it apart from the id's holder."""
    return f"{item_id}~{shard:06d}:{position}"


def id_hash(item_id: str) -> int:
    """64 bits of a stable hash of an item id."""
    return int.from_bytes(hashlib.blake2b(item_id.encode(), digest_size=8).digest(), "little")


#: The columns that `content_hashes` reads.
CONTENT = ("revision", "span")


def content_hashes(items: pa.Table | pa.RecordBatch) -> np.ndarray:
    """(N,) uint64 hashes of what items hold, by their `CONTENT`: of a part of a file with its span.

    Equal content has equal hashes, whatever the items are called.
    """
    rows = zip(items["revision"].to_pylist(), items["span"].to_pylist(), strict=True)
    hashes = (id_hash(f"{revision} {span and tuple(span.values())}") for revision, span in rows)
    return np.fromiter(hashes, np.uint64, items.num_rows)


def gone_rows(job: ListingJob, num_shards: int, collections: Sequence[str]) -> dict[int, list[str]]:
    """The rows of some collections that are no longer listed, as item ids by fragment.

    What is there but was rejected, itself or its parent, keeps its rows. Run it in a task: it holds
    8 bytes a listed item, and the ids that are gone.
    """
    listed, unlisted = (
        np.unique(np.concatenate([np.zeros(0, np.uint64), *_hashes(job, kind, num_shards)]))
        for kind in ("listed", "unlisted")
    )
    gone: dict[int, list[str]] = {}
    scanner = lance.dataset(part(job.index, ITEMS)).scanner(
        columns=["item_id", "parent_id"],
        filter=f"source IN ({', '.join(map(quote, collections))})",
        with_row_address=True,
    )
    for batch in scanner.to_batches():
        ids = batch["item_id"].to_pylist()
        own, parents = (
            np.array([id_hash(name) for name in names], dtype=np.uint64)
            for names in (ids, batch["parent_id"].to_pylist())
        )
        is_there = np.isin(own, listed) | np.isin(own, unlisted) | np.isin(parents, unlisted)
        fragments = batch["_rowaddr"].to_numpy() >> 32
        for i in np.flatnonzero(~is_there):
            gone.setdefault(int(fragments[i]), []).append(ids[i])
    return gone


def scan(source: Source, described: dict[str, Any]) -> Iterator[tuple[int, Item | Reject]]:
    """Yields the entries of a shard with their positions, up to the shard's limit.

    Args:
        source: The source.
        described: Description of the shard, as `plan` wrote it.
    """
    for position, entry in enumerate(source.scan(described["shard"])):
        if described["limit"] is not None and position >= described["limit"]:
            return
        yield position, entry


def _stored(
    dataset: lance.LanceDataset | None, item_ids: Sequence[str]
) -> dict[str, tuple[str, str, int]]:
    """For the ids that have a row: its revision, source and fragment."""
    if dataset is None or not item_ids:
        return {}
    scanner = dataset.scanner(
        columns=["item_id", "revision", "source"],
        filter=with_ids(item_ids),
        with_row_address=True,
    )
    with reading(dataset.uri):
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
    """For the ids that this very spec rejected and that need no other try: the revision then."""
    if dataset is None or not item_ids:
        return {}
    table = dataset.scanner(
        columns=["item_id", "revision", "reason"],
        filter=f"spec = {quote(job.spec_digest)} AND NOT retryable AND {with_ids(item_ids)}",
    ).to_table()
    return {
        row["item_id"]: row["revision"]
        for row in table.to_pylist()
        if row["reason"] not in job.retry_rejects
    }


def _hashes(job: ListingJob, kind: str, num_shards: int) -> list[np.ndarray]:
    """(n,) uint64 for each shard: the hashes of the ids in its file of that kind."""
    return [job.read_table(kind, i)["hash"].to_numpy() for i in range(num_shards)]


def _ids_among(rejected: lance.LanceDataset | None, item_ids: Sequence[str]) -> list[str]:
    """Those of the ids that are in the table of rejects."""
    if rejected is None or not item_ids:
        return []
    table = rejected.scanner(columns=["item_id"], filter=with_ids(item_ids)).to_table()
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
    """Yields lists of up to `size` entries."""
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
    with fsspec.open(uri, "wb", auto_mkdir=True) as file:
        file.write(sink.getvalue())
