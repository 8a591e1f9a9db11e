"""Search over one version of an index: `open_index(uri).search("...")`.

What a score is, by its name:

    late     sum over the query tokens of the best similarity with a token of the item
    single   similarity of the pooled vectors of query and item
    hybrid   single + late / number of query tokens: both are cosines (SMART, equations 5 and 4)

SMART adds the two with equal weight "to keep SMART hyperparameter-free"; its code has a weight for
each, both 1, and so has the hybrid score here: weights[0] * single + weights[1] * late / tokens.

Query texts are encoded by the encoder that made the representation. Query vectors, its own or the
caller's, are brought to unit length, so with a representation of unit vectors (the field's metadata
says `normalised`) every similarity is a cosine.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from pipeline.compression import Compressor
from pipeline.config import SpecError, digest
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.index.artefacts import load_artefact
from pipeline.index.filters import matching_ids
from pipeline.index.info import EncoderInfo, RepresentationInfo
from pipeline.index.reader import Index
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.schema import Composed, Hit, Match, Parts, Passage, Place, Reranked
from pipeline.search.cache import packed_column
from pipeline.search.explain import (
    NO_SPAN,
    contributions,
    find_passages,
    input_tokens,
    merge,
    outputs_of,
    place_of,
)
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors
from pipeline.search.queries import Queries, Unencoded, bad_query, encoded_by

if TYPE_CHECKING:  # it needs transformers, and a search without it does not
    from pipeline.search.rerank import Reranker

T = TypeVar("T")
AnyQuery = Unencoded | np.ndarray
AnyQueries = Sequence[AnyQuery] | EncodedQueries | Queries
Score = Literal["late", "single", "hybrid"]
SCORES: tuple[str, ...] = get_args(Score)

#: What the single and the late score count in the hybrid one.
Weights = tuple[float, float]
EQUAL: Weights = (1.0, 1.0)
LEGAL_WEIGHTS = "two numbers (single, late), each 0 or from 1e-6 to 1e6, and not both 0"

#: The columns that lists of ids are about.
ID_COLUMNS = {"ids": "item_id", "parents": "parent_id"}
#: Queries scored at once: bounds the (queries, items) score matrix of a long list.
QUERY_BATCH = 64
#: Filters whose items are known: 8 bytes an item each.
KEPT_FILTERS = 16
#: Pairs of a query token and a vector that are scored between two pauses of `rank_in_slices`:
#: 0.15 s for 128 dimensions in float32 on two cores.
SLICE_PAIRS = 1 << 27
#: Hits that are described between two pauses of `hits_in_slices`.
SLICE_HITS = 64


@dataclass(frozen=True)
class Ranking:
    """The best items of one query, best first, without what is stored about them."""

    item_ids: list[str]
    parent_ids: list[str]
    scores: list[float]
    rows: np.ndarray  # (k,) int64, positions among the items of the index
    late: np.ndarray | None = None  # (k,) float32, where the score has this part
    single: np.ndarray | None = None
    reranked: tuple[Reranked, ...] | None = None  # of each item, where there was a second stage

    def scores_by_item(self) -> dict[str, float]:
        """Scores by item id, best first: one query of a run."""
        return dict(zip(self.item_ids, self._falling(), strict=True))

    def scores_by_parent(self) -> dict[str, float]:
        """Scores by parent id, best first, of a ranking that was grouped by parent."""
        return dict(zip(self.parent_ids, self._falling(), strict=True))

    def _falling(self) -> Sequence[float]:
        """The scores; of two stages, which are not to be compared, what says the order alone."""
        if self.reranked is None:
            return self.scores
        return [float(number) for number in range(len(self.scores), 0, -1)]

    def taken(self, places: Sequence[int]) -> Ranking:
        """Some of the items, in the order of their places."""
        at = np.array(places, np.int64)
        return Ranking(
            [self.item_ids[i] for i in places],
            [self.parent_ids[i] for i in places],
            [self.scores[i] for i in places],
            self.rows[at],
            *(part if part is None else part[at] for part in (self.late, self.single)),
        )


def open_index(
    uri: str,
    version: int | None = None,
    *,
    shard: tuple[int, int] | None = None,
    cache: bool = True,
    device: str = "cpu",
) -> Searcher:
    """Opens an index for search; vectors and query encoder are loaded when first needed.

    Args:
        version: the Lance version; default the newest.
        shard: (i, n) to search the i-th of n parts of the items alone; see `Index.fragments`.
        cache: whether vectors are packed into local files, and mapped (`pipeline.search.cache`
            says where they lie); else they are read into memory.
        device: "cpu", or a CUDA device, whose memory then holds the vectors.

    Raises:
        SpecError: no index there, or a damaged or newer one; no such shard or device.
    """
    return Searcher(Index(uri, version), shard=shard, cache=cache, device=device)


class Searcher:
    """Exact search over one version of an index, or over a shard of it."""

    def __init__(
        self,
        index: Index,
        *,
        shard: tuple[int, int] | None = None,
        cache: bool = True,
        device: str = "cpu",
    ):
        devices = ["cpu"]
        if torch.cuda.is_available():
            devices += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        if device not in devices:
            raise SpecError("device", device, ", ".join(devices), "is not there")
        self.index, self._device = index, device
        self._fragments = index.fragments(shard)
        self._cache = cache
        self._packed: dict[str, PackedVectors] = {}
        self._filtered: dict[str, np.ndarray] = {}
        self._encoders: dict[str, Encoder] = {}
        self._compressors: dict[str, Compressor] = {}

    def search(
        self,
        query: AnyQuery | AnyQueries,
        representation: str | None = None,
        *,
        k: int = 10,
        score: Score = "late",
        weights: Weights = EQUAL,
        group_by: Literal["parent"] | None = None,
        where: str | None = None,
        ids: Collection[str] | None = None,
        parents: Collection[str] | None = None,
        explain: bool = True,
        rerank: Reranker | None = None,
    ) -> list[Hit] | list[list[Hit]]:
        """Finds the k best items for a query, exactly; equal scores in the order of the item ids.

        Args:
            query: a text; or a picture, as the bytes of a PNG, JPEG or WebP file; or a `Composed`
                of both; or token vectors (M, D); or a list of one of these, or encoded queries, or
                what `queries` gave for this representation.
            representation: the column to search; default `full` if there is one, else the first.
            k: the most hits to return.
            score: "late", "single" or "hybrid"; see the module.
            weights: of the single and the late score in the hybrid one; an item without either has
                none, whatever their weights.
            group_by: "parent" gives the k best parents, each with its best item.
            where: a Lance SQL filter over the items' columns, such as "modality = 'text'".
            ids: the items that can be hits; ids that are not in the index are none. With `where`
                and `parents`, what all of them let through.
            parents: the ids of the parents whose items can be hits.
            explain: whether hits carry `matches`, one per query token, and `passages`.
            rerank: a second stage, which puts its pool of the best into an order of its own.

        Returns:
            The hits of the query, best first; for a list of queries a list of such lists. Items
            without vectors are never hits.

        Raises:
            SpecError: an argument is not legal, or the index needs another query encoder.
        """
        name, info = self.representation(representation)
        rows = self._rows(where, ids, parents)  # what is wrong there needs no encoder to be said
        alone = isinstance(query, AnyQuery)
        given = [query] if alone else query
        depth = k
        if rerank is not None:
            check_k(k)
            rerank.check(self.index, given)
            depth = max(k, rerank.pool)
        queries = self.queries(given, name)
        rankings = self._rank(queries, name, info, depth, score, weights, group_by, rows)
        if rerank is not None:
            rankings = rerank.rerank(self, given, rankings, k)
        hits = self.hits(rankings, queries, name, explain=explain)
        return hits[0] if alone else hits

    def rank(
        self,
        queries: AnyQueries,
        representation: str | None = None,
        *,
        k: int = 10,
        score: Score = "late",
        weights: Weights = EQUAL,
        group_by: Literal["parent"] | None = None,
        where: str | None = None,
        ids: Collection[str] | None = None,
        parents: Collection[str] | None = None,
    ) -> list[Ranking]:
        """What `search` finds as ids and scores alone: for runs over many queries."""
        name, info = self.representation(representation)
        rows, queries = self._rows(where, ids, parents), self.queries(queries, name)
        return self._rank(queries, name, info, k, score, weights, group_by, rows)

    def rank_in_slices(
        self,
        queries: Queries,
        representation: str,
        *,
        rows: np.ndarray | None,
        k: int,
        score: Score = "late",
        weights: Weights = EQUAL,
        group_by: Literal["parent"] | None = None,
    ) -> Generator[None, None, list[Ranking]]:
        """Ranks as `rank` does, and yields after each fraction of a second's work.

        Args:
            queries: What `transformed` returned for the representation.
            rows: Ascending positions of the items that can be hits; None for all.
        """
        name, info = self.representation(representation)
        arguments = name, info, k, score, weights, group_by, rows
        return (yield from self._rank_in_slices(queries, *arguments, slice_pairs=SLICE_PAIRS))

    def num_items(
        self,
        *,
        where: str | None = None,
        ids: Collection[str] | None = None,
        parents: Collection[str] | None = None,
    ) -> int:
        """How many items a search with these restrictions looks at.

        Raises:
            SpecError: one of them is not legal.
        """
        rows = self._rows(where, ids, parents)
        return len(self._ids) if rows is None else len(rows)

    def num_known(self, ids: Collection[str], field: Literal["ids", "parents"] = "ids") -> int:
        """How many of some items, or parents, are in the index; one that is named twice is one."""
        named = pc.unique(_id_array(field, ids))
        return pc.sum(pc.is_in(named, value_set=self._ids[ID_COLUMNS[field]])).as_py() or 0

    def representation(self, name: str | None = None) -> tuple[str, RepresentationInfo]:
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
        if name in self.index.rerank_columns:
            raise SpecError("representation", name, ", ".join(there), "is for reranking alone")
        return name, self.index.representation(name)

    def encoder(self, representation: str | None = None) -> Encoder:
        """The query encoder of a representation, loaded once.

        Raises:
            SpecError: it cannot be built here, or is not the one that made the representation.
        """
        name, info = self.representation(representation)
        key = digest(info.encoder.spec)
        if key not in self._encoders:
            self._encoders[key] = query_encoder(info.encoder)
        check_fingerprint(self._encoders[key], name, info.encoder)
        return self._encoders[key]

    def queries(
        self,
        queries: AnyQueries,
        representation: str | None = None,
    ) -> Queries:
        """Query vectors for a representation, from texts, pictures, vectors or encoded queries.

        Raises:
            SpecError: an empty text, a kind of query that its encoder does not read, or vectors of
                another dimension, or without a direction.
        """
        if isinstance(queries, Queries):
            return queries
        name, _ = self.representation(representation)
        if isinstance(queries, EncodedQueries):
            ready = Queries.of_encoded(queries)
        elif len(queries) and _are_of_one_kind(queries):
            texts = [query.text if isinstance(query, Composed) else query for query in queries]
            check_texts([text for text in texts if isinstance(text, str)])
            ready = Queries.of_encoded(encoded_by(self.encoder(representation), queries))
        else:
            ready = Queries.of_vectors(queries)
        return self.transformed(ready, name)

    def transformed(self, queries: Queries, representation: str) -> Queries:
        """Unit query vectors as a representation compares them.

        Raises:
            SpecError: they are of another dimension.
        """
        name, info = self.representation(representation)
        dim = info.encoder.dim
        for place, tokens in enumerate(queries.tokens):
            if tokens.shape[1] != dim:
                value = f"vectors of {tokens.shape[1]} numbers"
                raise bad_query(value, str(dim), place, len(queries))
        compressor, codec = self._compressor(info), self.index.codec(name)
        tokens = [codec.transform_queries(compressor.transform_queries(t)) for t in queries.tokens]
        return replace(queries, tokens=tokens)

    def _compressor(self, info: RepresentationInfo) -> Compressor:
        """What made a representation, for how it compares queries."""
        key = digest([info.compressor, info.artefact])
        if key not in self._compressors:
            name = info.artefact
            artefact = name and load_artefact(self.index.uri, name, info.compressor_fit)
            spec = COMPRESSORS.resolve(info.compressor)
            self._compressors[key] = COMPRESSORS.build(spec, artefact)
        return self._compressors[key]

    def load(self, representation: str | None = None, score: Score = "late") -> None:
        """Reads into memory now what a search with this score needs of the items."""
        name, info = self.representation(representation)
        for column in _columns(name, info, score):
            self._vectors(column)

    def has_loaded(self, representation: str, score: Score = "late") -> bool:
        """Returns whether `load` has nothing to do."""
        name, info = self.representation(representation)
        return all(column in self._packed for column in _columns(name, info, score))

    def packed(self, representation: str | None = None) -> PackedVectors:
        """The vectors of a representation, for what looks at them otherwise than by a score."""
        return self._vectors(self.representation(representation)[0])

    def _rank(
        self,
        queries: Queries,
        name: str,
        info: RepresentationInfo,
        k: int,
        score: str,
        weights: Weights,
        group_by: str | None,
        rows: np.ndarray | None,
    ) -> list[Ranking]:
        return _finished(
            self._rank_in_slices(queries, name, info, k, score, weights, group_by, rows)
        )

    def _rank_in_slices(
        self,
        queries: Queries,
        name: str,
        info: RepresentationInfo,
        k: int,
        score: str,
        weights: Weights,
        group_by: str | None,
        rows: np.ndarray | None,
        slice_pairs: int | None = None,
    ) -> Generator[None, None, list[Ranking]]:
        check_options(queries, info, k, score, weights, group_by)
        parents = self._parents if group_by else None
        rankings = []
        for first in range(0, len(queries), QUERY_BATCH):
            if first:
                yield
            batch = slice(first, first + QUERY_BATCH)
            scores = yield from self._scores(
                queries, batch, name, info, score, weights, rows, slice_pairs
            )
            for query, total in enumerate(scores.total):
                best = top_rows(total, rows, self._order, k, parents)
                rankings.append(self._ranking(best, scores.of(query), rows))
        return rankings

    def _scores(
        self,
        queries: Queries,
        batch: slice,
        name: str,
        info: RepresentationInfo,
        score: str,
        weights: Weights,
        rows: np.ndarray | None,
        slice_pairs: int | None,
    ) -> Generator[None, None, _Scores]:
        """Scores the queries of a batch; -inf where an item lacks what the score needs."""
        items = None if rows is None else torch.from_numpy(rows)
        tokens = queries.tokens[batch]
        late = single = None
        if score in ("late", "hybrid"):
            late = yield from _maxsim(tokens, self._vectors(name), items, slice_pairs)
        if score in ("single", "hybrid"):
            # One vector each: MaxSim of a one-token query with a one-token item.
            pooled, ones = self._vectors(info.pooled_column), queries.pooled[batch].unsqueeze(1)
            single = yield from _maxsim(list(ones), pooled, items, slice_pairs)
        if score == "hybrid":
            mean = late / torch.tensor([[max(len(query), 1)] for query in tokens])
            total = weights[0] * single + weights[1] * mean
            if 0 in weights:
                total.masked_fill_((single == -torch.inf) | (late == -torch.inf), -torch.inf)
        else:
            total = late if single is None else single
        return _Scores(*(part if part is None else part.numpy() for part in (total, late, single)))

    def _ranking(self, best: np.ndarray, scores: _Scores, rows: np.ndarray | None) -> Ranking:
        found = best if rows is None else rows[best]
        ids = self._ids.take(pa.array(found))
        return Ranking(
            ids["item_id"].to_pylist(),
            ids["parent_id"].to_pylist(),
            scores.total[best].tolist(),
            found,
            *(part if part is None else part[best] for part in (scores.late, scores.single)),
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

    def _rows(
        self,
        where: str | None,
        ids: Collection[str] | None,
        parents: Collection[str] | None,
    ) -> np.ndarray | None:
        """The ascending positions of the items that can be hits; None for all."""
        return self.restricted(self._rows_where(where), ids, parents)

    def restricted(
        self,
        rows: np.ndarray | None,
        ids: Collection[str] | None,
        parents: Collection[str] | None,
    ) -> np.ndarray | None:
        """Returns those of ascending positions (None: all) that lists of ids let through."""
        for field, named in (("ids", ids), ("parents", parents)):
            if named is not None:
                own = pc.is_in(self._ids[ID_COLUMNS[field]], value_set=_id_array(field, named))
                chosen = np.flatnonzero(own.to_numpy())
                rows = chosen if rows is None else np.intersect1d(rows, chosen, assume_unique=True)
        return rows

    def _rows_where(self, where: str | None) -> np.ndarray | None:
        """The ascending positions of the items that a filter lets through; None for all."""
        if where is None:
            return None
        if isinstance(where, str) and where in self._filtered:  # the version does not change
            return self._filtered[where]
        return self.remember_filter(where, matching_ids(self.index, where, self._fragments))

    def filtered(self, where: str) -> np.ndarray | None:
        """Returns the positions of the items that a filter lets through, if they are known."""
        return self._filtered.get(where)

    def remember_filter(self, where: str, item_ids: pa.ChunkedArray) -> np.ndarray:
        """Returns the ascending positions of the items that a filter lets through, and keeps them.

        Args:
            item_ids: What `matching_ids` returned for the filter.
        """
        let_through = pc.is_in(self._ids["item_id"], value_set=item_ids)
        rows = np.flatnonzero(let_through.to_numpy())
        while len(self._filtered) >= KEPT_FILTERS:
            self._filtered.pop(next(iter(self._filtered)), None)
        self._filtered[where] = rows
        return rows

    def _vectors(self, column: str) -> PackedVectors:
        """The vectors of a representation, or of the pooled ones, opened once."""
        if column not in self._packed:
            packed = packed_column(
                self.index,
                column,
                self._fragments,
                cache=self._cache,
                when_damaged=lambda: self._packed.pop(column, None),
            )
            self._packed[column] = packed if self._device == "cpu" else packed.to(self._device)
        return self._packed[column]

    def _items(self, name: str, rows: np.ndarray) -> list[torch.Tensor]:
        """The vectors (N, D) float32 of some items of a representation."""
        packed = self._vectors(name)
        return [packed.item(row).cpu() for row in rows.tolist()]

    def hits(
        self,
        rankings: Sequence[Ranking],
        queries: Queries,
        representation: str,
        *,
        explain: bool = True,
    ) -> list[list[Hit]]:
        """What is stored about the items that `rank` found for each query.

        Args:
            queries: what `queries` gave for the representation.
            explain: whether hits carry `matches` and `passages`.
        """
        return _finished(self.hits_in_slices(rankings, queries, representation, explain=explain))

    def hits_in_slices(
        self,
        rankings: Sequence[Ranking],
        queries: Queries,
        representation: str,
        *,
        explain: bool = True,
    ) -> Generator[None, None, list[list[Hit]]]:
        """Describes as `hits` does, and yields after each fraction of a second's work."""
        name, info = self.representation(representation)
        text = info.text_column
        wanted = ["title", text, "span"]
        if explain:
            wanted += info.token_columns
        there = [column for column in wanted if column in self.index.schema.names]
        item_ids = sorted({item_id for ranking in rankings for item_id in ranking.item_ids})
        found = self.index.items(item_ids, there) if item_ids else pa.table({"item_id": []})
        stored = {row["item_id"]: row for row in found.to_pylist()}

        hits, num_described = [], 0
        for query, ranking in enumerate(rankings):
            vectors = self._items(name, ranking.rows) if explain else []
            hits.append([])
            for i, item_id in enumerate(ranking.item_ids):
                if num_described and num_described % SLICE_HITS == 0:
                    yield
                num_described += 1
                row = stored[item_id]
                hit = Hit(
                    rank=i + 1,
                    score=ranking.scores[i],
                    item_id=item_id,
                    parent_id=ranking.parent_ids[i],
                    title=row.get("title"),
                    text=row.get(text),
                    span=row.get("span"),
                    parts=_parts(ranking, i, len(queries.tokens[query])),
                    reranked=ranking.reranked and ranking.reranked[i],
                )
                if explain and len(vectors[i]):  # else it was found by its pooled vector alone
                    inputs, positions = self._inputs_of(row, info), _positions(row, info)
                    sim_MN = (queries.tokens[query] @ vectors[i].T).numpy()
                    tokens = queries.token_texts[query]
                    outputs = self._outputs_of(row, info, positions.num_tokens)
                    hit = replace(
                        hit,
                        matches=_matches(tokens, sim_MN, inputs, positions),
                        passages=positions.passages(tokens, sim_MN, outputs, hit.text),
                    )
                hits[-1].append(hit)
        return hits

    def _inputs_of(
        self, row: dict[str, Any], info: RepresentationInfo
    ) -> Callable[[int], Sequence[int]]:
        """A function from an item's vector to the input tokens it stands for, if that is stored."""
        if info.is_uncompressed:
            return lambda token: [token]
        support = row.get(info.support_column)
        if support is None:
            return lambda token: []
        form = info.support_form
        return lambda token: input_tokens(token, support, form)

    def _outputs_of(
        self, row: dict[str, Any], info: RepresentationInfo, num_tokens: int
    ) -> np.ndarray | None:
        """Returns the vector of each input token, or -1: (T,); None if that is not stored."""
        if info.is_uncompressed:
            return np.arange(num_tokens)
        support = row.get(info.support_column)
        if support is None or not num_tokens:
            return None
        return outputs_of(support, info.support_form, num_tokens)


