"""Search over one version of an index: `open_index(uri).search("...")`.

What a score is, by its name:

    late     sum over the query tokens of the best similarity with a token of the item
    single   similarity of the pooled vectors of query and item
    hybrid   single + late / number of query tokens: both are cosines (SMART, equations 5 and 4)

Query texts are encoded by the encoder that made the representation. Query vectors, its own or the
caller's, are brought to unit length, so with a representation of unit vectors (the field's metadata
says `normalised`) every similarity is a cosine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from pipeline.compression import Compressor
from pipeline.config import SpecError, digest
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.index.artefacts import load_artefact
from pipeline.index.columns import fitted_for
from pipeline.index.reader import Index, first_line
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.schema import Hit, Match, Place
from pipeline.search.cache import packed_column
from pipeline.search.explain import input_tokens, merge, place_of
from pipeline.search.maxsim import best_matches, maxsim
from pipeline.search.packed import PackedVectors
from pipeline.search.queries import Queries

Score = Literal["late", "single", "hybrid"]
SCORES: tuple[str, ...] = get_args(Score)

#: Queries scored at once: bounds the (queries, items) score matrix of a long list.
QUERY_BATCH = 64
#: Filters whose items are known: 8 bytes an item each.
KEPT_FILTERS = 16


@dataclass(frozen=True)
class Ranking:
    """The best items of one query, best first, without what is stored about them."""

    item_ids: list[str]
    parent_ids: list[str]
    scores: list[float]
    rows: np.ndarray  # (k,) int64, positions among the items of the index

    def scores_by_item(self) -> dict[str, float]:
        """Scores by item id, best first: one query of a run."""
        return dict(zip(self.item_ids, self.scores, strict=True))

    def scores_by_parent(self) -> dict[str, float]:
        """Scores by parent id, best first, of a ranking that was grouped by parent."""
        return dict(zip(self.parent_ids, self.scores, strict=True))


def open_index(
    uri: str,
    version: int | None = None,
    *,
    shard: tuple[int, int] | None = None,
    cache: bool = True,
) -> Searcher:
    """Opens an index for search; vectors and query encoder are loaded when first needed.

    Args:
        version: the Lance version; default the newest.
        shard: (i, n) to search the i-th of n parts of the items alone; see `Index.fragments`.
        cache: whether vectors are packed into local files, and mapped (`pipeline.search.cache`
            says where they lie); else they are read into memory.

    Raises:
        SpecError: no index there, or a damaged or newer one; no such shard.
    """
    return Searcher(Index(uri, version), shard=shard, cache=cache)


class Searcher:
    """Exact search over one version of an index, or over a shard of it."""

    def __init__(self, index: Index, *, shard: tuple[int, int] | None = None, cache: bool = True):
        self.index = index
        self._fragments = index.fragments(shard)
        self._cache = cache
        self._packed: dict[str, PackedVectors] = {}
        self._filtered: dict[str, np.ndarray] = {}
        self._encoders: dict[str, Encoder] = {}
        self._compressors: dict[str, Compressor] = {}

    def search(
        self,
        query: str | np.ndarray | Sequence[str] | Sequence[np.ndarray] | EncodedQueries,
        representation: str | None = None,
        *,
        k: int = 10,
        score: Score = "late",
        group_by: Literal["parent"] | None = None,
        where: str | None = None,
        explain: bool = True,
    ) -> list[Hit] | list[list[Hit]]:
        """Finds the k best items for a query, exactly; equal scores in the order of the item ids.

        Args:
            query: a text; or token vectors (M, D); or a list of either, or encoded queries.
            representation: the column to search; default `full` if there is one, else the first.
            k: the most hits to return.
            score: "late", "single" or "hybrid"; see the module.
            group_by: "parent" gives the k best parents, each with its best item.
            where: a Lance SQL filter over the items' columns, such as "modality = 'text'".
            explain: whether hits carry `matches`, one a query token.

        Returns:
            The hits of the query, best first; for a list of queries a list of such lists. Items
            without vectors are never hits.

        Raises:
            SpecError: an argument is not legal, or the index needs another query encoder.
        """
        name, about = self.representation(representation)
        alone = isinstance(query, str | np.ndarray)
        queries = self.queries([query] if alone else query, name)
        rankings = self._rank(queries, name, about, k, score, group_by, where)
        hits = self._hits(rankings, queries, name, about, explain)
        return hits[0] if alone else hits

    def rank(
        self,
        queries: Sequence[str] | Sequence[np.ndarray] | EncodedQueries,
        representation: str | None = None,
        *,
        k: int = 10,
        score: Score = "late",
        group_by: Literal["parent"] | None = None,
        where: str | None = None,
    ) -> list[Ranking]:
        """What `search` finds as ids and scores alone: for runs over many queries."""
        name, about = self.representation(representation)
        return self._rank(self.queries(queries, name), name, about, k, score, group_by, where)

    def representation(self, name: str | None = None) -> tuple[str, dict[str, Any]]:
        """The name and the metadata of a representation; default `full`, else the first.

        Raises:
            SpecError: no such representation, or one that is not for search.
        """
        there = self.index.representations()
        if name is None:
            if not there:
                problem = f"has none in version {self.index.version}"
                legal = "an index, or a version of it, with at least one representation"
                raise SpecError("index", self.index.uri, legal, problem)
            name = "full" if "full" in there else next(iter(there))
        if name in self.index.by_role("rerank"):
            raise SpecError("representation", name, ", ".join(there), "is for reranking alone")
        return name, self.index.representation(name)

    def encoder(self, representation: str | None = None) -> Encoder:
        """The query encoder of a representation, loaded once.

        Raises:
            SpecError: it cannot be built here, or is not the one that made the representation.
        """
        name, about = self.representation(representation)
        key = digest(about["encoder"])
        if key not in self._encoders:
            spec = ENCODERS.resolve(about["encoder"])
            ENCODERS.load(spec.name).check_queries(spec)
            self._encoders[key] = ENCODERS.build(spec)
        encoder = self._encoders[key]
        if encoder.fingerprint != about["fingerprint"]:
            problem = (
                f"was made by another encoder (fingerprint {about['fingerprint']}, "
                f"this one has {encoder.fingerprint})"
            )
            legal = f"the weights and settings of {about['encoder']['name']} that made it"
            raise SpecError("representation", name, legal, problem)
        return encoder

    def queries(
        self,
        queries: Sequence[str] | Sequence[np.ndarray] | EncodedQueries,
        representation: str | None = None,
    ) -> Queries:
        """Query vectors for a representation, from texts, vectors or what its encoder gave.

        Raises:
            SpecError: an empty text, or vectors of another dimension.
        """
        name, about = self.representation(representation)
        if isinstance(queries, EncodedQueries):
            ready = Queries.of_encoded(queries)
        elif len(queries) and all(isinstance(query, str) for query in queries):
            for query in queries:
                if not query.strip():
                    raise SpecError("query", query, "a text with at least one word")
                if re.search("[\ud800-\udfff]", query):
                    raise SpecError("query", query, "a text in UTF-8", "cannot be read")
            encoder = self.encoder(representation)
            ready = Queries.of_encoded(encoder.encode_queries(list(queries)))
        else:
            ready = Queries.of_vectors(queries)
        dim = about.get("query_dim", about["dim"])
        for tokens in ready.tokens:
            if tokens.shape[1] != dim:
                raise SpecError("query", f"vectors of {tokens.shape[1]} numbers", str(dim))
        compressor, codec = self._compressor(about), self.index.codec(name)
        tokens = [codec.transform_queries(compressor.transform_queries(t)) for t in ready.tokens]
        return replace(ready, tokens=tokens)

    def _compressor(self, about: dict[str, Any]) -> Compressor:
        """What made a representation, for how it compares queries."""
        key = digest([about["compressor"], about["artefact"]])
        if key not in self._compressors:
            name = about["artefact"]
            artefact = name and load_artefact(self.index.uri, name, fitted_for(about))
            spec = COMPRESSORS.resolve(about["compressor"])
            self._compressors[key] = COMPRESSORS.build(spec, artefact)
        return self._compressors[key]

    def load(self, representation: str | None = None, score: Score = "late") -> None:
        """Reads into memory now what a search with this score needs of the items."""
        name, about = self.representation(representation)
        for column in _columns(name, about, score):
            self._vectors(column)

    def packed(self, representation: str | None = None) -> PackedVectors:
        """The vectors of a representation, for what looks at them otherwise than by a score."""
        return self._vectors(self.representation(representation)[0])

    def _rank(
        self,
        queries: Queries,
        name: str,
        about: dict[str, Any],
        k: int,
        score: str,
        group_by: str | None,
        where: str | None,
    ) -> list[Ranking]:
        if not isinstance(k, int) or k < 1:
            raise SpecError("k", k, "an integer >= 1")
        if group_by not in (None, "parent"):
            raise SpecError("group_by", group_by, "parent, or nothing")
        _check_score(score, about, queries)
        rows = self._rows_where(where)
        rankings = []
        for first in range(0, len(queries), QUERY_BATCH):
            batch = slice(first, first + QUERY_BATCH)
            for scores in self._scores(queries, batch, name, about, score, rows):
                parents = self._parents if group_by else None
                best = top_rows(scores, rows, self._order, k, parents)
                rankings.append(self._ranking(best, scores, rows))
        return rankings

    def _scores(
        self,
        queries: Queries,
        batch: slice,
        name: str,
        about: dict[str, Any],
        score: str,
        rows: np.ndarray | None,
    ) -> np.ndarray:
        """(queries of the batch, rows) float32; -inf where an item lacks what the score needs."""
        items = None if rows is None else torch.from_numpy(rows)
        tokens = queries.tokens[batch]
        terms = []
        if score in ("late", "hybrid"):
            packed = self._vectors(name)
            late = maxsim(tokens, packed, rows=items)
            if score == "hybrid":
                late /= torch.tensor([[max(len(query), 1)] for query in tokens])
            terms.append(late)
        if score in ("single", "hybrid"):
            # One vector each: MaxSim of a one-token query with a one-token item.
            pooled = self._vectors(about["pooled"])
            vectors = list(queries.pooled[batch].unsqueeze(1))
            terms.append(maxsim(vectors, pooled, rows=items))
        return sum(terms).numpy()

    def _ranking(self, best: np.ndarray, scores: np.ndarray, rows: np.ndarray | None) -> Ranking:
        found = best if rows is None else rows[best]
        ids = self._ids.take(pa.array(found))
        return Ranking(
            ids["item_id"].to_pylist(), ids["parent_id"].to_pylist(), scores[best].tolist(), found
        )

    @functools.cached_property
    def _ids(self) -> pa.Table:
        """The item and parent ids of all items, in storage order like everything packed."""
        columns = ["item_id", "parent_id"]
        scanner = self.index.dataset.scanner(
            columns=columns, scan_in_order=True, fragments=self._fragments
        )
        with self.index.reading():
            return scanner.to_table().combine_chunks()

    @functools.cached_property
    def _order(self) -> np.ndarray:
        """(B,) int64: the place of each item in the order of the ids, which breaks ties."""
        place = np.empty(len(self._ids), np.int64)
        place[pc.sort_indices(self._ids["item_id"]).to_numpy()] = np.arange(len(place))
        return place

    @functools.cached_property
    def _parents(self) -> np.ndarray:
        """(B,) int64: equal numbers for items of one parent."""
        codes = self._ids["parent_id"].combine_chunks().dictionary_encode().indices
        return codes.to_numpy().astype(np.int64)

    def _rows_where(self, where: str | None) -> np.ndarray | None:
        """The ascending positions of the items that a filter lets through; None for all."""
        if where is None:
            return None
        if where in self._filtered:  # the version does not change
            return self._filtered[where]
        try:
            through = self.index.dataset.to_table(columns=["item_id"], filter=where)["item_id"]
        except (ValueError, OSError) as error:
            raise SpecError("where", where, f"a Lance SQL filter ({first_line(error)})") from None
        let_through = pc.is_in(self._ids["item_id"], value_set=through)
        while len(self._filtered) >= KEPT_FILTERS:
            del self._filtered[next(iter(self._filtered))]
        self._filtered[where] = np.flatnonzero(let_through.to_numpy())
        return self._filtered[where]

    def _vectors(self, column: str) -> PackedVectors:
        """The vectors of a representation, or of the pooled ones, opened once."""
        if column not in self._packed:
            self._packed[column] = packed_column(
                self.index,
                column,
                self._fragments,
                cache=self._cache,
                when_damaged=lambda: self._packed.pop(column, None),
            )
        return self._packed[column]

    def _items(self, name: str, rows: np.ndarray) -> list[torch.Tensor]:
        """The vectors (N, D) float32 of some items of a representation."""
        packed = self._vectors(name)
        return [packed.item(row) for row in rows.tolist()]

    def _hits(
        self,
        rankings: list[Ranking],
        queries: Queries,
        name: str,
        about: dict[str, Any],
        explain: bool,
    ) -> list[list[Hit]]:
        text = about.get("text", "text")
        wanted = ["title", text, "span"]
        if explain:
            positions = about["positions"].values()
            wanted += [column for column in (about.get("support"), *positions) if column]
        there = [column for column in wanted if column in self.index.schema.names]
        item_ids = sorted({item_id for ranking in rankings for item_id in ranking.item_ids})
        found = self.index.items(item_ids, there) if item_ids else pa.table({"item_id": []})
        stored = {row["item_id"]: row for row in found.to_pylist()}

        hits = []
        for query, ranking in enumerate(rankings):
            vectors = self._items(name, ranking.rows) if explain else []
            hits.append([])
            for i, item_id in enumerate(ranking.item_ids):
                row = stored[item_id]
                hit = Hit(
                    rank=i + 1,
                    score=ranking.scores[i],
                    item_id=item_id,
                    parent_id=ranking.parent_ids[i],
                    title=row.get("title"),
                    text=row.get(text),
                    span=row.get("span"),
                )
                if explain:
                    inputs = self._inputs_of(row, about)
                    matches = _matches(queries, query, vectors[i], inputs, _positions(row, about))
                    hit = replace(hit, matches=matches)
                hits[-1].append(hit)
        return hits

    def _inputs_of(
        self, row: dict[str, Any], about: dict[str, Any]
    ) -> Callable[[int], Sequence[int]]:
        """A function from an item's vector to the input tokens it stands for, if that is stored."""
        if about["compressor"]["name"] == "none":
            return lambda token: [token]
        support = row.get(about.get("support"))
        if support is None:
            return lambda token: []
        form = self.index.by_role("support")[about["support"]]["form"]
        return lambda token: input_tokens(token, support, form)


