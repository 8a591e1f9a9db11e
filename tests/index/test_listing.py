"""Tests of the listing: item statuses, rejects, units and samples."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lance
import pyarrow as pa
import pytest
from PIL import Image

from pipeline.config import parse
from pipeline.data import images, text
from pipeline.index import listing, unit_reader
from pipeline.index import units as index_units
from pipeline.index.fragments import write_table
from pipeline.index.listing import ListingJob, ShardTally
from pipeline.index.reader import part_uri
from pipeline.index.units import UnitLimits, UnitRange
from pipeline.index.writer import IndexWriter, open_or_create
from pipeline.schema import ITEM, REJECT, Item, Reject


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a collection."""
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def write(folder: Path, **texts: str) -> None:
    """Writes a .jsonl file, which is a shard, per keyword argument."""
    for name, documents in texts.items():
        lines = [
            json.dumps({"_id": item_id, "text": words})
            for item_id, _, words in (entry.partition("=") for entry in documents.split("; "))
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


def listing_job(folder: Path, name: str = "job", **fields: Any) -> ListingJob:
    """Returns a listing job for the folder and an index next to it."""
    index = str(folder.parent / "index")
    open_or_create(index)
    spec = parse(text.Text.Spec, {"name": "text", "path": str(folder)})
    given = {"spec_digest": "this spec", "limits": UnitLimits(items=2), **fields}
    return ListingJob(index, part_uri(index, "jobs", name), spec, **given)


def list_all(job: ListingJob, limit: int | None = None) -> list[ShardTally]:
    """Plans and lists the shards, marks duplicates and returns the tallies."""
    tallies = listing.list_source(job, limit)
    changed = listing.mark_duplicates(job, len(tallies))
    return [replace(t, counts=changed.get(t.shard, t.counts)) for t in tallies]


def counts(tallies: list[ShardTally]) -> dict[str, int]:
    """Returns the nonzero counts by status, summed over the shards."""
    return {
        status: total
        for status in listing.STATUSES
        if (total := sum(t.counts[status] for t in tallies))
    }


def units(job: ListingJob, num_shards: int) -> dict[str, list[str]]:
    """Returns the item ids of each unit to process."""
    return {
        unit.name: unit.items["item_id"].to_pylist()
        for shard in range(num_shards)
        for unit in unit_reader.read_units(job, UnitRange(shard))
    }


def store(job: ListingJob, *item_ids: str, source: str = "notes") -> IndexWriter:
    """Commits rows of listed items as one fragment, like the index job."""
    items = pa.concat_tables(
        unit.items
        for tally in listing.list_source(job)
        for unit in unit_reader.read_units(job, UnitRange(tally.shard))
    )
    rows = [{**row, "source": source} for row in items.to_pylist() if row["item_id"] in item_ids]
    assert {row["item_id"] for row in rows} == set(item_ids)
    writer = IndexWriter(job.index, "writer")
    table = pa.Table.from_pylist(rows, schema=ITEM)
    writer.commit(write_table(table, part_uri(job.index, "items.lance")))
    writer.release()
    return writer


def set_reject(job: ListingJob, item_id: str, revision: str, **fields: Any) -> None:
    """Records a reject, like an earlier run."""
    row = {
        **Reject(item_id, "notes", "encode", "too odd", revision=revision).row(),
        "spec": job.spec_digest,
        **fields,
    }
    writer = IndexWriter(job.index, "writer")
    writer.set_rejects(pa.Table.from_pylist([row], schema=REJECT))
    writer.release()


def listed_revision(job: ListingJob, item_id: str) -> str:
    """Returns the revision of an item in the source."""
    source = text.Text(job.source)
    entries = [entry for shard in source.shards() for entry in source.scan(shard)]
    return next(e.revision for e in entries if isinstance(e, Item) and e.item_id == item_id)


def record_unlisted(job: ListingJob) -> list[dict[str, Any]]:
    """Lists the source, records unlisted entries and returns the new rejects."""
    tallies = list_all(job)
    tables = [listing.unlisted_rejects(job, tally.shard)[0] for tally in tallies]
    rejects = pa.concat_tables(tables)
    writer = IndexWriter(job.index, "writer")
    writer.set_rejects(rejects)
    writer.release()
    return rejects.to_pylist()


# -- units -----------------------------------------------------------------------------------


def test_units_are_formed_by_position(folder):
    write(folder, a="a0=x; a1=x; a2=x; a3=x; a4=x", b="b0=x; b1=x; b2=x")
    first = listing_job(folder)
    list_all(first)
    everything = units(first, 2)
    assert everything == {
        "000000-000000": ["a0", "a1"],
        "000000-000001": ["a2", "a3"],
        "000000-000002": ["a4"],
        "000001-000000": ["b0", "b1"],
        "000001-000001": ["b2"],
    }
    store(first, "a1", "a2", "a3", "b0")
    resumed = listing_job(folder, "resumed")
    assert counts(list_all(resumed)) == {"new": 4, "done": 4}
    assert units(resumed, 2) == {
        "000000-000000": ["a0"],
        "000000-000002": ["a4"],
        "000001-000000": ["b1"],
        "000001-000001": ["b2"],
    }


def test_unlisted_lines_keep_their_position(folder):
    (folder / "a.jsonl").write_text(
        '{"_id": "a", "text": "x"}\nnot json\n{"_id": "c", "text": "x"}'
    )
    job = listing_job(folder)
    (tally,) = list_all(job)
    rejects, _ = listing.unlisted_rejects(job, 0)
    assert (tally.num_unlisted, rejects["item_id"].to_pylist()) == (1, ["a.jsonl:2"])
    assert rejects["reason"].to_pylist() == ["not JSON"]
    assert rejects["spec"].to_pylist() == ["this spec"]
    assert units(job, 1) == {"000000-000000": ["a"], "000000-000001": ["c"]}


def test_limit_counts_entries_of_all_shards(folder):
    write(folder, a="a0=x; a1=x", b="b0=x; b1=x", c="c0=x")
    job = listing_job(folder)
    tallies = list_all(job, limit=3)
    assert len(tallies) == 2
    assert units(job, 2) == {"000000-000000": ["a0", "a1"], "000001-000000": ["b0"]}


def test_items_added_after_listing_are_left_to_the_next_run(folder):
    write(folder, a="a0=x")
    job = listing_job(folder)
    list_all(job)
    with (folder / "a.jsonl").open("a") as file:
        file.write('\n{"_id": "late", "text": "x"}')
    assert units(job, 1) == {"000000-000000": ["a0"]}


def test_items_deleted_after_listing_do_not_shift_units(folder):
    write(folder, a="a0=x; a1=y; a2=z; a3=w")
    store(listing_job(folder), "a0")
    job = listing_job(folder, "next")
    list_all(job)
    write(folder, a="a1=y; a3=w; a4=later")
    first, second, gone = unit_reader.read_units(job, UnitRange(0))
    assert first.items["item_id"].to_pylist() == ["a1"]
    assert second.items["item_id"].to_pylist() == ["a3"]
    assert (gone.items.num_rows, gone.extra["gone"]) == (0, 1)


def test_units_are_limited_by_tokens_and_stable(folder):
    write(folder, a="a0=xxxx; a1=xxxx; a2=xxxxxxxxxxxx; a3=xxxx")
    limits = UnitLimits(items=8, num_tokens=3)
    first = listing_job(folder, limits=limits)
    (tally,) = list_all(first)
    expected = {
        "000000-000000": ["a0", "a1"],
        "000000-000001": ["a2"],
        "000000-000002": ["a3"],
    }
    assert units(first, 1) == expected and tally.ranges == [UnitRange(0)]
    store(first, "a0", "a2")
    resumed = listing_job(folder, "resumed", limits=limits)
    list_all(resumed)
    assert units(resumed, 1) == {"000000-000000": ["a1"], "000000-000002": ["a3"]}


def test_ranges_of_a_stored_listing_read_each_item_once(tmp_path, monkeypatch):
    monkeypatch.setattr(index_units, "TASK_ITEMS", 4)
    (tmp_path / "images").mkdir()
    for number in range(14):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / f"images/{number:02}.png")
    spec = parse(images.Images.Spec, {"name": "images", "path": str(tmp_path / "images")})
    open_or_create(str(tmp_path / "index"))
    job = ListingJob(
        str(tmp_path / "index"),
        str(tmp_path / "index/jobs/job"),
        spec,
        "spec",
        wants=("image",),
        limits=UnitLimits(items=3),
    )
    (tally,) = listing.list_source(job)
    assert [(r.first, r.end) for r in tally.ranges] == [(0, 2), (2, 4), (4, -1)]
    hashed = mock.Mock(side_effect=AssertionError("the files are not hashed again"))
    monkeypatch.setattr(images.Images, "_content", hashed)
    read = [unit for units in tally.ranges for unit in unit_reader.read_units(job, units)]
    assert [unit.items.num_rows for unit in read] == [3, 3, 3, 3, 2]
    ids = [item_id for unit in read for item_id in unit.items["item_id"].to_pylist()]
    assert ids == [f"{number:02}.png" for number in range(14)]