def _finished(slices: Generator[None, None, T]) -> T:
    """The result of work that is done in slices, all at once."""
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
    """Scores (Q, R) of some items; pauses after about `slice_pairs` pairs."""
    num_rows = len(packed) if rows is None else len(rows)
    pairs = sum(map(len, queries)) * packed.num_vectors / max(len(packed), 1)  # per item
    size = num_rows if slice_pairs is None else max(1, int(slice_pairs / max(pairs, 1)))
    if num_rows <= size:
        return maxsim(queries, packed, rows=rows).cpu()
    rows = torch.arange(num_rows) if rows is None else rows
    parts = []
    for some in rows.split(size):
        if parts:
            yield
        parts.append(maxsim(queries, packed, rows=some).cpu())
    return torch.cat(parts, dim=1)


def _are_of_one_kind(queries: Sequence[AnyQuery]) -> bool:
    """Whether an encoder reads them together."""
    return any(all(isinstance(query, kind) for query in queries) for kind in get_args(Unencoded))


def check_texts(texts: Sequence[str]) -> None:
    """Raises `SpecError` if a text is no query: without a word, or not to be written in UTF-8."""
    for place, text in enumerate(texts):
        if not text.strip():
            raise bad_query(text, "a text with at least one word", place, len(texts))
        if re.search("[\ud800-\udfff]", text):
            raise bad_query(text, "a text in UTF-8", place, len(texts))


