"""Stages of a search, which are deployed behind the gateway and do not depend on HTTP.

Apart from loaded models and indexes, a stage has no state, so that any replica can process a call
and calls can be retried. Stages share their time fairly between keys (see
`pipeline.serve.scheduler`). Waiting calls that have the same options are batched: queries are
encoded together, and vectors are read only once for all queries.

Every query is passed as a separate `Queries` object that has not been transformed for a
representation yet.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from ray import serve

from pipeline.config import SpecError, digest
from pipeline.encoders import Encoder
from pipeline.extras import MissingExtra
from pipeline.index.info import EncoderInfo
from pipeline.index.reader import Edition, open_edition
from pipeline.runtime.tracing import span
from pipeline.search.describe import describe
from pipeline.search.maps import SimilarityMap, similarity_map
from pipeline.search.media import Unencoded
from pipeline.search.options import Rerank, SearchOptions
from pipeline.search.pauses import pause
from pipeline.search.query import Queries, check_fingerprint, encode, query_encoder
from pipeline.search.results import Hit, RerankScore
from pipeline.search.score import SLICE_PAIRS, Ranking, fuse
from pipeline.search.searcher import Searcher
from pipeline.serve.filters import Filters
from pipeline.serve.metrics import batch_sizes
from pipeline.serve.outcomes import logged, returns_errors
from pipeline.serve.replica import bind_to_loopback
from pipeline.serve.router import LOADED, SHARD
from pipeline.serve.scheduler import Caller, FairScheduler, busiest, gather_or_cancel
from pipeline.serve.served import Served
from pipeline.serve.settings import Scale, ServedIndex, Timeouts
from pipeline.serve.vectors import SearchVectors
from pipeline.serve.versions import Versions

log = logging.getLogger("ray.serve")

#: Maximum number of characters per encoded batch: about one second of work on two cores.
BATCH_CHARS = 2_000
#: Maximum number of (query, item) pairs per batch of the joint encoder.
BATCH_PAIRS = 100
#: Maximum number of hits per described batch.
BATCH_HITS = 200


def limit_threads(scale: Scale) -> None:
    """Sets the number of PyTorch threads, which Ray limits to the CPUs of the actor."""
    torch.set_num_threads(scale.num_threads or os.cpu_count() or 1)


class QueryEncoder:
    """Stage that encodes queries. Encoders of preloaded representations are loaded before calls."""

    def __init__(self, scale: Scale, indexes: Mapping[str, ServedIndex]):
        bind_to_loopback()
        limit_threads(scale)
        self._encoders: dict[str, Encoder] = {}
        self._lock = threading.Lock()
        size = batch_sizes("encode").observe
        self._scheduler = FairScheduler(self._encode, _num_chars, BATCH_CHARS, observe=size)
        for name, served in indexes.items():
            self._preload(name, served)

    def _preload(self, name: str, spec: ServedIndex) -> None:
        try:
            served = Served.newest(name, spec)
            for vectors in served.preloaded():
                self._encoder(served.representation(vectors.representation).encoder)
        except Exception as error:  # requests that need the encoder report the error
            log.warning("encoders of index %s were not loaded: %s", name, error)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the queueing delay and the utilisation, for `QueueingDelayPolicy`."""
        return busiest(self._scheduler)

    async def ping(self, caller: Caller) -> bool:
        """Responds to a readiness check."""
        return True

    @returns_errors
    async def encode(
        self,
        representation: str,
        info: EncoderInfo,
        queries: Sequence[Unencoded],
        caller: Caller,
    ) -> list[Queries]:
        """Encodes queries for a representation, either texts or queries with media."""
        with logged("encode", queries=len(queries)):
            group = digest([info.spec, info.fingerprint]), str(isinstance(queries[0], str))
            pending = [_PendingQuery(query, representation, info) for query in queries]
            return await self._scheduler.run(caller, group, pending)

    def _encode(self, group: tuple[str, str], pending: list[_PendingQuery]) -> list[Queries]:
        _, representation, info = pending[0]
        encoder = self._encoder(info)
        pause()  # loading the encoder may have taken long
        check_fingerprint(encoder, representation, info)
        try:
            encoded = encode(encoder, [p.query for p in pending])
        except MissingExtra as error:
            raise SpecError(
                "query", "the media", "a text or an image", f"cannot be read; {error}"
            ) from None
        texts = encoded.texts or [None] * len(pending)
        split = Queries.from_encoded(encoded).split()
        return [query.with_texts([text]) for query, text in zip(split, texts, strict=True)]

    def _encoder(self, info: EncoderInfo) -> Encoder:
        key = digest(info.spec)
        with self._lock:
            if key not in self._encoders:
                self._encoders[key] = query_encoder(info)
            return self._encoders[key]