# -- statuses --------------------------------------------------------------------------------


def test_changed_items_reference_the_replaced_rows(folder):
    write(folder, a="a0=x; a1=x; a2=x")
    store(listing_job(folder), "a0", "a1")
    write(folder, a="a0=x; a1=changed; a2=x")
    job = listing_job(folder, "next")
    assert counts(list_all(job)) == {"new": 1, "changed": 1, "done": 1}
    first, second = unit_reader.read_units(job, UnitRange(0))
    assert first.extra == {"replaces": {"0": ["a1"]}, "gone": 0}
    assert second.extra == {"replaces": {}, "gone": 0}
    assert first.items["text"].to_pylist() == ["changed"]


def test_duplicates_within_and_across_shards(folder):
    write(folder, a="same=first; a1=x; same=second", b="b0=x; same=third")
    job = listing_job(folder)
    assert counts(list_all(job)) == {"new": 3, "duplicate": 2}
    read = [unit for shard in range(2) for unit in unit_reader.read_units(job, UnitRange(shard))]
    texts = {row["item_id"]: row["text"] for unit in read for row in unit.items.to_pylist()}
    assert texts == {"same": "first", "a1": "x", "b0": "x"}
    rejected = [row for unit in read for row in unit.rejects.to_pylist()]
    assert [(r["item_id"], r["reason"]) for r in rejected] == [
        ("same~000000:2", "duplicate id"),
        ("same~000001:1", "duplicate id"),
    ]
    # Once the first is indexed, the others remain duplicates and are not changed items.
    store_first = pa.Table.from_pylist(
        [row for unit in read for row in unit.items.to_pylist()], schema=ITEM
    )
    writer = IndexWriter(job.index, "writer")
    writer.commit(write_table(store_first, part_uri(job.index, "items.lance")))
    assert counts(list_all(listing_job(folder, "next"))) == {"done": 3, "duplicate": 2}