def query_encoder(info: EncoderInfo) -> Encoder:
    """The encoder that a representation's metadata names, for queries.

    Raises:
        SpecError: it cannot be built here.
    """
    spec = ENCODERS.resolve(info.spec)
    ENCODERS.load(spec.name).check_queries(spec)
    return ENCODERS.build(spec)


def check_fingerprint(encoder: Encoder, representation: str, info: EncoderInfo) -> None:
    """Raises `SpecError` if another encoder made the representation."""
    if encoder.fingerprint != info.fingerprint:
        problem = (
            f"was made by another encoder (fingerprint {info.fingerprint}, "
            f"this one has {encoder.fingerprint})"
        )
        legal = f"the weights and settings of {info.name} that made it"
        raise SpecError("representation", representation, legal, problem)


class _Scores(NamedTuple):
    """The scores (Q, R) float32 of a batch, or (R,) of a query, and the parts they are made of."""

    total: np.ndarray
    late: np.ndarray | None
    single: np.ndarray | None

    def of(self, query: int) -> _Scores:
        """The scores of one query."""
        return _Scores(*(part if part is None else part[query] for part in self))


def _parts(ranking: Ranking, place: int, num_tokens: int) -> Parts:
    """What the score of a hit is made of."""
    late, single = (
        None if part is None else float(part[place]) for part in (ranking.late, ranking.single)
    )
    return Parts(late, None if late is None else late / max(num_tokens, 1), single)


