"""Search over one version of an index: `open_index(uri).search("...")`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from pipeline.config import SpecError, parse
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.encoders.shared import Encoders
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import IndexReader
from pipeline.search.candidates import AUTO, EXACT
from pipeline.search.describe import describe
from pipeline.search.html import Hits
from pipeline.search.media import Unencoded, is_supported, query_parts
from pipeline.search.options import SearchOptions, representation_info
from pipeline.search.packed import PackedVectors
from pipeline.search.query import (
    AnyQueries,
    AnyQuery,
    Queries,
    QueryEncoders,
    reading_negative,
)
from pipeline.search.results import Hit
from pipeline.search.score import Ranking, Scorer
from pipeline.search.scores import Score
from pipeline.search.selection import Items

if TYPE_CHECKING:  # imports transformers, which a search without reranking does not need
    from pipeline.search.rerankers import AnyReranker, Reranker, RerankerSpec


def open_index(
    uri: str,
    version: int | None = None,
    *,
    shard: tuple[int, int] | None = None,
    cache: bool = True,
    device: str = "cpu",
) -> Searcher:
    """Opens an index for searching. Vectors and query encoders are loaded on first use.

    Args:
        uri: Path or URI of the index.
        version: Lance version. Defaults to the newest.
        shard: (i, n) to search only shard i of n. See `IndexReader.fragments`.
        cache: Whether to pack vectors into memory-mapped local files, see `pipeline.search.cache`.
            If False, vectors are read into memory.
        device: "cpu", or a CUDA device that holds the vectors and computes the scores.

    Raises:
        SpecError: The index is missing, corrupted or of another format, or the shard or device does
            not exist.
    """
    return Searcher(IndexReader(uri, version), shard=shard, cache=cache, device=device)


class Searcher:
    """Search over a version of an index, or over one of its shards.

    Args:
        encoders: Loaded query encoders, which other parts of this process share.

    Attributes:
        index: Open version of the index.
        device: Device that computes the scores.
        items: Items of the index, with selection by filters and ids.
        encoders: Query encoders of the representations.
        scorer: Scorer of the items.
    """

    def __init__(
        self,
        index: IndexReader,
        *,
        shard: tuple[int, int] | None = None,
        cache: bool = True,
        device: str = "cpu",
        encoders: Encoders | None = None,
    ):
        self.index, self.device = index, device
        self.items = Items(index, shard)
        self.encoders = QueryEncoders(index, encoders)
        self.scorer = Scorer(self.items, cache=cache, device=device)
        self._models: dict[RerankerSpec, Reranker[Any]] = {}

    def search(
        self,
        query: AnyQuery | AnyQueries,
        representation: str | None = None,
        *,
        negative: AnyQuery | None = None,
        explain: bool = True,
        rerank: AnyReranker | Sequence[AnyReranker] | None = None,
        **options: Any,
    ) -> list[Hit] | list[list[Hit]]:
        """Finds the k best items for a query. Ties are sorted by item id.

        The search is exact unless `candidates` names a candidate generator, or the index is large
        and has `ivf`, see `SearchOptions`.

        Args:
            query: A text; an image, as the bytes of a PNG, JPEG or WebP file; a `Composed` query of
                a text, an image, audio and a video, or some of these; token vectors (M, D); a list
                of these; encoded queries; or the output of `queries` for this representation.
            representation: Name of the representation to search, or `NAME@K` for the first K
                vectors of each item of a representation with nested vectors. Defaults to `full` if
                it exists, otherwise the first. If the index has a representation of images by
                another encoder (`see`), the hits of both alternate by default: their scores are not
                comparable.
            negative: Query that the hits should not match: a text, an image, a `Composed` query or
                token vectors. The score of an item is that of the query minus `negative_weight`
                (default 0.5) times that of the negative query. Candidates and explanations are
                those of the query.
            explain: Whether hits contain `matches`, one per query token, and `passages`.
            rerank: Reranker of the best items, as the fields of its spec such as
                `{"name": "cross_encoder", "model": FOLDER, "top": 20}`, or loaded; or several that
                are applied one after another.
            options: Other fields of `SearchOptions`, such as `k` (default 10), `score` or `filter`.

        Returns:
            The hits of the query, best first, or a list of hits per query for several queries.
            Items without vectors are never returned.

        Raises:
            SpecError: An argument is invalid, or the query encoder differs from that of the index.
        """
        options |= {"representation": representation, "explain": "matches" if explain else None}
        parsed = parse(SearchOptions, options)
        rerankers = load_once(rerank, self._models)
        if isinstance(query, AnyQuery):
            return Hits(self.search_with([query], parsed, rerankers, negative)[0])
        if not isinstance(query, Sequence | EncodedQueries | Queries):
            rule = "a text, an image, vectors, or a list of these"
            raise SpecError("query", type(query).__name__, rule)
        return self.search_with(cast(AnyQueries, query), parsed, rerankers, negative)

    def search_with(
        self,
        queries: AnyQueries,
        options: SearchOptions,
        rerankers: Sequence[Reranker[Any]] = (),
        negative: AnyQuery | None = None,
    ) -> list[list[Hit]]:
        """Returns the hits of each query. See `search`."""
        if not rerankers and (names := self._alternating(queries, options)):
            found, errors = [], []
            for name in names:
                named = options.model_copy(update={"representation": name})
                try:
                    found.append(self.search_with(queries, named, negative=negative))
                except SpecError as error:  # such as a video without speech
                    errors.append(error)
            if not found:
                raise errors[0]
            id = "parent_id" if options.group_by else "item_id"
            return [_alternate(groups, options.k, id) for groups in zip(*found, strict=True)]
        options = options.resolve(self.index, self.device)
        encoded, rankings = self._rank(queries, options, rerankers, negative)
        explain = options.explain is not None
        return self.hits(rankings, encoded, options.column, explain=explain)

    def _alternating(self, queries: AnyQueries, options: SearchOptions) -> list[str]:
        """Returns the representations of texts and images that a search by default combines."""
        is_default = options.representation is None and options.candidates == AUTO
        if not (is_default and options.score == "maxsim" and isinstance(queries, Sequence)):
            return []
        infos = self.index.representations().values()
        seen = next((info for info in infos if info.field == "image"), None)
        parts = {query_parts(query) for query in queries if isinstance(query, Unencoded)}
        if seen is None or not all(isinstance(query, Unencoded) for query in queries):
            return []
        both = self.representation(), seen
        return [
            info.name
            for info in both
            if all(is_supported(each, info.encoder.query_kinds) for each in parts)
        ]

    def _rank(
        self,
        queries: AnyQueries,
        options: SearchOptions,
        rerankers: Sequence[Reranker[Any]],
        negative: AnyQuery | None,
    ) -> tuple[Queries, list[Ranking]]:
        """Returns the encoded queries and their rankings. The options must be resolved."""
        rows = self.items.select(options)  # reports an invalid filter before encoding
        for reranker in rerankers:
            texts_or_images = reranker.check(self.index, queries)
        encoded = self.encoders.encode(queries, options.column)
        if negative is not None:
            if rerankers:
                raise SpecError("rerank", rerankers[0].spec.title, "null with a negative query")
            with reading_negative():
                encoded = encoded.minus(self.encoders.encode([negative], options.column))
        depth = max((reranker.spec.top for reranker in rerankers), default=0)
        rankings = self.scorer.rank(encoded, options.first_stage(depth), rows)
        if rerankers:
            from pipeline.search.rerankers import rerank_in_turn

            rankings = rerank_in_turn(rerankers, self, texts_or_images, rankings, options.k)
        return encoded, rankings

    def rank(
        self,
        queries: AnyQueries,
        representation: str | None = None,
        **options: Any,
    ) -> list[Ranking]:
        """Ranks the items for each query. Returns only their ids and scores."""
        options |= {"representation": representation}
        return self.rank_with(queries, parse(SearchOptions, options))

    def rank_with(
        self,
        queries: AnyQueries,
        options: SearchOptions,
        rerankers: Sequence[Reranker[Any]] = (),
        negative: AnyQuery | None = None,
    ) -> list[Ranking]:
        """Returns the ranking of each query. See `rank`."""
        options = options.resolve(self.index, self.device)
        return self._rank(queries, options, rerankers, negative)[1]

    def hits(
        self,
        rankings: Sequence[Ranking],
        queries: Queries,
        representation: str,
        *,
        explain: bool = True,
    ) -> list[list[Hit]]:
        """Converts rankings to hits.

        Args:
            rankings: Rankings of the queries.
            queries: Output of `queries` for the representation.
            representation: Name of the representation.
            explain: Whether hits contain `matches` and `passages`.
        """
        vectors = self.scorer.item_vectors if explain else None
        return describe(rankings, queries, self.index, representation, vectors)

    def queries(self, queries: AnyQueries, representation: str | None = None) -> Queries:
        """Encodes queries for a representation, so that they can be used in several searches."""
        return self.encoders.encode(queries, self.representation(representation).name)

    def encoder(self, representation: str | None = None) -> Encoder:
        """Returns the query encoder of a representation."""
        return self.encoders.encoder(self.representation(representation).name)

    def representation(self, name: str | None = None) -> RepresentationInfo:
        """Returns the metadata of a representation. See `representation_info`."""
        return representation_info(self.index, name)

    def load(
        self,
        representation: str | None = None,
        score: Score = "maxsim",
        candidates: str = EXACT,
    ) -> None:
        """Opens the vectors that a search with this score and generator needs."""
        self.scorer.load(self.representation(representation).name, score, candidates)

    def packed(self, representation: str | None = None) -> PackedVectors:
        """Returns the vectors of a representation."""
        return self.scorer.vectors(self.representation(representation).name)

    def num_items(self, **selection: Any) -> int:
        """Returns the number of items selected by `filter`, `ids` and `parents`."""
        rows = self.items.select(parse(SearchOptions, selection))
        return len(self.items) if rows is None else len(rows)

    def num_known(self, ids: Collection[str], field: Literal["ids", "parents"] = "ids") -> int:
        """Counts how many different item or parent ids of a list occur in the index."""
        selected = parse(SearchOptions, {field: ids})
        return self.items.num_known(getattr(selected, field) or (), field)


def load_once(
    values: AnyReranker | Sequence[AnyReranker] | None,
    models: MutableMapping[RerankerSpec, Reranker[Any]],
) -> Sequence[Reranker[Any]]:
    """Returns rerankers. Those in `models` are not loaded again."""
    if values is None:
        return ()
    from pipeline.search.rerankers import load_rerankers

    return load_rerankers(values, models)


def _alternate(groups: Iterable[Sequence[Hit]], k: int, id: str = "item_id") -> list[Hit]:
    """Returns the first hit of each group, then the second ones, and so on, without repeated ones.

    >>> fields = {"rank": 1, "score": 1.0, "parent_id": ""}
    >>> a, b, c = (Hit(item_id=name, **fields) for name in "abc")
    >>> [hit.item_id for hit in _alternate([[a, b], [b, a, c]], 3)]
    ['a', 'b', 'c']
    """
    found: dict[str, Hit] = {}
    for hit in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*groups))):
        found.setdefault(getattr(hit, id), hit)
    hits = itertools.islice(found.values(), k)
    return [hit.model_copy(update={"rank": rank}) for rank, hit in enumerate(hits, 1)]
