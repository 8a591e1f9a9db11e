"""Scoring and ranking of the items of an index.

    maxsim         sum over the query tokens of the best similarity with an item token
    single_vector  similarity of the pooled vectors of query and item
    hybrid         weights[0] * single_vector + weights[1] * maxsim / number of query tokens
                   (SMART, eq. 5 and 4)
    fused          combination of the rankings by MaxSim, BM25 and single vectors
                   (`pipeline.search.fusion`)

With a negative query, its score multiplied by `negative_weight` is subtracted from these scores.

SMART adds both terms of the hybrid score with equal weights "to keep SMART hyperparameter-free",
which is the default here.

All items are scored, or only the candidates that a generator finds (`pipeline.search.candidates`).
Query vectors have unit length, so similarities are cosines if the vectors of the representation
have unit length too (`normalised` in the metadata of the column).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from pipeline.config import SpecError
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import files_with
from pipeline.runtime.tracing import span
from pipeline.search import pauses
from pipeline.search.cache import packed_column
from pipeline.search.candidates import (
    BM25,
    EXACT,
    IVF,
    generator_columns,
    is_exact_faster,
    most_probes,
    numbers_for,
)
from pipeline.search.fusion import COMPONENTS, DEFAULT_FUSION, FUSED, best_rows, pool_rows
from pipeline.search.generators.bm25 import Postings, encode
from pipeline.search.lists import Lists
from pipeline.search.maxsim import best_scores, maxsim
from pipeline.search.options import SearchOptions
from pipeline.search.packed import PackedVectors
from pipeline.search.query import Queries
from pipeline.search.results import FirstStage, RerankScore
from pipeline.search.scores import Score
from pipeline.search.selection import Items

#: Number of queries per batch, which bounds the size of the (queries, items) score matrix.
QUERY_BATCH = 64
#: Number of (query token, vector) pairs between pauses: 0.15 s for 128 dimensions in float32 on
#: two cores.
SLICE_PAIRS = 1 << 27
#: Maximum number of selected items that are all scored although a candidate generator is requested.
#: On two cores, 4,096 items of 32 int8 vectors take 3 ms.
EXACT_ITEMS = 4096
#: Number of prefixes whose views are cached. A view holds two offsets per item, and clients may
#: request any prefix.
MAX_PREFIXES = 16

#: Ascending indices (R,) int64 of items, or None for all.
Rows = np.ndarray | None


@dataclass(frozen=True)
class Ranking:
    """Ids and scores of the k best items of a query in descending order.

    Attributes:
        item_ids: Ids of the items.
        parent_ids: Ids of their parents.
        scores: Scores of the items.
        rows: (k,) int64, indices of the items in the index.
        maxsim: (k,) float32, MaxSim scores if they are part of the score.
        single_vector: (k,) float32, single-vector scores if they are part of the score.
        bm25: (k,) float32, BM25 scores if they are part of the score. 0 without a common term.
        negative: (k,) float32, scores of the negative query, or None without one.
        first_stage: Ranks and scores before reranking, or None without reranking.
        rerank: Scores of rerankers, or None without one.
    """

    item_ids: list[str]
    parent_ids: list[str]
    scores: list[float]
    rows: np.ndarray
    maxsim: np.ndarray | None = None
    single_vector: np.ndarray | None = None
    bm25: np.ndarray | None = None
    negative: np.ndarray | None = None
    first_stage: tuple[FirstStage, ...] | None = None
    rerank: tuple[RerankScore, ...] | None = None

    def scores_by_item(self) -> dict[str, float]:
        """Returns scores by item id, best first."""
        return dict(zip(self.item_ids, self._descending_scores(), strict=True))

    def scores_by_parent(self) -> dict[str, float]:
        """Returns scores by parent id, best first. The ranking must be grouped by parent."""
        return dict(zip(self.parent_ids, self._descending_scores(), strict=True))

    def components(self) -> dict[str, np.ndarray]:
        """Returns the computed components of the scores by name."""
        parts = {name: getattr(self, name) for name in COMPONENTS}
        return {name: scores for name, scores in parts.items() if scores is not None}

    def ranks(self) -> tuple[FirstStage, ...]:
        """Returns the rank and the score of each item."""
        numbers = enumerate(self.scores, start=1)
        return tuple(FirstStage(rank=rank, score=score) for rank, score in numbers)

    def _descending_scores(self) -> Sequence[float]:
        """Returns scores, or descending ranks after reranking, which mixes scores of two stages."""
        if self.first_stage is None:
            return self.scores
        return [float(number) for number in range(len(self.scores), 0, -1)]

    def take(self, indices: Sequence[int]) -> Ranking:
        """Selects items by their indices and returns them in the given order."""
        index = np.array(indices, np.int64)

        def taken(values: Any) -> Any:
            if values is None or isinstance(values, np.ndarray):
                return None if values is None else values[index]
            return type(values)(values[i] for i in indices)

        return Ranking(**{f.name: taken(getattr(self, f.name)) for f in fields(Ranking)})


class Scorer:
    """Scores the items of an index. Their vectors are opened on first use.

    Args:
        cache: Whether to pack vectors into memory-mapped local files. If False, they are read into
            memory.
        device: "cpu", or a CUDA device that holds the vectors and computes the scores.

    Raises:
        SpecError: The device is not available.
    """

    def __init__(self, items: Items, *, cache: bool = True, device: str = "cpu"):
        devices = ["cpu"]
        if torch.cuda.is_available():
            devices += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        if device not in devices:
            raise SpecError("device", device, f"one of {', '.join(devices)}", "is not available")
        self._items, self._index = items, items.index
        self._cache, self._device = cache, device
        self._packed: dict[str, PackedVectors] = {}
        self._postings: dict[str, Postings] = {}
        self._lists: dict[str, Lists] = {}
        self._uncoded_rows: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}
        self._prefix = functools.lru_cache(MAX_PREFIXES)(PackedVectors.prefix)

    def load(self, representation: str, score: Score = "maxsim", candidates: str = EXACT) -> None:
        """Opens the vectors that a score and a candidate generator need."""
        for column in self._columns(representation, score, candidates):
            self.lists(column) if self._is_ivf(column) else self.codes(column)

    def is_loaded(
        self, representation: str, score: Score = "maxsim", candidates: str = EXACT
    ) -> bool:
        """Checks whether the vectors that a score and a generator need have been opened."""
        columns = self._columns(representation, score, candidates)
        opened = self._packed.keys() | self._postings.keys()
        return all(c in (self._lists if self._is_ivf(c) else opened) for c in columns)

    def num_scored_vectors(self, options: SearchOptions) -> int:
        """Returns the number of vectors with which each query token is compared, as an estimate."""
        if options.score == "single_vector":
            return 1
        packed = self.vectors(options.column)
        if options.candidates == EXACT:
            return packed.num_vectors
        info = self._index.representation(options.column)
        columns = generator_columns(self._index, info, options.candidates)
        codes = [self.codes(column) for column in columns.values() if not self._is_ivf(column)]
        num_candidates = min(sum(self._nums_candidates(options)), len(packed))
        share = num_candidates / max(len(packed), 1)
        return sum(opened.num_vectors for opened in codes) + int(share * packed.num_vectors)

    def _columns(self, representation: str, score: Score, candidates: str) -> list[str]:
        info = self._index.representation(representation)
        columns = [] if score == "single_vector" else [info.column]
        if score != "maxsim" and info.pooled_column:
            columns.append(info.pooled_column)
        if score == FUSED:
            columns.append(self._bm25_column(info))
        if candidates != EXACT:
            columns += generator_columns(self._index, info, candidates).values()
        return columns

    def _bm25_column(self, info: RepresentationInfo) -> str:
        return generator_columns(self._index, info, BM25)[BM25]

    def vectors(self, representation: str) -> PackedVectors:
        """Returns the vectors of a representation. Those of a prefix are a view of its column."""
        info = self._index.representation(representation)
        packed = self.packed(info.column)
        return packed if info.max_vectors is None else self._prefix(packed, info.max_vectors)

    def packed(self, column: str) -> PackedVectors:
        """Returns the vectors of a column, which is a representation or contains pooled vectors."""
        if column not in self._packed:
            scorer = weakref.ref(self)  # a cycle would delay the release of the vectors

            def close() -> None:
                if (opened := scorer()) is not None:
                    opened._close(column)

            self._packed[column] = packed_column(
                self._index,
                column,
                self._items.fragments,
                cache=self._cache,
                device="cpu" if self._is_ivf(column) else self._device,
                on_corruption=close,
            )
        return self._packed[column]

    def postings(self, column: str) -> Postings:
        """Returns the postings of the items, which are held in memory with 8 bytes per entry."""
        if column not in self._postings:
            generator = self._index.generator(column)
            self._postings[column] = Postings(generator, self._text_codes(column))
        return self._postings[column]

    def _text_codes(self, column: str) -> Iterator[pa.Array]:
        """Yields the codes of all texts. Those added since the column was filled are encoded."""
        index = self._index
        text_column = index.candidates_columns[column].representation
        (field_ids,) = index.field_ids([column]).values()
        for fragment in self._items.fragments:
            has_codes = bool(files_with(fragment, field_ids))
            for batch in index.batches(
                [column if has_codes else text_column], fragments=[fragment]
            ):
                yield batch[0] if has_codes else encode(batch[0].to_pylist())

    def codes(self, column: str) -> PackedVectors | Postings:
        """Returns the codes or the vectors of a column."""
        info = self._index.candidates_columns.get(column)
        is_bm25 = info is not None and info.generator_name == BM25
        return self.postings(column) if is_bm25 else self.packed(column)

    def lists(self, column: str) -> Lists:
        """Returns the inverted lists of a column of the generator `ivf`, which are in memory."""
        if column not in self._lists:
            self._lists[column] = Lists(self._index.generator(column), self.packed(column))
        return self._lists[column]

    def _is_ivf(self, column: str) -> bool:
        info = self._index.candidates_columns.get(column)
        return info is not None and info.generator_name == IVF

    def _close(self, column: str) -> None:
        self._packed.pop(column, None)
        self._lists.pop(column, None)
        self._prefix.cache_clear()

    def item_vectors(self, representation: str, rows: np.ndarray) -> list[torch.Tensor]:
        """Returns the decoded vectors (N, D) float32 of the given items."""
        packed = self.vectors(representation)
        return [packed.item(row).cpu() for row in rows.tolist()]

    def scores_all(self, options: SearchOptions, rows: np.ndarray | None) -> bool:
        """Checks whether all selected items are scored, not only the candidates of a generator."""
        if options.candidates == EXACT:
            return True
        number = max(self._nums_candidates(options))
        if rows is None:
            return len(self._items) <= number
        if options.candidates != IVF or len(rows) <= max(number, EXACT_ITEMS):
            return len(rows) <= max(number, EXACT_ITEMS)
        given = options.k, options.num_candidates, len(rows), len(self._items)
        return is_exact_faster(self._index, self._index.representation(options.column), *given)

    def rank(
        self, queries: Queries, options: SearchOptions, rows: np.ndarray | None
    ) -> list[Ranking]:
        """Finds the k best items for each query. Ties are sorted by item id.

        Raises:
            SpecError: The queries or the representation lack vectors that the score needs.
        """
        return [fuse(ranking, options) for ranking in self.rank_part(queries, options, rows)]

    def rank_part(
        self, queries: Queries, options: SearchOptions, rows: np.ndarray | None
    ) -> list[Ranking]:
        """Finds the items that `merge_rankings` needs: the k best, or more for fused scores."""
        options.check_vectors(queries, self._index.representation(options.column).pooled_column)
        if options.candidates != EXACT:
            options.check_candidates(queries)
        scores_all = self.scores_all(options, rows)
        rankings = []
        for first in range(0, len(queries), QUERY_BATCH):
            if first:
                pauses.pause()
            batch = queries.part(first, first + QUERY_BATCH)
            if scores_all:
                with span("score", queries=len(batch)):
                    rankings += self._rank_batch(batch, options, rows)
                continue
            with span("candidates", queries=len(batch), generator=options.candidates):
                candidates = self._candidates(batch, options, rows)
            with span("score", queries=len(batch)):
                rankings += self._rank_batch(batch, options, candidates)
        return rankings

    def _rank_batch(
        self, queries: Queries, options: SearchOptions, rows: Rows | list[np.ndarray]
    ) -> list[Ranking]:
        """Ranks the items `rows`, which can be a list with those of each query."""
        groups = self._items.parent_codes if options.group_by else None
        order, k = self._items.id_order, options.k
        rankings = []
        packed = None if options.score == "single_vector" else self.vectors(options.column)
        is_plain = options.score == "maxsim" and queries.negatives is None
        if is_plain and packed is not None and packed.device.type == "cpu":
            for items, scores in _best_scores(queries.tokens, packed, k, rows, groups):
                best = top_rows(scores, items, order, k, groups)
                rankings.append(self._ranking(best, _Scores(scores, scores), items))
        elif isinstance(rows, list):
            for query, query_rows in zip(queries.split(), rows, strict=True):
                rankings += self._rank_batch(query, options, query_rows)
        elif options.score == FUSED:
            return self._pools(queries, options, rows)
        else:
            all_scores = self._scores(queries, options, rows)
            each: Iterable[tuple[np.ndarray | None, _Scores]]
            if all_scores.total.is_cuda:
                each = _shortlists(all_scores, rows, k, groups)
            else:
                each = ((rows, all_scores.select(number)) for number in range(len(queries)))
            for found, parts in each:
                best = top_rows(parts.total, found, order, k, groups)
                rankings.append(self._ranking(best, parts, found))
        return rankings

    def _pools(
        self,
        queries: Queries,
        options: SearchOptions,
        rows: np.ndarray | None,
    ) -> list[Ranking]:
        """Returns the best items of a batch of queries by each component of the fused score.

        They are not fused yet, since bounds depend on the items of all shards.
        """
        weights = options.fusion.component_weights
        groups = self._items.parent_codes if options.group_by else None
        others: dict[str, Any] = {"fusion": DEFAULT_FUSION, "candidates": EXACT}
        maxsim_options = options.model_copy(update={"score": "maxsim", **others})
        maxsim_QR = self._scores(queries, maxsim_options, rows).total.numpy(force=True)
        single_QR = bm25_QR = None
        if weights.single_vector:
            single_options = options.model_copy(update={"score": "single_vector", **others})
            single_QR = self._scores(queries, single_options, rows).total.numpy(force=True)
        if weights.bm25:
            column = self._bm25_column(self._index.representation(options.column))
            bm25_QR = np.stack(list(self._bm25_scores(column, queries, rows)))
        all_parts = _Scores(maxsim_QR, maxsim_QR, single_QR, bm25_QR)
        pools = []
        for query in range(len(queries)):
            parts = all_parts.select(query)
            components = {n: s for n in COMPONENTS if (s := getattr(parts, n)) is not None}
            found = pool_rows(components, options.fusion, options.k, rows, groups)
            pools.append(self._ranking(found, parts, rows))
        return pools

    def _candidates(self, queries: Queries, options: SearchOptions, rows: Rows) -> list[np.ndarray]:
        """Finds the ascending indices of the candidates of each query in a batch.

        Items that have vectors but no code are candidates of all queries. If fewer than k items are
        found, all items are candidates.
        """
        info = self._index.representation(options.column)
        columns = generator_columns(self._index, info, options.candidates)
        found: list[np.ndarray] = []
        for name, column in columns.items():
            more = self._generate(name, column, queries, options, rows)
            found = [np.union1d(*pair) for pair in zip(found, more, strict=True)] if found else more
        if any(len(candidates) < options.k for candidates in found):
            all_rows = np.arange(len(self._items)) if rows is None else rows
            found = [all_rows if len(items) < options.k else items for items in found]
        return found

    def _generate(
        self,
        generator: str,
        column: str,
        queries: Queries,
        options: SearchOptions,
        rows: Rows,
    ) -> list[np.ndarray]:
        """Finds the items whose codes match each query best, and those without a code."""
        share = 1.0 if rows is None else len(rows) / max(len(self._items), 1)
        num, num_probes = numbers_for(self._index, column, options.k, options.num_candidates, share)
        uncoded, unscored = self._uncoded(column, options)
        coded = rows
        if len(unscored):
            all_rows = np.arange(len(self._items)) if rows is None else rows
            coded = np.setdiff1d(all_rows, unscored, assume_unique=True)
        groups = self._items.parent_codes if options.group_by else None
        approximate: Iterable[tuple[np.ndarray, np.ndarray]]
        if generator == IVF:
            info = self._index.representation(options.column)
            most = most_probes(info, len(self._items if coded is None else coded))
            approximate = self.lists(column).find(queries.tokens, num_probes, coded, num, most)
        elif generator == BM25:
            approximate = self._found_by_bm25(column, queries, coded)
        else:
            assert queries.pooled is not None
            pooled = list(queries.pooled[:, None])
            approximate = _best_scores(pooled, self.packed(column), num, coded, groups)
        found = [np.sort(best_rows(scores, items, num, groups)) for items, scores in approximate]
        if len(uncoded):
            more = uncoded if rows is None else np.intersect1d(uncoded, rows)
            found = [np.union1d(candidates, more) for candidates in found]
        return found

    def _found_by_bm25(
        self, column: str, queries: Queries, rows: Rows
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the items with a term of each query, and their scores."""
        for scores_R in self._bm25_scores(column, queries, rows):
            index = np.flatnonzero(scores_R > 0)
            yield index if rows is None else rows[index], scores_R[index]

    def ranks(
        self, queries: Queries, column: str, rows: Sequence[np.ndarray], num_probes: int
    ) -> list[np.ndarray]:
        """Returns the ranks (R,) of some items of each query by their scores of `ivf`.

        Items with equal scores have the worst of their ranks, and those without a code rank 0.

        Args:
            num_probes: Number of probed lists per query token.
        """
        is_coded = self.packed(column).is_coded
        ranks = []
        found = self.lists(column).scores(queries.tokens, num_probes)
        for scores_B, items in zip(found, rows, strict=True):
            num_below = np.searchsorted(np.sort(scores_B[is_coded]), scores_B[items])
            ranks.append((is_coded.sum() - num_below) * is_coded[items])
        return ranks

    def _nums_candidates(self, options: SearchOptions) -> list[int]:
        """Returns the number of candidates of each generator of a union."""
        info = self._index.representation(options.column)
        columns = generator_columns(self._index, info, options.candidates)
        given = options.k, options.num_candidates
        return [numbers_for(self._index, name, *given)[0] for name in columns.values()]

    def _bm25_scores(
        self, column: str, queries: Queries, rows: np.ndarray | None
    ) -> Iterator[np.ndarray]:
        """Yields the BM25 scores (R,) of items for each query, with a pause in between."""
        assert queries.texts is not None
        postings = self.postings(column)
        for number, text in enumerate(queries.texts):
            if number:
                pauses.pause()
            scores = postings.scores(text)
            yield scores if rows is None else scores[rows]

    def _uncoded(self, column: str, options: SearchOptions) -> tuple[np.ndarray, np.ndarray]:
        """Returns and caches the items with the score's vectors but no code, and vice versa."""
        score = "maxsim" if options.score == FUSED else options.score
        scored = self._columns(options.column, score, EXACT)
        key = (column, *scored)
        if key not in self._uncoded_rows:
            has_vectors = np.logical_and.reduce([self.packed(name).is_coded for name in scored])
            is_coded = self.codes(column).is_coded
            self._uncoded_rows[key] = (
                np.flatnonzero(has_vectors & ~is_coded),
                np.flatnonzero(is_coded & ~has_vectors),
            )
        return self._uncoded_rows[key]

    def _scores(self, queries: Queries, options: SearchOptions, rows: np.ndarray | None) -> _Scores:
        """Scores a batch of queries, with tensors on the device of the vectors.

        Items that lack the required vectors have the score -inf.
        """
        scores = self._query_scores(queries, options, rows)
        if queries.negatives is None:
            return scores
        negative = self._query_scores(queries.negatives, options, rows).total
        total = scores.total - options.negative_weight * negative
        total.masked_fill_(scores.total == -torch.inf, -torch.inf)  # -inf - -inf is NaN
        return scores._replace(total=total, negative=negative)

    def _query_scores(
        self, queries: Queries, options: SearchOptions, rows: np.ndarray | None
    ) -> _Scores:
        """Scores a batch of queries without their negatives, as `_scores` does."""
        items = None if rows is None else torch.from_numpy(rows)
        maxsim_scores = None
        if options.score != "single_vector":
            packed = self.vectors(options.column)
            maxsim_scores = _maxsim(queries.tokens, packed, items)
            if options.score == "maxsim":
                return _Scores(maxsim_scores, maxsim_scores)
        # The single-vector score is the MaxSim score of one-token queries and one-token items.
        pooled_column = self._index.representation(options.column).pooled_column
        assert queries.pooled is not None and pooled_column is not None
        packed = self.packed(pooled_column)
        pooled_scores = _maxsim(list(queries.pooled[:, None]), packed, items)
        if maxsim_scores is None:
            return _Scores(pooled_scores, None, pooled_scores)
        mean = maxsim_scores / torch.tensor(queries.num_tokens, device=packed.device).unsqueeze(1)
        total = options.weights[0] * pooled_scores + options.weights[1] * mean
        if 0 in options.weights:
            total.masked_fill_(
                (pooled_scores == -torch.inf) | (maxsim_scores == -torch.inf), -torch.inf
            )
        return _Scores(total, maxsim_scores, pooled_scores)

    def _ranking(self, best: np.ndarray, scores: _Scores, rows: np.ndarray | None) -> Ranking:
        best_rows = best if rows is None else rows[best]
        ids = self._items.ids.take(pa.array(best_rows))
        return Ranking(
            ids["item_id"].to_pylist(),
            ids["parent_id"].to_pylist(),
            scores.total[best].tolist(),
            best_rows,
            None if scores.maxsim is None else scores.maxsim[best],
            None if scores.single_vector is None else scores.single_vector[best],
            None if scores.bm25 is None else scores.bm25[best],
            None if scores.negative is None else scores.negative[best],
        )


