"""Search options that the Python interface, HTTP and the command line have in common."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

from pipeline.config import SpecError
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Index
from pipeline.scores import SCORES, Score, reject_former_name
from pipeline.search.candidates import (
    BM25,
    CANDIDATES_PER_HIT,
    EXACT,
    MIN_CANDIDATES,
    SINGLE,
    generator_columns,
    generator_steps,
    generators,
)
from pipeline.search.fusion import DEFAULT_FUSION, FUSED, Fusion
from pipeline.search.query import Queries
from pipeline.search.representations import representation_info
from pipeline.search.token_weights import check_token_frequencies

#: Weights of the single-vector and the MaxSim score in the hybrid score.
Weights = tuple[float, float]
EQUAL_WEIGHTS: Weights = (1.0, 1.0)
#: Maximum value of `idf_power`.
MAX_IDF_POWER = 4
WEIGHTS_RULE = "two numbers (single_vector, maxsim), each 0 or from 1e-6 to 1e6, and not both 0"


class _CommonKeywords(TypedDict, total=False):
    """Keyword arguments that have the same name and type as the option."""

    k: int
    score: Score
    weights: Weights
    fusion: Fusion
    group_by: Literal["parent"] | None
    candidates: str
    num_candidates: int | None
    idf_power: float | None


class Selection(TypedDict, total=False):
    """Keyword arguments of `Searcher.num_items`.

    Collections are converted by `SearchOptions`.
    """

    filter: str | None
    ids: Collection[str] | None
    parents: Collection[str] | None


class SearchKeywords(_CommonKeywords, Selection, total=False):
    """Keyword arguments of `Searcher.search` and `Searcher.rank`.

    See `SearchOptions`.
    """


@dataclass(frozen=True)
class SearchOptions:
    """Options for selecting, scoring, reranking and explaining items.

    Attributes:
        representation: Name of the representation to search, or `NAME@K` for a prefix. If None,
            `full` is used if it exists, otherwise the first representation.
        k: Maximum number of hits.
        score: "maxsim", "single_vector", "hybrid" or "fused". See `pipeline.search.score`.
        weights: Weights of the single-vector and the MaxSim score in the hybrid score. Items that
            lack either score have no hybrid score, even if its weight is 0.
        fusion: Settings of the fused score. See `pipeline.search.fusion`.
        group_by: "parent" returns the best item of each of the k best parents.
        filter: Lance SQL expression over the item columns, such as "modality = 'text'".
        ids: Ids of the items to search. Unknown ids are ignored. Items must satisfy `filter`, `ids`
            and `parents`.
        parents: Ids of the parents whose items are searched.
        candidates: "exact" scores all items. Otherwise, the name of a candidate generator of the
            representation, or several joined by "+", which find the items that are scored. The
            generator after ":" selects among the items that the one before it finds. Items without
            a code of a generator are always scored. If fewer than k items are found, all items are
            scored.
        num_candidates: Number of items that each generator finds per query and shard, at least `k`.
            Defaults to 1,000, or 16 k if that is more. A generator before ":" finds 32 times as
            many.
        idf_power: Weights of the query tokens in the MaxSim score are their inverse document
            frequency to this power, see `TokenFrequencies.weights`. None does not weight them.
        rerank: Second stage: "vectors" scores with another representation, "edje" with EDJE's joint
            encoder.
        rerank_representation: Representation used by "vectors", or None for the default.
        rerank_depth: Number of first-stage items to rerank, or 0 without a second stage.
        add_first_stage: Whether "edje" adds the score of the first stage.
        rerank_is_optional: Whether to return the hits of the first stage if reranking fails.
        explain: "matches" adds `matches` and `passages` to hits. "map" also adds a similarity map.

    Raises:
        SpecError: An option is invalid.
    """

    representation: str | None = None
    k: int = 10
    score: Score = "maxsim"
    weights: Weights = EQUAL_WEIGHTS
    fusion: Fusion = DEFAULT_FUSION
    group_by: Literal["parent"] | None = None
    filter: str | None = None
    ids: tuple[str, ...] | None = None
    parents: tuple[str, ...] | None = None
    candidates: str = EXACT
    num_candidates: int | None = None
    idf_power: float | None = None
    rerank: Literal["vectors", "edje"] | None = None
    rerank_representation: str | None = None
    rerank_depth: int = 0
    add_first_stage: bool = False
    rerank_is_optional: bool = False
    explain: Literal["matches", "map"] | None = None

    def __post_init__(self) -> None:
        check_count("k", self.k)
        if self.group_by not in (None, "parent"):
            raise SpecError("group_by", self.group_by, "parent or null")
        reject_former_name(self.score)
        if self.score not in SCORES:
            raise SpecError.unknown_name("score", self.score, SCORES)
        if not are_weights(self.weights):
            raise SpecError("weights", self.weights, WEIGHTS_RULE)
        if self.score != "hybrid" and tuple(self.weights) != EQUAL_WEIGHTS:
            rule = f"{EQUAL_WEIGHTS} for the score {self.score}"
            raise SpecError("weights", self.weights, rule)
        if self.score != FUSED and self.fusion != DEFAULT_FUSION:
            raise SpecError("score", self.score, f"{FUSED} if fusion is set")
        if self.score == FUSED:
            _ = self.fusion.component_weights  # must be set
        if self.num_candidates is not None:
            check_count("num_candidates", self.num_candidates)
            if self.num_candidates < self.k:
                raise SpecError("num_candidates", self.num_candidates, f"at least k = {self.k}")
        if self.score == "single_vector" and self.candidates != EXACT:
            rule = f"{EXACT} for the score single_vector"
            raise SpecError("candidates", self.candidates, rule)
        if self.idf_power is not None:
            check_idf_power(self.idf_power)
            if self.score == "single_vector":
                raise SpecError("idf_power", self.idf_power, "null for the score single_vector")

    @classmethod
    def from_keywords(
        cls,
        representation: str | None = None,
        *,
        explain: bool = False,
        filter: str | None = None,
        ids: Collection[str] | None = None,
        parents: Collection[str] | None = None,
        **others: Unpack[_CommonKeywords],
    ) -> SearchOptions:
        """Creates options from the keyword arguments of the Python interface."""
        return cls(
            representation,
            filter=filter,
            ids=id_tuple("ids", ids),
            parents=id_tuple("parents", parents),
            explain="matches" if explain else None,
            **others,
        )

    def resolve(self, index: Index) -> SearchOptions:
        """Returns the options after filling in the default representation of an index.

        Raises:
            SpecError: The representation does not exist or is only for reranking, the candidate
                generator was not built for it, or its token frequencies were not counted.
        """
        info = representation_info(index, self.representation)
        if self.candidates != EXACT:
            generator_columns(index, info, self.candidates)
        if self.score == FUSED:
            _check_bm25(index, info)
        if self.idf_power is not None:
            check_token_frequencies(index, info, self.idf_power)
            if self.rerank_representation is not None:
                second = representation_info(index, self.rerank_representation)
                check_token_frequencies(index, second, self.idf_power)
        return replace(self, representation=info.name)

    @property
    def column(self) -> str:
        """Name of the representation, which must have been resolved."""
        assert self.representation is not None
        return self.representation

    @property
    def candidates_per_query(self) -> int:
        """Number of candidates per query."""
        if self.num_candidates is not None:
            return self.num_candidates
        return max(MIN_CANDIDATES, CANDIDATES_PER_HIT * self.k)

    def first_stage(self) -> SearchOptions:
        """Returns the options of the first stage, which finds the items to rerank."""
        k = max(self.k, self.rerank_depth)
        return replace(
            self,
            k=k,
            num_candidates=None if self.num_candidates is None else max(self.num_candidates, k),
            rerank=None,
            rerank_representation=None,
            rerank_depth=0,
            add_first_stage=False,
            rerank_is_optional=False,
            explain=None,
        )

    def without_selection(self) -> SearchOptions:
        """Returns the options without `filter`, `ids` and `parents`, for use after selection."""
        return replace(self, filter=None, ids=None, parents=None)

    def check_vectors(self, queries: Queries, pooled_column: str | None) -> None:
        """Raises `SpecError` if the queries or the representation lack vectors for the score.

        Args:
            queries: Queries transformed for the representation.
            pooled_column: Column of the representation's single vectors, or None.
        """
        if self.score != "single_vector" and not all(map(len, queries.tokens)):
            problem = "needs token vectors (the query has none)"
            raise SpecError("score", self.score, "single_vector", problem)
        if self.score == FUSED and self.fusion.component_weights.bm25 and queries.texts is None:
            raise SpecError("score", self.score, "maxsim", "needs the text of the query")
        if self.score == "maxsim" or (
            self.score == FUSED and not self.fusion.component_weights.single_vector
        ):
            return
        if pooled_column is None:
            problem = "needs single vectors (the index has none)"
            raise SpecError("score", self.score, "maxsim", problem)
        if queries.pooled is None:
            problem = "needs a pooled query vector (pass the query as text)"
            raise SpecError("score", self.score, "maxsim", problem)

    def check_candidates(self, queries: Queries) -> None:
        """Raises `SpecError` if the queries lack single vectors or texts that candidates need."""
        names = [name for steps in generator_steps(self.candidates) for name in steps]
        if BM25 in names and queries.texts is None:
            raise SpecError("candidates", self.candidates, EXACT, "needs the text of the query")
        if SINGLE in names and queries.pooled is None:
            problem = "needs a pooled query vector (pass the query as text)"
            raise SpecError("candidates", self.candidates, EXACT, problem)


def _check_bm25(index: Index, info: RepresentationInfo) -> None:
    """Raises `SpecError` if the index has no BM25 scores for the texts of a representation."""
    if BM25 not in generators(index, info):
        problem = f"needs {BM25}, which was not built for the texts of {info.name}"
        note = f"; build it with `maxray add candidates INDEX {BM25}`"
        raise SpecError("score", FUSED, "maxsim", problem, note)


def check_count(field: str, value: int) -> None:
    """Raises `SpecError` unless a value is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(field, value, "an integer >= 1")


