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
    Member,
    federated_hits,
    item_ranges,
    left_out,
    score_scale,
    shown_rankings,
)
from pipeline.search.options import SearchOptions
from pipeline.search.query import Queries
from pipeline.search.results import Hit
from pipeline.search.score import Ranking
from pipeline.serve import wire
from pipeline.serve.errors import ApiError, from_spec_error
from pipeline.serve.inputs import member_options, read_unencoded
from pipeline.serve.scheduler import gather_or_cancel
from pipeline.serve.served import Served, ServedFederation

if TYPE_CHECKING:
    from pipeline.serve.engine import Engine, Timer

log = logging.getLogger("ray.serve")
T = TypeVar("T")


class FederatedResult(NamedTuple):
    """Hits of each query, how the members were searched, and a sentence for each that failed."""

    hits: list[list[Hit]]
    members: list[wire.MemberResult]
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
        request: wire.SearchFields,
        timer: Timer,
        key: str,
    ):
        self._engine, self._served, self._spec = engine, served, served.spec
        self._queries, self._request, self._timer, self._key = queries, request, timer, key
        self._failures: dict[str, ApiError] = {}
        self._options: dict[str, SearchOptions] = {}
        self._encoding: dict[str, asyncio.Task[list[Queries]]] = {}

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
        return FederatedResult(hits, self._members(), self._sentences())

    async def _check_queries(self) -> None:
        """Raises `ApiError` for a query that is invalid whatever the member."""
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
        self._failures[name] = failure
        self._engine.degraded(title, failure.message, self._served.name)
        return None

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
        joined = self._spec.join_hits(found, self._request.k)

        async def describe(name: str) -> list[list[Hit]]:
            member, served = ranked[name], self._served.members[name]
            shown = shown_rankings(name, member.rankings, joined)
            options = self._options[name]
            return await self._engine.describe(served, member.queries, shown, options, self._key)

        described = await self._each(names, describe)
        return federated_hits(joined, described) if len(described) == len(names) else None

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
