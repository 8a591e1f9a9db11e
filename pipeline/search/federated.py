"""Search over several indexes as one: `FederatedSearcher("federation.yaml").search("...")`.

Each member of a federation ranks its best `depth` items. The scores s of these hits, whose lowest
is s_min, are made comparable by a value v >= 0:

    rank      v = 1 / (rank_constant + rank), reciprocal rank fusion
    min_max   v = (s - s_min) / (s_max - s_min)
    z_score   v = (s - s_min) / standard deviation of s

With `min_max` and `z_score`, v = 1 if all scores are equal, and a member that does not find an item
adds as much as for its lowest hit: 0. The score of a hit is the weighted sum of its value and of
the best value of a hit that is joined to it in each other member. A hit is left out if a better one
of another member is joined to it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
import pyarrow.compute as pc
from pydantic import Field

from pipeline.config import JobError, Spec, SpecError, first_line, load, parse
from pipeline.encoders import EncodedQueries
from pipeline.encoders.shared import Encoders
from pipeline.extras import MissingExtra
from pipeline.index import find_index
from pipeline.index.filters import check_filter
from pipeline.index.reader import IndexReader, combine_filters
from pipeline.search.candidates import AUTO
from pipeline.search.fusion import DEFAULT_FUSION, FusionSpec
from pipeline.search.html import Hits
from pipeline.search.options import SearchOptions
from pipeline.search.query import AnyQuery, Queries, check_texts
from pipeline.search.results import FederatedHit, Hit, MemberHit
from pipeline.search.score import Ranking
from pipeline.search.scores import Score
from pipeline.search.searcher import Searcher

#: Options of a search in a federation. The members set the others.
OPTIONS = {"k", "filter", "ids", "parents", "explain"}
#: Errors of a member that the others make up for. Others are mistakes in the program.
FAILURES = (ImportError, OSError, RuntimeError, ValueError)
#: Fields of a member that can become invalid while its spec remains the same.
AVAILABILITY = ("index", "version")


class Member(Spec):
    """Index of a federation, and how it is searched."""

    index: str
    """URI of the index, or the folder that it is beside. Paths are relative to the working
    directory."""
    version: int | None = None
    """Version of the index. Default: the newest."""
    weight: float = Field(1.0, gt=0, le=1e6, allow_inf_nan=False)
    """Weight of the member in the scores of the federation."""
    representation: str | None = None
    """Name of the representation to search, as in `SearchOptions`."""
    score: Score = "maxsim"
    """Score of the items, as in `SearchOptions`."""
    fusion: FusionSpec = DEFAULT_FUSION
    """Settings of the `fused` score: a mapping, or the path of a YAML file."""
    candidates: str = AUTO
    """Candidate generator, as in `SearchOptions`."""
    num_candidates: int | None = Field(None, ge=1)
    """Number of candidates, as in `SearchOptions`. It is `depth` if that is more."""
    filter: str | None = None
    """Lance SQL expression. Only the items of the member that satisfy it are searched."""


class Federation(Spec):
    """Several indexes that are searched as one."""

    members: dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], Member] = Field(min_length=1)
    """Indexes by name. An index can be several members, such as one per representation."""
    normalise: Literal["rank", "min_max", "z_score"] = "rank"
    """Method that makes the scores of the members comparable, see above."""
    rank_constant: float = Field(60.0, ge=0, le=1e6, allow_inf_nan=False)
    """Constant of the reciprocal rank. The larger it is, the less the first ranks count."""
    join: Literal["item", "parent", "overlap"] = "item"
    """Hits that are joined: those of the same item or parent, or of ranges of the same parent that
    overlap, such as 10-20 s and 15-30 s. An item without a range overlaps all of its parent."""
    depth: int = Field(100, ge=1, le=10_000)
    """Number of best items of each member that are joined. It is `k` if that is more."""
    require_all: bool = False
    """Whether a member that is missing or fails is an error. Otherwise it is a warning, and the
    hits are those of the others."""


#: Errors of members that are left out, by name.
Failures = dict[str, Exception]


class MemberWarning(UserWarning):
    """Warning about a member of a federation, which it names."""


class Found(NamedTuple):
    """Hit of a member.

    Attributes:
        rank: Rank in the member, from 1.
        score: Score in the member.
        value: Weighted comparable score.
        range: Unit, start and end in the parent, or None for the whole parent.
    """

    member: str
    rank: int
    score: float
    value: float
    item_id: str
    parent_id: str
    range: tuple[str, float, float] | None = None

    def overlaps(self, other: Found) -> bool:
        """Checks whether the ranges of two hits of the same parent overlap."""
        if self.range is None or other.range is None or self.range == other.range:
            return True
        (unit, start, end), (other_unit, other_start, other_end) = self.range, other.range
        return unit == other_unit and start < other_end and other_start < end

    @property
    def length(self) -> float:
        """Length of the range."""
        return math.inf if self.range is None else self.range[2] - self.range[1]


class Joined(NamedTuple):
    """Hit of a federation: the hit that describes it, and those of all members, by member."""

    score: float
    shown: Found
    found: dict[str, Found]


class MemberRankings(NamedTuple):
    """Rankings of the queries by a member."""

    representation: str
    queries: Queries
    rankings: list[Ranking]


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


def values(scores: Sequence[float], spec: Federation) -> np.ndarray:
    """Returns the comparable scores (n,) float64 of the hits of a member, best first.

    >>> members = {"a": {"index": "a"}}
    >>> values([4.0, 2.0, 0.0], Federation(members=members, normalise="min_max")).tolist()
    [1.0, 0.5, 0.0]
    >>> values([4.0, 2.0], Federation(members=members, rank_constant=1)).tolist()
    [0.5, 0.3333333333333333]
    """
    if spec.normalise == "rank":
        return 1 / (spec.rank_constant + np.arange(1, len(scores) + 1))
    array = np.array(scores, np.float64)
    if not len(array) or array.max() == array.min():
        return np.ones_like(array)
    return (array - array.min()) / (np.ptp(array) if spec.normalise == "min_max" else array.std())


def join_hits(hits: Iterable[Found], join: str, k: int) -> list[Joined]:
    """Joins the hits of a query and returns the k best.

    Hits are sorted by their scores. Ties are sorted by item or parent id, and those of ranges first
    by length. Of joined hits with equal scores, the one that its member ranks best is shown.

    Args:
        hits: Hits of one member after another, best first.
    """
    is_overlap = join == "overlap"
    groups: dict[str, list[Found]] = {}
    for hit in hits:
        groups.setdefault(hit.item_id if join == "item" else hit.parent_id, []).append(hit)
    joined = []
    for group in groups.values():
        for hit in group:
            found: dict[str, Found] = {}
            for other in group:
                is_joined = not is_overlap or hit.overlaps(other)
                if other is hit or (other.member != hit.member and is_joined):
                    found.setdefault(other.member, other)
            joined.append(Joined(sum(other.value for other in found.values()), hit, found))
    joined.sort(key=lambda each: (-each.score, _order(each.shown, join)))  # stable: by member
    best: list[Joined] = []
    shown: dict[str, list[Found]] = {}
    for each in joined:
        hit = each.shown
        others = shown.setdefault(hit.item_id if join == "item" else hit.parent_id, [])
        if not any(o.member != hit.member and (not is_overlap or hit.overlaps(o)) for o in others):
            others.append(hit)
            best.append(each)
    return best[:k]


def _order(hit: Found, join: str) -> tuple[float, str, int]:
    if join == "overlap":
        return hit.length, hit.item_id, hit.rank
    return 0, hit.item_id if join == "item" else hit.parent_id, hit.rank


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
        self, query: AnyQuery | Sequence[AnyQuery], *, explain: bool = True, **options: Any
    ) -> Sequence[Hit] | list[list[FederatedHit]]:
        """Finds the k best hits for a query, or for each of several. See `Searcher.search`.

        Args:
            query: A text; an image, as the bytes of its file; a `Composed` query; token vectors;
                or a list of one of these. It is encoded once per encoder.
            explain: Whether hits contain `matches` and `passages`.
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
        found, sentences = self.search_with(queries, parsed)
        for sentence in sentences:
            warnings.warn(sentence, MemberWarning, stacklevel=2)
        return Hits(found[0]) if is_single else found

    def search_with(
        self, queries: Sequence[AnyQuery], options: SearchOptions
    ) -> tuple[list[list[FederatedHit]], list[str]]:
        """Returns the hits of each query, and the warnings. See `search`."""
        failures = dict(self._missing)
        while True:
            rankings = self.rank_with(queries, options, failures)
            if (hits := self._describe(rankings, options, failures)) is not None:
                return hits, rankings.warnings

    def rank_with(
        self,
        queries: Sequence[AnyQuery],
        options: SearchOptions,
        failures: Failures | None = None,
        encode: Callable[[str, str], Queries] | None = None,
    ) -> Rankings:
        """Ranks the items for each query.

        Args:
            failures: Errors of members that are left out, which is completed.
            encode: Returns the queries for a member and a representation, in place of encoding
                `queries`.
        """
        if others := options.model_fields_set - OPTIONS:
            rule = "set in the members of the federation"
            raise SpecError(min(others), getattr(options, min(others)), rule)
        if encode is None:  # such a mistake is none of a member
            check_texts([query for query in queries if isinstance(query, str)])
        failures = dict(self._missing) if failures is None else failures
        encoded: dict[str, EncodedQueries] = {}
        members: dict[str, MemberRankings] = {}
        hits: list[list[Found]] = [[] for _ in queries]
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
                found = self.found(name, rankings)
            except FAILURES as error:
                self._fail(name, error, failures)
                continue
            members[name] = MemberRankings(column, member_queries, rankings)
            for query_hits, more in zip(hits, found, strict=True):
                query_hits += more
        joined = [join_hits(query_hits, self.spec.join, options.k) for query_hits in hits]
        sentences = [_sentence(name, error) for name, error in failures.items()]
        return Rankings(members, joined, sentences + self._unjoined(tuple(members)))

    def scores(self, joined: Sequence[Joined], level: str | None = None) -> dict[str, float]:
        """Returns the scores of hits by item id or, at the level `parent`, by parent id.

        By default, the level is that by which hits are joined.
        """
        level = level or ("parent" if self.spec.join == "parent" else "item")
        by_id: dict[str, float] = {}
        for each in joined:
            by_id.setdefault(getattr(each.shown, f"{level}_id"), each.score)
        return by_id

    def options(self, name: str, options: SearchOptions) -> SearchOptions:
        """Returns the options of a member, resolved for its index."""
        member, depth, index = self.spec.members[name], self.spec.depth, self.searchers[name].index
        depth = max(depth, options.k)
        fields = member.model_dump(exclude={"index", "version", "weight", "fusion"})
        fields |= {"fusion": member.fusion, "k": depth, "ids": options.ids}
        fields["parents"] = options.parents
        fields["num_candidates"] = member.num_candidates and max(member.num_candidates, depth)
        fields["group_by"] = "parent" if self.spec.join == "parent" else None
        if options.filter is not None:
            check_filter(index, options.filter)  # as a part, it could change the whole
            fields["filter"] = combine_filters(member.filter, f"({options.filter})")
        return parse(SearchOptions, fields).resolve(index, self.searchers[name].device)

    def found(self, name: str, rankings: Sequence[Ranking]) -> list[list[Found]]:
        """Returns the hits of a member for each query."""
        ranges: dict[str, tuple[str, float, float]] = {}
        if self.spec.join == "overlap":
            item_ids = sorted({item_id for ranking in rankings for item_id in ranking.item_ids})
            for row in self.searchers[name].index.items(item_ids, ["span"]).to_pylist():
                if (span := row["span"]) and span["unit"]:
                    ranges[row["item_id"]] = span["unit"], span["start"], span["end"]
        found = []
        for ranking in rankings:
            comparable = self.spec.members[name].weight * values(ranking.scores, self.spec)
            columns = ranking.scores, comparable.tolist(), ranking.item_ids, ranking.parent_ids
            rows = enumerate(zip(*columns, strict=True), start=1)
            found.append([Found(name, rank, *row, ranges.get(row[2])) for rank, row in rows])
        return found

    def _describe(
        self, rankings: Rankings, options: SearchOptions, failures: Failures
    ) -> list[list[FederatedHit]] | None:
        """Returns the hits of each query, or None if a member fails."""
        hits: dict[tuple[int, str, int], Hit] = {}
        for name, member in rankings.members.items():
            shown = [[j.shown.rank for j in q if j.shown.member == name] for q in rankings.joined]
            taken = [
                ranking.take([rank - 1 for rank in ranks])
                for ranking, ranks in zip(member.rankings, shown, strict=True)
            ]
            explain = options.explain is not None
            try:
                described = self.searchers[name].hits(
                    taken, member.queries, member.representation, explain=explain
                )
            except FAILURES as error:
                self._fail(name, error, failures)
                return None
            for query, (ranks, found) in enumerate(zip(shown, described, strict=True)):
                hits |= {(query, name, r): hit for r, hit in zip(ranks, found, strict=True)}
        return [
            [
                _federated_hit(rank, each, hits[query, each.shown.member, each.shown.rank])
                for rank, each in enumerate(joined, start=1)
            ]
            for query, joined in enumerate(rankings.joined)
        ]

    def _fail(self, name: str, error: Exception, failures: Failures) -> None:
        """Records the error of a member, or raises it if the others cannot make up for it."""
        failures[name] = error
        if not self.spec.require_all and len(failures) < len(self.spec.members):
            return
        name, error = (name, error) if self.spec.require_all else next(iter(failures.items()))
        if isinstance(error, SpecError):
            raise _located(name, error) from None
        raise JobError(_sentence(name, error)) from error

    def _unjoined(self, names: tuple[str, ...]) -> list[str]:
        """Returns a sentence for each member that has no id in common with another one."""
        if names not in self._notes and len(names) > 1:
            column = "item_id" if self.spec.join == "item" else "parent_id"
            ids = {name: self.searchers[name].items.ids[column] for name in names}
            self._notes[names] = [
                f"member {name} has no {column} in common with another member, so that its hits "
                "are not joined"
                for name in names
                if not any(
                    pc.any(pc.is_in(ids[name], value_set=ids[other])).as_py()
                    for other in names
                    if other != name
                )
            ]
        return self._notes.get(names, [])


def _federated_hit(rank: int, joined: Joined, hit: Hit) -> FederatedHit:
    found = tuple(
        MemberHit(member=name, rank=each.rank, score=each.score, item_id=each.item_id)
        for name, each in joined.found.items()
    )
    return FederatedHit(**{**dict(hit), "rank": rank, "score": joined.score}, members=found)


def _located(name: str, error: SpecError) -> SpecError:
    """Returns the error with the path of its field, if it is a field of the member."""
    is_field = error.field.partition(".")[0] in Member.model_fields
    return error.below(f"members.{name}") if is_field else error


def _sentence(name: str, error: Exception) -> str:
    is_sentence = isinstance(error, SpecError | JobError | MissingExtra)
    text = str(error) if is_sentence else f"{type(error).__name__}: {first_line(error)}"
    return f"member {name} is left out: {text}"