def check_idf_power(value: Any) -> None:
    """Raises `SpecError` unless a value is a valid power of inverse document frequencies."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_IDF_POWER:
        raise SpecError("idf_power", value, f"a number > 0 and <= {MAX_IDF_POWER}")


def are_weights(weights: Any) -> bool:
    """Checks whether a value is a valid pair of hybrid weights.

    >>> are_weights((1, 0.5)), are_weights((0, 0)), are_weights((1, float("nan"))), are_weights(1)
    (True, False, False, False)
    """
    return (
        isinstance(weights, tuple | list)
        and len(weights) == 2
        and all(isinstance(w, int | float) and not isinstance(w, bool) for w in weights)
        and all(w == 0 or 1e-6 <= w <= 1e6 for w in weights)
        and any(weights)
    )


def id_tuple(field: str, ids: Collection[str] | None) -> tuple[str, ...] | None:
    """Converts a collection of ids to a tuple.

    Raises:
        SpecError: The ids are not a collection of valid UTF-8 strings.
    """
    if ids is None:
        return None
    values = (ids,) if isinstance(ids, str) else tuple(ids)
    if isinstance(ids, str) or not _are_texts(values):
        invalid = ids if isinstance(ids, str) else next(i for i in values if not _are_texts((i,)))
        raise SpecError(field, invalid, "a list of ids in valid UTF-8")
    return values


def _are_texts(values: tuple[Any, ...]) -> bool:
    """Checks whether all values are valid UTF-8 strings. This takes 1 ms for 100,000 ids."""
    try:
        "".join(values).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return True