class _Scores(NamedTuple):
    """Scores and their components. (Q, R) float32 for a batch, or (R,) for a single query."""

    total: Any
    maxsim: Any = None
    single_vector: Any = None
    bm25: Any = None
    negative: Any = None

    def select(self, index: Any) -> _Scores:
        """Returns the scores of a query, or those that an index selects, as NumPy arrays."""
        parts = (None if part is None else part[index] for part in self)
        return _Scores(*(p.numpy(force=True) if isinstance(p, torch.Tensor) else p for p in parts))


def _shortlists(
    scores: _Scores, rows: np.ndarray | None, k: int, groups: np.ndarray | None
) -> Iterator[tuple[np.ndarray, _Scores]]:
    """Yields the items of each query among which `top_rows` finds the best, and their scores.

    These reach the k-th best score. A GPU selects them, because all scores take longer to copy and
    to sort than to compute.
    """
    total_QR = best_QR = scores.total
    if groups is not None and len(groups):
        group_R = torch.from_numpy(groups if rows is None else groups[rows]).to(total_QR.device)
        best_QR = total_QR.new_full((len(total_QR), int(groups.max()) + 1), -torch.inf)
        best_QR.scatter_reduce_(1, group_R.expand(len(total_QR), -1), total_QR, "amax")
    limit_Q1 = best_QR.topk(min(k, best_QR.shape[1])).values[:, -1:]
    found = ((total_QR >= limit_Q1) & (total_QR > -torch.inf)).nonzero(as_tuple=True)
    parts = scores.select(found)
    query_C, index_C = (numbers.numpy(force=True) for numbers in found)
    for start, end in itertools.pairwise(np.searchsorted(query_C, np.arange(len(total_QR) + 1))):
        index = index_C[start:end]
        yield index if rows is None else rows[index], parts.select(slice(start, end))


