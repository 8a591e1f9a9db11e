"""Benchmark of `Index.add`: given vectors against writing the same vectors to Lance unchanged.

    python -m tests.bench add
    python -m tests.bench add --items 20000 --repeats 1

The vectors are float32, as encoders return them. `Index.add` checks and normalises them, stores one
byte per number, and commits; the first search then packs the vectors of the new index.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa

import jobs
from pipeline import Index
from pipeline.schema import vectors_type
from tests.bench.harness import Bench, Repeats, seconds_of, table


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its table."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--items", type=jobs.positive, default=100_000)
    parser.add_argument("--vectors", type=jobs.positive, default=32, help="vectors per item")
    parser.add_argument("--dim", type=jobs.positive, default=128)
    parser.add_argument("--repeats", type=jobs.positive, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args(arguments)
    bench = Bench("add", list(arguments or ()), args.out)
    shape = (args.items, args.vectors, args.dim)
    vectors_BND = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    runs = [_run(vectors_BND) for _ in range(args.repeats)]
    sides = {name: Repeats(tuple(run[name] for run in runs)) for name in runs[0]}
    rows = [[name, seconds] for name, seconds in sides.items()]
    rows.append(["Index.add / Lance", sides["Index.add"].over(sides["Lance, unchanged"])])
    title = f"Seconds for {args.items:,} items of {args.vectors} vectors of {args.dim} dimensions"
    bench.add("add", title, sides, table(["", "seconds"], rows))


def _run(vectors_BND: np.ndarray) -> dict[str, float]:
    ids = [f"item-{number}" for number in range(len(vectors_BND))]
    items, query = list(vectors_BND), vectors_BND[len(ids) // 2][:16]
    with tempfile.TemporaryDirectory() as folder:
        index = Index(f"{folder}/index", cache=False)
        return {
            "Lance, unchanged": seconds_of(lambda: _write(ids, vectors_BND, f"{folder}/lance")),
            "Index.add": seconds_of(lambda: index.add(ids, items)),
            "first search": seconds_of(lambda: index.search(query, explain=False)),
            "next search": seconds_of(lambda: index.search(query, explain=False)),
        }


def _write(ids: list[str], vectors_BND: np.ndarray, uri: str) -> None:
    _, number, dim = vectors_BND.shape
    offsets = pa.array(number * np.arange(len(ids) + 1, dtype=np.int32))
    values = pa.FixedSizeListArray.from_arrays(pa.array(vectors_BND.reshape(-1)), dim)
    lists = pa.ListArray.from_arrays(offsets, values).cast(vectors_type(dim, pa.float32()))
    lance.write_dataset(pa.table({"item_id": ids, "vectors": lists}), uri)
