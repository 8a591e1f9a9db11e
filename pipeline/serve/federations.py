"""Searches of federations: all members at the same time, each with a time limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pipeline.config import SpecError, digest
from pipeline.index.conditions import condition_sql
from pipeline.search.federation import (
    Found,
    Joined,
    Member,
    federated_hits,
    item_ranges,
    left_out,
    score_scale,
    shown_rankings,
)
from pipeline.search.options import Rerank, SearchOptions
from pipeline.search.query import Queries
from pipeline.search.results import Hit, RerankScore
from pipeline.search.score import Ranking
from pipeline.serve import wire
from pipeline.serve.errors import ApiError, from_spec_error
from pipeline.serve.inputs import check_readable, member_options, read_unencoded
from pipeline.serve.responses import hit_truncation_warnings
from pipeline.serve.scheduler import gather_or_cancel
from pipeline.serve.served import Served, ServedFederation

if TYPE_CHECKING:
    from pipeline.search.rerankers.members import MemberHits
    from pipeline.serve.engine import Engine, Timer

log = logging.getLogger("ray.serve")
T = TypeVar("T")


class FederatedResult(NamedTuple):
    """Hits of each query, and how the members were searched.

    Attributes:
        warnings: Sentences about members and rerankers that failed, and about truncated texts.
    """

    hits: list[list[Hit]]
    members: list[wire.MemberResult]
    is_reranked: bool
    warnings: list[str]


@dataclass
class _Ranked:
    """Rankings of a member, and its hits for each query."""

    queries: list[Queries]
    rankings: list[Ranking]
    found: list[list[Found]]


class FederationSearch:
    """Search of a federation for a request. Members that fail or are too slow are left out."""

    def __init__(
        self,
        engine: Engine,
        served: ServedFederation,
        queries: Sequence[wire.Query],
        request: SearchOptions,
        timer: Timer,
        key: str,
    ):
        self._engine, self._served, self._spec = engine, served, served.spec
        self._queries, self._request, self._timer, self._key = queries, request, timer, key
        self._failures: dict[str, ApiError] = {}
        self._options: dict[str, SearchOptions] = {}
        self._encoding: dict[str, asyncio.Task[list[Queries]]] = {}
        self._is_reranked, self._warnings = False, list[str]()

    async def run(self) -> FederatedResult:
        """Returns the joined hits.

        Raises:
            ApiError: The request is invalid, or members fail that the others cannot make up for.
        """
        await self._check_queries()
        try:
            ranked = await self._each(self._served.members, self._rank)
            hits = None
            while hits is None:
                hits = await self._describe(ranked)
        finally:
            for task in self._encoding.values():
                task.cancel()
            await asyncio.gather(*self._encoding.values(), return_exceptions=True)
        warnings = self._warnings + hit_truncation_warnings(self._queries, hits)
        warnings = self._sentences() + warnings
        return FederatedResult(hits, self._members(), self._is_reranked, warnings)

    async def _check_queries(self) -> None:
        """Raises `ApiError` for a query that is invalid whatever the member."""
        for stage in self._request.rerank or ():
            check_readable(self._queries, stage.name)
        for query in self._queries:
            if isinstance(query, wire.StoredItem):
                rule = "a text, an image, both, or vectors for a federation"
                raise from_spec_error(SpecError("query", query.item, rule, "is an item"))
            if not isinstance(query, wire.Vectors):
                try:
                    await asyncio.to_thread(read_unencoded, query)
                except SpecError as error:
                    raise from_spec_error(error) from None

    async def _each(
        self, names: Collection[str], work: Callable[[str], Coroutine[Any, Any, T]]
    ) -> dict[str, T]:
        """Awaits the work for members at the same time, and returns its results by member."""
        results = await gather_or_cancel(self._attempt(name, work(name)) for name in names)
        found = {name: result for name, result in zip(names, results, strict=True) if result}
        self._check_failures()
        return {name: result for name, (result,) in found.items()}

    async def _attempt(self, name: str, work: Coroutine[Any, Any, T]) -> tuple[T] | None:
        """Returns the result of the work for a member, or None after recording its failure."""
        title, limit_s = f"{self._served.name}.{name}", self._engine.settings.timeouts.member_s
        try:
            with self._timer.stage(title):
                async with asyncio.timeout(limit_s):
                    return (await work,)
        except ApiError as error:
            failure = error
        except TimeoutError:
            failure = ApiError("timeout", f"it took longer than {limit_s:g} s")
        except Exception as error:
            log.error("member failed", exc_info=error, extra={"event": "member_failed"})
            failure = ApiError("internal", "internal server error")
        self._fail(name, failure)
        return None

    def _fail(self, name: str, failure: ApiError) -> None:
        """Records the failure of a member."""
        self._failures[name] = failure
        title = f"{self._served.name}.{name}"
        self._engine.degraded(title, failure.message, self._served.name)

    async def _rank(self, name: str) -> _Ranked:
        served = self._served.members[name]
        options = self._options[name] = self._member_options(name, served)
        queries = await self._encode(served, options.column)
        rankings = await self._engine.rank(served, queries, options.first_stage(), self._key)
        ranges = {}
        if self._spec.join == "overlap":
            ranges = await asyncio.to_thread(_ranges, served, rankings)
        scale = score_scale(name, served.representation(options.column), options)
        return _Ranked(queries, rankings, self._spec.found(name, rankings, scale, ranges))

    def _member_options(self, name: str, served: Served) -> SearchOptions:
        try:
            if self._request.filter is not None:
                condition_sql(self._request.filter, served.index.schema)
            options = self._spec.member_options(name, self._request)
            return member_options(options, served)
        except SpecError as error:
            raise from_spec_error(error) from None

    async def _encode(self, served: Served, representation: str) -> list[Queries]:
        """Encodes the queries once for all members with the same encoder."""
        encoder = served.representation(representation).encoder
        key = digest([encoder.spec, encoder.fingerprint])
        if key not in self._encoding:
            encode = self._engine.encode(served, self._queries, representation, self._key)
            self._encoding[key] = asyncio.create_task(encode)
        return await asyncio.shield(self._encoding[key])  # other members may have more time

    async def _describe(self, ranked: dict[str, _Ranked]) -> list[list[Hit]] | None:
        """Returns the joined hits, or None if a member fails, which must then be left out."""
        names = [name for name in ranked if name not in self._failures]
        found = {name: ranked[name].found for name in names}
        joined = self._spec.join_hits(found, self._request.first_stage().k)
        if self._request.rerank:
            reranked = await self._rerank(names, joined)
            if reranked is None:
                return None
            joined = reranked

        async def describe(name: str) -> list[list[Hit]]:
            member, served = ranked[name], self._served.members[name]
            shown = shown_rankings(name, member.rankings, joined)
            options = self._options[name]
            return await self._engine.describe(served, member.queries, shown, options, self._key)

        described = await self._each(names, describe)
        return federated_hits(joined, described) if len(described) == len(names) else None

    async def _rerank(
        self, names: Sequence[str], joined: Sequence[Sequence[Joined]]
    ) -> list[list[Joined]] | None:
        """Applies rerankers to the hits. Returns None if the index of a member cannot be read."""
        from pipeline.search.rerankers.members import MemberError, MemberHits

        self._is_reranked, self._warnings = False, []
        members = self._served.members
        hits = MemberHits({name: members[name].index for name in names}, joined)
        rankings, stages = hits.rankings(), self._request.rerank or ()
        queries = [await asyncio.to_thread(read_unencoded, query) for query in self._queries]
        for number, stage in enumerate(stages):
            k = max([self._request.k, *(later.depth for later in stages[number + 1 :])])
            try:
                with self._timer.stage(stage.name):
                    rankings = await self._apply(stage, hits, names, queries, rankings, k)
                self._is_reranked = True
            except MemberError as failed:
                self._fail(failed.name, from_spec_error(failed.error))
                self._check_failures()
                return None
            except ApiError as error:
                if not stage.optional or error.code not in ("unavailable", "timeout"):
                    raise
                self._engine.degraded(stage.name, error.message, self._served.name)
                self._warnings.append(f"not reranked: {error.message}")
        k = self._request.k
        return [query_hits[:k] for query_hits in hits.reranked(rankings)]

    async def _apply(
        self,
        stage: Rerank,
        hits: MemberHits,
        names: Sequence[str],
        queries: Sequence[Any],
        rankings: Sequence[Ranking],
        k: int,
    ) -> list[Ranking]:
        """Applies a reranker and returns the k best hits of each query."""
        from pipeline.search.rerankers import reorder
        from pipeline.search.rerankers.members import add_scores

        members = {name: self._served.members[name] for name in names}
        specs = {
            name: served.spec.rerankers[stage.name]
            for name, served in members.items()
            if stage.name in served.spec.rerankers
        }
        if not specs:  # all members that have it were left out
            raise ApiError("unavailable", f"no member has the reranker {stage.name}")
        spec = next(iter(specs.values()))
        is_added = stage.add_first_stage or spec.add_first_stage
        spec = spec.model_copy(update={"top": stage.depth, "add_first_stage": is_added})
        candidates = [ranking.item_ids[: spec.top] for ranking in rankings]
        scores: list[dict[str, RerankScore]] = [{} for _ in queries]

        async def read(name: str, query: int, item_ids: dict[str, str]) -> None:
            ids = list(dict.fromkeys(item_ids.values()))
            arguments = members[name], stage.name, queries[query], ids, self._key
            found = await self._engine.read_by_model(*arguments)
            add_scores([scores[query]], [item_ids], [found])

        turns = hits.turns(candidates, scores, specs.keys())
        while by_member := await asyncio.to_thread(next, turns, None):
            await gather_or_cancel(
                read(name, query, item_ids)
                for name, by_query in by_member.items()
                for query, item_ids in enumerate(by_query)
                if item_ids
            )
        problems = [record.problem for found in scores for record in found.values()]
        problem = next(filter(None, problems), "")
        try:
            await asyncio.to_thread(hits.check_content, scores, stage.name, problem)
        except SpecError as error:
            raise from_spec_error(error) from None
        return [
            reorder("is in no index with the reranker", ranking, found, spec, k)
            for ranking, found in zip(rankings, scores, strict=True)
        ]

    def _check_failures(self) -> None:
        """Raises an error if the other members cannot make up for those that failed."""
        is_complete = len(self._failures) < len(self._served.members)
        if not self._failures or (is_complete and not self._spec.require_all):
            return
        name, error = next(iter(self._failures.items()))
        if all(failure.status < 500 for failure in self._failures.values()):
            is_field = (error.field or "").partition(".")[0] in {*Member.model_fields} - {"filter"}
            place = f"members.{name}." if is_field else ""
            raise ApiError(error.code, place + error.message, error.field and place + error.field)
        raise ApiError("unavailable", "; ".join(self._sentences()))

    def _sentences(self) -> list[str]:
        failures = [(name, self._failures.get(name)) for name in self._served.members]
        return [left_out(name, failure.message) for name, failure in failures if failure]

    def _members(self) -> list[wire.MemberResult]:
        results = []
        for name, served in self._served.members.items():
            options, failure = self._options.get(name), self._failures.get(name)
            result = wire.MemberResult(
                name=name,
                index=served.name,
                version=served.version,
                representation=options and options.representation,
                candidates=options and options.candidates,
                error=failure and failure.message,
            )
            results.append(result)
        return results


def _ranges(served: Served, rankings: Sequence[Ranking]) -> dict[str, tuple[str, float, float]]:
    try:
        return item_ranges(served.index, rankings)
    except SpecError as error:
        raise from_spec_error(error) from None
