"""Ranking of the judged queries by the rows of an evaluation, with latencies and sizes."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from pipeline.config import SpecError, digest, dump, parse
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.eval import JudgedQueries, bm25
from pipeline.eval.cache import Measurements, cache_key
from pipeline.eval.diagnose import Diagnoser, uncompressed_representation
from pipeline.eval.diagnostics import Diagnosis
from pipeline.eval.example_selection import NUM_HITS
from pipeline.eval.metrics import per_query
from pipeline.eval.results import BM25, SINGLE_VECTOR, SIZES, Result
from pipeline.eval.rows import Row
from pipeline.eval.spec import EvaluateSpec, RerankRow
from pipeline.eval.topics import judged_query_vectors
from pipeline.index.columns import RERANK_TOKENS
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import IndexReader
from pipeline.index.status import representation_stats, rerank_token_stats
from pipeline.schema import ITEM
from pipeline.search.candidates import BM25 as BM25_GENERATOR
from pipeline.search.candidates import EXACT, generator_columns
from pipeline.search.fusion import FUSED
from pipeline.search.options import EQUAL_WEIGHTS, SearchOptions
from pipeline.search.query import Queries, encode
from pipeline.search.results import Hit
from pipeline.search.searcher import Searcher

if TYPE_CHECKING:
    from pipeline.search.rerankers import Reranker, RerankerSpec

T = TypeVar("T")
AnyQueries = EncodedQueries | list[np.ndarray]
#: Ids of the documents that are ranked for a query, or None for all documents of the index.
Pool = tuple[str, ...] | None
#: Returns the scores by document id, best first, of queries given by their numbers.
RankInPool = Callable[[list[int], Pool], Sequence[dict[str, float]]]
#: Checks that rerankers support queries and what they search.
CheckRerankers = Callable[["Sequence[Reranker[Any]]", Any], object]
#: Number of queries that are scored one at a time to measure latency.
NUM_TIMED_QUERIES = 50


class Ranker:
    """Ranks the judged queries by one row after another. Encoders are loaded on first use.

    Args:
        encoded: Encoded queries by fingerprint of the encoder, which rankers of several indexes
            share.

    Attributes:
        report: Function that reports the progress of rerankers, if any.
    """

    def __init__(
        self,
        spec: EvaluateSpec,
        judged: JudgedQueries,
        searcher: Searcher,
        encoded: dict[str, EncodedQueries] | None = None,
    ):
        self._spec, self._judged, self._searcher = spec, judged, searcher
        self._group_by = "parent" if spec.judged == "parent" else None
        self._k = spec.k + judged.num_removed  # hits per query before the query itself is removed
        self._encoded = {} if encoded is None else encoded
        self._vectors = judged_query_vectors(spec.query_vectors, judged, list(judged.queries))
        self._vectors_hash = self._vectors and _vectors_digest(self._vectors)
        self._query_ids, self._texts = list(judged.queries), list(judged.queries.values())
        self._diagnoser: Diagnoser | None = None
        self._rerankers: dict[str, list[Reranker[Any]]] = {}
        self._models: dict[RerankerSpec, Reranker[Any]] = {}
        self.report: Callable[[str], None] | None = None
        options = judged.options()
        judgments = [judged.queries, judged.qrels, spec.judged, *([options] if options else [])]
        self.judgments = digest(judgments)

    def key(self, row: Row) -> str:
        """Computes the cache key of `measure`, which is a hash of everything that it depends on."""
        index, spec = self._searcher.index, self._spec
        inputs: dict[str, Any] = {"judgments": self.judgments, "k": spec.k}
        inputs["measures"] = spec.measures
        if row.score == BM25:
            columns: list[str] = [spec.text]
            inputs["bm25"] = [spec.text, spec.filter]
        else:
            info = index.representation(row.representation)
            columns = [*_columns(row, info), *self._codes_columns(row)]
            name: str | None = row.representation
            stored = [info.codec, *fitting_key(info)]
            if row.score == SINGLE_VECTOR:  # all representations of an encoder share them
                name, stored = info.pooled_column, []
            inputs["options"] = dump(self._options(row, representation=name))
            inputs["vectors"] = [self._vectors_hash, info.encoder.fingerprint, *stored]
        if row.rerank is not None:
            inputs["rerank"] = self.rerank_key(self.rerankers(row.rerank))
        columns = ["item_id", "parent_id", *columns, *self._filter_columns]
        return cache_key(**inputs, content=index.content_key(columns))

    def _options(self, row: Row, **changes: Any) -> SearchOptions:
        spec, depth = self._spec, self._k
        if row.rerank is not None:
            depth = max(depth, row.rerank.top)
        fields: dict[str, Any] = {"representation": row.representation, "score": row.score}
        fields |= {"k": depth, "group_by": self._group_by, "filter": spec.filter}
        fields["candidates"] = EXACT
        if row.score == "hybrid":
            fields["weights"] = spec.weights
        if row.score == FUSED:
            fields["fusion"] = spec.fusion
        if row.candidates is not None:
            number = max(row.candidates.number, depth)
            fields |= {"candidates": row.candidates.generator, "num_candidates": number}
        return parse(SearchOptions, {**fields, **changes})

    def rerankers(self, row: RerankRow, check: CheckRerankers | None = None) -> list[Reranker[Any]]:
        """Returns the rerankers of a row, loaded once.

        Args:
            check: Function that raises `SpecError` if rerankers do not support the queries. By
                default, they must also support the index.
        """
        if row.row not in self._rerankers:
            from pipeline.search.rerankers import load_rerankers

            first = [next(self._judged.inputs(self._judged.queries))]
            queries = first if self._judged.media else self._texts
            field = f"rerank[{self._spec.rerank.index(row)}]"
            specs: list[Any] = row.rerankers
            try:
                loaded = load_rerankers(specs if len(specs) > 1 else specs[0], self._models)
                (check or self._check_rerankers)(loaded, queries)
            except SpecError as error:
                if not error.field.startswith("rerank"):
                    raise
                raise error.at(error.field.replace("rerank", field, 1)) from None
            self._rerankers[row.row] = loaded
        return self._rerankers[row.row]

    def _check_rerankers(self, rerankers: Sequence[Reranker[Any]], queries: Any) -> None:
        for reranker in rerankers:
            reranker.check(self._searcher.index, queries)

    def rerank_key(self, rerankers: Sequence[Reranker[Any]]) -> list[Any]:
        """Returns the part of cache keys that depends on rerankers and what they read."""
        options = [[r.fingerprint, r.spec.top, r.spec.add_first_stage] for r in rerankers]
        columns = [name for reranker in rerankers for name in reranker.columns]
        return [self._searcher.index.content_key(columns), options]

    def weights(self, score: str) -> list[float] | None:
        """Returns the weights of the hybrid score, or None if they are equal."""
        weighted = score == "hybrid" and self._spec.weights != EQUAL_WEIGHTS
        return list(self._spec.weights) if weighted else None

    def diagnosis_key(self, representation: str) -> str:
        """Returns the cache key of `diagnosis`."""
        index = self._searcher.index
        names = [representation, uncompressed_representation(index, representation)]
        infos = [index.representation(name) for name in names if name]
        stored = [info.column for info in infos]
        columns = ["item_id", "parent_id", *stored, *self._filter_columns]
        return cache_key(
            diagnosis=names,
            content=index.content_key(columns),
            fitted=[fitting_key(info) for info in infos],
            vectors=self._vectors_hash,
            judgments=self.judgments,
            filter=self._spec.filter,
        )

    def diagnosis(self, representation: str) -> Diagnosis:
        """Diagnoses a representation on all judged queries."""
        if self._diagnoser is None:
            spec, all_queries = self._spec, range(len(self._judged.queries))
            assert spec.judged != "auto"
            self._diagnoser = Diagnoser(
                self._searcher,
                self._judged,
                spec.judged,
                spec.filter,
                lambda name: self._queries(name, all_queries),
            )
        return self._diagnoser.diagnose(representation)

    @property
    def _filter_columns(self) -> list[str]:
        return ITEM.names if self._spec.filter else []

    def measure(self, row: Row) -> Measurements:
        """Ranks all queries by a row in one batch, and then some of them individually."""
        rank = self._bm25_ranker() if row.score == BM25 else self._vector_ranker(row)
        costs: dict[str, Any] = {"maxsim_ops": self._maxsim_ops(row), **self._row_sizes(row)}
        if row.rerank is None:
            return self.measure_ranking(rank, **costs)
        return self.measure_ranking(rank, self.rerankers(row.rerank), **costs)

    def measure_ranking(
        self,
        rank_in_pool: RankInPool,
        rerankers: Sequence[Reranker[Any]] = (),
        **costs: float,
    ) -> Measurements:
        """Measures a ranking, whose sizes and `maxsim_ops` are known. See `Measurements`.

        Args:
            rerankers: Rerankers that the ranking applies, whose usage is measured.
        """
        take_usage: Callable[[], dict[str, float]] = dict
        if rerankers:
            from pipeline.search.rerankers import usage_fields

            take_usage = functools.partial(usage_fields, rerankers)
        for reranker in rerankers:
            reranker.report = self.report
        rank = functools.partial(self._by_pool, rank_in_pool)
        all_queries = range(len(self._judged.queries))
        rank(all_queries[:1])  # warm-up
        take_usage()
        start = time.perf_counter()
        ranked = rank(all_queries)
        seconds = time.perf_counter() - start
        usage = take_usage()
        latencies_ms = []
        for number in all_queries[:NUM_TIMED_QUERIES]:
            query_start = time.perf_counter()
            rank([number])
            latencies_ms.append(1000 * (time.perf_counter() - query_start))
        rankings = {
            query_id: self._judged.remove_queries(query_id, scores, self._spec.k)
            for query_id, scores in zip(self._judged.queries, ranked, strict=True)
        }
        return Measurements(
            rankings=rankings,
            values=per_query(
                rankings, self._judged.qrels, self._spec.measures, self._judged.moments
            ),
            **costs,
            rerank_usage=usage,
            queries_per_second=len(all_queries) / seconds,
            median_ms=float(np.median(latencies_ms)),
            p95_ms=float(np.percentile(latencies_ms, 95)),
        )

    def _maxsim_ops(self, row: Row) -> float:
        """Counts the similarities of query tokens and vectors. See `Result.maxsim_ops`."""
        is_exact = row.rerank is None and row.candidates is None
        if row.score not in ("maxsim", "hybrid") or not is_exact:
            return 0.0
        name = row.representation
        lengths = self._searcher.packed(name).lengths.cpu().numpy()

        def count(numbers: Sequence[int], pool: Pool) -> list[int]:
            rows = self._searcher.items.select(self._options(row, **self.restriction(pool)))
            num_vectors = int((lengths if rows is None else lengths[rows]).sum())
            tokens = self._searcher.queries(self._queries(name, numbers), name).tokens
            return [len(query) * num_vectors for query in tokens]

        return float(sum(self._by_pool(count, range(len(self._judged.queries)))))

    def _codes_columns(self, row: Row) -> list[str]:
        generators = [] if row.candidates is None else [row.candidates.generator]
        generators += [BM25_GENERATOR] if row.score == FUSED else []
        if not generators:  # such as the row of BM25
            return []
        info = self._searcher.representation(row.representation)
        found = (generator_columns(self._searcher.index, info, name) for name in generators)
        return [column for columns in found for column in columns.values()]

    def _row_sizes(self, row: Row) -> dict[str, float]:
        """Computes the bytes per item that a row reads, including the tokens of a reranker."""
        index, filter = self._searcher.index, self._spec.filter
        sizes = _sizes(index, row, filter)
        for column in self._codes_columns(row):
            for name in ("vector_bytes", "all_bytes"):
                sizes[name] += self._searcher.scorer.codes(column).item_bytes
        if row.rerank is not None:
            add_token_sizes(sizes, index, self.rerankers(row.rerank), filter)
        return sizes

    def hits(self, result: Result, query_ids: Sequence[str]) -> list[list[Hit]]:
        """Returns the best hits of a few queries with explanations."""
        if not query_ids:
            return []
        numbers = {query_id: number for number, query_id in enumerate(self._judged.queries)}
        name, score = result.representation, cast(Any, result.score)
        row = Row(name, score)
        fields = {"k": NUM_HITS + self._judged.num_removed, "explain": "matches"}

        def search(numbers: Sequence[int], pool: Pool) -> list[list[Hit]]:
            options = self._options(row, **fields, **self.restriction(pool))
            return self._searcher.search_with(self.queries_with_texts(name, numbers), options)

        found = self._by_pool(search, [numbers[query_id] for query_id in query_ids])
        return [
            self._without_query(query_id, hits)
            for query_id, hits in zip(query_ids, found, strict=True)
        ]

    def _without_query(self, query_id: str, hits: list[Hit]) -> list[Hit]:
        by_id = {hit.parent_id if self._group_by else hit.item_id: hit for hit in hits}
        scores = {document_id: hit.score for document_id, hit in by_id.items()}
        documents = self._judged.remove_queries(query_id, scores, NUM_HITS)
        ranks = enumerate(documents, start=1)
        return [by_id[document].model_copy(update={"rank": rank}) for rank, document in ranks]

    def _bm25_ranker(self) -> RankInPool:
        spec = self._spec
        ranker = bm25.Bm25(self._searcher.index, spec.judged, spec.text, spec.filter)

        def rank(numbers: Sequence[int], pool: Pool) -> list[dict[str, float]]:
            return ranker.rank([self._texts[number] for number in numbers], self._k, pool)

        return rank

    def _by_pool(
        self, rank: Callable[[list[int], Pool], Sequence[T]], numbers: Sequence[int]
    ) -> list[T]:
        """Ranks queries by their numbers, those with the same candidate pool in one call."""
        return map_by_pool(rank, numbers, self._query_ids, self._judged.pools)

    def restriction(self, pool: Pool) -> dict[str, Any]:
        """Returns the search options that restrict the documents to a pool."""
        return {} if pool is None else {"parents" if self._group_by else "ids": pool}

    def _vector_ranker(self, row: Row) -> RankInPool:
        name = row.representation
        assert row.score != BM25
        candidates = EXACT if row.candidates is None else row.candidates.generator
        self._searcher.load(name, row.score, candidates)
        rerankers = [] if row.rerank is None else self.rerankers(row.rerank)

        def rank(numbers: Sequence[int], pool: Pool) -> list[dict[str, float]]:
            options = self._options(row, **self.restriction(pool))
            rankings = self._searcher.rank_with(self.queries_with_texts(name, numbers), options)
            if rerankers:
                from pipeline.search.rerankers import rerank_in_turn

                selected: Any = list(self._judged.inputs(self._query_ids[n] for n in numbers))
                rankings = rerank_in_turn(rerankers, self._searcher, selected, rankings, self._k)
            if self._group_by:
                return [ranking.scores_by_parent() for ranking in rankings]
            return [ranking.scores_by_item() for ranking in rankings]

        return rank

    def queries_with_texts(self, representation: str, numbers: Sequence[int]) -> Queries:
        """Returns some of the judged queries as vectors, with their texts if they have any."""
        queries = self._searcher.queries(self._queries(representation, numbers), representation)
        if not self._judged.has_texts:
            return queries
        return queries.with_texts([self._texts[number] for number in numbers])

    def query_encoder(self, representation: str) -> Encoder:
        """Returns the query encoder of a representation, with the instruction of the task."""
        encoder = self._searcher.encoder(representation)
        if self._judged.instruction is None:
            return encoder
        return encoder.with_instruction(self._judged.instruction)

    def _queries(self, representation: str, numbers: Sequence[int]) -> AnyQueries:
        if self._vectors is not None:
            return [self._vectors[number] for number in numbers]
        encoder = self._searcher.index.representation(representation).encoder.fingerprint
        if encoder not in self._encoded:
            inputs = self._judged.inputs(self._judged.queries)
            model = self.query_encoder(representation)
            self._encoded[encoder] = encode(model, inputs, max_seconds=math.inf)
        encoded = self._encoded[encoder]
        tokens, texts = encoded.tokens.take(torch.tensor(numbers)), encoded.texts
        return EncodedQueries(
            tokens,
            [encoded.token_texts[number] for number in numbers],
            texts and [texts[number] for number in numbers],
        )


def _vectors_digest(vectors: Sequence[np.ndarray]) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for array in vectors:
        hashed.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def fitting_key(info: RepresentationInfo) -> list[Any]:
    """Returns the part of cache keys that depends on fitting: codec, artefact and prefix length."""
    return [*info.codec_fit.values(), info.codec_artefact, info.max_vectors]


def _columns(row: Row, info: RepresentationInfo) -> list[str]:
    pooled = [] if row.score == "maxsim" or not info.pooled_column else [info.pooled_column]
    if row.score == SINGLE_VECTOR:
        return pooled
    return [info.column, *info.token_columns, *pooled]


def _sizes(index: IndexReader, row: Row, filter: str | None) -> dict[str, float]:
    """Returns the number of vectors and bytes per item that are read to compute a row's score."""
    sizes = dict.fromkeys(SIZES, 0.0)
    if row.score in ("maxsim", "hybrid", FUSED):
        stored_sizes = representation_stats(index, row.representation, filter)
        parts = ("vectors", "bytes_vectors", "bytes_assignment", "bytes_positions", "bytes_all")
        sizes = {name: float(stored_sizes[part]) for name, part in zip(SIZES, parts, strict=True)}
    if row.score in (SINGLE_VECTOR, "hybrid"):
        pooled = index.representation(row.representation).pooled_column
        type = index.schema.field(pooled).type
        sizes["vectors_per_item"] += 1
        for name in ("vector_bytes", "all_bytes"):
            sizes[name] += type.list_size * type.value_type.bit_width / 8
    return sizes