@dataclass(frozen=True)
class _Positions:
    """Where an item's input tokens stand, as far as that is stored: lists of T, or None."""

    spans: list | None
    extents: list | None

    def characters(self, tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The character ranges of some input tokens, merged."""
        return merge(self.spans[i] for i in tokens) if self.spans else ()

    def places(self, tokens: Sequence[int]) -> tuple[Place, ...]:
        """Where some input tokens are to be seen or heard, in the order of the text."""
        if not self.spans or not self.extents:
            return ()
        found = (place_of(self.spans[i], self.extents[i]) for i in tokens)
        return tuple(sorted({p for p in found if p}, key=lambda place: place.span))


def _positions(row: dict[str, Any], about: dict[str, Any]) -> _Positions:
    return _Positions(*(row.get(about["positions"].get(kind)) for kind in ("spans", "extents")))


def _matches(
    queries: Queries,
    query: int,
    vectors_ND: torch.Tensor,
    inputs_of: Callable[[int], Sequence[int]],
    positions: _Positions,
) -> tuple[Match, ...]:
    if not len(vectors_ND):  # found by its pooled vector alone
        return ()
    similarities, tokens = best_matches(queries.tokens[query], vectors_ND)
    texts = queries.token_texts[query]
    matches = []
    for text, similarity, token in zip(texts, similarities.tolist(), tokens.tolist(), strict=True):
        inputs = inputs_of(token)
        characters, places = positions.characters(inputs), positions.places(inputs)
        matches.append(Match(text, similarity, token, characters, places))
    return tuple(matches)


def _columns(name: str, about: dict[str, Any], score: str) -> list[str]:
    """The columns of vectors that a score reads."""
    late, single = score in ("late", "hybrid"), score in ("single", "hybrid")
    return [name] * late + [about["pooled"]] * (single and about["pooled"] is not None)


def _check_score(score: str, about: dict[str, Any], queries: Queries) -> None:
    if score not in SCORES:
        raise SpecError("score", score, ", ".join(SCORES))
    if score == "late":
        return
    if about["pooled"] is None:
        raise SpecError("score", score, "late", "needs single vectors, and the index has none")
    if queries.pooled is None:
        raise SpecError("score", score, "late", "needs a single vector of the query, given as text")


def top_rows(
    scores: np.ndarray,
    rows: np.ndarray | None,
    order: np.ndarray,
    k: int,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """The positions of the k best scores, or of the best of each of the k best groups.

    Args:
        scores: (S,) float; -inf is never among the best.
        rows: (S,) the items that were scored; None: all, in order.
        order: (B,) the place of each item among equals.
        groups: (B,) the group of each item, if groups are wanted.

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
    # Everything that can still be among the k best: sorting the rest would be waste.
    limit = np.partition(best, -k)[-k] if k < len(best) else -np.inf
    candidates = np.flatnonzero((scores >= limit) & (scores > -np.inf))
    candidates = candidates[np.lexsort((order[candidates], -scores[candidates]))]
    if groups is not None:
        _, first = np.unique(groups[candidates], return_index=True)
        candidates = candidates[np.sort(first)]
    return candidates[:k]
