"""Engine of the gateway, which answers requests by calling the stages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.config import SpecError
from pipeline.runtime.tracing import span
from pipeline.schema import Composed
from pipeline.search.candidates import EXACT
from pipeline.search.facets import IndexFacets
from pipeline.search.media import Unencoded
from pipeline.search.options import VECTORS, Rerank, SearchOptions
from pipeline.search.previews import ByteRange, MediaPart
from pipeline.search.query import Queries
from pipeline.search.results import Hit, RerankScore
from pipeline.search.score import Ranking
from pipeline.search.shards import merge_rankings
from pipeline.serve import wire
from pipeline.serve.calls import Handle, Method, StageClient, Stages
from pipeline.serve.errors import ApiError, from_spec_error
from pipeline.serve.inputs import check_readable, read_query, read_unencoded
from pipeline.serve.library import WRITER
from pipeline.serve.responses import hit_truncation_warnings, truncation_warnings
from pipeline.serve.scheduler import Caller, gather_or_cancel
from pipeline.serve.served import Served, ServedIndexes
from pipeline.serve.settings import ServeSpec
from pipeline.serve.vectors import SearchVectors

log = logging.getLogger("ray.serve")

#: Offset between the row numbers of consecutive shards, which identifies the shard of a row.
SHARD_ROWS = 1 << 40
#: `Retry-After` of a deletion while another job writes to the index, in seconds.
RETRY_WRITE_SECONDS = 60
#: Names of reranking stages in metrics and in `durations_ms`, if they are not their own.
RERANK_STAGES = {VECTORS: "rerank"}


class Timer:
    """Timer of the stages of a request.

    Args:
        observe: Called with the name and the duration, in seconds, of each stage.
    """

    def __init__(self, observe: Callable[[str, float], None]):
        self.start = time.perf_counter()
        self.durations_ms: dict[str, float] = {}
        self._observe = observe

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the duration of the context to a stage."""
        start = time.perf_counter()
        try:
            with span(name):
                yield
        finally:
            seconds = time.perf_counter() - start
            self._observe(name, seconds)
            self.durations_ms[name] = round(self.durations_ms.get(name, 0.0) + 1e3 * seconds, 3)

    def all(self) -> dict[str, float]:
        """Returns the time that each stage and the whole request have taken, in milliseconds."""
        total = round(1e3 * (time.perf_counter() - self.start), 3)
        return {**self.durations_ms, "total": total}


