"""Search over several indexes as one: `FederatedSearcher("federation.yaml").search("...")`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pipeline.config import JobError, SpecError, load, parse
from pipeline.encoders import EncodedQueries
from pipeline.encoders.shared import Encoders
from pipeline.index import find_index
from pipeline.index.filters import check_filter
from pipeline.index.reader import IndexReader
from pipeline.search.federation import (
    AVAILABILITY,
    Federation,
    Found,
    Joined,
    Member,
    check_options,
    federated_hits,
    item_ranges,
    join_notes,
    left_out,
    score_scale,
    shown_rankings,
)
from pipeline.search.html import Hits
from pipeline.search.options import SearchOptions
from pipeline.search.query import AnyQuery, Queries, check_texts
from pipeline.search.results import Hit
from pipeline.search.score import Ranking
from pipeline.search.searcher import Searcher, load_once

if TYPE_CHECKING:  # imports transformers, which a search without reranking does not need
    from pipeline.search.rerankers import AnyReranker, Reranker, RerankerSpec

#: Errors of a member that the others make up for. Others are mistakes in the program.
FAILURES = (ImportError, OSError, RuntimeError, ValueError)

#: Errors of members that are left out, by name.
Failures = dict[str, Exception]


class MemberWarning(UserWarning):
    """Warning about a member of a federation, which it names."""


class MemberRankings(NamedTuple):
    """Rankings of the queries by a member, and its hits for each query."""

    representation: str
    queries: Queries
    rankings: list[Ranking]
    found: list[list[Found]]


class Rankings(NamedTuple):
    """Rankings of the queries by the members, and by the federation.

    Attributes:
        members: Rankings by the members that did not fail.
        joined: Best hits of each query, best first.
        warnings: Sentences about members that were left out, or whose hits cannot be joined.
    """

    members: dict[str, MemberRankings]
    joined: list[list[Joined]]
    warnings: list[str]


class FederatedSearcher:
    """Search over several indexes as one. Members are opened at once, their vectors on first use.

    Args:
        spec: Federation, its fields, or the path of a YAML file.
        cache: Whether to pack vectors into memory-mapped local files. See `open_index`.
        device: "cpu", or a CUDA device that holds the vectors and computes the scores.

    Attributes:
        searchers: Searchers of the members that could be opened.

    Raises:
        SpecError: A field is invalid, a member has no such representation, candidates or filter, or
            no member can be opened.
    """

    def __init__(
        self,
        spec: Federation | Mapping[str, Any] | str,
        *,
        cache: bool = True,
        device: str = "cpu",
    ):
        if isinstance(spec, str):
            spec = load(Federation, spec, role="federation")
        self.spec = spec if isinstance(spec, Federation) else parse(Federation, spec)
        self.searchers: dict[str, Searcher] = {}
        self._missing: Failures = {}
        self._notes: dict[tuple[str, ...], list[str]] = {}
        self._models: dict[RerankerSpec, Reranker[Any]] = {}
        encoders: Encoders = {}
        for name, member in self.spec.members.items():
            try:
                index = IndexReader(find_index(member.index), member.version)
                searcher = Searcher(index, cache=cache, device=device, encoders=encoders)
                self.searchers[name] = searcher
                searcher.items.select(self.options(name, SearchOptions()))
            except FAILURES as error:
                if isinstance(error, SpecError) and error.field not in AVAILABILITY:
                    raise _located(name, error) from None
                self.searchers.pop(name, None)
                self._fail(name, error, self._missing)

    def search(
        self,
        query: AnyQuery | Sequence[AnyQuery],
        *,
        explain: bool = True,
        rerank: AnyReranker | Sequence[AnyReranker] | None = None,
        **options: Any,
    ) -> Sequence[Hit] | list[list[Hit]]:
        """Finds the k best hits for a query, or for each of several. See `Searcher.search`.

        Args:
            query: A text; an image, as the bytes of its file; a `Composed` query; token vectors;
                or a list of one of these. It is encoded once per encoder.
            explain: Whether hits contain `matches` and `passages`.
            rerank: Reranker of the best hits, or several in a row, as in `Searcher.search`. A hit
                is read in the index of the member that describes it or, if that lacks what the
                reranker reads, of the first other member that has it.
            options: `k`, `filter`, `ids` and `parents` of `SearchOptions`.

        Raises:
            SpecError: An argument is invalid, or all members fail.
            JobError: All members fail.

        Warns:
            MemberWarning: A member is left out, or its hits cannot be joined.
        """
        parsed = parse(SearchOptions, options | {"explain": "matches" if explain else None})
        is_single = isinstance(query, AnyQuery)
        if not isinstance(query, AnyQuery | Sequence):
            rule = "a text, an image, vectors, or a list of these"
            raise SpecError("query", type(query).__name__, rule)
        queries = [cast(AnyQuery, query)] if is_single else cast(Sequence[AnyQuery], query)
        found, sentences = self.search_with(queries, parsed, load_once(rerank, self._models))
        for sentence in sentences:
            warnings.warn(sentence, MemberWarning, stacklevel=2)
        return Hits(found[0]) if is_single else found

    def search_with(
        self,
        queries: Sequence[AnyQuery],
        options: SearchOptions,
        rerankers: Sequence[Reranker[Any]] = (),
    ) -> tuple[list[list[Hit]], list[str]]:
        """Returns the hits of each query, and the warnings. See `search`."""
        failures = dict(self._missing)
        while True:
            rankings = self.rank_with(queries, options, failures, rerankers=rerankers)
            if (hits := self._describe(rankings, options, failures)) is not None:
                return hits, rankings.warnings

    def rank_with(
        self,
        queries: Sequence[AnyQuery],
        options: SearchOptions,
        failures: Failures | None = None,
        encode: Callable[[str, str], Queries] | None = None,
        rerankers: Sequence[Reranker[Any]] = (),
    ) -> Rankings:
        """Ranks the items for each query.

        Args:
            failures: Errors of members that are left out, which is completed.
            encode: Returns the queries for a member and a representation, in place of encoding
                `queries`.
            rerankers: Rerankers that are applied in turn to the joined hits.
        """
        check_options(options)
        k, depth = options.k, max((reranker.spec.top for reranker in rerankers), default=0)
        options = options.model_copy(update={"k": max(k, depth)})
        if encode is None:  # such a mistake is none of a member
            check_texts([query for query in queries if isinstance(query, str)])
        failures = dict(self._missing) if failures is None else failures
        opened = {n: one.index for n, one in self.searchers.items() if n not in failures}
        readable: Sequence[str | bytes] = ()
        if rerankers:  # before anything is encoded
            from pipeline.search.rerankers.members import MemberError, check_rerankers

            readable = check_rerankers(rerankers, opened, queries)
        encoded: dict[str, EncodedQueries] = {}
        members: dict[str, MemberRankings] = {}
        for name, searcher in self.searchers.items():
            if name in failures:
                continue
            try:
                resolved = self.options(name, options)
                column = resolved.column
                member_queries = (
                    searcher.encoders.encode(queries, column, encoded)
                    if encode is None
                    else encode(name, column)
                )
                rankings = searcher.rank_with(member_queries, resolved)
                found = self.found(name, rankings, resolved)
            except FAILURES as error:
                self._fail(name, error, failures)
                continue
            members[name] = MemberRankings(column, member_queries, rankings, found)
        found_by = {name: member.found for name, member in members.items()}
        joined = self.spec.join_hits(found_by, options.k)
        if rerankers:
            sources = {name: self.searchers[name] for name in members}
            try:
                joined = _rerank(rerankers, sources, readable, joined, k)
            except MemberError as failed:
                self._fail(failed.name, failed.error, failures)
                options = options.model_copy(update={"k": k})
                return self.rank_with(queries, options, failures, encode, rerankers)
        sentences = [left_out(name, error) for name, error in failures.items()]
        return Rankings(members, joined, sentences + self._join_notes(tuple(members)))

    def scores(self, joined: Sequence[Joined], level: str | None = None) -> dict[str, float]:
        """Returns the scores of hits by item id or, at the level `parent`, by parent id.

        By default, the level is that by which hits are joined. After reranking, which mixes the
        scores of two stages, they are descending ranks.
        """
        level = level or ("parent" if self.spec.join == "parent" else "item")
        by_id: dict[str, float] = {}
        for number, each in zip(range(len(joined), 0, -1), joined, strict=True):
            score = each.score if each.first_stage is None else float(number)
            by_id.setdefault(getattr(each.shown, f"{level}_id"), score)
        return by_id

    def options(self, name: str, options: SearchOptions) -> SearchOptions:
        """Returns the options of a member, resolved for its index."""
        index = self.searchers[name].index
        if options.filter is not None:
            check_filter(index, options.filter)
        member_options = self.spec.member_options(name, options)
        return member_options.resolve(index, self.searchers[name].device)

    def found(
        self, name: str, rankings: Sequence[Ranking], options: SearchOptions
    ) -> list[list[Found]]:
        """Returns the hits of a member for each query, without values."""
        index = self.searchers[name].index
        ranges = item_ranges(index, rankings) if self.spec.join == "overlap" else {}
        scale = score_scale(name, index.representation(options.column), options)
        return self.spec.found(name, rankings, scale, ranges)

    def _describe(
        self, rankings: Rankings, options: SearchOptions, failures: Failures
    ) -> list[list[Hit]] | None:
        """Returns the hits of each query, or None if a member fails."""
        described: dict[str, list[list[Hit]]] = {}
        for name, member in rankings.members.items():
            shown = shown_rankings(name, member.rankings, rankings.joined)
            explain = options.explain is not None
            try:
                described[name] = self.searchers[name].hits(
                    shown, member.queries, member.representation, explain=explain
                )
            except FAILURES as error:
                self._fail(name, error, failures)
                return None
        return federated_hits(rankings.joined, described)

    def _fail(self, name: str, error: Exception, failures: Failures) -> None:
        """Records the error of a member, or raises it if the others cannot make up for it."""
        failures[name] = error
        if not self.spec.require_all and len(failures) < len(self.spec.members):
            return
        name, error = (name, error) if self.spec.require_all else next(iter(failures.items()))
        if isinstance(error, SpecError):
            raise _located(name, error) from None
        raise JobError(left_out(name, error)) from error

    def _join_notes(self, names: tuple[str, ...]) -> list[str]:
        if names not in self._notes:
            self._notes[names] = []
            with contextlib.suppress(*FAILURES):  # a search reports an index that cannot be read
                indexes = {name: self.searchers[name].index for name in names}
                self._notes[names] = join_notes(indexes, self.spec.join)
        return self._notes[names]


def _rerank(
    rerankers: Sequence[Reranker[Any]],
    searchers: Mapping[str, Searcher],
    queries: Sequence[str | bytes],
    joined: list[list[Joined]],
    k: int,
) -> list[list[Joined]]:
    """Applies rerankers one after another and returns the k best hits of each query."""
    from pipeline.search.rerankers import rerank_in_turn
    from pipeline.search.rerankers.members import MemberHits

    indexes = {name: searcher.index for name, searcher in searchers.items()}
    hits = MemberHits(indexes, joined, searchers)
    return hits.reranked(rerank_in_turn(rerankers, hits, queries, hits.rankings(), k))


def _located(name: str, error: SpecError) -> SpecError:
    """Returns the error with the path of its field, if it is a field of the member."""
    is_field = error.field.partition(".")[0] in Member.model_fields
    return error.below(f"members.{name}") if is_field else error
