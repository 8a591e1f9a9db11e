"""The systems of `tests.bench efficiency`: Maxray and others, on the same vectors and texts.

Each of them stores an index in a folder and opens it in another process. Systems that only find
candidates are MUVERA and faiss over token vectors. Maxray scores their candidates exactly, with
int8 vectors, whose bytes are added to those of the index.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

#: Number of results of a search.
K = 10
#: Number of items that Maxray adds in one commit, whose vectors are in memory several times.
ADDED = 20_000
#: Number of vectors that faiss adds at once, in float32.
ADDED_VECTORS = 1 << 20
#: Number of lists of faiss above which a graph finds the nearest, as its guidelines recommend.
MAX_COMPARED = 10_000
#: Numbers of repetitions, of bits of a bucket and of projected dimensions of MUVERA. Together they
#: determine the dimensions of an encoding: 20 * 2^5 * 16 = 10,240.
MUVERA_REPETITIONS, MUVERA_BITS, MUVERA_DIM = 20, 5, 16


class Data:
    """Vectors and texts of items and queries, which the benchmark has written to a folder.

    Attributes:
        vectors: Token vectors (T, D) float16 of all items, memory-mapped.
        ends: End (n,) of the vectors of each item.
        singles: Single vectors (n, P) float32 of the items.
        queries: Token vectors (M, D) float32 of each query.
        query_singles: Single vectors (Q, P) float32 of the queries.
        texts: Texts of the items.
        query_texts: Texts of the queries.
    """

    def __init__(self, folder: Path):
        self.vectors = np.load(folder / "vectors.npy", mmap_mode="r")
        self.ends = np.load(folder / "lengths.npy").cumsum()
        self.singles = np.load(folder / "singles.npy")
        self.query_singles = np.load(folder / "query_singles.npy")
        lengths = np.load(folder / "query_lengths.npy")
        self.queries = np.split(np.load(folder / "query_vectors.npy"), lengths.cumsum()[:-1])
        self.texts, self.query_texts = json.loads((folder / "texts.json").read_text())

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def documents(self) -> list[np.ndarray]:
        """Token vectors (N, D) float32 of each item, in one array."""
        return np.split(np.asarray(self.vectors, np.float32), self.ends[:-1])


#: Rows of the best items of each of the queries of the given numbers, best first.
Search = Callable[[Sequence[int]], Sequence[np.ndarray]]


class System(NamedTuple):
    """A system with its functions.

    Attributes:
        package: Package whose version is shown.
        build: Writes the index of the items to a folder.
        open: Opens the index. Yields settings of a search with the search.
        is_rescored: Whether it only finds candidates.
    """

    package: str
    build: Callable[[Data, Path], None]
    open: Callable[[Data, Path], Iterator[tuple[str, Search]]]
    is_rescored: bool = False


# -- Maxray ----------------------------------------------------------------------------------------


def maxray(
    *generators: str, compressor: Any = "none", codec: str = "int8", single: bool = False
) -> System:
    """Returns an index of one representation, and its candidate generators."""
    name = "full"
    representation = {"id": name, "compressor": compressor, "codec": codec}

    def build(data: Data, folder: Path) -> None:
        from pipeline import Index

        index = Index(str(folder / "index"))
        vectors = list(data.singles) if single else data.documents
        for first in range(0, len(data), ADDED):
            block = vectors[first : first + ADDED]
            ids = [str(row) for row in range(first, first + len(block))]
            index.add(ids, block, representations=[representation])
        for generator in generators:
            index.add_candidates(generator, name)

    def open(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
        from pipeline import Index

        searcher = Index(str(folder / "index")).searcher
        queries = list(data.query_singles[:, None]) if single else data.queries

        def search(options: dict[str, Any], numbers: Sequence[int]) -> list[np.ndarray]:
            found = searcher.rank([queries[n] for n in numbers], name, k=K, **options)
            return [ranking.rows for ranking in found]

        settings: dict[str, dict[str, Any]] = {"all items": {"candidates": "exact"}}
        if generators:
            settings = {f"{g}, default": {"candidates": g} for g in generators}
            numbers = itertools.product(generators, (400, 1600, 6400))
            settings |= {f"{g}, {n:,}": {"candidates": g, "num_candidates": n} for g, n in numbers}
        for label, options in settings.items():
            yield label, functools.partial(search, options)

    return System("maxray", build, open)


def build_bm25(data: Data, folder: Path) -> None:
    """Stores the codes of the texts."""
    import pyarrow as pa
    from pyarrow import feather

    from pipeline.search.generators import bm25

    feather.write_feather(pa.table({"codes": bm25.encode(data.texts)}), folder / "codes.arrow")


def open_bm25(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
    """Loads the postings."""
    from pyarrow import feather

    from pipeline.search.generators import bm25

    codes = feather.read_table(folder / "codes.arrow")["codes"].chunks
    postings = bm25.Postings(bm25.Bm25(bm25.Bm25.Spec(), bm25.statistics(codes)), codes)
    yield "", lambda numbers: [best(postings.scores(data.query_texts[n])) for n in numbers]


def best(scores: np.ndarray) -> np.ndarray:
    """Returns the rows of the K best positive scores, best first."""
    rows = np.argpartition(-scores, min(K, len(scores) - 1))[:K]
    rows = rows[scores[rows] > 0]
    return rows[np.argsort(-scores[rows], kind="stable")]


class Exact:
    """Exact scoring of all items, or of candidates, by the kernels of Maxray."""

    def __init__(self, data: Data, codec: str):
        import torch

        from pipeline.config import parse
        from pipeline.registry import CODECS
        from pipeline.search.packed import PackedVectors, Segment

        kind = CODECS.load(codec)
        self._codec, self._queries = kind(parse(kind.Spec, {})), data.queries
        dim, blocks = data.vectors.shape[1], range(0, len(data.vectors), 1 << 18)
        vectors = (torch.from_numpy(np.array(data.vectors[i : i + (1 << 18)])) for i in blocks)
        quantised = [self._codec.quantise(block.float()) for block in vectors]
        parts = {name: torch.cat([part[name] for part in quantised]) for name in quantised[0]}
        lengths = torch.from_numpy(np.diff(data.ends, prepend=0))
        self._packed = PackedVectors([Segment(self._codec, dim, parts, lengths)])

    def best(self, number: int, rows: np.ndarray | None = None) -> np.ndarray:
        """Returns the rows of the K best of the given items for a query, best first."""
        import torch

        from pipeline.search.maxsim import maxsim

        query = self._codec.transform_queries(torch.from_numpy(self._queries[number]))
        items = None if rows is None else torch.from_numpy(np.sort(rows))
        (scores,) = maxsim([query], self._packed, rows=items).numpy()
        order = np.argsort(-scores, kind="stable")[:K]
        return order if items is None else items.numpy()[order]


# -- multi-vector search ---------------------------------------------------------------------------


def fast_plaid(folder: Path) -> Any:
    """Returns fast-plaid, with its default options of 4 bits per dimension."""
    search = importlib.import_module("fast_plaid.search")
    return search.FastPlaid(index=str(folder / "index"), device="cpu")


def build_fast_plaid(data: Data, folder: Path) -> None:
    """Builds an index of fast-plaid."""
    import torch

    fast_plaid(folder).create(documents_embeddings=[torch.from_numpy(d) for d in data.documents])


def open_fast_plaid(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
    """Opens an index of fast-plaid."""
    import torch

    index = fast_plaid(folder)

    def search(options: dict[str, int], numbers: Sequence[int]) -> list[np.ndarray]:
        queries = [torch.from_numpy(data.queries[n]) for n in numbers]
        found = index.search(queries, top_k=K, show_progress=False, **options)
        return [np.array([row for row, _ in hits], int) for hits in found]

    yield "default", functools.partial(search, {})
    for full, probe in ((400, 8), (4096, 32)):
        options = {"n_full_scores": full, "n_ivf_probe": probe}
        yield f"{probe} probes, {full:,} full scores", functools.partial(search, options)


def build_xtr_warp(data: Data, folder: Path) -> None:
    """Builds an index of xtr-warp-rs with its default options of 4 bits per dimension."""
    import torch

    index = importlib.import_module("xtr_warp.search").XTRWarp(str(folder / "index"))
    index.create([torch.from_numpy(d) for d in data.documents], "cpu", show_progress=False)


def open_xtr_warp(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
    """Opens an index of xtr-warp-rs."""
    import torch

    index = importlib.import_module("xtr_warp.search").XTRWarp(str(folder / "index"))
    index.load("cpu")

    def search(options: dict[str, int], numbers: Sequence[int]) -> list[np.ndarray]:
        tokens = [torch.from_numpy(data.queries[n]) for n in numbers]
        given = {"top_k": K, "num_threads": 2, "show_progress": False, **options}
        rows = [index.search(query.unsqueeze(0), **given)[0] for query in tokens]
        return [np.array([row for row, _ in hits], int) for hits in rows]

    options: dict[str, int]
    for options in ({}, {"nprobe": 32}, {"nprobe": 64, "bound": 1024}):
        label = ", ".join(f"{name} {value}" for name, value in options.items()) or "default"
        yield label, functools.partial(search, options)


def pylate(kind: str) -> System:
    """Returns an index of PyLate, whose retriever scores the documents of the index again."""

    def index(folder: Path, **options: Any) -> Any:
        indexes = importlib.import_module("pylate.indexes")
        given = {"index_folder": str(folder), "index_name": "index", **options}
        return getattr(indexes, kind)(**given)

    def build(data: Data, folder: Path) -> None:
        options = {"embedding_size": data.vectors.shape[1]} if kind == "Voyager" else {}
        names = [str(row) for row in range(len(data))]
        index(folder, override=True, **options).add_documents(names, data.documents)

    def open(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
        options = {"embedding_size": data.vectors.shape[1]} if kind == "Voyager" else {}
        retriever = importlib.import_module("pylate.retrieve").ColBERT(index(folder, **options))

        def search(numbers: Sequence[int]) -> list[np.ndarray]:
            found = retriever.retrieve([data.queries[n] for n in numbers], k=K)
            return [np.array([int(hit["id"]) for hit in hits], int) for hits in found]

        yield "default", search

    return System("pylate", build, open)


def build_lance(data: Data, folder: Path) -> None:
    """Builds the index of a multi-vector column of Lance, in float16."""
    import lance
    import pyarrow as pa

    dim = data.vectors.shape[1]
    values = pa.FixedSizeListArray.from_arrays(np.asarray(data.vectors).ravel(), dim)
    column = pa.ListArray.from_arrays(np.append(0, data.ends).astype(np.int32), values)
    table = pa.table({"vectors": column, "row": np.arange(len(data))})
    dataset = lance.write_dataset(table, str(folder / "index"))
    options = {"num_partitions": max(1, int(len(values) ** 0.5)), "num_sub_vectors": dim // 8}
    dataset.create_index("vectors", "IVF_PQ", metric="cosine", **options)


def open_lance(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
    """Opens a multi-vector column of Lance."""
    import lance

    dataset = lance.dataset(str(folder / "index"))

    def search(options: dict[str, int], numbers: Sequence[int]) -> list[np.ndarray]:
        tables = []
        for n in numbers:
            query = data.queries[n].astype(np.float16)
            nearest = {"column": "vectors", "q": query, "k": K, **options}
            tables.append(dataset.to_table(columns=["row", "_distance"], nearest=nearest))
        return [table["row"].to_numpy() for table in tables]

    for probes, refine in ((20, 1), (20, 10), (64, 40)):
        options = {"nprobes": probes, "refine_factor": refine}
        yield f"{probes} probes, refine {refine}", functools.partial(search, options)


# -- candidates that Maxray scores -----------------------------------------------------------------


def rescored(
    data: Data, find: Callable[[np.ndarray, int], np.ndarray], sizes: dict[str, int]
) -> Iterator[tuple[str, Search]]:
    """Yields searches that score candidates exactly, by the number that finds them."""
    exact = Exact(data, "int8")

    def search(size: int, numbers: Sequence[int]) -> list[np.ndarray]:
        return [exact.best(n, find(data.queries[n], size)) for n in numbers]

    for label, size in sizes.items():
        yield label, functools.partial(search, size)


def token_ivf(codes: str) -> System:
    """Returns an inverted file of all token vectors: 8 bits (`SQ8`) or one bit (`RaBitQ`)."""

    def build(data: Data, folder: Path) -> None:
        import faiss

        vectors = data.vectors
        lists = int(4 * len(vectors) ** 0.5)
        kind = f"IVF{lists}{'_HNSW32' * (lists > MAX_COMPARED)},{codes}"
        index: Any = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
        sample = np.random.default_rng(0).permutation(len(vectors))[: 64 * lists]
        index.train(np.asarray(vectors[np.sort(sample)], np.float32))
        for first in range(0, len(vectors), ADDED_VECTORS):
            index.add(np.asarray(vectors[first : first + ADDED_VECTORS], np.float32))
        faiss.write_index(index, str(folder / "index"))

    def open(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
        import faiss

        index: Any = faiss.read_index(str(folder / "index"))
        index.nprobe = 32
        item_T = np.repeat(np.arange(len(data)), np.diff(data.ends, prepend=0))

        def find(query: np.ndarray, num_hits: int) -> np.ndarray:
            """Returns the items of the hits of all query tokens."""
            _, hits = index.search(query, num_hits)
            return np.unique(item_T[hits[hits >= 0]])

        labels = {f"32 probes, {n} hits per token": n for n in (32, 128, 512)}
        yield from rescored(data, find, labels)

    return System("faiss-cpu", build, open, is_rescored=True)


def build_muvera(data: Data, folder: Path) -> None:
    """Computes fixed dimensional encodings (arXiv 2405.19504)."""
    encoder = Muvera(data.vectors.shape[1])
    shape = len(data), MUVERA_REPETITIONS * (1 << MUVERA_BITS) * MUVERA_DIM
    codes = np.lib.format.open_memmap(folder / "codes.npy", "w+", np.float32, shape)
    for row, vectors in enumerate(np.split(data.vectors, data.ends[:-1])):
        codes[row] = encoder.document(vectors.astype(np.float32))
    codes.flush()


def open_muvera(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
    """Loads encodings, which are scanned."""
    encoder, codes = Muvera(data.vectors.shape[1]), np.load(folder / "codes.npy")

    def find(query: np.ndarray, num: int) -> np.ndarray:
        scores = codes @ encoder.query(query)
        return np.argpartition(scores, -min(num, len(scores)))[-num:]

    yield from rescored(data, find, {f"{n:,} candidates": n for n in (100, 400, 1600)})


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


# -- single vectors and words ----------------------------------------------------------------------


def build_singles(data: Data, folder: Path) -> None:
    """Stores the single vectors, which sentence-transformers searches."""
    np.save(folder / "singles.npy", data.singles)


def open_singles(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
    """Loads single vectors, and scores all of them."""
    import torch
    from sentence_transformers import util

    items = torch.from_numpy(np.load(folder / "singles.npy"))
    queries = torch.from_numpy(data.query_singles)

    def search(numbers: Sequence[int]) -> list[np.ndarray]:
        found = util.semantic_search(queries[list(numbers)], items, top_k=K)
        return [np.array([hit["corpus_id"] for hit in hits]) for hits in found]

    yield "semantic_search", search


def faiss_singles(kind: str) -> System:
    """Returns an index of faiss over the single vectors: `hnsw` or `ivf`."""

    def build(data: Data, folder: Path) -> None:
        import faiss

        factory = "HNSW32,Flat" if kind == "hnsw" else f"IVF{int(4 * len(data) ** 0.5)},Flat"
        dim = data.singles.shape[1]
        index: Any = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        index.train(data.singles)
        index.add(data.singles)
        faiss.write_index(index, str(folder / "index"))

    def open(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
        import faiss

        index: Any = faiss.read_index(str(folder / "index"))

        def search(name: str, value: int, numbers: Sequence[int]) -> Sequence[np.ndarray]:
            parameters = faiss.ParameterSpace()
            parameters.set_index_parameter(index, name, value)
            return list(index.search(data.query_singles[list(numbers)], K)[1])

        name, values = ("efSearch", (64, 256)) if kind == "hnsw" else ("nprobe", (8, 32))
        for value in values:
            yield f"{name} {value}", functools.partial(search, name, value)

    return System("faiss-cpu", build, open)


def build_usearch(data: Data, folder: Path) -> None:
    """Builds a graph of usearch over the single vectors."""
    from usearch.index import Index

    index = Index(ndim=data.singles.shape[1], metric="ip", dtype="f16")
    index.add(np.arange(len(data)), data.singles)
    index.save(str(folder / "index"))


def open_usearch(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
    """Opens a graph of usearch."""
    from usearch.index import Index

    index = Index.restore(str(folder / "index"))

    def search(expansion: int, numbers: Sequence[int]) -> list[np.ndarray]:
        index.expansion_search = expansion
        queries = data.query_singles[list(numbers)]
        return [index.search(query, K).keys.astype(np.int64) for query in queries]

    for expansion in (64, 256):
        yield f"expansion {expansion}", functools.partial(search, expansion)


def build_bm25s(data: Data, folder: Path) -> None:
    """Builds an index of bm25s."""
    import bm25s

    index = bm25s.BM25()
    index.index(
        bm25s.tokenize(data.texts, stopwords=None, show_progress=False), show_progress=False
    )
    index.save(str(folder / "index"))


def open_bm25s(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
    """Opens an index of bm25s."""
    import bm25s

    index = bm25s.BM25.load(str(folder / "index"))

    def search(numbers: Sequence[int]) -> list[np.ndarray]:
        texts = [data.query_texts[n] for n in numbers]
        tokens = bm25s.tokenize(texts, stopwords=None, show_progress=False)
        rows, scores = index.retrieve(tokens, k=K, show_progress=False)
        return [r[s > 0] for r, s in zip(rows, scores, strict=True)]

    yield "", search


def build_lance_fts(data: Data, folder: Path) -> None:
    """Builds the full-text index of Lance."""
    import lance
    import pyarrow as pa

    table = pa.table({"text": data.texts, "row": np.arange(len(data))})
    dataset = lance.write_dataset(table, str(folder / "index"))
    dataset.create_scalar_index("text", "INVERTED")


def open_lance_fts(data: Data, folder: Path) -> Iterator[tuple[str, Search]]:
    """Opens the full-text index of Lance."""
    import lance

    dataset = lance.dataset(str(folder / "index"))

    def search(numbers: Sequence[int]) -> list[np.ndarray]:
        given = ({"full_text_query": data.query_texts[n], "limit": K} for n in numbers)
        tables = [dataset.to_table(columns=["row", "_score"], **options) for options in given]
        return [table.sort_by([("_score", "descending")])["row"].to_numpy() for table in tables]

    yield "", search


def version(package: str) -> str:
    """Returns the name of a package with its version. Maxray is the checkout that runs."""
    return package if package == "maxray" else f"{package} {importlib.metadata.version(package)}"


SYSTEMS: dict[str, System] = {
    "Maxray, int8": maxray(),
    "Maxray, int8, ivf": maxray("ivf"),
    "Maxray, bits": maxray(codec="bits"),
    "Maxray, 16 vectors, int8": maxray(compressor={"name": "hpool", "num_vectors": 16}),
    "Maxray, 8 vectors, int8": maxray(compressor={"name": "hpool", "num_vectors": 8}),
    "fast-plaid": System("fast-plaid", build_fast_plaid, open_fast_plaid),
    "xtr-warp-rs": System("xtr-warp-rs", build_xtr_warp, open_xtr_warp),
    "PyLate, PLAID": pylate("PLAID"),
    "PyLate, Voyager": pylate("Voyager"),
    "PyLate, TACHIOM": pylate("TachiomIndex"),
    "Lance, multi-vector": System("pylance", build_lance, open_lance),
    "MUVERA in NumPy": System("numpy", build_muvera, open_muvera, is_rescored=True),
    "faiss, IVF of tokens": token_ivf("SQ8"),
    "faiss, IVF-RaBitQ of tokens": token_ivf("RaBitQ"),
    "Maxray, single vector": maxray(single=True),
    "sentence-transformers": System("sentence-transformers", build_singles, open_singles),
    "faiss, HNSW": faiss_singles("hnsw"),
    "faiss, IVF": faiss_singles("ivf"),
    "usearch": System("usearch", build_usearch, open_usearch),
    "Maxray, BM25": System("maxray", build_bm25, open_bm25),
    "bm25s": System("bm25s", build_bm25s, open_bm25s),
    "Lance, full-text": System("pylance", build_lance_fts, open_lance_fts),
}