class Engine:
    """Answers requests by calling the stages.

    The argument `key` of the methods is the name of an access key. The stages use it to share their
    time fairly between keys.

    Args:
        observe: Called with the name and the duration, in seconds, of each stage of a request.
        count: Called with an event ("retry", "degraded" or "reload_failed") and its stage.
    """

    def __init__(
        self,
        settings: ServeSpec,
        stages: Stages[Handle],
        observe: Callable[[str, float], None] = lambda stage, seconds: None,
        count: Callable[[str, str], None] = lambda event, stage: None,
    ):
        self.settings, self._stages = settings, stages
        self._observe, self._count = observe, count
        self.indexes = ServedIndexes(settings, stages, count)
        self.calls = StageClient(stages, count)

    async def search(
        self,
        served: Served,
        queries: Sequence[wire.Query],
        options: SearchOptions,
        timer: Timer,
        key: str,
        negative: wire.Query | None = None,
    ) -> tuple[list[list[Hit]], bool, list[str]]:
        """Returns the hits of each query, whether they are reranked, and warnings."""
        stages = options.rerank or ()
        for stage in stages:
            if stage.name != VECTORS:
                check_readable(queries, stage.name)
        with timer.stage("encode"):
            encoded = await self.encode(served, queries, options.column, key)
            if negative is not None:
                encoded = await self._subtract(served, encoded, negative, options.column, key)
        recognised = _recognised_texts(queries, encoded)
        if not stages and len(self._stages.searchers[served.name]) == 1:
            with timer.stage("search"):
                return await self._search_shard(served, encoded, options, key), False, recognised
        with timer.stage("search"):
            rankings = await self.rank(served, encoded, options.first_stage(), key)
        is_reranked, warnings = False, recognised
        for number, stage in enumerate(stages):
            name = RERANK_STAGES.get(stage.name, stage.name)
            k = max([options.k, *(later.depth for later in stages[number + 1 :])])
            try:
                with timer.stage(name):
                    rankings = await self._rerank(
                        served, queries, encoded, rankings, stage, k, options.column, key
                    )
                is_reranked = True
            except ApiError as error:
                if not stage.optional or error.code not in ("unavailable", "timeout"):
                    raise
                self.degraded(name, error.message, served.name)
                warnings.append(f"not reranked: {error.message}")
        if stages:
            rankings = [r.take(range(min(options.k, len(r.rows)))) for r in rankings]
        with timer.stage("describe"):
            hits = await self.describe(served, encoded, rankings, options, key)
        warnings += hit_truncation_warnings(queries, hits)
        return hits, is_reranked, warnings

    def degraded(self, stage: str, reason: str, index: str) -> None:
        """Counts and logs that a response lacks the results of a stage."""
        self._count("degraded", stage)
        fields = {"event": "degraded", "stage": stage, "index": index}
        log.warning("%s is left out: %s", stage, reason, extra=fields)

    async def encode(
        self, served: Served, queries: Sequence[wire.Query], representation: str, key: str
    ) -> list[Queries]:
        """Encodes queries for a representation and returns one `Queries` object per query."""
        info = served.representation(representation)
        try:
            read = [await asyncio.to_thread(read_query, query, info) for query in queries]
        except SpecError as error:
            raise from_spec_error(error) from None
        encoded = {i: query for i, query in enumerate(read) if isinstance(query, Queries)}
        timeouts = self.settings.timeouts
        # Texts do not wait for media.
        groups = (str, timeouts.encode_s), (bytes | Composed, timeouts.media_s)
        for kinds, timeout_s in groups:
            positions = [i for i, query in enumerate(read) if isinstance(query, kinds)]
            if positions:
                results = await self.calls.call(
                    "encode",
                    Caller(key, timeout_s),
                    self._stages.encoder.encode,
                    representation,
                    info.encoder,
                    [read[i] for i in positions],
                )
                encoded |= zip(positions, results, strict=True)
        for i, query in enumerate(read):
            if isinstance(query, wire.StoredItem):
                encoded[i] = await self._stored_query(served, query, info.name, key)
        return [encoded[i] for i in range(len(queries))]

    async def _subtract(
        self,
        served: Served,
        encoded: Sequence[Queries],
        negative: wire.Query,
        representation: str,
        key: str,
    ) -> list[Queries]:
        """Returns the queries with a negative query."""
        try:
            (other,) = await self.encode(served, [negative], representation, key)
        except ApiError as error:
            if error.field is None or error.field.partition(".")[0] != "query":
                raise
            message, field = (
                s.replace("query", "negative", 1) for s in (error.message, error.field)
            )
            raise ApiError(error.code, message, field) from None
        return [query.minus(other) for query in encoded]

    async def _stored_query(
        self, served: Served, query: wire.StoredItem, representation: str, key: str
    ) -> Queries:
        caller = Caller(key, self.settings.timeouts.encode_s)
        arguments = query.item, representation, query.box, query.times
        return await self.calls.call(
            "item",
            caller,
            self._stages.library.stored_query,
            served.name,
            served.edition,
            *arguments,
        )

    async def _search_shard(
        self, served: Served, encoded: Sequence[Queries], options: SearchOptions, key: str
    ) -> list[list[Hit]]:
        """Ranks and describes the hits of an index that has only one shard, in a single call."""
        timeout_s = self.settings.timeouts.search_s + self.settings.timeouts.describe_s
        (shard,) = self._stages.searchers[served.name]
        hits = await self.calls.call(
            "search", Caller(key, timeout_s), shard.search, served.edition, encoded, options
        )
        self.indexes.used(served.name, "search", SearchVectors.of(options))
        return hits

    async def rank(
        self, served: Served, encoded: Sequence[Queries], options: SearchOptions, key: str
    ) -> list[Ranking]:
        """Ranks the items of all shards for each query."""
        caller = Caller(key, self.settings.timeouts.search_s)
        by_shard = await gather_or_cancel(
            self.calls.call("search", caller, shard.rank, served.edition, encoded, options)
            for shard in self._stages.searchers[served.name]
        )
        self.indexes.used(served.name, "search", SearchVectors.of(options))
        offset = [
            [replace(ranking, rows=ranking.rows + i * SHARD_ROWS) for ranking in rankings]
            for i, rankings in enumerate(by_shard)
        ]
        by_query = zip(*offset, strict=True)
        return [merge_rankings(rankings, options) for rankings in by_query]

    async def _rerank(
        self,
        served: Served,
        queries: Sequence[wire.Query],
        encoded: Sequence[Queries],
        rankings: Sequence[Ranking],
        stage: Rerank,
        k: int,
        representation: str,
        key: str,
    ) -> list[Ranking]:
        """Applies a stage and returns the k best items of each query."""
        if stage.name != VECTORS:
            return await self._rerank_by_model(served, queries, rankings, stage, k, key)
        name = stage.representation
        assert name is not None
        first, second = (served.representation(n).encoder for n in (representation, name))
        # Another encoder needs query vectors of its own.
        if (first.spec, first.fingerprint) != (second.spec, second.fingerprint):
            encoded = await self.encode(served, queries, name, key)
        depth = max(k, stage.depth)
        item_ids = [ranking.item_ids[:depth] for ranking in rankings]
        scores = await self._score(served, encoded, name, item_ids, key)
        return [_reorder(*pair, k) for pair in zip(rankings, scores, strict=True)]

    async def _rerank_by_model(
        self,
        served: Served,
        queries: Sequence[wire.Query],
        rankings: Sequence[Ranking],
        stage: Rerank,
        k: int,
        key: str,
    ) -> list[Ranking]:
        """Reranks items with a model. Text and image queries need separate calls."""
        caller = Caller(key, self.settings.timeouts.rerank_s)
        rerank = self._stages.models[served.name].rerank
        inputs = [await asyncio.to_thread(read_unencoded, query) for query in queries]
        groups = [[i for i, q in enumerate(inputs) if isinstance(q, kind)] for kind in (str, bytes)]
        arguments = [([inputs[i] for i in g], [rankings[i] for i in g]) for g in groups if g]
        results = await gather_or_cancel(
            self.calls.call(stage.name, caller, rerank, served.edition, *pair, stage, k)
            for pair in arguments
        )
        reranked = dict(zip(itertools.chain(*groups), itertools.chain(*results), strict=True))
        return [reranked[i] for i in range(len(queries))]

    async def score_by_vectors(
        self,
        served: Served,
        query: wire.Query,
        representation: str,
        item_ids: Sequence[str],
        key: str,
    ) -> dict[str, float]:
        """Returns exact MaxSim scores in descending order. Items without vectors are omitted."""
        encoded = await self.encode(served, [query], representation, key)
        (scores,) = await self._score(served, encoded, representation, [item_ids], key)
        return scores

    async def _score(
        self,
        served: Served,
        encoded: Sequence[Queries],
        representation: str,
        item_ids: Sequence[Sequence[str]],
        key: str,
    ) -> list[dict[str, float]]:
        unique = [tuple(dict.fromkeys(ids)) for ids in item_ids]
        options = [
            SearchOptions(
                representation=representation, k=max(len(ids), 1), ids=ids, candidates=EXACT
            )
            for ids in unique
        ]
        rankings = await self.calls.call(
            "rerank",
            Caller(key, self.settings.timeouts.rerank_s),
            self._stages.rerankers[served.name].rank_each,
            served.edition,
            encoded,
            options,
        )
        self.indexes.used(served.name, "rerank", SearchVectors(representation, "maxsim", EXACT))
        return [ranking.scores_by_item() for ranking in rankings]

    async def score_by_model(
        self, served: Served, name: str, query: wire.Query, item_ids: Sequence[str], key: str
    ) -> tuple[dict[str, float], list[str]]:
        """Computes the scores of the items that a reranker can read.

        Returns them sorted, with warnings.
        """
        check_readable([query], name)
        try:
            unencoded = await asyncio.to_thread(read_unencoded, query)
        except SpecError as error:
            raise from_spec_error(error) from None
        unique = list(dict.fromkeys(item_ids))
        readings = await self.read_by_model(served, name, unencoded, unique, key)
        read = {i: reading.score for i, reading in readings.items() if reading.score is not None}
        num_truncated = max((r.num_truncated_tokens for r in readings.values()), default=0)
        scores = dict(sorted(read.items(), key=lambda pair: (-pair[1], pair[0])))
        return scores, truncation_warnings([query], [num_truncated])

    async def read_by_model(
        self,
        served: Served,
        name: str,
        query: Unencoded,
        item_ids: Sequence[str],
        key: str,
    ) -> dict[str, RerankScore]:
        """Returns the scores of items by a reranker of their index, or why they have none."""
        caller = Caller(key, self.settings.timeouts.rerank_s)
        read = self._stages.models[served.name].read
        return await self.calls.call(
            name, caller, read, served.edition, name, query, list(item_ids)
        )

    async def describe(
        self,
        served: Served,
        encoded: Sequence[Queries],
        rankings: Sequence[Ranking],
        options: SearchOptions,
        key: str,
    ) -> list[list[Hit]]:
        """Builds the hits of each query. Every shard describes the items that it contains."""
        shards = self._stages.searchers[served.name]
        options = options.without_selection()
        # Positions of the items of each shard in the ranking of each query.
        positions = [
            [np.flatnonzero(ranking.rows // SHARD_ROWS == i).tolist() for ranking in rankings]
            for i in range(len(shards))
        ]
        used_shards = [i for i, by_query in enumerate(positions) if any(by_query)]
        by_shard = await gather_or_cancel(
            self.calls.call(
                "describe",
                Caller(key, self.settings.timeouts.describe_s),
                shards[i].describe,
                served.edition,
                encoded,
                options,
                [_shard_ranking(*pair) for pair in zip(rankings, positions[i], strict=True)],
            )
            for i in used_shards
        )
        hits: list[dict[int, Hit]] = [{} for _ in rankings]
        for i, described in zip(used_shards, by_shard, strict=True):
            for query_hits, query_positions, found in zip(
                hits, positions[i], described, strict=True
            ):
                for position, hit in zip(query_positions, found, strict=True):
                    query_hits[position] = hit.model_copy(update={"rank": position + 1})
        return [[by_position[i] for i in sorted(by_position)] for by_position in hits]

    async def item(self, served: Served, item_id: str, key: str) -> dict[str, Any] | None:
        """Returns the stored columns of an item, or None if it is not in the index."""
        caller = Caller(key, self.settings.timeouts.describe_s)
        look_up = self._stages.library.item
        return await self.calls.call("item", caller, look_up, served.name, served.edition, item_id)

    async def delete(
        self,
        served: Served,
        item_ids: list[str] | None,
        filter: str | None,
        is_dry: bool,
        key: str,
    ) -> dict[str, int]:
        """Deletes items and serves the new version. Returns the numbers of items by outcome."""
        caller = Caller(key, self.settings.timeouts.delete_s)
        arguments = served.name, item_ids, filter, is_dry
        try:
            counts = await self.calls.call(
                "delete", caller, self._stages.library.delete, *arguments
            )
        except ApiError as error:
            if error.field == WRITER:
                message = "another job is writing to the index"
                raise ApiError("conflict", message, retry_after=RETRY_WRITE_SECONDS) from None
            raise
        if counts["deleted"]:
            await self.indexes.refresh(served.name)
        return counts

    async def facets(self, served: Served, key: str) -> IndexFacets:
        """Returns the facets of an index, the sizes of its representations, and examples."""
        caller = Caller(key, self.settings.timeouts.search_s)
        look_up = self._stages.library.facets
        return await self.calls.call("facets", caller, look_up, served.name, served.edition)

    async def item_map(self, served: Served, key: str) -> str:
        """Returns the positions of the items of an index as CSV."""
        caller = Caller(key, self.settings.timeouts.search_s)
        look_up = self._stages.library.item_map
        return await self.calls.call("map", caller, look_up, served.name, served.edition)

    async def preview(
        self,
        served: Served,
        item_id: str,
        media: str,
        seconds: float | None,
        width: int | None,
        key: str,
    ) -> tuple[bytes, str]:
        """Returns the image or audio of an item as an encoded file, with its media type."""
        preview = self._stages.library.preview
        return await self._read_file(served, preview, key, item_id, media, seconds, width)

    async def media(self, served: Served, item_id: str, range: ByteRange, key: str) -> MediaPart:
        """Returns a part of the file of an item."""
        return await self._read_file(served, self._stages.library.media, key, item_id, range)

    async def _read_file(self, served: Served, method: Method, key: str, *arguments: Any) -> Any:
        caller = Caller(key, self.settings.timeouts.preview_s)
        try:
            return await self.calls.call(
                "preview", caller, method, served.name, served.edition, *arguments
            )
        except ApiError as error:
            if error.field == "item_id":  # the item does not exist or has no preview
                raise ApiError("not_found", error.message, error.field) from None
            raise


def _recognised_texts(queries: Sequence[wire.Query], encoded: Sequence[Queries]) -> list[str]:
    """Returns a sentence for each query whose text was recognised in its media."""
    return [
        f"recognised in the query: {read.texts[0]}"
        for query, read in zip(queries, encoded, strict=True)
        if isinstance(query, wire.Media) and read.texts and read.texts[0] != query.text
    ]


def _reorder(ranking: Ranking, scores: Mapping[str, float], k: int) -> Ranking:
    """Returns the k best items by the second stage, which omits items without a score."""
    scored = [i for i, item_id in enumerate(ranking.item_ids) if item_id in scores]
    order = sorted(scored, key=lambda i: (-scores[ranking.item_ids[i]], ranking.item_ids[i]))[:k]
    first_stage = ranking.first_stage or ranking.ranks()
    best = replace(ranking, first_stage=first_stage).take(order)
    return replace(
        best,
        scores=[scores[item_id] for item_id in best.item_ids],
    )


def _shard_ranking(ranking: Ranking, positions: Sequence[int]) -> Ranking:
    selected = ranking.take(positions)
    return replace(selected, rows=selected.rows % SHARD_ROWS)
