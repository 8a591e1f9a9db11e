"""Benchmark of other systems for multi-vector search, on the vectors of `tests.bench candidates`.

    python -m tests.bench candidates_peers --vectors FOLDER --items 30000
    python -m tests.bench candidates_peers --vectors FOLDER --items 30000 --systems faiss-ivf muvera

--vectors names a folder in the .npy layout of `jobs.export` with queries. Its first documents are
searched. The queries are those that `tests.bench candidates` searches.

fast-plaid and xtr-warp compute the scores of their results themselves from quantised vectors. The
other systems are candidate generators: IVF over the token vectors (faiss), the fixed dimensional
encodings of MUVERA (in NumPy), and the multi-vector index of Lance. Their candidates are scored
exactly by Maxray. The exact results are those of int8 vectors.

Systems that are not installed are skipped. fast-plaid and xtr-warp-rs require torch 2.11.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jobs
from tests.bench.candidates import DEPTHS, join_queries, project, read_vectors
from tests.bench.harness import Bench, recall, seconds_of, table

#: Numbers of repetitions, of bits of a bucket and of projected dimensions of MUVERA. Together they
#: determine the dimensions of an encoding: 20 * 2^5 * 16 = 10,240.
MUVERA_REPETITIONS, MUVERA_BITS, MUVERA_DIM = 20, 5, 16
NUM_CANDIDATES = (100, 400, 1600)


class Setting(NamedTuple):
    """System with the options of a search.

    Attributes:
        label: Options of the search.
        build_seconds: Time to build the index.
        bytes_per_item: Size of the index, without vectors for exact scoring.
        search: Function that returns the positions of the items found for a query (M, D).
        is_rescored: Whether these are candidates that are scored exactly.
    """

    label: str
    build_seconds: float
    bytes_per_item: float
    search: Callable[[np.ndarray], np.ndarray]
    is_rescored: bool


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--vectors", required=True, help="folder in the .npy layout")
    parser.add_argument("--items", type=jobs.positive, default=30_000, help="number of documents")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--queries", type=jobs.positive, default=128, help="queries to search")
    parser.add_argument("--query-tokens", type=jobs.positive, help="see `tests.bench candidates`")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    bench = Bench("candidates_peers", arguments, args.out)
    stored = read_vectors(args.vectors)
    documents, queries = project(stored._replace(documents=stored.documents[: args.items]))
    if args.query_tokens:
        queries = join_queries(queries, args.query_tokens)
    queries = queries[::2][: args.queries]
    exact = Exact(documents)
    best = [exact.best(query, max(DEPTHS)) for query in queries]
    rows, figures = [], {}
    for name in args.systems:
        module, build = SYSTEMS[name]
        if importlib.util.find_spec(module) is None:
            print(f"{name} is not installed", flush=True)
            continue
        system = f"{name} {version(module)}"
        with tempfile.TemporaryDirectory() as folder:
            for setting in build(documents, f"{folder}/index"):
                cells = measure(setting, exact, queries, best)
                rows.append([system, *cells])
                figures[f"{system} {setting.label}"] = cells
                print(*rows[-1], flush=True)
    lengths, tokens = map(len, documents), map(len, queries)
    title = (
        f"{len(documents):,} items of {np.mean(list(lengths)):.1f} vectors, {len(queries)} queries"
        f" of {np.mean(list(tokens)):.0f} tokens on average, one at a time"
    )
    header = ["system", "search", "build s", "B/item"]
    header += [*(f"recall@{depth}" for depth in DEPTHS), "p50 ms", "p99 ms"]
    bench.add("peers", title, figures, table(header, rows))


def measure(
    setting: Setting, exact: Exact, queries: Sequence[np.ndarray], best: Sequence[np.ndarray]
) -> list[Any]:
    """Returns the cells of a row: the recall of the best items, and the latency of a query."""

    def search(query: np.ndarray) -> np.ndarray:
        found = setting.search(query)
        return exact.best(query, max(DEPTHS), np.sort(found)) if setting.is_rescored else found

    for query in queries[:3]:  # warm-up
        search(query)
    found = [search(query) for query in queries]
    seconds = [seconds_of(lambda q=query: search(q)) for query in queries]
    exact_ids = [items.tolist() for items in best]
    recalls = [
        recall(exact_ids, [items[:depth].tolist() for items in found], depth) for depth in DEPTHS
    ]
    p50, p99 = (1000 * float(np.percentile(seconds, p)) for p in (50, 99))
    costs = f"{setting.build_seconds:.1f}", f"{setting.bytes_per_item:,.0f}"
    return [setting.label, *costs, *(f"{share:.3f}" for share in recalls), p50, p99]


class Exact:
    """Exact scoring of int8 vectors by the kernels of Maxray."""

    def __init__(self, documents: Sequence[np.ndarray]):
        import torch

        from pipeline.compression.codecs.int8 import Int8
        from pipeline.search.packed import PackedVectors, Segment

        self._codec = Int8(Int8.Spec())
        vectors = torch.from_numpy(np.concatenate(documents))
        lengths = torch.tensor([len(document) for document in documents])
        parts = self._codec.quantise(vectors)
        self._packed = PackedVectors([Segment(self._codec, vectors.shape[1], parts, lengths)])

    def best(self, query: np.ndarray, k: int, rows: np.ndarray | None = None) -> np.ndarray:
        """Returns the positions of the k best of the given items, best first."""
        import torch

        from pipeline.search.maxsim import maxsim

        tokens = self._codec.transform_queries(torch.from_numpy(query))
        items = None if rows is None else torch.from_numpy(rows)
        (scores,) = maxsim([tokens], self._packed, rows=items).numpy()
        order = np.argsort(-scores, kind="stable")[:k]
        return order if rows is None else rows[order]


def fast_plaid(documents: Sequence[np.ndarray], folder: str) -> Iterator[Setting]:
    """Builds an index of fast-plaid with its default options of 4 bits per dimension."""
    import torch

    index = importlib.import_module("fast_plaid.search").FastPlaid(index=folder, device="cpu")
    embeddings = [torch.from_numpy(document) for document in documents]
    seconds = seconds_of(lambda: index.create(documents_embeddings=embeddings))
    for num_full, num_probe in ((400, 8), (4096, 8), (4096, 32)):

        def search(query: np.ndarray, full: int = num_full, probe: int = num_probe) -> np.ndarray:
            tokens = torch.from_numpy(query).unsqueeze(0)
            options = {"n_full_scores": full, "n_ivf_probe": probe, "show_progress": False}
            (found,) = index.search(tokens, top_k=max(DEPTHS), **options)
            return np.array([row for row, _ in found])

        label = f"{num_probe} probes, {num_full:,} full scores"
        yield Setting(label, seconds, folder_bytes(folder) / len(documents), search, False)


def xtr_warp(documents: Sequence[np.ndarray], folder: str) -> Iterator[Setting]:
    """Builds an index of xtr-warp-rs with its default options of 4 bits per dimension."""
    import torch

    index = importlib.import_module("xtr_warp.search").XTRWarp(folder)
    embeddings = [torch.from_numpy(document) for document in documents]
    seconds = seconds_of(lambda: index.create(embeddings, "cpu", show_progress=False))
    index.load("cpu")
    for options in ({}, {"nprobe": 32}, {"nprobe": 64, "bound": 1024}):

        def search(query: np.ndarray, options: dict[str, int] = options) -> np.ndarray:
            tokens = torch.from_numpy(query).unsqueeze(0)
            given = {"top_k": max(DEPTHS), "num_threads": 2, "show_progress": False, **options}
            (found,) = index.search(tokens, **given)
            return np.array([row for row, _ in found])

        label = ", ".join(f"{name} {value}" for name, value in options.items()) or "defaults"
        yield Setting(label, seconds, folder_bytes(folder) / len(documents), search, False)


def faiss_ivf(documents: Sequence[np.ndarray], folder: str) -> Iterator[Setting]:
    """Builds an inverted file of all token vectors in 8 bits, and unites the items of the hits."""
    import faiss

    vectors = np.concatenate(documents)
    item_T = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    start = time.perf_counter()
    num_lists = int(4 * len(vectors) ** 0.5)
    index: Any = faiss.index_factory(
        vectors.shape[1], f"IVF{num_lists},SQ8", faiss.METRIC_INNER_PRODUCT
    )
    index.train(vectors[np.random.default_rng(0).permutation(len(vectors))[: 64 * num_lists]])
    index.add(vectors)
    seconds = time.perf_counter() - start
    index.nprobe = 32
    size = vectors.shape[1] + 8  # bytes per vector, with its number
    for num_hits in (32, 128, 512):

        def search(query: np.ndarray, num_hits: int = num_hits) -> np.ndarray:
            _, hits = index.search(query, num_hits)
            return np.unique(item_T[hits[hits >= 0]])

        label = f"{index.nprobe} probes, {num_hits} hits per token"
        yield Setting(label, seconds, size * len(vectors) / len(documents), search, True)


def muvera(documents: Sequence[np.ndarray], folder: str) -> Iterator[Setting]:
    """Computes fixed dimensional encodings (arXiv 2405.19504) and scans them."""
    start = time.perf_counter()
    encoder = Muvera(documents[0].shape[1])
    codes = np.stack([encoder.document(document) for document in documents])
    seconds = time.perf_counter() - start
    for num in NUM_CANDIDATES:

        def search(query: np.ndarray, num: int = num) -> np.ndarray:
            scores = codes @ encoder.query(query)
            return np.argpartition(scores, -num)[-num:]

        yield Setting(f"{num} candidates", seconds, codes[0].nbytes, search, True)


class Muvera:
    """Fixed dimensional encodings of sets of vectors.

    Each repetition assigns vectors to buckets by the signs of random projections, and sums those of
    a query and averages those of a document in each bucket, in random projected dimensions. An
    empty bucket of a document has the vector whose signs differ least.
    """

    def __init__(self, dim: int):
        rng = np.random.default_rng(0)
        shape = MUVERA_REPETITIONS, dim
        self._planes = rng.normal(size=(*shape, MUVERA_BITS)).astype(np.float32)
        signs = rng.choice([-1, 1], size=(*shape, MUVERA_DIM)) / MUVERA_DIM**0.5
        self._projections = signs.astype(np.float32)
        numbers = np.arange(1 << MUVERA_BITS)
        self._num_different = np.bitwise_count(numbers[:, None] ^ numbers)

    def query(self, vectors: np.ndarray) -> np.ndarray:
        """Returns the encoding of a query."""
        sums, _, _, _ = self._sums(vectors)
        return sums.ravel()

    def document(self, vectors: np.ndarray) -> np.ndarray:
        """Returns the encoding of a document."""
        sums, counts, buckets_RN, projected = self._sums(vectors)
        means = sums / np.maximum(counts, 1).astype(np.float32)[:, :, None]
        for repetition, buckets_N in enumerate(buckets_RN):
            empty = np.flatnonzero(counts[repetition] == 0)
            nearest = self._num_different[empty][:, buckets_N].argmin(axis=1)
            means[repetition, empty] = projected[repetition, nearest]
        return means.ravel()

    def _sums(self, vectors: np.ndarray) -> tuple[np.ndarray, ...]:
        is_positive = vectors @ self._planes > 0
        buckets_RN = is_positive @ (1 << np.arange(MUVERA_BITS))
        projected = vectors @ self._projections
        sums = np.zeros((MUVERA_REPETITIONS, 1 << MUVERA_BITS, MUVERA_DIM), np.float32)
        counts = np.zeros(sums.shape[:2], np.int64)
        repetitions = np.arange(MUVERA_REPETITIONS)[:, None]
        np.add.at(sums, (repetitions, buckets_RN), projected)
        np.add.at(counts, (repetitions, buckets_RN), 1)
        return sums, counts, buckets_RN, projected


def lance(documents: Sequence[np.ndarray], folder: str) -> Iterator[Setting]:
    """Builds the index of a multi-vector column of Lance."""
    import lance
    import pyarrow as pa

    dim = documents[0].shape[1]
    values = pa.FixedSizeListArray.from_arrays(np.concatenate(documents).ravel(), dim)
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int32)
    column = pa.ListArray.from_arrays(offsets, values)
    dataset = lance.write_dataset(pa.table({"vectors": column}), folder)
    before = folder_bytes(folder)
    num_lists = int(len(values) ** 0.5)
    options = {"metric": "cosine", "num_partitions": num_lists, "num_sub_vectors": dim // 8}
    seconds = seconds_of(lambda: dataset.create_index("vectors", "IVF_PQ", **options))
    dataset = lance.dataset(folder)
    size = (folder_bytes(folder) - before) / len(documents)
    for num in NUM_CANDIDATES:

        def search(query: np.ndarray, num: int = num) -> np.ndarray:
            nearest = {"column": "vectors", "q": query, "k": num, "nprobes": 32}
            found = dataset.to_table(columns=[], nearest=nearest, with_row_id=True)
            return found["_rowid"].to_numpy()

        yield Setting(f"32 probes, {num} candidates", seconds, size, search, True)


def folder_bytes(folder: str) -> int:
    """Returns the size of all files in a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def version(module: str) -> str:
    """Returns the version of the package of a module."""
    names = importlib.metadata.packages_distributions()[module]
    return importlib.metadata.version(names[0])


#: Module of each system, and the function that builds its index.
SYSTEMS: dict[str, tuple[str, Callable[[Sequence[np.ndarray], str], Iterator[Setting]]]] = {
    "fast-plaid": ("fast_plaid", fast_plaid),
    "xtr-warp": ("xtr_warp", xtr_warp),
    "faiss-ivf": ("faiss", faiss_ivf),
    "muvera": ("numpy", muvera),
    "lance": ("lance", lance),
}
