"""Search over one version of an index: `open_index(uri).search("...")`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Unpack

from pipeline.encoders import Encoder
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Index
from pipeline.schema import Hit
from pipeline.search.describe import describe_in_slices
from pipeline.search.options import (
    Score,
    SearchKeywords,
    SearchOptions,
    Selection,
    id_tuple,
)
from pipeline.search.packed import PackedVectors
from pipeline.search.query import AnyQueries, AnyQuery, Queries, QueryEncoders
from pipeline.search.representations import representation_info
from pipeline.search.score import Ranking, Scorer, finish
from pipeline.search.selection import Items

if TYPE_CHECKING:  # it needs transformers, and a search without it does not
    from pipeline.search.rerank import Reranker


def open_index(
    uri: str,
    version: int | None = None,
    *,
    shard: tuple[int, int] | None = None,
    cache: bool = True,
    device: str = "cpu",
) -> Searcher:
    """Opens an index for search; vectors and query encoders are loaded when first needed.

    Args:
        uri: Path or URI of the index.
        version: Lance version; default the newest.
        shard: (i, n) to search only the i-th of n parts of the items; see `Index.fragments`.
        cache: Whether vectors are packed into local files (`pipeline.search.cache` says where) and
            mapped; else they are read into memory.
        device: "cpu", or a CUDA device, whose memory then holds the vectors.

    Raises:
        SpecError: The index is missing, corrupted or newer than this version of the software, or
            the shard or device does not exist.
    """
    return Searcher(Index(uri, version), shard=shard, cache=cache, device=device)


class Searcher:
    """Exact search over one version of an index, or over a shard of it.

    Attributes:
        items: Items of the index, and the positions that filters and ids select.
        encoders: Query encoders of the representations.
        scorer: Vectors of the items and their scores.
    """

    def __init__(
        self,
        index: Index,
        *,
        shard: tuple[int, int] | None = None,
        cache: bool = True,
        device: str = "cpu",
    ):
        self.index = index
        self.items = Items(index, shard)
        self.encoders = QueryEncoders(index)
        self.scorer = Scorer(self.items, cache=cache, device=device)

    def search(
        self,
        query: AnyQuery | AnyQueries,
        representation: str | None = None,
        *,
        explain: bool = True,
        rerank: Reranker | None = None,
        **options: Unpack[SearchKeywords],
    ) -> list[Hit] | list[list[Hit]]:
        """Finds the k best items for a query, exactly; equal scores in the order of the item ids.

        Args:
            query: A text; an image, as the bytes of a PNG, JPEG or WebP file; a `Composed` of
                both; token vectors (M, D); or a list of one of these, encoded queries, or what
                `queries` returned for this representation.
            representation: Column to search; default `full` if it exists, else the first.
            explain: Whether hits carry `matches`, one per query token, and `passages`.
            rerank: Second stage, which reorders the best items of the first.
            options: `k` (default 10), `score`, `weights`, `group_by`, `filter`, `ids` and
                `parents`; see `SearchOptions`.

        Returns:
            The hits of the query, best first; for a list of queries a list of such lists. Items
            without vectors are never hits.

        Raises:
            SpecError: An argument is invalid, or the index needs another query encoder.
        """
        parsed = SearchOptions.from_keywords(representation, explain=explain, **options)
        if isinstance(query, AnyQuery):
            return self.search_with([query], parsed, rerank)[0]
        return self.search_with(query, parsed, rerank)

    def search_with(
        self, queries: AnyQueries, options: SearchOptions, reranker: Reranker | None = None
    ) -> list[list[Hit]]:
        """Searches as `search` does: select, encode, score, rerank, describe."""
        options = options.resolve(self.index)
        rows = self.items.select(options)  # an invalid filter is reported before encoding
        if reranker is not None:
            texts_or_images = reranker.check(self.index, queries)
            options = replace(options, rerank_depth=reranker.rerank_depth)
        encoded = self.encoders.encode(queries, options.column)
        rankings = self.scorer.rank(encoded, options.first_stage(), rows)
        if reranker is not None:
            rankings = reranker.rerank(self, texts_or_images, rankings, options.k)
        explain = options.explain is not None
        return self.hits(rankings, encoded, options.column, explain=explain)

    def rank(
        self,
        queries: AnyQueries,
        representation: str | None = None,
        **options: Unpack[SearchKeywords],
    ) -> list[Ranking]:
        """Returns the ids and scores that `search` finds: for runs over many queries."""
        return self.rank_with(queries, SearchOptions.from_keywords(representation, **options))

    def rank_with(self, queries: AnyQueries, options: SearchOptions) -> list[Ranking]:
        """Ranks as `rank` does."""
        options = options.resolve(self.index)
        rows = self.items.select(options)
        encoded = self.encoders.encode(queries, options.column)
        return self.scorer.rank(encoded, options, rows)

    def hits(
        self,
        rankings: Sequence[Ranking],
        queries: Queries,
        representation: str,
        *,
        explain: bool = True,
    ) -> list[list[Hit]]:
        """Returns the hits of rankings.

        Args:
            rankings: Rankings of the queries.
            queries: What `queries` returned for the representation.
            representation: Name of the representation.
            explain: Whether hits carry `matches` and `passages`.
        """
        vectors = self.scorer.item_vectors if explain else None
        return finish(describe_in_slices(rankings, queries, self.index, representation, vectors))

    def queries(self, queries: AnyQueries, representation: str | None = None) -> Queries:
        """Encodes queries once for several searches of a representation; see `QueryEncoders`."""
        return self.encoders.encode(queries, self.representation(representation).name)

    def encoder(self, representation: str | None = None) -> Encoder:
        """Returns the query encoder of a representation; see `QueryEncoders`."""
        return self.encoders.encoder(self.representation(representation).name)

    def representation(self, name: str | None = None) -> RepresentationInfo:
        """Returns the metadata of a representation; default `full`, else the first.

        Raises:
            SpecError: The representation does not exist, or is only for reranking.
        """
        return representation_info(self.index, name)

    def load(self, representation: str | None = None, score: Score = "late") -> None:
        """Reads into memory what a search with this score needs of the items."""
        self.scorer.load(self.representation(representation).name, score)

    def packed(self, representation: str | None = None) -> PackedVectors:
        """Returns the vectors of a representation."""
        return self.scorer.packed(self.representation(representation).name)

    def num_items(self, **selection: Unpack[Selection]) -> int:
        """Returns how many items a search with this `filter`, `ids` and `parents` looks at."""
        rows = self.items.select(SearchOptions.from_keywords(**selection))
        return len(self.items) if rows is None else len(rows)

    def num_known(self, ids: Collection[str], field: Literal["ids", "parents"] = "ids") -> int:
        """Returns how many distinct items, or parents, of a list are in the index."""
        return self.items.num_known(id_tuple(field, ids) or (), field)