@dataclass(frozen=True)
class _Positions:
    """Where an item's input tokens stand, as far as that is stored: lists of T, or None."""

    spans: list | None
    extents: list | None
    confidence: list | None

    def characters(self, tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The character ranges of some input tokens, merged."""
        return merge(self.spans[i] for i in tokens) if self.spans else ()

    @property
    def num_tokens(self) -> int:
        """Number of the item's input tokens; 0 if nothing is stored."""
        return len(self.spans or self.extents or ())

    def passages(
        self,
        query_tokens: Sequence[str],
        sim_MN: np.ndarray,
        output_T: np.ndarray | None,
        text: str | None,
    ) -> tuple[Passage, ...]:
        """Returns the passages that match best, see `find_passages`."""
        if output_T is None or not self.num_tokens:
            return ()
        spans = None if self.spans is None else np.array(self.spans)
        extents = None if self.extents is None else np.array(self.extents, float)
        confidence = None if self.confidence is None else np.array(self.confidence, float)
        return find_passages(query_tokens, sim_MN, output_T, spans, extents, text, confidence)

    def places(self, tokens: Sequence[int]) -> tuple[Place, ...]:
        """Where some input tokens are to be seen or heard, in the order of the text."""
        if not self.extents:
            return ()
        spans = self.spans or [NO_SPAN] * len(self.extents)
        sure = self.confidence or [math.nan] * len(self.extents)
        found = (place_of(spans[i], self.extents[i], sure[i]) for i in tokens)
        places = dict.fromkeys(place for place in found if place)
        return tuple(sorted(places, key=lambda place: place.span))


def _positions(row: dict[str, Any], info: RepresentationInfo) -> _Positions:
    kinds = ("spans", "extents", "confidence")
    return _Positions(*(row.get(info.positions.get(kind)) for kind in kinds))


def _matches(
    query_tokens: Sequence[str],
    sim_MN: np.ndarray,
    inputs_of: Callable[[int], Sequence[int]],
    positions: _Positions,
) -> tuple[Match, ...]:
    matches = []
    best_M, contribution_M = sim_MN.argmax(axis=1).tolist(), contributions(sim_MN).tolist()
    for text, row, token, contribution in zip(
        query_tokens, sim_MN, best_M, contribution_M, strict=True
    ):
        inputs = inputs_of(token)
        characters, places = positions.characters(inputs), positions.places(inputs)
        matches.append(Match(text, float(row[token]), token, characters, places, contribution))
    return tuple(matches)


def _columns(name: str, info: RepresentationInfo, score: str) -> list[str]:
    """The columns of vectors that a score reads."""
    late, single = score in ("late", "hybrid"), score in ("single", "hybrid")
    return [name] * late + [info.pooled_column] * (single and info.pooled_column is not None)


def check_k(k: int) -> None:
    """Raises `SpecError` if this is no number of hits."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise SpecError("k", k, "an integer >= 1")


def check_options(
    queries: Queries, info: RepresentationInfo, k: int, score: str, weights: Weights, group_by: Any
) -> None:
    """Raises `SpecError` if a search of a representation cannot be done in this way."""
    check_k(k)
    if group_by not in (None, "parent"):
        raise SpecError("group_by", group_by, "parent, or nothing")
    _check_score(score, info, queries)
    check_weights(weights, score)


def _check_score(score: str, info: RepresentationInfo, queries: Queries) -> None:
    if score not in SCORES:
        raise SpecError("score", score, ", ".join(SCORES))
    if score != "single" and not all(map(len, queries.tokens)):
        raise SpecError(
            "score", score, "single", "needs token vectors of the query, which has none"
        )
    if score == "late":
        return
    if info.pooled_column is None:
        raise SpecError("score", score, "late", "needs single vectors, and the index has none")
    if queries.pooled is None:
        raise SpecError("score", score, "late", "needs a single vector of the query, given as text")


def are_weights(weights: Any) -> bool:
    """Whether these can be the weights of the hybrid score.

    >>> are_weights((1, 0.5)), are_weights((0, 0)), are_weights((1, float("nan"))), are_weights(1)
    (True, False, False, False)
    """
    return (
        isinstance(weights, tuple | list)
        and len(weights) == 2
        and all(isinstance(w, int | float) and not isinstance(w, bool) for w in weights)
        and all(w == 0 or 1e-6 <= w <= 1e6 for w in weights)
        and any(weights)
    )


def check_weights(weights: Weights, score: str) -> None:
    """Raises `SpecError` if these are no weights, or the score has none."""
    if not are_weights(weights):
        raise SpecError("weights", weights, LEGAL_WEIGHTS)
    if score != "hybrid" and tuple(weights) != EQUAL:
        raise SpecError(
            "weights", weights, "the score hybrid", f"mean nothing to the score {score}"
        )


def _id_array(field: str, ids: Collection[str]) -> pa.Array:
    """Ids as Arrow has them.

    Raises:
        SpecError: for `field`: they are no strings, or one string in place of a list.
    """
    named = [] if isinstance(ids, str) else list(ids)
    wrong = [ids] if isinstance(ids, str) else [i for i in named if not isinstance(i, str)]
    try:
        if not wrong:
            return pa.array(named, pa.string())
    except UnicodeEncodeError as error:
        wrong = [error.object]
    raise SpecError(field, wrong[0], "a list of ids, each a text in UTF-8")


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
