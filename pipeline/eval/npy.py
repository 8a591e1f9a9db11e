"""Benchmarks with query vectors: a folder with queries.npy and a file of judgments."""

from __future__ import annotations

import math
import posixpath
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import numpy as np
from fsspec import AbstractFileSystem

from pipeline.config import ComponentSpec, SpecError, absolute, reading
from pipeline.data.decode import Unreadable
from pipeline.data.vector_files import FLOATS, INTEGERS, QUERIES, QUERY_IDS, STRINGS, NpyArray
from pipeline.eval import Benchmark, JudgedQueries
from pipeline.eval.topics import read_qrels
from pipeline.paths import locate

QUERY_LENGTHS = "querylens.npy"
#: Alternative name of the file of the ids in published data sets.
QUERIES_IDS = "queries_ids.npy"
FIELD = "benchmark.path"


class Npy(Benchmark["Npy.Spec"]):
    """Benchmark in a folder with query vectors, as in published multi-vector data sets.

    The folder contains

    - `queries.npy`: (Q, M, D), where trailing zero vectors of a query are padding, or (T, D) with
      the concatenated vectors of all queries;
    - `querylens.npy` (Q,) with the number of vectors per query. It is optional for (Q, M, D);
    - optionally `query_ids.npy` or `queries_ids.npy` (Q,), strings or integers. Without ids, they
      are the row numbers;
    - the judgments, as lines of BEIR (`query-id<TAB>corpus-id<TAB>score`) or TREC.

    The documents of the folder are indexed with the source `vectors`.
    """

    class Spec(ComponentSpec):
        """Benchmark with query vectors in .npy files."""

        name: Literal["npy"] = "npy"
        path: str
        """Folder of the benchmark."""
        qrels: str = ""
        """File of the judgments in the folder, or empty for the only .tsv file in it."""

    def load(self) -> JudgedQueries:
        """Loads the queries with judgments."""
        fs, folder = locate(absolute(self.spec.path))
        vectors = _read_queries(fs, folder, self.spec.path)
        name = self.spec.qrels or _find_qrels(fs, folder, self.spec.path)
        qrels = read_qrels(posixpath.join(absolute(self.spec.path), name), "benchmark.qrels")
        judged = {query_id: array for query_id, array in vectors.items() if query_id in qrels}
        if not judged:
            rule = "a benchmark with a judged query"
            raise SpecError(FIELD, self.spec.path, rule, "has no judged queries")
        return JudgedQueries(
            dict.fromkeys(judged, ""),
            {query_id: qrels[query_id] for query_id in judged},
            num_unjudged=len(vectors) - len(judged),
            num_without_text=len(qrels) - len(judged),
            vectors=judged,
        )


def _find_qrels(fs: AbstractFileSystem, folder: str, path: str) -> str:
    names = sorted(posixpath.basename(name) for name in fs.ls(folder, detail=False))
    names = [name for name in names if name.endswith(".tsv")]
    if len(names) != 1:
        problem = f"contains {', '.join(names) or 'no .tsv file'}; set qrels"
        raise SpecError(FIELD, path, "a folder with a single .tsv file", problem)
    return names[0]


def _read_queries(fs: AbstractFileSystem, folder: str, path: str) -> dict[str, np.ndarray]:
    """Reads the vectors (M_i, D) of the queries by id."""
    queries = _read(fs, folder, QUERIES, FLOATS, path)
    lengths = None
    if fs.exists(f"{folder}/{QUERY_LENGTHS}"):
        lengths = _read(fs, folder, QUERY_LENGTHS, INTEGERS, path)
    num_dimensions = (3,) if lengths is None else (2, 3)
    if queries.ndim not in num_dimensions or not queries.size:
        rule = f"a folder with {QUERIES} of shape (Q, M, D), or (T, D) with {QUERY_LENGTHS}"
        raise SpecError(FIELD, path, rule, f"has {QUERIES} of shape {queries.shape}")
    if lengths is None:
        is_padding_QM = np.abs(queries).max(axis=2) == 0
        lengths = queries.shape[1] - np.argmin(is_padding_QM[:, ::-1], axis=1)
    _check_lengths(lengths, queries, path)
    if queries.ndim == 3:
        arrays = [array[:length] for array, length in zip(queries, lengths, strict=True)]
    else:
        arrays = np.split(queries, np.cumsum(lengths)[:-1])
    ids = _read_ids(fs, folder, len(arrays), path)
    for query_id, array in zip(ids, arrays, strict=True):
        if not np.isfinite(array).all() or not array.any():
            problem = f"has NaN, infinity or only zeros in the query {query_id!r}"
            raise SpecError(FIELD, path, "a folder with finite query vectors", problem)
    return dict(zip(ids, arrays, strict=True))


def _check_lengths(lengths: np.ndarray, queries: np.ndarray, path: str) -> None:
    num_vectors = int(lengths.sum(dtype=object))  # Python integers do not overflow
    rule = f"a folder with a length >= 1 in {QUERY_LENGTHS} per query"
    if queries.ndim == 2:
        rule += f", whose sum is the number of rows of {QUERIES}"
        fits = num_vectors == len(queries)
    else:
        rule += f", at most M of the shape (Q, M, D) of {QUERIES}"
        fits = lengths.shape == queries.shape[:1] and lengths.max() <= queries.shape[1]
    if lengths.ndim != 1 or not lengths.size or lengths.min() < 1 or not fits:
        limits = f", from {lengths.min()} to {lengths.max()}" if lengths.size else ""
        problem = f"has {QUERY_LENGTHS} of shape {lengths.shape} and sum {num_vectors}{limits},"
        raise SpecError(FIELD, path, rule, f"{problem} and {QUERIES} of shape {queries.shape}")


def _read_ids(fs: AbstractFileSystem, folder: str, num_queries: int, path: str) -> list[str]:
    names = (QUERY_IDS, QUERIES_IDS)
    name = next((name for name in names if fs.exists(f"{folder}/{name}")), None)
    if name is None:
        return [str(row) for row in range(num_queries)]
    array = _read(fs, folder, name, STRINGS | INTEGERS, path)
    values = array.ravel().tolist()
    ids = [i.decode(errors="replace") if isinstance(i, bytes) else str(i) for i in values]
    ids = [query_id.strip() for query_id in ids]  # as in judgments
    (query_id, number), *_ = Counter(ids).most_common(1) or [("", 0)]
    if array.shape != (num_queries,) or number > 1:
        problem = f"has {num_queries} queries and {name} of shape {array.shape}"
        problem = f"has the id {query_id!r} more than once" if number > 1 else problem
        raise SpecError(FIELD, path, f"a folder with one unique id in {name} per query", problem)
    return ids


def _read(
    fs: AbstractFileSystem, folder: str, name: str, dtypes: Mapping[str, str], path: str
) -> np.ndarray:
    rule, problem = f"a folder with {name}", f"has an unreadable {name}"
    with reading(FIELD, path, rule, ValueError, Unreadable, problem=problem):
        array = NpyArray(fs, f"{folder}/{name}", dtypes)
        return array.values(0, math.prod(array.shape)).reshape(array.shape)
