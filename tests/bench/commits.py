"""Measures commits, lease renewals, opening and filters against the number of fragments.

The fragments of the first table share a few data files, because these times depend on the list of
fragments, not on the data. The second table compares an index that many small jobs wrote with the
same index after `jobs.maintain`, and with a new index of the same items.

    python -m tests.bench commits
    python -m tests.bench commits --fragments 100 1000 --jobs 50 --repeats 3
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import jobs
from pipeline.index import maintain
from pipeline.index.fragments import write_table
from pipeline.index.maintain import MaintainSpec
from pipeline.index.reader import ITEMS, IndexReader, part_uri
from pipeline.index.writer import IndexWriter
from pipeline.schema import ITEM, REJECT, Item, Reject
from tests.bench.harness import Bench, Repeats, seconds_of, table

#: Items per fragment of the first table, and its number of data files.
FRAGMENT_ITEMS, NUM_FILES = 8, 16
#: Items per fragment that the index job writes before it merges them.
WRITTEN_ITEMS = 512
#: Items per small job.
JOB_ITEMS = 16
#: A filter that no item satisfies, so that its time is that of the search.
FILTER = "title = 'no such title'"
TIMES = ("commit", "renewal", "renewal by a commit", "rejects", "open", "filter")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its tables."""
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "--fragments",
        type=jobs.positive,
        nargs="+",
        default=[100, 1000, 1819, 5000, 20_000, 60_000, 200_000],
        help="numbers of fragments; 1,819 is the number of merged and recent fragments of an index"
        f" of 200,000 fragments of {WRITTEN_ITEMS} items (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=jobs.positive, default=1000, help="number of small jobs")
    parser.add_argument("--repeats", type=jobs.positive, default=7)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args(arguments)
    bench = Bench("commits", list(arguments or ()), args.out)

    rows, figures = [], {}
    for number in args.fragments:
        with tempfile.TemporaryDirectory() as folder:
            times = measure(f"{folder}/index", number, args.repeats)
        figures[str(number)] = times
        rows.append([f"{number:,}", *(_milliseconds(times[name]) for name in TIMES)])
    title = "Milliseconds against the number of fragments"
    bench.add("fragments", title, figures, table(["fragments", *TIMES], rows))

    with tempfile.TemporaryDirectory() as folder:
        figures = small_jobs(folder, args.jobs, args.repeats)
    names = ("fragments", "commit", "open", "filter")
    rows = [
        [side, f"{f['fragments']:,}", *(_milliseconds(f[name]) for name in names[1:])]
        for side, f in figures.items()
    ]
    title = f"Milliseconds after {args.jobs:,} jobs of {JOB_ITEMS} items"
    bench.add("small jobs", title, figures, table(["index", *names], rows))


def measure(uri: str, num_fragments: int, repeats: int) -> dict[str, Repeats]:
    """Builds an index with a number of fragments and measures it."""
    writer = IndexWriter(uri, "bench", ttl=3600)
    files = [
        fragment
        for number in range(NUM_FILES)
        for fragment in write_table(_items(number, FRAGMENT_ITEMS), part_uri(uri, ITEMS))
    ]
    writer.commit([files[i % NUM_FILES] for i in range(num_fragments)])
    rejects = [_rejects(number) for number in range(repeats)]
    calls: dict[str, Any] = {
        "commit": lambda i: writer.commit([files[i % NUM_FILES]]),
        "renewal": lambda i: writer.renew(),
        "renewal by a commit": lambda i: writer.dataset.update_config({"bench": str(i)}),
        "rejects": lambda i: writer.set_rejects(rejects[i], [f"unknown-{i}"]),
        "open": lambda i: IndexReader(uri),
        "filter": lambda i: _filter(IndexReader(uri)),
    }
    times = {name: _repeat(call, repeats) for name, call in calls.items()}
    writer.release()
    return times


def small_jobs(folder: str, num_jobs: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Writes the same items in small jobs and in one, maintains the former, and measures all."""
    many, fresh = f"{folder}/many", f"{folder}/fresh"
    for number in range(num_jobs):
        writer = IndexWriter(many, f"job-{number}")
        writer.commit(write_table(_items(number, JOB_ITEMS), part_uri(many, ITEMS)))
        writer.release()
    figures = {"many small jobs": _measure_index(many, repeats)}
    spec = MaintainSpec(index=many, retain_hours=0)
    maintain.run(spec, job="maintain", report=lambda line: None)
    figures["after jobs.maintain"] = _measure_index(many, repeats)
    writer = IndexWriter(fresh, "job")
    items = pa.concat_tables(_items(number, JOB_ITEMS) for number in range(num_jobs))
    writer.commit(write_table(items, part_uri(fresh, ITEMS)))
    writer.index_ids()
    writer.release()
    figures["one job"] = _measure_index(fresh, repeats)
    return figures


def _measure_index(uri: str, repeats: int) -> dict[str, Any]:
    num_fragments = len(IndexReader(uri).fragments())
    times = {
        "open": _repeat(lambda i: IndexReader(uri), repeats),
        "filter": _repeat(lambda i: _filter(IndexReader(uri)), repeats),
    }
    writer = IndexWriter(uri, "measure")
    tables = [_items(i, 1) for i in range(repeats)]
    fragments = [write_table(rows, part_uri(uri, ITEMS)) for rows in tables]
    commits = _repeat(lambda i: writer.commit(fragments[i]), repeats)
    for fragment in writer.dataset.get_fragments()[num_fragments:]:
        ids = fragment.to_table(columns=["item_id"])["item_id"].to_pylist()
        writer.remove({fragment.fragment_id: ids})
    writer.release()
    return {"fragments": num_fragments, "commit": commits, **times}


def _filter(index: IndexReader) -> None:
    assert not index.dataset.to_table(columns=["item_id"], filter=FILTER).num_rows


def _repeat(call: Any, repeats: int) -> Repeats:
    return Repeats(tuple(seconds_of(lambda i=i: call(i)) for i in range(repeats)))


def _milliseconds(times: Repeats) -> str:
    return f"{1000 * times.median:.1f}"


def _items(number: int, num_items: int) -> pa.Table:
    ids = [f"{number:06d}-{i}" for i in range(num_items)]
    rows = [Item(i, i, "bench", "text", "revision", title="a title", text=i).row() for i in ids]
    return pa.Table.from_pylist(rows, schema=ITEM)


def _rejects(number: int) -> pa.Table:
    reject = Reject(f"reject-{number}", "bench", "decode", "unreadable")
    return pa.Table.from_pylist([{**reject.row(), "spec": ""}], schema=REJECT)


if __name__ == "__main__":
    jobs.run(main)
