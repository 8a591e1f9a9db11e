"""A search from its request to its answer: asks the stages in turn."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from pipeline.config import SpecError
from pipeline.schema import Reranked
from pipeline.search.options import SearchOptions
from pipeline.search.query import Queries, Unencoded
from pipeline.search.score import Ranking
from pipeline.search.shards import merge_rankings
from pipeline.serve import wire
from pipeline.serve.answers import hit_answer, truncation_warnings
from pipeline.serve.calls import Calls, Handle, Stages
from pipeline.serve.errors import ApiError, of_spec_error
from pipeline.serve.inputs import check_edje, read_query, read_written
from pipeline.serve.served import Served, ServedIndexes
from pipeline.serve.settings import ServeSpec
from pipeline.serve.turns import Caller, all_of

#: Rows of shard i are counted from i times this, so that merged rankings name their shards.
SHARD_ROWS = 1 << 40
#: Names of the second stages in metrics and in `milliseconds`.
STAGE_OF = {"vectors": "rerank", "edje": "edje"}


class Timer:
    """Milliseconds by stage of one request."""

    def __init__(self, observe: Callable[[str, float], None]):
        self.start = time.perf_counter()
        self.milliseconds: dict[str, float] = {}
        self._observe = observe

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of the context to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._observe(name, seconds)
            self.milliseconds[name] = round(self.milliseconds.get(name, 0.0) + 1e3 * seconds, 3)

    def all(self) -> dict[str, float]:
        """Returns the milliseconds of the stages and the total."""
        total = round(1e3 * (time.perf_counter() - self.start), 3)
        return {**self.milliseconds, "total": total}


class Engine:
    """Answers requests by asking the stages.

    In its methods `key` is the name of the access key: the stages share their time among keys.

    Args:
        observe: Called with each stage of each request and its seconds.
        count: Called with other events ("retry", "degraded") and their stage.

    Attributes:
        indexes: The served version of each index.
        calls: Calls of the stages.
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
        self.calls = Calls(stages, count)

    async def search(
        self,
        served: Served,
        queries: Sequence[wire.Query],
        options: SearchOptions,
        timer: Timer,
        key: str,
    ) -> tuple[list[list[wire.Hit]], bool, list[str]]:
        """Searches for each query.

        Returns:
            The hits of each query, whether they were reranked, and warnings.
        """
        if options.rerank == "edje":
            check_edje(served, queries, "rerank.by")
        with timer.stage("encode"):
            encoded = await self.encode(served, queries, options.column, key)
        if options.rerank is None and len(self._stages.searchers[served.name]) == 1:
            with timer.stage("search"):
                return await self._search_shard(served, encoded, options, key), False, []
        with timer.stage("search"):
            rankings = await self._rank(served, encoded, options.first_stage(), key)
        is_reranked, warnings = False, []
        if options.rerank is not None:
            stage = STAGE_OF[options.rerank]
            try:
                with timer.stage(stage):
                    rankings = await self._rerank(served, queries, encoded, rankings, options, key)
                is_reranked = True
            except ApiError as error:
                if not options.rerank_is_optional or error.code not in ("unavailable", "timeout"):
                    raise
                self._count("degraded", stage)
                warnings.append(f"not reranked: {error.message}")
                rankings = [r.take(range(min(options.k, len(r.rows)))) for r in rankings]
        with timer.stage("describe"):
            hits = await self._describe(served, encoded, rankings, options, key)
        if options.rerank == "edje":
            num_truncated = [
                max((hit.edje.num_truncated_tokens for hit in query_hits if hit.edje), default=0)
                for query_hits in hits
            ]
            warnings += truncation_warnings(queries, num_truncated)
        return hits, is_reranked, warnings

    async def encode(
        self, served: Served, queries: Sequence[wire.Query], representation: str, key: str
    ) -> list[Queries]:
        """Encodes queries for a representation, one `Queries` each.

        Raises:
            ApiError: A query is invalid, or the encoder does not read its kind.
        """
        info = served.representation(representation)
        limits = self.settings.limits
        try:
            read = [await asyncio.to_thread(read_query, query, info, limits) for query in queries]
        except SpecError as error:
            raise of_spec_error(error) from None
        encoded = {place: each for place, each in enumerate(read) if isinstance(each, Queries)}
        for kind in get_args(Unencoded):  # an encoder reads one kind at a time
            places = [place for place, each in enumerate(read) if isinstance(each, kind)]
            if places:
                found = await self.calls.ask(
                    "encode",
                    Caller(key, self.settings.timeouts.encode_s),
                    self._stages.encoder.encode,
                    representation,
                    info.encoder,
                    [read[place] for place in places],
                )
                encoded |= zip(places, found, strict=True)
        return [encoded[place] for place in range(len(queries))]

    async def _search_shard(
        self, served: Served, encoded: Sequence[Queries], options: SearchOptions, key: str
    ) -> list[list[wire.Hit]]:
        """Returns the hits of the only shard, ranked and described in one call."""
        seconds = self.settings.timeouts.search_s + self.settings.timeouts.describe_s
        (shard,) = self._stages.searchers[served.name]
        described = await self.calls.ask(
            "search", Caller(key, seconds), shard.search, served.edition, encoded, options
        )
        return [
            [hit_answer(hit, rank, map, options) for rank, (hit, map) in enumerate(own, start=1)]
            for own in described
        ]

    async def _rank(
        self, served: Served, encoded: Sequence[Queries], options: SearchOptions, key: str
    ) -> list[Ranking]:
        """Returns the best items of all shards for each query."""
        caller = Caller(key, self.settings.timeouts.search_s)
        by_shard = await all_of(
            self.calls.ask("search", caller, shard.rank, served.edition, encoded, options)
            for shard in self._stages.searchers[served.name]
        )
        if len(by_shard) == 1:
            return by_shard[0]
        counted = [
            [replace(ranking, rows=ranking.rows + i * SHARD_ROWS) for ranking in rankings]
            for i, rankings in enumerate(by_shard)
        ]
        merged = zip(*counted, strict=True)
        return [merge_rankings(each, options.k, options.group_by) for each in merged]

    async def _rerank(
        self,
        served: Served,
        queries: Sequence[wire.Query],
        encoded: Sequence[Queries],
        rankings: Sequence[Ranking],
        options: SearchOptions,
        key: str,
    ) -> list[Ranking]:
        """Returns the k best items by the second stage."""
        if options.rerank == "edje":
            return await self._rerank_by_edje(served, queries, rankings, options, key)
        second = options.rerank_representation
        assert second is not None
        of_first, of_second = (
            served.representation(name).encoder for name in (options.column, second)
        )
        # Vectors of another encoder do not compare.
        if (of_first.spec, of_first.fingerprint) != (of_second.spec, of_second.fingerprint):
            encoded = await self.encode(served, queries, second, key)
        item_ids = [ranking.item_ids for ranking in rankings]
        scores = await self._score(served, encoded, second, item_ids, key)
        return [_reordered(*each, options.k) for each in zip(rankings, scores, strict=True)]

    async def _rerank_by_edje(
        self,
        served: Served,
        queries: Sequence[wire.Query],
        rankings: Sequence[Ranking],
        options: SearchOptions,
        key: str,
    ) -> list[Ranking]:
        """Returns the k best items by EDJE's joint encoder; texts and images are read apart."""
        limits, caller = self.settings.limits, Caller(key, self.settings.timeouts.rerank_s)
        options = options.without_selection()
        rerank = self._stages.edjes[served.name].rerank
        written = [await asyncio.to_thread(read_written, query, limits) for query in queries]
        places = [[i for i, q in enumerate(written) if isinstance(q, k)] for k in (str, bytes)]
        given = [([written[i] for i in own], [rankings[i] for i in own]) for own in places if own]
        reranked = await all_of(
            self.calls.ask("edje", caller, rerank, served.edition, *own, options) for own in given
        )
        found = dict(zip(itertools.chain(*places), itertools.chain(*reranked), strict=True))
        return [found[place] for place in range(len(queries))]

    async def score_by_vectors(
        self,
        served: Served,
        query: wire.Query,
        representation: str,
        item_ids: Sequence[str],
        key: str,
    ) -> dict[str, float]:
        """Returns exact late scores of items, best first; those without vectors are left out."""
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
        """Returns exact late scores of some items of each query."""
        unique = [tuple(dict.fromkeys(own)) for own in item_ids]
        options = [SearchOptions(representation, k=max(len(own), 1), ids=own) for own in unique]
        rankings = await self.calls.ask(
            "rerank",
            Caller(key, self.settings.timeouts.rerank_s),
            self._stages.rerankers[served.name].rank_each,
            served.edition,
            encoded,
            options,
        )
        return [ranking.scores_by_item() for ranking in rankings]

    async def score_by_edje(
        self, served: Served, query: wire.Query, item_ids: Sequence[str], key: str
    ) -> tuple[dict[str, float], list[str]]:
        """Returns EDJE's logits of the items that it can read, best first, and warnings.

        Raises:
            ApiError: The index is served without EDJE, or the query is not a text or an image.
        """
        check_edje(served, [query], "by")
        try:
            written = await asyncio.to_thread(read_written, query, self.settings.limits)
        except SpecError as error:
            raise of_spec_error(error) from None
        unique = list(dict.fromkeys(item_ids))
        found = await self.calls.ask(
            "edje",
            Caller(key, self.settings.timeouts.rerank_s),
            self._stages.edjes[served.name].read,
            served.edition,
            written,
            unique,
        )
        best = sorted(found, key=lambda item_id: (-found[item_id][0], item_id))
        num_truncated = max((number for _, number in found.values()), default=0)
        scores = {item_id: found[item_id][0] for item_id in best}
        return scores, truncation_warnings([query], [num_truncated])

    async def _describe(
        self,
        served: Served,
        encoded: Sequence[Queries],
        rankings: Sequence[Ranking],
        options: SearchOptions,
        key: str,
    ) -> list[list[wire.Hit]]:
        """Returns the hits of each query, each described by its shard."""
        shards = self._stages.searchers[served.name]
        options = options.without_selection()
        # For each shard, the places of its items in the ranking of each query.
        places = [
            [np.flatnonzero(ranking.rows // SHARD_ROWS == i).tolist() for ranking in rankings]
            for i in range(len(shards))
        ]
        asked = [i for i, own in enumerate(places) if any(own)]
        by_shard = await all_of(
            self.calls.ask(
                "describe",
                Caller(key, self.settings.timeouts.describe_s),
                shards[i].describe,
                served.edition,
                encoded,
                options,
                [_of_shard(r, own) for r, own in zip(rankings, places[i], strict=True)],
            )
            for i in asked
        )
        hits: list[dict[int, wire.Hit]] = [{} for _ in rankings]
        for i, described in zip(asked, by_shard, strict=True):
            for found, own, hits_of_query in zip(hits, places[i], described, strict=True):
                for place, (hit, map) in zip(own, hits_of_query, strict=True):
                    found[place] = hit_answer(hit, place + 1, map, options)
        return [[found[place] for place in sorted(found)] for found in hits]

    async def item(self, served: Served, item_id: str, key: str) -> dict[str, Any] | None:
        """Returns the stored columns of an item; None if it is not in the index."""
        caller = Caller(key, self.settings.timeouts.describe_s)
        look_up = self._stages.library.item
        return await self.calls.ask("item", caller, look_up, served.name, served.edition, item_id)

    async def preview(
        self, served: Served, item_id: str, media: str, seconds: float | None, key: str
    ) -> tuple[bytes, str]:
        """Returns the encoded image or audio of an item, and its media type.

        Raises:
            ApiError: The item has none, or its file is gone.
        """
        arguments = served.name, served.edition, item_id, media, seconds
        caller = Caller(key, self.settings.timeouts.preview_s)
        try:
            return await self.calls.ask("preview", caller, self._stages.library.preview, *arguments)
        except ApiError as error:
            if error.field == "item_id":  # there is no such item, or it has none
                raise ApiError("not_found", error.message, error.field) from None
            raise


def _reordered(ranking: Ranking, scores: Mapping[str, float], k: int) -> Ranking:
    """Returns the k best items by scores of the second stage; others are left out."""
    scored = [i for i, item_id in enumerate(ranking.item_ids) if item_id in scores]
    order = sorted(scored, key=lambda i: (-scores[ranking.item_ids[i]], ranking.item_ids[i]))[:k]
    best = ranking.take(order)
    return replace(
        best,
        scores=[scores[item_id] for item_id in best.item_ids],
        reranked=tuple(Reranked(i + 1, ranking.scores[i]) for i in order),
    )


def _of_shard(ranking: Ranking, places: Sequence[int]) -> Ranking:
    """Returns some items of a ranking, all of one shard, with rows as that shard counts them."""
    chosen = ranking.take(places)
    return replace(chosen, rows=chosen.rows % SHARD_ROWS)
