"""Exact scores of the items of an index, and the best items by them.

    late     sum over the query tokens of the best similarity with a token of the item
    single   similarity of the pooled vectors of query and item
    hybrid   single + late / number of query tokens: both are cosines (SMART, equations 5 and 4)

SMART adds the two with equal weight "to keep SMART hyperparameter-free"; its code has a weight for
each, both 1, and so does the hybrid score here: weights[0] * single + weights[1] * late / tokens.

Query vectors have unit length, so with a representation of unit vectors (the field's metadata
says `normalised`) every similarity is a cosine.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import torch

from pipeline.config import SpecError
from pipeline.index.info import RepresentationInfo
from pipeline.schema import Reranked
from pipeline.search.cache import packed_column
from pipeline.search.maxsim import maxsim
from pipeline.search.options import Score, SearchOptions
from pipeline.search.packed import PackedVectors
from pipeline.search.query import Queries
from pipeline.search.selection import Items

T = TypeVar("T")

#: Queries scored in one batch: bounds the (queries, items) score matrix of a long list.
QUERY_BATCH = 64
#: Pairs of a query token and a vector that are scored between two pauses: 0.15 s for 128
#: dimensions in float32 on two cores.
SLICE_PAIRS = 1 << 27


@dataclass(frozen=True)
class Ranking:
    """The best items of one query, best first, without what is stored about them."""

    item_ids: list[str]
    parent_ids: list[str]
    scores: list[float]
    rows: np.ndarray  # (k,) int64, positions among the items of the index
    late: np.ndarray | None = None  # (k,) float32, where the score has this part
    single: np.ndarray | None = None
    reranked: tuple[Reranked, ...] | None = None  # of each item, after a second stage

    def scores_by_item(self) -> dict[str, float]:
        """Returns scores by item id, best first: one query of a run."""
        return dict(zip(self.item_ids, self._descending_scores(), strict=True))

    def scores_by_parent(self) -> dict[str, float]:
        """Returns scores by parent id, best first, of a ranking that is grouped by parent."""
        return dict(zip(self.parent_ids, self._descending_scores(), strict=True))

    def _descending_scores(self) -> Sequence[float]:
        """Scores, or descending ranks after reranking: scores of two stages do not compare."""
        if self.reranked is None:
            return self.scores
        return [float(number) for number in range(len(self.scores), 0, -1)]

    def take(self, places: Sequence[int]) -> Ranking:
        """Returns some of the items, in the order of their places."""
        chosen = np.array(places, np.int64)
        return Ranking(
            [self.item_ids[i] for i in places],
            [self.parent_ids[i] for i in places],
            [self.scores[i] for i in places],
            self.rows[chosen],
            None if self.late is None else self.late[chosen],
            None if self.single is None else self.single[chosen],
            None if self.reranked is None else tuple(self.reranked[i] for i in places),
        )


class Scorer:
    """Scores items, whose vectors are opened when first needed.

    Args:
        cache: Whether vectors are packed into local files and mapped; else they are read into
            memory.
        device: "cpu", or a CUDA device, whose memory then holds the vectors.

    Raises:
        SpecError: The device does not exist.
    """

    def __init__(self, items: Items, *, cache: bool = True, device: str = "cpu"):
        devices = ["cpu"]
        if torch.cuda.is_available():
            devices += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        if device not in devices:
            raise SpecError("device", device, f"one of {', '.join(devices)}", "is not available")
        self._items, self._cache, self._device = items, cache, device
        self._packed: dict[str, PackedVectors] = {}

    def load(self, representation: str, score: Score = "late") -> None:
        """Opens the vectors that a score needs."""
        for column in self._columns(representation, score):
            self.packed(column)

    def is_loaded(self, representation: str, score: Score = "late") -> bool:
        """Returns whether `load` has nothing to do."""
        return all(column in self._packed for column in self._columns(representation, score))

    def _columns(self, representation: str, score: Score) -> list[str]:
        columns = [] if score == "single" else [representation]
        if score != "late" and (pooled := self._info(representation).pooled_column):
            columns.append(pooled)
        return columns

    def _info(self, representation: str) -> RepresentationInfo:
        return self._items.index.representation(representation)

    def packed(self, column: str) -> PackedVectors:
        """Returns the vectors of a representation or of a pooled column."""
        if column not in self._packed:
            packed = packed_column(
                self._items.index,
                column,
                self._items.fragments,
                cache=self._cache,
                when_damaged=lambda: self._forget(column),
            )
            self._packed[column] = packed if self._device == "cpu" else packed.to(self._device)
        return self._packed[column]

    def _forget(self, column: str) -> None:
        self._packed.pop(column, None)

    def item_vectors(self, representation: str, rows: np.ndarray) -> list[torch.Tensor]:
        """Returns the vectors (N, D) float32 of items."""
        packed = self.packed(representation)
        return [packed.item(row).cpu() for row in rows.tolist()]

    def rank(
        self, queries: Queries, options: SearchOptions, rows: np.ndarray | None
    ) -> list[Ranking]:
        """Returns the k best items of each query; equal scores are in the order of the ids.

        Args:
            queries: Queries transformed for the representation.
            options: Options of the first stage, with a representation.
            rows: Ascending positions of the items that can be hits; None for all.

        Raises:
            SpecError: The queries or the representation lack vectors of the score.
        """
        return finish(self._rank(queries, options, rows, None))

    def rank_in_slices(
        self, queries: Queries, options: SearchOptions, rows: np.ndarray | None
    ) -> Generator[None, None, list[Ranking]]:
        """Ranks as `rank` does, and yields after each fraction of a second of work."""
        return self._rank(queries, options, rows, SLICE_PAIRS)

    def _rank(
        self,
        queries: Queries,
        options: SearchOptions,
        rows: np.ndarray | None,
        slice_pairs: int | None,
    ) -> Generator[None, None, list[Ranking]]:
        options.check_vectors(queries, self._info(options.column).pooled_column)
        order = self._items.id_order
        groups = self._items.parent_codes if options.group_by else None
        rankings = []
        for first in range(0, len(queries), QUERY_BATCH):
            if first:
                yield
            batch = queries.part(first, first + QUERY_BATCH)
            scores = yield from self._scores(batch, options, rows, slice_pairs)
            for query, total in enumerate(scores.total):
                best = top_rows(total, rows, order, options.k, groups)
                rankings.append(self._ranking(best, scores.of_query(query), rows))
        return rankings

    def _scores(
        self,
        queries: Queries,
        options: SearchOptions,
        rows: np.ndarray | None,
        slice_pairs: int | None,
    ) -> Generator[None, None, _Scores]:
        """Scores a batch of queries; -inf where an item lacks vectors of the score."""
        items = None if rows is None else torch.from_numpy(rows)
        late = None
        if options.score != "single":
            packed = self.packed(options.column)
            late = yield from _maxsim(queries.tokens, packed, items, slice_pairs)
            if options.score == "late":
                return _Scores(late.numpy(), late.numpy(), None)
        # One vector each: MaxSim of a one-token query with a one-token item.
        pooled_column = self._info(options.column).pooled_column
        assert queries.pooled is not None and pooled_column is not None
        packed = self.packed(pooled_column)
        single = yield from _maxsim(list(queries.pooled[:, None]), packed, items, slice_pairs)
        if late is None:
            return _Scores(single.numpy(), None, single.numpy())
        mean = late / torch.tensor([[max(len(query), 1)] for query in queries.tokens])
        total = options.weights[0] * single + options.weights[1] * mean
        if 0 in options.weights:
            total.masked_fill_((single == -torch.inf) | (late == -torch.inf), -torch.inf)
        return _Scores(total.numpy(), late.numpy(), single.numpy())

    def _ranking(self, best: np.ndarray, scores: _Scores, rows: np.ndarray | None) -> Ranking:
        positions = best if rows is None else rows[best]
        ids = self._items.ids.take(pa.array(positions))
        return Ranking(
            ids["item_id"].to_pylist(),
            ids["parent_id"].to_pylist(),
            scores.total[best].tolist(),
            positions,
            None if scores.late is None else scores.late[best],
            None if scores.single is None else scores.single[best],
        )


class _Scores(NamedTuple):
    """Scores (Q, R) float32 of a batch, or (R,) of a query, and the parts they are made of."""

    total: np.ndarray
    late: np.ndarray | None
    single: np.ndarray | None

    def of_query(self, query: int) -> _Scores:
        """Returns the scores of one query."""
        late, single = (None if part is None else part[query] for part in self[1:])
        return _Scores(self.total[query], late, single)


def finish(slices: Generator[None, None, T]) -> T:
    """Returns the result of work that is done in slices, all at once."""
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            return stop.value


def _maxsim(
    queries: Sequence[torch.Tensor],
    packed: PackedVectors,
    rows: torch.Tensor | None,
    slice_pairs: int | None,
) -> Generator[None, None, torch.Tensor]:
    """Returns scores (Q, R) of items; yields after about `slice_pairs` pairs."""
    num_rows = len(packed) if rows is None else len(rows)
    pairs = sum(map(len, queries)) * packed.num_vectors / max(len(packed), 1)  # per item
    size = num_rows if slice_pairs is None else max(1, int(slice_pairs / max(pairs, 1)))
    if num_rows <= size:
        return maxsim(queries, packed, rows=rows).cpu()
    rows = torch.arange(num_rows) if rows is None else rows
    parts: list[torch.Tensor] = []
    for some in rows.split(size):
        if parts:
            yield
        parts.append(maxsim(queries, packed, rows=some).cpu())
    return torch.cat(parts, dim=1)


def top_rows(
    scores: np.ndarray,
    rows: np.ndarray | None,
    order: np.ndarray,
    k: int,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the positions of the k best scores, or of the best of each of the k best groups.

    Args:
        scores: (S,) float; -inf is never among the best.
        rows: (S,) items that were scored; None for all, in order.
        order: (B,) rank of each item among equal scores.
        k: Maximum number of positions.
        groups: (B,) group of each item; None for no groups.

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
    # Only what can still be among the k best is sorted.
    limit = np.partition(best, -k)[-k] if k < len(best) else -np.inf
    candidates = np.flatnonzero((scores >= limit) & (scores > -np.inf))
    candidates = candidates[np.lexsort((order[candidates], -scores[candidates]))]
    if groups is not None:
        _, first = np.unique(groups[candidates], return_index=True)
        candidates = candidates[np.sort(first)]
    return candidates[:k]