def add_token_sizes(
    sizes: dict[str, float],
    index: IndexReader,
    rerankers: Sequence[Reranker[Any]],
    filter: str | None,
) -> None:
    """Adds the tokens that rerankers read to the sizes per item."""
    if any(RERANK_TOKENS in reranker.columns for reranker in rerankers):
        # Image queries are scored with the texts of items, which need no tokens.
        tokens = rerank_token_stats(index, filter) or {"tokens": 0.0, "bytes": 0.0}
        sizes["vectors_per_item"] += tokens["tokens"]
        for name in ("vector_bytes", "all_bytes"):
            sizes[name] += tokens["bytes"]


def map_by_pool(
    function: Callable[[list[int], Pool], Sequence[T]],
    numbers: Sequence[int],
    query_ids: Sequence[str],
    pools: Mapping[str, Sequence[str]] | None,
) -> list[T]:
    """Calls a function once per distinct pool and returns its results in the order of the queries.

    The function gets the numbers of some queries and their common pool, which is None to rank all
    documents. Queries without an entry rank no document.

    >>> pools = {"a": ("x",), "b": ("y", "z"), "c": ("x",)}
    >>> sizes = lambda numbers, pool: [len(pool)] * len(numbers)
    >>> map_by_pool(sizes, [0, 1, 2], ["a", "b", "c"], pools)
    [1, 2, 1]
    """
    if pools is None:
        return list(function(list(numbers), None))
    by_pool: dict[tuple[str, ...], list[int]] = {}
    for position, number in enumerate(numbers):
        by_pool.setdefault(tuple(pools.get(query_ids[number], ())), []).append(position)
    results: dict[int, T] = {}
    for pool, positions in by_pool.items():
        found = function([numbers[position] for position in positions], pool)
        results.update(zip(positions, found, strict=True))
    return [results[position] for position in range(len(numbers))]
