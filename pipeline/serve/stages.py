"""The stages of a search behind the gateway, as classes that know nothing of HTTP.

`pipeline.serve.app` makes deployments of them. A stage gets its input in the call, keeps only what
is expensive to load, and answers each request by itself, so that any replica can be asked, or asked
again.

Every call names its caller: the access key, and for how long the answer is waited for. Stages share
their time fairly among keys, compute in slices of a fraction of a second, and drop what nobody
waits for any more (`pipeline.serve.turns`). Calls with equal options that wait at the same time are
batched: queries are encoded together, and vectors are read once for all queries.

Queries travel as `Queries` of one query each, before the transformation of the representation.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pipeline.config import SpecError, digest
from pipeline.encoders import Encoder
from pipeline.index.info import EncoderInfo
from pipeline.index.reader import Edition, open_edition
from pipeline.schema import Hit
from pipeline.search.describe import describe_in_slices
from pipeline.search.maps import SimilarityMap, similarity_map
from pipeline.search.options import SearchOptions
from pipeline.search.query import Queries, Unencoded, check_fingerprint, encode, query_encoder
from pipeline.search.score import SLICE_PAIRS, Ranking
from pipeline.search.searcher import Searcher
from pipeline.serve.filters import Filters
from pipeline.serve.metrics import batch_sizes
from pipeline.serve.outcomes import logged, returns_errors
from pipeline.serve.replica import bind_to_loopback
from pipeline.serve.settings import Scale, ServedIndex
from pipeline.serve.turns import Caller, Turns, all_of
from pipeline.serve.versions import Versions

if TYPE_CHECKING:  # it needs transformers, and the gateway does not
    from pipeline.search.rerank import Reading

log = logging.getLogger("ray.serve")

#: Characters of queries that are encoded together: about a second's work of two cores.
PORTION_CHARS = 2_000
#: Pairs of a query and an item that the joint encoder reads together.
PORTION_PAIRS = 100
#: Hits that are described together.
PORTION_HITS = 200

#: A hit, and its similarity map if there is one.
Described = tuple[Hit, SimilarityMap | None]


def limit_threads(scale: Scale) -> None:
    """Sets the threads of torch, which Ray would limit to the CPUs of the actor."""
    torch.set_num_threads(scale.num_threads or os.cpu_count() or 1)


class QueryEncoder:
    """Encodes queries with the encoders of the representations, each loaded once."""

    def __init__(self, scale: Scale):
        bind_to_loopback()
        limit_threads(scale)
        self._encoders: dict[str, Encoder] = {}
        self._lock = threading.Lock()
        size = batch_sizes("encode").observe
        self._turns = Turns(self._encode, _num_chars, PORTION_CHARS, observe=size)

    async def is_there(self, caller: Caller) -> bool:
        """Answers a check that the stage runs."""
        return True

    @returns_errors
    async def encode(
        self,
        representation: str,
        info: EncoderInfo,
        queries: Sequence[Unencoded],
        caller: Caller,
    ) -> list[Queries]:
        """Encodes queries for a representation.

        Args:
            representation: Name of the representation.
            info: The encoder of the representation.
            caller: The access key, and the time limit in seconds.
            queries: Texts, image files, or both together; all of one kind.

        Raises:
            SpecError: The encoder did not make the representation, or is not here.
            TimeoutError: The deadline has passed.
        """
        with logged("encode", queries=len(queries)):
            group = digest([info.spec, info.fingerprint]), type(queries[0]).__name__
            waiting = [_Unencoded(query, representation, info) for query in queries]
            return await self._turns.ask(caller, group, waiting)

    def _encode(
        self, group: tuple[str, str], waiting: list[_Unencoded]
    ) -> Generator[None, None, list[Queries]]:
        _, representation, info = waiting[0]
        encoder = self._encoder(info)
        yield  # loading it may have taken long
        check_fingerprint(encoder, representation, info)
        return Queries.from_encoded(encode(encoder, [each.query for each in waiting])).split()

    def _encoder(self, info: EncoderInfo) -> Encoder:
        key = digest(info.spec)
        with self._lock:
            if key not in self._encoders:
                self._encoders[key] = query_encoder(info)
            return self._encoders[key]


class _Unencoded(NamedTuple):
    """A query that waits to be encoded, by an encoder that the queries of a batch share."""

    query: Unencoded
    representation: str
    info: EncoderInfo


def _num_chars(waiting: _Unencoded) -> int:
    return len(waiting.query) if isinstance(waiting.query, str) else PORTION_CHARS


class _Waiting(NamedTuple):
    """A query that waits to be scored.

    Attributes:
        rows: Ascending positions of the items that pass the filter; None for all.
        num_pairs: Number of pairs of a query token and a vector, if all items are scored.
    """

    query: Queries
    rows: np.ndarray | None
    num_pairs: int


class Ranker:
    """Ranks and describes the items of an index, or of a shard of it.

    As the first stage it searches its shard; as the second it scores the hits of the first by
    another representation of all items.
    """

    def __init__(
        self,
        served: ServedIndex,
        scale: Scale,
        filter_seconds: float,
        shard: tuple[int, int] | None = None,
    ):
        bind_to_loopback()
        limit_threads(scale)
        self._served, self._shard = served, shard
        self._versions = Versions(self._open)
        self._loading: dict[tuple[Edition, str, str], asyncio.Future] = {}
        self._filters = Filters(served.uri, shard, filter_seconds)
        size = batch_sizes("rank").observe
        self._ranking = Turns(self._rank, lambda each: each.num_pairs, SLICE_PAIRS, observe=size)
        self._describing = Turns(self._describe, lambda pair: len(pair[1].rows), PORTION_HITS)

    async def is_there(self, caller: Caller) -> bool:
        """Answers a check that the stage runs."""
        return True

    def _open(self, edition: Edition) -> Searcher:
        index = open_edition(self._served.uri, edition)
        cache, device = self._served.cache, self._served.device
        return Searcher(index, shard=self._shard, cache=cache, device=device)

    @returns_errors
    async def prepare(self, edition: Edition, representations: Sequence[str]) -> None:
        """Opens a version and the vectors of some representations, if they are not open."""
        for name in representations:
            await self._loaded(edition, SearchOptions(name))
        await asyncio.to_thread(self._versions.get, edition)

    async def _loaded(self, edition: Edition, options: SearchOptions) -> Searcher:
        """Returns a version with the vectors of a score; only those who need them wait."""
        searcher = await asyncio.to_thread(self._versions.get, edition)
        name, score = options.column, options.score
        if not searcher.scorer.is_loaded(name, score):
            key = edition, name, score
            if key not in self._loading:
                load = asyncio.ensure_future(asyncio.to_thread(searcher.load, name, score))
                self._loading[key] = load
                load.add_done_callback(lambda _: self._loading.pop(key))
            await asyncio.shield(self._loading[key])  # cancelled, it continues for others
        return searcher

    @returns_errors
    async def rank(
        self, edition: Edition, queries: Sequence[Queries], options: SearchOptions, caller: Caller
    ) -> list[Ranking]:
        """Returns the best items of the shard for each query; `rows` are counted in the shard.

        Raises:
            SpecError: An option is invalid.
            TimeoutError: The deadline has passed.
        """
        with logged("rank", representation=options.column, version=edition.version):
            return await self._ranked(edition, queries, options, caller)

    @returns_errors
    async def rank_each(
        self,
        edition: Edition,
        queries: Sequence[Queries],
        options: Sequence[SearchOptions],
        caller: Caller,
    ) -> list[Ranking]:
        """Ranks as `rank` does, by options of each query."""
        with logged("rank", queries=len(queries)):
            pairs = zip(queries, options, strict=True)
            found = await all_of(self._ranked(edition, [q], own, caller) for q, own in pairs)
            return [ranking for (ranking,) in found]

    async def _ranked(
        self, edition: Edition, queries: Sequence[Queries], options: SearchOptions, caller: Caller
    ) -> list[Ranking]:
        async with asyncio.timeout(caller.seconds):
            options = options.first_stage()
            searcher = await self._loaded(edition, options)
            rows = await self._filtered(edition, searcher, options, caller)
            is_single = options.score == "single"
            size = 1 if is_single else searcher.packed(options.column).num_vectors
            waiting = [_Waiting(q, rows, q.tokens[0].shape[0] * size) for q in queries]
            # Queries are scored together that have equal options, and single vectors.
            group = edition, options, all(query.pooled is not None for query in queries)
            return await self._ranking.ask(caller, group, waiting)

    async def _filtered(
        self, edition: Edition, searcher: Searcher, options: SearchOptions, caller: Caller
    ) -> np.ndarray | None:
        """Returns the positions of the items that pass the filter; None without a filter."""
        if options.filter is None:
            return None
        if (rows := searcher.items.cached_rows(options.filter)) is not None:
            return rows
        item_ids = await self._filters.matching_ids(caller, edition, options.filter)
        return await asyncio.to_thread(searcher.items.cache_rows, options.filter, item_ids)

    def _rank(
        self, group: tuple[Edition, SearchOptions, bool], waiting: list[_Waiting]
    ) -> Generator[None, None, list[Ranking]]:
        edition, options, _ = group
        searcher = self._versions.get(edition)
        joined = Queries.join([each.query for each in waiting])
        queries = searcher.encoders.transform(joined, options.column)
        rows = searcher.items.restrict(waiting[0].rows, options)
        return (yield from searcher.scorer.rank_in_slices(queries, options, rows))

    @returns_errors
    async def search(
        self, edition: Edition, queries: Sequence[Queries], options: SearchOptions, caller: Caller
    ) -> list[list[Described]]:
        """Ranks and describes in one call, for an index of one shard."""
        details = {"representation": options.column, "version": edition.version}
        with logged("search", queries=len(queries), **details):
            async with asyncio.timeout(caller.seconds):
                rankings = await self._ranked(edition, queries, options, caller)
                return await self._described(edition, queries, options, rankings, caller)

    @returns_errors
    async def describe(
        self,
        edition: Edition,
        queries: Sequence[Queries],
        options: SearchOptions,
        rankings: Sequence[Ranking],
        caller: Caller,
    ) -> list[list[Described]]:
        """Returns the hits of rankings of this shard."""
        with logged("describe", queries=len(queries)):
            return await self._described(edition, queries, options, rankings, caller)

    async def _described(
        self,
        edition: Edition,
        queries: Sequence[Queries],
        options: SearchOptions,
        rankings: Sequence[Ranking],
        caller: Caller,
    ) -> list[list[Described]]:
        group = edition, options.column, options.explain
        pairs = list(zip(queries, rankings, strict=True))
        return await self._describing.ask(caller, group, pairs)

    def _describe(
        self, group: tuple[Edition, str, str | None], pairs: list[tuple[Queries, Ranking]]
    ) -> Generator[None, None, list[list[Described]]]:
        edition, name, explain = group
        searcher = self._versions.get(edition)
        joined = Queries.join([query for query, _ in pairs])
        queries = searcher.encoders.transform(joined, name)
        vectors = searcher.scorer.item_vectors if explain else None
        rankings = [ranking for _, ranking in pairs]
        hits = yield from describe_in_slices(rankings, queries, searcher.index, name, vectors)
        described: list[list[Described]] = []
        for query, found in zip(queries.split(), hits, strict=True):
            described.append([])
            for hit in found:
                map = None
                if explain == "map":
                    yield
                    map = _similarity_map(searcher, query, hit.item_id, name)
                described[-1].append((hit, map))
        return described


def _similarity_map(
    searcher: Searcher, query: Queries, item_id: str, representation: str
) -> SimilarityMap | None:
    """Returns the map of an item; None if the item lacks what a map needs."""
    try:
        return similarity_map(searcher, query, item_id, representation)
    except SpecError:
        return None


class JointRanker:
    """Reorders the best hits of the first stage by EDJE's joint encoder, loaded once.

    Raises:
        SpecError: The folder of the settings is not an EDJE.
    """

    def __init__(self, served: ServedIndex, scale: Scale):
        from pipeline.search.rerank import Reranker

        assert served.edje is not None
        bind_to_loopback()
        limit_threads(scale)
        self._reranker = Reranker(served.edje, precision=served.edje_precision)
        self._versions = Versions(lambda edition: Searcher(open_edition(served.uri, edition)))
        size = batch_sizes("edje").observe
        self._turns = Turns(self._read_some, lambda pair: len(pair[1]), PORTION_PAIRS, observe=size)

    async def is_there(self, caller: Caller) -> bool:
        """Answers a check that the stage runs."""
        return True

    @returns_errors
    async def rerank(
        self,
        edition: Edition,
        queries: Sequence[str | bytes],
        rankings: Sequence[Ranking],
        options: SearchOptions,
        caller: Caller,
    ) -> list[Ranking]:
        """Returns the k best of each query's ranking of the first stage.

        Args:
            edition: Version of the index.
            queries: All texts, or all images.
            rankings: Ranking of the first stage for each query.
            options: Options of the search.
            caller: The access key, and the time limit in seconds.

        Raises:
            SpecError: An image cannot be read; for `edje`: the index has no tokens of this EDJE.
            TimeoutError: The deadline has passed.
        """
        from pipeline.search.rerank import reorder

        candidates = [ranking.item_ids[: options.rerank_depth] for ranking in rankings]
        read = await self._read(edition, queries, candidates, caller)
        settings = options.rerank_depth, options.add_first_stage, options.k
        return [reorder(*each, *settings) for each in zip(queries, rankings, read, strict=True)]

    @returns_errors
    async def read(
        self, edition: Edition, query: str | bytes, item_ids: list[str], caller: Caller
    ) -> dict[str, Reading]:
        """Returns what the joint encoder says of the items that it can read; see `rerank`."""
        (found,) = await self._read(edition, [query], [item_ids], caller)
        return found

    async def _read(
        self,
        edition: Edition,
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
        caller: Caller,
    ) -> list[dict[str, Reading]]:
        """Reads the candidates of each query, in chunks of `PORTION_PAIRS`."""
        chunks = [
            [(query, ids[i : i + PORTION_PAIRS]) for i in range(0, len(ids) or 1, PORTION_PAIRS)]
            for query, ids in zip(queries, candidates, strict=True)
        ]
        with logged("edje", queries=len(queries), version=edition.version):
            try:
                pairs = list(itertools.chain(*chunks))
                read = iter(await self._turns.ask(caller, (edition, type(queries[0])), pairs))
            except SpecError as error:
                if error.field in ("query", "index"):
                    raise
                # The EDJE, its encoder or its tokens: the caller can do nothing about it.
                log.error("edje: %s", error)
                raise error.at("edje") from None
        return [dict(itertools.chain(*(next(read).items() for _ in own))) for own in chunks]

    def _read_some(
        self, group: tuple[Edition, type], pairs: list[tuple[str | bytes, list[str]]]
    ) -> Generator[None, None, list[dict[str, Reading]]]:
        searcher = self._versions.get(group[0])
        queries = self._reranker.check(searcher.index, [query for query, _ in pairs])
        yield  # opening it may have taken long
        return self._reranker.read(searcher, queries, [ids for _, ids in pairs])