def top_rows(
    scores: np.ndarray,
    rows: np.ndarray | None,
    order: np.ndarray,
    k: int,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Finds the k best scores or, with groups, the best score of each of the k best groups.

    Args:
        scores: (S,) float. Items with -inf are excluded.
        rows: (S,) indices of the scored items, or None for all items in order.
        order: (B,) rank of each item among equal scores.
        groups: (B,) group of each item, or None without grouping.

    >>> order, groups = np.arange(4), np.array([0, 0, 1, 1])
    >>> scores = np.array([3.0, 2.0, 1.0, 3.0])
    >>> top_rows(scores, None, order, 2).tolist(), top_rows(scores, None, order, 3, groups).tolist()
    ([0, 3], [0, 3])
    """
    if rows is not None:
        order = order[rows]
        groups = None if groups is None else groups[rows]
    best = scores
    if groups is not None and len(groups):
        best = np.full(groups.max() + 1, -np.inf, scores.dtype)
        np.maximum.at(best, groups, scores)
    # Sort only scores that can be among the k best.
    limit = np.partition(best, -k)[-k] if k < len(best) else -np.inf
    candidates = np.flatnonzero((scores >= limit) & (scores > -np.inf))
    candidates = candidates[np.lexsort((order[candidates], -scores[candidates]))]
    if groups is not None:
        _, first = np.unique(groups[candidates], return_index=True)
        candidates = candidates[np.sort(first)]
    return candidates[:k]


def fuse(ranking: Ranking, options: SearchOptions) -> Ranking:
    """Fuses the items found by all shards and returns the k best. Other scores are unchanged."""
    if options.score != FUSED:
        return ranking
    groups = None
    if options.group_by:
        groups = np.unique(np.array(ranking.parent_ids, object), return_inverse=True)[1]
    scores = options.fusion.scores(ranking.components(), options.k, groups)
    order = np.argsort(np.argsort(np.array(ranking.item_ids, object)))
    best = top_rows(scores, None, order, options.k, groups)
    return replace(ranking, scores=scores.tolist()).take(best.tolist())


def _best_scores(
    queries: Sequence[torch.Tensor],
    packed: PackedVectors,
    num: int,
    rows: Rows | list[np.ndarray],
    groups: np.ndarray | None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Computes `best_scores`, with pauses. `rows` can be a list with the items of each query."""
    if not isinstance(rows, list):
        items = None if rows is None else torch.from_numpy(rows)
        parts = [
            best_scores(queries, packed, num, rows=part, groups=groups)
            for part in _slices(queries, packed, items)
        ]
        if len(parts) == 1:
            return parts[0]
        pairs = [zip(*found, strict=True) for found in zip(*parts, strict=True)]
        return [(np.concatenate(items), np.concatenate(scores)) for items, scores in pairs]
    num_pairs = np.array([_num_pairs([q], packed, r) for q, r in zip(queries, rows, strict=True)])
    slices = np.cumsum(num_pairs) // SLICE_PAIRS if pauses.action.get() else np.zeros(len(queries))
    bounds = [0, *np.flatnonzero(np.diff(slices)) + 1, len(queries)]
    found = []
    for first, end in itertools.pairwise(bounds):
        if first:
            pauses.pause()
        if end == first + 1:
            found += _best_scores(queries[first:end], packed, num, rows[first], groups)
        else:
            tensors = [torch.from_numpy(items) for items in rows[first:end]]
            found += best_scores(queries[first:end], packed, num, rows=tensors, groups=groups)
    return found


def _maxsim(
    queries: Sequence[torch.Tensor], packed: PackedVectors, rows: torch.Tensor | None
) -> torch.Tensor:
    """Computes scores (Q, R) of items, with pauses."""
    parts = [maxsim(queries, packed, rows=part) for part in _slices(queries, packed, rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)  # one part is not copied


def _slices(
    queries: Sequence[torch.Tensor], packed: PackedVectors, rows: torch.Tensor | None
) -> Iterator[torch.Tensor | None]:
    """Yields the items in parts of about `SLICE_PAIRS` pairs, with a pause in between."""
    num_rows = len(packed) if rows is None else len(rows)
    num_parts = _num_pairs(queries, packed, rows) / SLICE_PAIRS if pauses.action.get() else 1
    size = max(1, int(num_rows / max(num_parts, 1)))
    if num_rows <= size:
        yield rows
        return
    rows = torch.arange(num_rows) if rows is None else rows
    for number, part in enumerate(rows.split(size)):
        if number:
            pauses.pause()
        yield part


def _num_pairs(queries: Sequence[torch.Tensor], packed: PackedVectors, rows: Sized | None) -> float:
    """Returns the number of (query token, vector) pairs, estimated by the mean length of items."""
    num_rows = len(packed) if rows is None else len(rows)
    return sum(map(len, queries)) * num_rows * packed.num_vectors / max(len(packed), 1)
