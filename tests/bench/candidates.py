"""Benchmark of the candidates of `ivf` against the exact search of the same index.

    python -m tests.bench candidates
    python -m tests.bench candidates --items 1000000 --figure plot.png
    python -m tests.bench candidates --vectors FOLDER --query-tokens 32
    python -m tests.bench candidates --vectors FOLDER --unmodified --items 117659
    python -m tests.bench candidates --index INDEX --representation hpool_32_int8 --log log.jsonl

The items are derived from real token vectors: each interpolates the vectors of two random
documents and adds noise. By default, these are the abstracts of jobs/data/cranfield, encoded by
MiniLM and merged to 32 vectors. --vectors names a folder in the .npy layout of `jobs.export` with
queries, such as those of examples/papers/specs/candidates/wordnet.yaml. Vectors are projected to
128 dimensions by a random orthogonal map. --index names an index whose items are searched instead,
with the texts of --log as queries; its codes are kept. Half of the queries are the log with which
numbers of candidates are measured, of the other half 128 are searched.

The benchmark measures the time of the build, and by the number of candidates the recall of the
exact results, the latency of single queries and the throughput in batches of 32.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jobs
from tests.bench.harness import Bench, Repeats, recall, seconds_of, table

#: Text, or vectors (M, D).
Query = str | np.ndarray
#: Number of vectors per item and dimensions of the default vectors.
NUM_VECTORS, DIM = 32, 128
#: Standard deviation of the noise, relative to the norm of a vector.
NOISE = 0.3
#: Number of items that are generated together, and that a fragment of the index contains.
FRAGMENT_ITEMS = 8192
COLUMN = "full_int8"
#: Depths of the measured recall, and number of queries per batch.
DEPTHS, BATCH = (10, 100), 32
#: Maximum number of queries whose exact search is timed, which takes seconds for a million items.
NUM_EXACT = 16
#: Generator that is measured.
GENERATOR = "ivf"


class Vectors(NamedTuple):
    """Token vectors of documents and queries.

    Attributes:
        documents: Vectors (n, D) of each document.
        queries: Vectors (M, D) of each query.
    """

    documents: list[np.ndarray]
    queries: list[np.ndarray]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--items", type=jobs.positive, default=100_000, help="number of items")
    parser.add_argument(
        "--unmodified", action="store_true", help="search the first documents themselves"
    )
    parser.add_argument("--index", help="index to search")
    parser.add_argument("--representation", default=COLUMN, help="representation of --index")
    parser.add_argument("--log", type=Path, help="queries of --index (.jsonl)")
    parser.add_argument("--vectors", help="folder with documents.npy, doclens.npy and queries.npy")
    parser.add_argument(
        "--num-candidates", type=jobs.positive, nargs="+", default=[100, 400, 1600, 6400]
    )
    parser.add_argument(
        "--query-tokens",
        type=jobs.positive,
        help="tokens per query: consecutive queries are joined and truncated",
    )
    parser.add_argument("--queries", type=jobs.positive, default=128, help="queries to search")
    parser.add_argument(
        "--selectivity",
        type=float,
        nargs="+",
        default=[],
        metavar="SHARE",
        help="also measure filtered search in these shares of the items, such as 0.001 0.01 0.1",
    )
    parser.add_argument("--filters", nargs="+", default=[], help="also measure these filters")
    parser.add_argument(
        "--stopping", action="store_true", help="also simulate early termination of exact scoring"
    )
    parser.add_argument("--repeats", type=jobs.positive, default=3, help="repeats of throughput")
    parser.add_argument(
        "--folder", type=Path, help="folder to keep the index in for later runs (default: none)"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--figure", type=Path, help="PNG file for a plot of recall against latency")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    bench = Bench("candidates", arguments, args.out)
    if args.index:
        if args.log is None or not args.log.is_file():
            parser.error(f"--log must be a file of queries (.jsonl) of --index, got {args.log}")
        lines = args.log.read_text().splitlines()
        with jobs.cluster():
            run(bench, args, args.index, [json.loads(line)["text"] for line in lines])
        return
    vectors = read_vectors(args.vectors) if args.vectors else shipped_vectors()
    if args.unmodified:
        vectors = vectors._replace(documents=vectors.documents[: args.items])
    vectors = project(vectors)
    queries = vectors.queries
    if args.query_tokens:
        queries = join_queries(queries, args.query_tokens)
    blocks = derived(vectors.documents, args.items)
    if args.unmodified:
        args.items = len(vectors.documents)
        blocks = (
            vectors.documents[first : first + FRAGMENT_ITEMS]
            for first in range(0, args.items, FRAGMENT_ITEMS)
        )
    with contextlib.ExitStack() as stack:
        folder = args.folder or stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["MAXRAY_CACHE"] = f"{folder}/cache"
        uri = f"{folder}/index"
        if not Path(uri).exists():
            write_index(uri, blocks, DIM)
        with jobs.cluster():
            run(bench, args, uri, queries)


def run(bench: Bench, args: Namespace, uri: str, queries: Sequence[Query]) -> None:
    """Measures the exact search and `ivf`, and reports a table."""
    from pipeline.search.searcher import open_index

    log, searched, column = queries[1::2], queries[::2][: args.queries], args.representation
    searcher = open_index(uri)
    searcher.load(column)
    best = [
        ranking.item_ids
        for ranking in searcher.rank(searched, column, k=max(DEPTHS), candidates="exact")
    ]
    options = {"candidates": "exact"}
    p50, p99, rate = latencies(searcher, column, searched[:NUM_EXACT], args.repeats, options)
    rows: list[list[Any]] = [["exact", "", "", "", 1.0, 1.0, p50, p99, str(rate)]]
    figures: dict[str, Any] = {"exact": {"p50_ms": p50, "p99_ms": p99, "queries_per_s": rate}}
    seconds, num_bytes = build(uri, column, log)
    searcher = open_index(uri)
    searcher.load(column, candidates=GENERATOR)
    for number in (None, *args.num_candidates):  # None: the measured numbers
        options = {"candidates": GENERATOR, "num_candidates": number}
        recalls = []
        for depth in DEPTHS:
            found = searcher.rank(searched, column, k=min(depth, number or depth), **options)
            recalls.append(recall(best, [r.item_ids for r in found], depth))
        p50, p99, rate = latencies(searcher, column, searched, args.repeats, options)
        label = number or "default"
        rows.append([GENERATOR, f"{seconds:.1f}", num_bytes, label, *recalls, p50, p99, str(rate)])
        print(f"{GENERATOR} {label}: recall {recalls}, {p50:.2f} ms", flush=True)
        figures[f"{GENERATOR} {label}"] = {
            "build_seconds": seconds,
            "bytes": num_bytes,
            **{f"recall@{d}": value for d, value in zip(DEPTHS, recalls, strict=True)},
            "p50_ms": p50,
            "p99_ms": p99,
            "queries_per_s": rate,
        }
    measure_options(bench, args, searched, searcher)
    lengths = searcher.queries(searched, column).num_tokens
    title = (
        f"{len(searcher.items):,} items {'of' if args.unmodified or args.index else 'derived from'}"
        f" real vectors, {len(searched)} queries of {np.mean(lengths):.0f} tokens on average;"
        f" numbers of candidates measured with {len(log)} others"
    )
    header = ["generator", "build s", "B/item", "candidates"]
    header += [*(f"recall@{depth}" for depth in DEPTHS), "p50 ms", "p99 ms", "queries/s"]
    cells = [[f"{c:.3f}" if i in (4, 5) else c for i, c in enumerate(row)] for row in rows]
    bench.add("candidates", title, figures, table(header, cells))
    if args.figure:
        _write_figure(args.figure, rows)


def measure_options(bench: Bench, args: Namespace, queries: Sequence[Query], searcher: Any) -> None:
    """Measures filtered search and early termination, and reports tables of their own."""
    from tests.bench import candidates_filters, candidates_stopping

    given = (searcher, args.representation, queries, GENERATOR)
    found = candidates_filters.measure(*given, args.selectivity, args.filters)
    parts = [("filtered search", candidates_filters.HEADER, found)]
    if args.stopping:
        found = candidates_stopping.measure(*given)
        parts.append(("early termination", candidates_stopping.HEADER, found))
    for title, header, found in parts:
        rows, figures = [], {}
        for cells, numbers in found:
            print(*cells, flush=True)
            rows.append(cells)
            figures[" ".join(map(str, cells[:2]))] = numbers
        if rows:
            bench.add(title, title, figures, table(header, rows))


def _write_figure(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    from pipeline.eval.report.plot import REFERENCE, STYLES, apply_style, to_png

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, len(DEPTHS), sharey=True)
    (_, *_, exact_ms, _, _), *measured = rows
    for i, (panel, depth) in enumerate(zip(panels, DEPTHS, strict=True)):
        apply_style(panel)
        for style, name in zip(STYLES, dict.fromkeys(row[0] for row in measured), strict=False):
            points = [(row[6], row[4 + i]) for row in measured if row[0] == name]
            panel.plot(*zip(*points, strict=True), label=name, **style)
        panel.axvline(exact_ms, color=REFERENCE, linestyle="dotted", label="exact")
        panel.set(xscale="log", xlabel="p50 latency, ms", ylabel=f"recall@{depth}")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
    panels[0].legend()
    path.write_bytes(to_png(figure))


def build(uri: str, representation: str, log: Sequence[Query]) -> tuple[float, float]:
    """Builds `ivf`. Returns the seconds it takes and the bytes per item of its codes."""
    from pipeline.config import parse
    from pipeline.index import add
    from pipeline.index.reader import IndexReader
    from pipeline.search import candidates_job

    spec = parse(
        candidates_job.CandidatesJobSpec,
        {"index": uri, "generator": {"name": GENERATOR}, "representation": representation},
    )
    start = time.perf_counter()
    add.run(
        candidates_job.Candidates(spec, candidates_job.CandidatesResources(), queries=log),
        job=jobs.job_id(),
        report=jobs.say,
    )
    seconds = time.perf_counter() - start
    index = IndexReader(uri)
    infos = index.candidates_columns.values()
    (column,) = (info.name for info in infos if info.generator_name == GENERATOR)
    fitted = index.generator(column)
    rows = index.dataset.to_table(columns=[column], limit=1000)
    _, lengths = fitted.codec.unpack(rows[column], fitted.dim)
    return seconds, fitted.codec.token_bytes(fitted.dim) * float(lengths.mean())


def latencies(
    searcher: Any, column: str, queries: Sequence[Query], repeats: int, options: dict[str, Any]
) -> tuple[float, float, Repeats]:
    """Measures the median and 99th percentile of a query in ms, and queries per second in batches.

    Queries are transformed beforehand, so that only candidate generation and scoring are measured.
    """
    encoded = [searcher.queries([query], column) for query in queries]
    for query in encoded[:3]:  # warm-up
        searcher.rank(query, column, k=10, **options)
    times = [seconds_of(lambda q=q: searcher.rank(q, column, k=10, **options)) for q in encoded]
    batches = [
        searcher.queries(queries[first : first + BATCH], column)
        for first in range(0, len(queries), BATCH)
    ]
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        for batch in batches:
            searcher.rank(batch, column, k=10, **options)
        rates.append(len(queries) / (time.perf_counter() - start))
    p50, p99 = (1000 * float(np.percentile(times, p)) for p in (50, 99))
    return p50, p99, Repeats(tuple(rates))


# -- vectors -----------------------------------------------------------------------------------


def shipped_vectors() -> Vectors:
    """Encodes the shipped abstracts and their queries, and merges the vectors."""
    import pyarrow as pa

    from pipeline.compression.hpool import HPool
    from pipeline.encoders.minilm import MiniLM
    from pipeline.tokens import unit_vectors

    folder = Path("jobs/data/cranfield")
    texts, queries = (
        [json.loads(line)["text"] for line in (folder / name).read_text().splitlines()]
        for name in ("corpus.jsonl", "queries.jsonl")
    )
    encoder = MiniLM(MiniLM.Spec())
    merge = HPool(HPool.Spec(num_vectors=NUM_VECTORS))
    documents: list[np.ndarray] = []
    table = pa.table({"item_id": [str(i) for i in range(len(texts))], "text": texts})
    for _, batch in encoder.encode(table.filter(pa.compute.field("text") != "")):
        merged = merge.compress(batch)
        documents += [v[m].numpy() for v, m in zip(merged.vectors, merged.mask, strict=True)]
    encoded = encoder.encode_queries(queries).tokens
    tokens = zip(unit_vectors(encoded), encoded.mask, strict=True)
    return Vectors(documents, [v[m].numpy() for v, m in tokens])


def read_vectors(folder: str) -> Vectors:
    """Reads documents and queries in the .npy layout."""
    vectors = np.load(f"{folder}/documents.npy", mmap_mode="r")
    ends = np.load(f"{folder}/doclens.npy").cumsum()
    documents = [part for part in np.split(vectors, ends[:-1]) if len(part)]
    queries = np.load(f"{folder}/queries.npy", mmap_mode="r")
    return Vectors(documents, [query[np.any(query != 0, axis=1)] for query in queries])


def project(vectors: Vectors) -> Vectors:
    """Projects vectors of more than `DIM` dimensions, and normalises them."""
    dim = vectors.documents[0].shape[1]
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(dim, min(dim, DIM))))
    basis = np.eye(dim, dtype=np.float32) if dim == DIM else basis.astype(np.float32)
    return Vectors(*([_unit(part.astype(np.float32) @ basis) for part in x] for x in vectors))


def join_queries(queries: list[np.ndarray], num_tokens: int) -> list[np.ndarray]:
    """Joins consecutive queries to queries of `num_tokens` tokens."""
    tokens = np.concatenate(queries)
    count = len(tokens) // num_tokens
    return list(tokens[: count * num_tokens].reshape(count, num_tokens, -1))


def derived(documents: list[np.ndarray], num_items: int) -> Iterator[list[np.ndarray]]:
    """Yields blocks of items that interpolate two documents, with noise."""
    rng = np.random.default_rng(0)
    for first in range(0, num_items, FRAGMENT_ITEMS):
        block = []
        for _ in range(min(FRAGMENT_ITEMS, num_items - first)):
            one, other = (documents[i] for i in rng.integers(len(documents), size=2))
            mixed = one + rng.uniform(0, 0.5) * other[rng.integers(len(other), size=len(one))]
            noise = rng.normal(0, NOISE / np.sqrt(one.shape[1]), one.shape)
            block.append(_unit(_unit(mixed) + noise))
        yield block


def write_index(uri: str, blocks: Iterator[list[np.ndarray]], dim: int) -> None:
    """Writes an index of int8 vectors, in fragments as the index job does."""
    import pyarrow as pa
    import torch
    from lance import LanceDataset, LanceOperation
    from lance.fragment import write_fragments

    from pipeline.compression.codecs.int8 import Int8
    from pipeline.config import parse
    from pipeline.index.columns import Representation, representation_fields
    from pipeline.index.info import EncoderInfo
    from pipeline.index.reader import ITEMS, part_uri
    from pipeline.index.writer import STORAGE_VERSION
    from pipeline.schema import ITEM, Item

    encoder_info = EncoderInfo(
        spec={"name": "precomputed", "dim": dim, "label": "bench"},
        fingerprint="bench",
        dim=dim,
        pooled_dim=None,
        normalised=True,
        has_spans=False,
        has_extents=False,
        prefix="precomputed",
        query_kinds=(),
    )
    representation = parse(Representation, {"compressor": "none", "codec": "int8", "id": COLUMN})
    fields = representation_fields(representation, encoder_info, None)
    schema = pa.schema([*ITEM, *fields])
    codec, fragments, number = Int8(Int8.Spec()), [], 0
    for block in blocks:
        names = [f"{i:09}" for i in range(number, number + len(block))]
        number += len(block)
        rows = pa.Table.from_pylist(
            [Item(name, name, "bench", "text", "1").row() for name in names], schema=ITEM
        )
        vectors = torch.from_numpy(np.concatenate(block).astype(np.float32))
        column = codec.encode_rows(vectors, np.array([len(item) for item in block]))
        fragments += write_fragments(
            rows.append_column(fields[0], column.cast(fields[0].type)).cast(schema),
            part_uri(uri, ITEMS),
            data_storage_version=STORAGE_VERSION,
        )
    LanceDataset.commit(part_uri(uri, ITEMS), LanceOperation.Overwrite(schema, fragments))


def _unit(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