class _PendingQuery(NamedTuple):
    """Query that is waiting to be encoded. All queries of a batch have the same encoder."""

    query: Unencoded
    representation: str
    info: EncoderInfo


def _num_chars(pending: _PendingQuery) -> int:
    return len(pending.query) if isinstance(pending.query, str) else BATCH_CHARS


class _PendingSearch(NamedTuple):
    """Query to be scored.

    Attributes:
        num_pairs: Number of (query token, vector) pairs if all items are scored.
    """

    query: Queries
    rows: np.ndarray | None
    num_pairs: int


def _num_tokens(query: Queries) -> int:
    return len(query.tokens[0]) + (_num_tokens(query.negatives) if query.negatives else 0)


class Ranker:
    """Stage that ranks and describes the items of an index or of one of its shards.

    Args:
        shard: (i, n) for shard i of n. A reranker, which rescores the hits of searchers with
            another representation, has None.
    """

    def __init__(
        self,
        served: ServedIndex,
        scale: Scale,
        timeouts: Timeouts,
        shard: tuple[int, int] | None = None,
    ):
        bind_to_loopback()
        limit_threads(scale)
        self._served, self._shard = served, shard
        self._versions = Versions(self._open, timeouts.request_s)
        self._loaded: set[tuple[Edition, SearchVectors]] = set()
        self._loading: dict[tuple[Edition, SearchVectors], asyncio.Future] = {}
        self._filters = Filters(served.uri, shard, timeouts.filter_s)
        size = batch_sizes("rank").observe
        self._rank_scheduler = FairScheduler(
            self._rank, lambda search: search.num_pairs, SLICE_PAIRS, observe=size
        )
        self._describe_scheduler = FairScheduler(
            self._describe, lambda pair: len(pair[1].rows), BATCH_HITS
        )
        if shard is not None:
            self._preload()

    def _preload(self) -> None:
        """Loads the newest version, so that calls do not wait for it in a replica that starts."""
        try:
            served = Served.newest(self._served.uri, self._served)
            searcher = self._versions.get(served.edition)
            for vectors in served.preloaded():
                searcher.load(*vectors)
                self._loaded.add((served.edition, vectors))
        except Exception as error:  # the gateway reports the error or serves an earlier version
            log.warning("index %s was not preloaded: %s", self._served.uri, error)

    async def record_routing_stats(self) -> dict[str, set[tuple[Edition, SearchVectors]]]:
        """Returns the vectors that have been loaded, for `VectorRouter`."""
        open_editions = self._versions.editions
        self._loaded = {key for key in self._loaded if key[0] in open_editions}
        return {LOADED: self._loaded}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the queueing delay and the utilisation, for `QueueingDelayPolicy`."""
        return busiest(self._rank_scheduler, self._describe_scheduler)

    async def ping(self, caller: Caller) -> bool:
        """Responds to a readiness check."""
        return True

    def _open(self, edition: Edition) -> Searcher:
        index = open_edition(self._served.uri, edition)
        cache, device = self._served.cache, self._served.device
        return Searcher(index, shard=self._shard, cache=cache, device=device)

    @returns_errors
    async def prepare(self, edition: Edition, needed: Collection[SearchVectors]) -> None:
        """Opens a version of the index and loads the given vectors."""
        for vectors in needed:
            await self._load(edition, vectors)
        await asyncio.to_thread(self._versions.get, edition)

    async def _load(self, edition: Edition, vectors: SearchVectors) -> Searcher:
        """Returns a version of the index after loading the vectors that a search needs."""
        searcher = await asyncio.to_thread(self._versions.get, edition)
        key = edition, vectors
        if not searcher.scorer.is_loaded(*vectors):
            if key not in self._loading:
                load = asyncio.ensure_future(asyncio.to_thread(searcher.load, *vectors))
                self._loading[key] = load
                load.add_done_callback(lambda _: self._loading.pop(key))
            await asyncio.shield(self._loading[key])  # loading continues if this call is cancelled
        self._loaded.add(key)
        return searcher

    @returns_errors
    async def rank(
        self, edition: Edition, queries: Sequence[Queries], options: SearchOptions, caller: Caller
    ) -> list[Ranking]:
        """Ranks the items of the shard, whose `rows` are relative to it, for `merge_rankings`."""
        with logged("rank", representation=options.column, version=edition.version):
            return await self._run_rank(edition, queries, options, caller)

    @returns_errors
    async def rank_each(
        self,
        edition: Edition,
        queries: Sequence[Queries],
        options: Sequence[SearchOptions],
        caller: Caller,
    ) -> list[Ranking]:
        """Ranks the items of the shard with individual options for each query."""
        with logged("rank", queries=len(queries)):
            pairs = zip(queries, options, strict=True)
            rankings = await gather_or_cancel(
                self._run_rank(edition, [query], query_options, caller)
                for query, query_options in pairs
            )
            return [ranking for (ranking,) in rankings]

    async def _run_rank(
        self, edition: Edition, queries: Sequence[Queries], options: SearchOptions, caller: Caller
    ) -> list[Ranking]:
        async with asyncio.timeout(caller.timeout_s):
            options = options.first_stage()
            searcher = await self._load(edition, SearchVectors.of(options))
            rows = await self._filtered_rows(edition, searcher, options, caller)
            num_vectors = searcher.scorer.num_scored_vectors(options)
            pending = [_PendingSearch(q, rows, _num_tokens(q) * num_vectors) for q in queries]
            # Queries with and without a single vector or a text cannot be joined.
            has_pooled = all(query.pooled is not None for query in queries)
            has_texts = all(query.texts is not None for query in queries)
            has_negatives = any(query.negatives is not None for query in queries)
            group = edition, options, has_pooled, has_texts, has_negatives
            return await self._rank_scheduler.run(caller, group, pending)

    async def _filtered_rows(
        self, edition: Edition, searcher: Searcher, options: SearchOptions, caller: Caller
    ) -> np.ndarray | None:
        """Returns the positions of the items that pass the filter, or None without a filter."""
        if options.filter is None:
            return None
        if (rows := searcher.items.cached_rows(options.filter)) is not None:
            return rows
        with span("filter"):
            item_ids = await self._filters.matching_ids(caller, edition, options.filter)
        return await asyncio.to_thread(searcher.items.cache_rows, options.filter, item_ids)

    def _rank(
        self, group: tuple[Edition, SearchOptions, bool, bool, bool], pending: list[_PendingSearch]
    ) -> list[Ranking]:
        edition, options, *_ = group
        searcher = self._versions.get(edition)
        joined = Queries.join([p.query for p in pending])
        queries = searcher.encoders.transform(joined, options.column)
        rows = searcher.items.restrict(pending[0].rows, options)
        return searcher.scorer.rank_part(queries, options, rows)

    @returns_errors
    async def search(
        self, edition: Edition, queries: Sequence[Queries], options: SearchOptions, caller: Caller
    ) -> list[list[Hit]]:
        """Ranks and describes items in a single call, for an index that has only one shard."""
        details = {"representation": options.column, "version": edition.version}
        with logged("search", queries=len(queries), **details):
            async with asyncio.timeout(caller.timeout_s):
                parts = await self._run_rank(edition, queries, options, caller)
                rankings = [fuse(part, options) for part in parts]
                with span("describe"):
                    return await self._run_describe(edition, queries, options, rankings, caller)

    @returns_errors
    async def describe(
        self,
        edition: Edition,
        queries: Sequence[Queries],
        options: SearchOptions,
        rankings: Sequence[Ranking],
        caller: Caller,
    ) -> list[list[Hit]]:
        """Returns the hits of rankings of this shard."""
        with logged("describe", queries=len(queries)):
            return await self._run_describe(edition, queries, options, rankings, caller)

    async def _run_describe(
        self,
        edition: Edition,
        queries: Sequence[Queries],
        options: SearchOptions,
        rankings: Sequence[Ranking],
        caller: Caller,
    ) -> list[list[Hit]]:
        group = edition, options.column, options.explain
        pairs = list(zip(queries, rankings, strict=True))
        return await self._describe_scheduler.run(caller, group, pairs)

    def _describe(
        self,
        group: tuple[Edition, str, str | None],
        pairs: list[tuple[Queries, Ranking]],
    ) -> list[list[Hit]]:
        edition, name, explain = group
        searcher = self._versions.get(edition)
        joined = Queries.join([query for query, _ in pairs])
        queries = searcher.encoders.transform(joined, name)
        vectors = searcher.scorer.item_vectors if explain else None
        rankings = [ranking for _, ranking in pairs]
        hits = describe(rankings, queries, searcher.index, name, vectors)
        if explain != "map":
            return hits
        return [
            [
                hit.model_copy(update={"map": _similarity_map(searcher, query, hit.item_id, name)})
                for hit in query_hits
            ]
            for query, query_hits in zip(queries.split(), hits, strict=True)
        ]


class GangRanker(Ranker):
    """Searcher of a gang, whose shard is its rank in the gang."""

    def __init__(self, served: ServedIndex, scale: Scale, timeouts: Timeouts):
        gang = serve.get_replica_context().gang_context
        assert gang is not None
        super().__init__(served, scale, timeouts, (gang.rank, served.num_shards))

    async def record_replica_metadata(self) -> dict[str, str]:
        """Returns the shard, for `VectorRouter`."""
        assert self._shard is not None
        return {SHARD: str(self._shard[0])}


def _similarity_map(
    searcher: Searcher, query: Queries, item_id: str, representation: str
) -> SimilarityMap | None:
    """Computes the similarity map of an item. Returns None if the item does not support maps."""
    pause()
    try:
        return similarity_map(searcher, query, item_id, representation)
    except SpecError:
        return None


class ModelRanker:
    """Stage that reranks hits with the rerankers of an index."""

    def __init__(self, served: ServedIndex, scale: Scale, timeouts: Timeouts):
        from pipeline.search.rerankers import load_rerankers

        bind_to_loopback()
        limit_threads(scale)
        specs: Any = served.rerank
        self._rerankers = dict(zip(served.rerankers, load_rerankers(specs), strict=True))
        self._versions = Versions(
            lambda edition: Searcher(open_edition(served.uri, edition)), timeouts.request_s
        )
        size = batch_sizes("rerank_models").observe
        self._scheduler = FairScheduler(
            self._read_batch, lambda pair: len(pair[1]), BATCH_PAIRS, observe=size
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the queueing delay and the utilisation, for `QueueingDelayPolicy`."""
        return busiest(self._scheduler)

    async def ping(self, caller: Caller) -> bool:
        """Responds to a readiness check."""
        return True

    @returns_errors
    async def rerank(
        self,
        edition: Edition,
        queries: Sequence[str | bytes],
        rankings: Sequence[Ranking],
        stage: Rerank,
        k: int,
        caller: Caller,
    ) -> list[Ranking]:
        """Reranks the ranking of each query and returns its k best items."""
        from pipeline.search.rerankers import reorder

        reranker = self._rerankers[stage.name]
        is_added = stage.add_first_stage or reranker.spec.add_first_stage
        changes = {"top": stage.top or reranker.spec.top, "add_first_stage": is_added}
        spec = reranker.spec.model_copy(update=changes)
        candidates = [ranking.item_ids[: spec.top] for ranking in rankings]
        read = await self._read(edition, stage.name, queries, candidates, caller)
        return [
            reorder(reranker.missing(query), ranking, found, spec, k)
            for query, ranking, found in zip(queries, rankings, read, strict=True)
        ]

    @returns_errors
    async def read(
        self,
        edition: Edition,
        name: str,
        query: str | bytes,
        item_ids: list[str],
        caller: Caller,
    ) -> dict[str, RerankScore]:
        """Scores items. Those that cannot be read have a `problem`."""
        (readings,) = await self._read(edition, name, [query], [item_ids], caller)
        missing = RerankScore(problem=self._rerankers[name].missing(query))
        return dict.fromkeys(item_ids, missing) | readings

    async def _read(
        self,
        edition: Edition,
        name: str,
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
        caller: Caller,
    ) -> list[dict[str, RerankScore]]:
        """Scores the candidates of each query in chunks of `BATCH_PAIRS` pairs."""
        chunks = [
            [(query, ids[i : i + BATCH_PAIRS]) for i in range(0, len(ids) or 1, BATCH_PAIRS)]
            for query, ids in zip(queries, candidates, strict=True)
        ]
        with logged(name, queries=len(queries), version=edition.version):
            try:
                pairs = list(itertools.chain(*chunks))
                group = edition, name, type(queries[0])
                read = iter(await self._scheduler.run(caller, group, pairs))
            except SpecError as error:
                if error.field in ("query", "index"):
                    raise
                # A problem with the model, its endpoint or its tokens, not with the request.
                log.error("%s: %s", name, error)
                raise error.at("reranker") from None
        return [
            dict(itertools.chain(*(next(read).items() for _ in query_chunks)))
            for query_chunks in chunks
        ]

    def _read_batch(
        self, group: tuple[Edition, str, type], pairs: list[tuple[str | bytes, list[str]]]
    ) -> list[dict[str, RerankScore]]:
        reranker, searcher = self._rerankers[group[1]], self._versions.get(group[0])
        queries = reranker.check(searcher.index, [query for query, _ in pairs])
        pause()  # opening the index may have taken long
        return reranker.score(searcher, queries, [ids for _, ids in pairs])
