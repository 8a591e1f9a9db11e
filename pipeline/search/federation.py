"""Federations: several indexes that are searched as one, and how their hits are joined.

Each member of a federation ranks its best `depth` items. The scores s of these hits become
comparable values v, which are the shares of the hits in a softmax of the standardised scores:

    v = exp(s / d) / (sum of exp(s / d) over the hits)   with the standard deviation d of s

Members whose scores have the same scale, by the same encoder and compressor, are one list of hits
in this equation, as if they were shards of one index. A list whose best hits stand out counts more
than one whose scores are similar. The score of a hit is the sum over the scales of the best
weighted value of this hit and of those that are joined to it in other members. A hit is left out if
a better one of another member is joined to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow.compute as pc
from pydantic import AfterValidator, BeforeValidator, Field

from pipeline.config import JobError, Spec, SpecError, digest, first_line, parse, read
from pipeline.extras import MissingExtra
from pipeline.search.candidates import AUTO
from pipeline.search.fusion import DEFAULT_FUSION, FusionSpec
from pipeline.search.options import VECTORS, SearchOptions
from pipeline.search.results import FirstStage, Hit, MemberHit, RerankScore
from pipeline.search.scores import Score

if TYPE_CHECKING:  # imports torch, which the settings of a server do not need
    from pipeline.index.info import RepresentationInfo
    from pipeline.index.reader import IndexReader
    from pipeline.search.score import Ranking

#: Options of a search in a federation. The members set the others.
OPTIONS = {"k", "filter", "ids", "parents", "explain", "rerank"}
#: Fields of a member that are options of its search.
MEMBER_OPTIONS = ("representation", "score", "candidates")
#: Fields of a member that can become invalid while its spec remains the same.
AVAILABILITY = ("index", "version")

#: Hits that are joined, see `Federation.join`.
Join = Literal["item", "parent", "overlap"]


def _not_federation(index: str) -> str:
    if index.lower().endswith((".yaml", ".yml")):
        rule = "the URI of an index"
        raise SpecError("", index, rule, "is a spec (a federation cannot have federations)")
    return index


class Member(Spec):
    """Index of a federation, and how it is searched."""

    index: Annotated[str, AfterValidator(_not_federation)]
    """URI of the index, or the folder that it is beside. Paths are relative to the working
    directory. A server also accepts the name of a served index."""
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
    join: Join = "item"
    """Hits that are joined: those of the same item or parent, or of ranges of the same parent that
    overlap, such as 10-20 s and 15-30 s. An item without a range overlaps all of its parent."""
    depth: int = Field(100, ge=1, le=10_000)
    """Number of best items of each member that are joined. It is `k` if that is more."""
    require_all: bool = False
    """Whether a member that is missing or fails is an error. Otherwise it is a warning, and the
    hits are those of the others."""

    def with_weights(self, weights: Mapping[str, float]) -> Federation:
        """Returns the federation with other weights, without the members of weight 0."""
        members = {
            name: member.model_copy(update={"weight": weights[name]})
            for name, member in self.members.items()
            if weights[name]
        }
        return self.model_copy(update={"members": members})

    def member_options(self, name: str, options: SearchOptions) -> SearchOptions:
        """Returns the options of a member for a search of the federation.

        The filter of the search must have been checked: as a part, it could change the whole.
        """
        member, depth = self.members[name], max(self.depth, options.first_stage().k)
        fields: dict[str, Any] = {"k": depth, "explain": options.explain}
        fields |= {field: getattr(member, field) for field in MEMBER_OPTIONS}
        if "fusion" in member.model_fields_set:  # a server has a default for each index
            fields["fusion"] = member.fusion
        fields |= {"ids": options.ids, "parents": options.parents}
        fields["num_candidates"] = member.num_candidates and max(member.num_candidates, depth)
        fields["group_by"] = "parent" if self.join == "parent" else None
        both = member.filter, options.filter
        is_both = None not in both
        fields["filter"] = f"({both[0]}) AND ({both[1]})" if is_both else both[0] or both[1]
        return parse(SearchOptions, fields)

    def found(
        self,
        name: str,
        rankings: Sequence[Ranking],
        scale: str,
        ranges: Mapping[str, Range],
    ) -> list[list[Found]]:
        """Returns the hits of a member for each query, without values.

        Args:
            scale: Scale of the scores, see `score_scale`.
            ranges: Ranges of the items by id, see `item_ranges`.
        """
        found = []
        for ranking in rankings:
            rows = zip(ranking.scores, ranking.item_ids, ranking.parent_ids, strict=True)
            hits = [
                Found(name, rank, score, item_id, parent_id, scale, ranges.get(item_id))
                for rank, (score, item_id, parent_id) in enumerate(rows, start=1)
            ]
            found.append(hits)
        return found

    def join_hits(self, found: Mapping[str, list[list[Found]]], k: int) -> list[list[Joined]]:
        """Joins the hits of the members for each query, and returns the k best."""
        by_query = zip(*(found[name] for name in self.members if name in found), strict=True)
        return [join_hits(self._weighted([*chain(*hits)]), self.join, k) for hits in by_query]

    def _weighted(self, hits: Sequence[Found]) -> Iterator[Found]:
        """Yields the hits of a query with their values."""
        by_scale: dict[str, list[float]] = {}
        for hit in hits:
            by_scale.setdefault(hit.scale, []).append(hit.score)
        shares = {scale: iter(values(scores).tolist()) for scale, scores in by_scale.items()}
        for hit in hits:
            weight = self.members[hit.member].weight
            yield hit._replace(value=weight * next(shares[hit.scale]))


def _read(value: Any) -> Any:
    return read(value, "") if isinstance(value, str) else value


#: Federation as a field of specs: a mapping, or the path of a YAML file.
FederationSpec = Annotated[Federation, BeforeValidator(_read)]
#: Unit, start and end of an item in its parent.
Range = tuple[str, float, float]


class Found(NamedTuple):
    """Hit of a member.

    Attributes:
        rank: Rank in the member, from 1.
        score: Score in the member.
        scale: Scale of the scores.
        value: Weighted comparable score.
        range: Unit, start and end in the parent, or None for the whole parent.
    """

    member: str
    rank: int
    score: float
    item_id: str
    parent_id: str
    scale: str
    range: Range | None = None
    value: float = 0.0

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
    """Hit of a federation: the hit that describes it, and those of all members, by member.

    Attributes:
        first_stage: Rank and score before reranking, or None without reranking.
        rerank: Score of the last reranker, or None without one.
    """

    score: float
    shown: Found
    found: dict[str, Found]
    first_stage: FirstStage | None = None
    rerank: RerankScore | None = None


def values(scores: Sequence[float]) -> np.ndarray:
    """Returns the comparable scores (n,) float64 of the hits of a member, best first.

    >>> values([9.0, 5.0, 5.0, 5.0]).round(2).tolist(), values([2.0, 2.0]).tolist()
    ([0.77, 0.08, 0.08, 0.08], [0.5, 0.5])
    """
    if not len(scores):
        return np.zeros(0)
    array = np.array(scores, np.float64)
    exponentials = np.exp((array - array.max()) / (array.std() or 1))
    return exponentials / exponentials.sum()


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
            best_values: dict[str, float] = {}
            for other in found.values():
                best_value = best_values.get(other.scale, 0.0)
                best_values[other.scale] = max(best_value, other.value)
            joined.append(Joined(sum(best_values.values()), hit, found))
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


def check_options(options: SearchOptions) -> None:
    """Raises `SpecError` for an option that the members of a federation set."""
    for name in sorted(options.model_fields_set & SearchOptions.model_fields.keys() - OPTIONS):
        if getattr(options, name) != getattr(SearchOptions(), name):
            value = options.model_dump(mode="json", include={name})[name]
            rules = {"group_by": "null; set `join` to parent"}
            raise SpecError(name, value, rules.get(name, "set in the members of the federation"))
    if any(stage.name == VECTORS for stage in options.rerank or ()):
        raise SpecError("rerank.name", VECTORS, "the name of a reranker for a federation")


def score_scale(name: str, info: RepresentationInfo, options: SearchOptions) -> str:
    """Returns an id of the scale of the scores of a member.

    It is the name of the member if its scores depend on the other items of the index.
    """
    if options.score == "maxsim":
        compression = info.compressor, info.codec, info.max_vectors
        return digest([info.encoder.spec, info.encoder.fingerprint, info.field, *compression])
    if options.score == "single_vector":
        return digest([info.encoder.spec, info.encoder.fingerprint, info.field])
    return name


def item_ranges(index: IndexReader, rankings: Sequence[Ranking]) -> dict[str, Range]:
    """Reads the ranges of ranked items in their parents, by which hits are joined by overlap."""
    item_ids = sorted({item_id for ranking in rankings for item_id in ranking.item_ids})
    ranges: dict[str, Range] = {}
    for row in index.items(item_ids, ["span"]).to_pylist() if item_ids else ():
        if (span := row["span"]) and span["unit"]:
            ranges[row["item_id"]] = span["unit"], span["start"], span["end"]
    return ranges


def shown_rankings(
    name: str, rankings: Sequence[Ranking], joined: Sequence[Sequence[Joined]]
) -> list[Ranking]:
    """Returns the rankings of the hits that a member describes, for `federated_hits`."""
    return [
        ranking.take([each.shown.rank - 1 for each in hits if each.shown.member == name])
        for ranking, hits in zip(rankings, joined, strict=True)
    ]


def federated_hits(
    joined: Sequence[Sequence[Joined]], described: Mapping[str, Sequence[Sequence[Hit]]]
) -> list[list[Hit]]:
    """Returns the hits of a federation.

    Args:
        joined: Best hits of each query.
        described: Hits of `shown_rankings` by member and query.
    """
    results = []
    for query, hits in enumerate(joined):
        parts = {name: iter(by_query[query]) for name, by_query in described.items()}
        results.append(
            [_hit(rank, each, next(parts[each.shown.member])) for rank, each in enumerate(hits, 1)]
        )
    return results


def _hit(rank: int, joined: Joined, hit: Hit) -> Hit:
    shown = joined.shown
    found = sorted(joined.found.values(), key=lambda each: each is not shown)  # stable
    members = tuple(
        MemberHit(**{n: getattr(each, n) for n in MemberHit.model_fields}) for each in found
    )
    fields = {"score": joined.score, "first_stage": joined.first_stage, "rerank": joined.rerank}
    return hit.model_copy(update={**fields, "rank": rank, "members": members})


def left_out(name: str, error: Exception | str) -> str:
    """Returns the sentence about a member that fails with an error, or for a reason."""
    is_sentence = isinstance(error, SpecError | JobError | MissingExtra)
    if isinstance(error, Exception) and not is_sentence:
        error = f"{type(error).__name__}: {first_line(error)}"
    return f"member {name} is left out: {error}"


def join_notes(indexes: Mapping[str, IndexReader], join: Join) -> list[str]:
    """Returns sentences about members whose hits cannot be joined, or perhaps should not be."""
    column, notes = "item_id" if join == "item" else "parent_id", []
    fields = ["item_id", "parent_id", "modality", "revision"]
    items = {name: index.dataset.to_table(columns=fields) for name, index in indexes.items()}
    for name, table in items.items():
        others = [other[column] for key, other in items.items() if key != name]
        if others and not any(pc.any(pc.is_in(table[column], ids)).as_py() for ids in others):
            notes.append(
                f"member {name} has no {column} in common with another member, so that its hits "
                "are not joined"
            )
    for (name, one), (other, two) in combinations(items.items(), 2):
        pairs = one.join(two, ["item_id", "modality"], right_suffix="_2", join_type="inner")
        # The second part of a revision hashes the file. The revision of a text has only one part.
        files = (pc.extract_regex(pairs[f], r"\.(?P<f>.*)") for f in ("revision", "revision_2"))
        pairs = pairs.filter(pc.not_equal(*(pc.struct_field(file, "f") for file in files)))
        if len(pairs):
            notes.append(
                f"members {name} and {other} have different files for items of the same id, such "
                f"as {pc.min(pairs['item_id'])}, whose hits are joined all the same"
            )
    return notes
