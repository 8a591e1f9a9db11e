"""Benchmark of a new version of an index next to the one in service: memory and time.

    python -m tests.bench reload
    python -m tests.bench reload --items 20000 --repeats 1

An index of random int8 vectors is extended by 5 %, then 5 % of its items are deleted, and then all
of its fragments are rewritten. For each change, a process with the vectors in memory (`cache:
false`) opens the new version while the previous one is open, and then closes the previous one. The
other side does the same without sharing vectors between the versions. Both sides must find the same
items.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import lance
import pyarrow as pa

import jobs
from pipeline.index.reader import ITEMS, part_uri
from tests.bench.harness import Bench, Repeats, run_apart, table
from tests.bench.maxsim_index import write_index

NUM_VECTORS, DIM = 64, 128
#: Share of the items that are appended and deleted.
SHARE = 0.05


def append(dataset: lance.LanceDataset) -> None:
    """Appends copies of some items under new ids."""
    rows = dataset.to_table(limit=int(SHARE * dataset.count_rows()))
    names = pa.array([f"new{name}" for name in rows["item_id"].to_pylist()])
    position = rows.schema.get_field_index("item_id")
    lance.write_dataset(rows.set_column(position, "item_id", names), dataset.uri, mode="append")


def delete(dataset: lance.LanceDataset) -> None:
    """Deletes items of all fragments."""
    names = dataset.to_table(columns=["item_id"])["item_id"].to_pylist()[:: round(1 / SHARE)]
    dataset.delete(f"item_id IN ({', '.join(map(repr, names))})")


def rewrite(dataset: lance.LanceDataset) -> None:
    """Rewrites all fragments, as `jobs.maintain` does with small ones."""
    dataset.optimize.compact_files(target_rows_per_fragment=1 << 20)


CHANGES: dict[str, Callable[[lance.LanceDataset], None]] = {
    "5 % appended": append,
    "5 % deleted": delete,
    "all fragments rewritten": rewrite,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--items", type=jobs.positive, default=100_000, help="items of the index")
    parser.add_argument("--repeats", type=jobs.positive, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    bench = Bench("reload", arguments, args.out)
    rows, figures = [], {}
    with tempfile.TemporaryDirectory(prefix="reload-") as uri:
        write_index(uri, args.items, NUM_VECTORS, DIM)
        for name, change in CHANGES.items():
            version = lance.dataset(part_uri(uri, ITEMS)).version
            change(lance.dataset(part_uri(uri, ITEMS)))
            versions = [version, lance.dataset(part_uri(uri, ITEMS)).version]
            sides: dict[bool, list[dict]] = {True: [], False: []}
            for _ in range(args.repeats):
                for is_shared, runs in sides.items():
                    fields = {"uri": uri, "versions": versions, "is_shared": is_shared}
                    runs.append(run_apart("tests.bench.reload_run", json.dumps(fields)))
            assert len({json.dumps(run["ranking"]) for runs in sides.values() for run in runs}) == 1
            for is_shared, runs in sides.items():
                rows.append([name, "shared" if is_shared else "separate", *_cells(runs)])
            figures[name] = {"shared": sides[True], "separate": sides[False]}
    header = ["change", "vectors", "vectors in memory, MB: before", "during", "after"]
    header += ["resident, MB: before", "during", "after", "seconds to open"]
    title = f"{args.items:,} items of {NUM_VECTORS} int8 vectors of {DIM} dimensions, cache: false"
    bench.add("reload", title, figures, table(header, rows))


def _cells(runs: Sequence[dict]) -> list[Repeats]:
    """Returns the measurements of one side: memory before, during and after, and seconds."""
    memory = [
        Repeats(tuple(run[kind][step] / 1e6 for run in runs))
        for kind in ("vector_bytes", "resident_bytes")
        for step in range(3)
    ]
    return [*memory, Repeats(tuple(run["seconds"] for run in runs))]