def test_rejects_id_of_another_source(folder):
    write(folder, a="a0=x; a1=x")
    store(listing_job(folder), "a0", source="other")
    job = listing_job(folder, "next")
    assert counts(list_all(job)) == {"new": 1, "foreign": 1}
    (unit,) = unit_reader.read_units(job, UnitRange(0))
    assert unit.items["item_id"].to_pylist() == ["a1"]
    assert unit.rejects["reason"].to_pylist() == ["id of another source"]
    assert unit.rejects["item_id"].to_pylist() == ["a0~000000:0"]


ITEM_X = Item("x", "x", "notes", "text", "r2")
ROW_R1, ROW_R2 = ("r1", "notes", 5), ("r2", "notes", 5)


@pytest.mark.parametrize(
    ("stored", "rejected_at", "expected", "fragment"),
    [
        (None, None, "new", -1),
        (None, "r1", "new", -1),
        (None, "r2", "rejected", -1),
        (ROW_R2, None, "done", 5),
        (ROW_R2, "r2", "done", 5),
        (ROW_R1, None, "changed", 5),
        (ROW_R1, "r2", "rejected", -1),  # the row of the older revision stays
        (("r2", "other", 5), None, "foreign", -1),
        (("r1", "other", 5), "r2", "foreign", -1),
    ],
)
def test_item_status(stored, rejected_at, expected, fragment):
    known = {"x": rejected_at} if rejected_at else {}
    status, row = listing._status(ITEM_X, stored, known)
    assert (listing.STATUSES[status], row) == (expected, fragment)


# -- rejects ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reject", "job_fields", "expected"),
    [
        ({}, {}, "rejected"),
        ({"retryable": True}, {}, "new"),
        ({"spec": "another spec"}, {}, "new"),
        ({"revision": "an older one"}, {}, "new"),
        ({}, {"retry_rejects": ("too odd",)}, "new"),
        ({}, {"retry_rejects": ("another reason",)}, "rejected"),
    ],
)
def test_rejects_are_retried_only_with_a_reason(folder, reject, job_fields, expected):
    write(folder, a="a0=x")
    job = listing_job(folder, **job_fields)
    set_reject(job, "a0", **{"revision": listed_revision(job, "a0"), **reject})
    assert counts(list_all(job)) == {expected: 1}
    assert units(job, 1) == ({"000000-000000": ["a0"]} if expected == "new" else {})


def test_unlisted_entries_are_recorded_once(folder):
    write(folder, a="a0= ; a1=x")
    job = listing_job(folder)
    assert [row["item_id"] for row in record_unlisted(job)] == ["a0"]
    assert record_unlisted(listing_job(folder, "next")) == []
    assert len(record_unlisted(listing_job(folder, "other", spec_digest="another spec"))) == 1


def test_unlisted_entries_have_distinct_ids(folder):
    """The table of rejects has one row per id, so entries with the same id would be lost."""
    write(folder, a="a0= ; a1=x; a0= ; a1= ", b="a0= ; b0=x")
    job = listing_job(folder)
    rows = record_unlisted(job)
    ids = ["a0", "a0~000000:2", "a1~000000:3", "a0~000001:0"]
    assert [row["item_id"] for row in rows] == ids
    stored = lance.dataset(part_uri(job.index, "rejects.lance")).to_table()["item_id"].to_pylist()
    assert sorted(stored) == sorted(ids)
    assert record_unlisted(listing_job(folder, "next")) == []  # already recorded


# -- stale rows and samples ------------------------------------------------------------------


def test_stale_rows(folder):
    write(folder, a="a0=x; a1=x; it's=x", b="b0=x")
    store(listing_job(folder), "a0", "a1", "it's")
    store(listing_job(folder, "second"), "b0")
    job = listing_job(folder, "same")
    list_all(job)
    assert listing.stale_rows(job, 2, ["notes"]) == {}
    write(folder, a="a0=changed", b="b9=x")
    job = listing_job(folder, "next")
    list_all(job)
    assert listing.stale_rows(job, 2, ["notes"]) == {0: ["a1", "it's"], 1: ["b0"]}
    assert listing.stale_rows(job, 2, ["another collection"]) == {}


def test_sample_depends_only_on_its_seed(folder):
    many = "; ".join(f"a{i}=text {i}" for i in range(40))
    write(folder, a=many, b="b0=x; b1=x; a0=again")
    job = listing_job(folder)
    list_all(job)

    def sample(job: ListingJob, size: int, seed: int) -> list[str]:
        tables = unit_reader.sample_items(job, 2, size, seed)
        return [item_id for table in tables for item_id in table["item_id"].to_pylist()]

    item_ids = sample(job, 10, seed=0)
    assert len(set(item_ids)) == 10
    assert sample(job, 10, seed=0) == item_ids
    assert set(sample(job, 5, seed=0)) < set(item_ids)
    assert set(sample(job, 10, seed=1)) != set(item_ids)
    assert len(sample(job, 1000, seed=0)) == 42  # duplicates count once
    store(job, *item_ids[:5])  # indexed items remain in the sample
    resumed = listing_job(folder, "resumed")
    list_all(resumed)
    assert sample(resumed, 10, seed=0) == item_ids
    tables = unit_reader.sample_items(job, 2, 10, 0)
    assert all(t for table in tables for t in table["text"].to_pylist())


def test_listing_loads_no_torch():
    """Each job starts by launching listing processes, whose imports delay everything else."""
    code = (
        "import sys, pipeline.index.listing, pipeline.data.text;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
