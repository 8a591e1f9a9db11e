"""Search options, which the Python interface, HTTP and the command line have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from pipeline.config import Spec, SpecError, parse, within
from pipeline.defaults import SCORE
from pipeline.search.candidates import (
    AUTO,
    BM25,
    EXACT,
    SINGLE,
    UNION,
    default_candidates,
    default_number,
    generator_columns,
    generators,
)
from pipeline.search.fusion import DEFAULT_FUSION, FUSED, Fusion
from pipeline.search.scores import Score

if TYPE_CHECKING:  # imported lazily to keep --help fast
    from pipeline.index.info import RepresentationInfo
    from pipeline.index.reader import IndexReader
    from pipeline.search.query import Queries

WEIGHTS_RULE = "two numbers (single_vector, maxsim), each 0 or from 1e-6 to 1e6, and not both 0"
#: Default number of hits that are reranked by vectors.
DEFAULT_TOP = 100


def _check_weights(weights: Any) -> Any:
    """Raises `SpecError` unless a value is a valid pair of hybrid weights.

    >>> _check_weights((1, 0.5))
    (1, 0.5)
    """
    if (
        isinstance(weights, tuple | list)
        and len(weights) == 2
        and all(isinstance(w, int | float) and not isinstance(w, bool) for w in weights)
        and all(w == 0 or 1e-6 <= w <= 1e6 for w in weights)
        and any(weights)
    ):
        return weights
    raise SpecError("", weights, WEIGHTS_RULE)


#: Weights of the single-vector and the MaxSim score in the hybrid score.
Weights = Annotated[
    tuple[float, float], BeforeValidator(_check_weights), Field(validate_default=False)
]
EQUAL_WEIGHTS = (1.0, 1.0)


def _id_tuple(ids: Any) -> tuple[str, ...] | None:
    """Converts a collection of ids to a tuple. This takes 1 ms for 100,000 ids."""
    if ids is None:
        return None
    values = (ids,) if isinstance(ids, str) else tuple(ids)
    if isinstance(ids, str) or not _are_texts(values):
        invalid = ids if isinstance(ids, str) else next(i for i in values if not _are_texts((i,)))
        raise SpecError("", invalid, "a list of ids in valid UTF-8")
    return values


def _are_texts(values: tuple[Any, ...]) -> bool:
    try:
        "".join(values).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return True


Ids = Annotated[tuple[str, ...] | None, BeforeValidator(_id_tuple), Field(validate_default=False)]


#: Name of the reranking by the vectors of another representation.
VECTORS = "vectors"


class Rerank(Spec):
    """Stage that rescores the best hits of the stage before."""

    name: str = Field(VECTORS, max_length=256)
    """Name of a reranker of the index, or `vectors` for exact MaxSim scores of another
    representation. Hits that a reranker cannot read keep their rank, and hits below `top` follow
    the reranked ones in their order."""
    representation: str | None = None
    """Representation that `vectors` scores with, or a prefix `NAME@K`. Default: the default
    representation."""
    top: int | None = Field(None, ge=1, le=10_000)
    """Number of hits to rerank. Default: 100 for `vectors`, otherwise that of the reranker."""
    add_first_stage: bool = False
    """Adds the score of the stage before to that of a reranker."""
    optional: bool = False
    """If reranking fails, returns the hits of the stage before, and that they are not reranked,
    instead of an error."""

    @model_validator(mode="after")
    def _check_name(self) -> Rerank:
        is_vectors, has_name = self.name == VECTORS, self.representation is not None
        is_valid = not is_vectors or not self.add_first_stage
        self.require(is_valid, "add_first_stage", f"omitted for {VECTORS}")
        is_valid = is_vectors or not has_name
        self.require(is_valid, "representation", f"omitted unless name is {VECTORS}")
        return self

    @property
    def depth(self) -> int:
        """Number of hits to rerank, or 0 if it is that of a reranker."""
        return self.top or (DEFAULT_TOP if self.name == VECTORS else 0)


def _rerank_stages(value: Any) -> tuple[Rerank, ...] | None:
    """Converts a stage, or a list of stages, to a tuple."""
    if value is None or isinstance(value, Rerank):
        return None if value is None else (value,)
    if not isinstance(value, list | tuple):
        return (parse(Rerank, value),)
    stages = []
    for number, stage in enumerate(value):
        with within(f"[{number}]"):
            stages.append(stage if isinstance(stage, Rerank) else parse(Rerank, stage))
    return tuple(stages) or None


#: One stage, or several that are applied one after another.
RerankStages = Annotated[
    tuple[Rerank, ...] | None,
    BeforeValidator(_rerank_stages, json_schema_input_type=Rerank | list[Rerank] | None),
]


class SearchOptions(Spec):
    """Options for selecting, scoring, reranking and explaining items."""

    representation: str | None = None
    """Name of the representation to search, or `NAME@K` for the first K vectors of each item of a
    representation with nested vectors. Default: `full` if the index has it, else the first."""
    k: int = Field(10, ge=1)
    """Maximum number of hits per query."""
    score: Score = SCORE
    """Score of the first stage: `maxsim` is the MaxSim score of the token vectors, `single_vector`
    the similarity of the single vectors, and `hybrid` their weighted sum. `fused` combines the
    rankings by MaxSim, BM25 and single vectors, see `fusion`."""
    weights: Weights = EQUAL_WEIGHTS
    """Weights of the `single_vector` and the `maxsim` score in the `hybrid` score. Items that lack
    either score have no hybrid score, even if its weight is 0."""
    negative_weight: float = Field(0.5, gt=0, le=1)
    """Weight of the negative query, if there is one: its score, multiplied by this, is subtracted
    from that of the query."""
    fusion: Fusion = Field(DEFAULT_FUSION, validate_default=False)
    """Settings of the `fused` score. A server has defaults of its own for each index."""
    group_by: Literal["parent"] | None = None
    """`parent` returns only the best item of each parent, such as the best page of a document."""
    filter: str | None = None
    """Lance SQL expression over the columns of the items, such as `modality = 'text'`. Only the
    items that satisfy it are searched."""
    ids: Ids = None
    """Ids of the items to search. Unknown ids are ignored. If null, all items are searched."""
    parents: Ids = None
    """Ids of the parents whose items are searched. If null, all items are searched."""
    candidates: str = AUTO
    """Candidate generator of the representation, or several joined by `+`, which find the items
    that are scored; `exact` scores all items. A search with candidates is faster and may miss hits.
    Items without a code of a generator are always scored, and all items if fewer than `k` are
    found. `auto` is `ivf` for the score `maxsim` on a CPU if it was built and the index has more
    than about 2 million vectors, otherwise `exact`. A server may have another default."""
    num_candidates: int | None = Field(None, ge=1)
    """Number of candidates per query, shard and generator, at least `k`. Default: the number that
    was measured for the wanted recall when the generator was built, unless the settings of a server
    name another. For former columns, it is the largest of 1,000, 16 `k` and a fortieth of the
    items."""
    rerank: RerankStages = None
    """Reranking of the hits: a stage, or several in a row. If null, hits are not reranked."""
    explain: Literal["matches", "map"] | None = None
    """Explanations to return: `matches` adds the best-matching vector of each query token and the
    best-matching passages of each hit, `map` additionally a similarity map of its words."""

    @model_validator(mode="after")
    def _check_combinations(self) -> SearchOptions:
        is_default = self.score == "hybrid" or self.weights == EQUAL_WEIGHTS
        self.require(is_default, "weights", f"{list(EQUAL_WEIGHTS)} for the score {self.score}")
        is_default = self.score == FUSED or self.fusion == DEFAULT_FUSION
        self.require(is_default, "score", f"{FUSED} if fusion is set")
        is_enough = self.num_candidates is None or self.num_candidates >= self.k
        self.require(is_enough, "num_candidates", f"at least k = {self.k}")
        is_exact = self.score != "single_vector" or self.candidates in (AUTO, EXACT)
        self.require(is_exact, "candidates", f"{EXACT} for the score single_vector")
        return self

    def resolve(self, index: IndexReader, device: str = "cpu", **changes: Any) -> SearchOptions:
        """Returns the options with changes and with the defaults for an index and a device."""
        fields = {name: getattr(self, name) for name in SearchOptions.model_fields} | changes
        options = SearchOptions.model_construct(**fields)
        info = representation_info(index, options.representation)
        candidates = options.candidates
        if candidates == AUTO:
            is_maxsim = options.score == "maxsim"
            candidates = default_candidates(index, info, device) if is_maxsim else EXACT
        elif candidates != EXACT:
            generator_columns(index, info, candidates)
        if options.score == FUSED:
            _ = options.fusion.component_weights  # must be set
            _check_bm25(index, info)
        return options.model_copy(update={"representation": info.name, "candidates": candidates})

    @property
    def column(self) -> str:
        """Name of the representation, which must have been resolved."""
        assert self.representation is not None
        return self.representation

    def candidates_per_query(self, num_items: int) -> int:
        """Returns the number of candidates per query in an index with this number of items."""
        if self.num_candidates is not None:
            return self.num_candidates
        return default_number(self.k, num_items)

    def first_stage(self, top: int = 0) -> SearchOptions:
        """Returns the options of the first stage, which finds the items to rerank.

        `top` is the number of items that other rerankers than those of `rerank` read.
        """
        k = max([self.k, top, *(stage.depth for stage in self.rerank or ())])
        number = None if self.num_candidates is None else max(self.num_candidates, k)
        changes = {"k": k, "num_candidates": number, "rerank": None, "explain": None}
        return self.model_copy(update=changes)

    def without_selection(self) -> SearchOptions:
        """Returns the options without `filter`, `ids` and `parents`, for use after selection."""
        return self.model_copy(update={"filter": None, "ids": None, "parents": None})

    def check_vectors(self, queries: Queries, pooled_column: str | None) -> None:
        """Raises `SpecError` if the queries or the representation lack vectors for the score."""
        weights = self.fusion.component_weights if self.score == FUSED else None
        needs_single = self.score != "maxsim" if weights is None else bool(weights.single_vector)
        rule, problem = "maxsim", None
        if self.score != "single_vector" and not all(map(len, queries.tokens)):
            rule, problem = "single_vector", "needs token vectors (the query has none)"
        elif weights is not None and weights.bm25 and queries.texts is None:
            problem = "needs the text of the query"
        elif needs_single and pooled_column is None:
            problem = "needs single vectors (the index has none)"
        elif needs_single and queries.pooled is None:
            problem = "needs a pooled query vector (pass the query as text)"
        if problem:
            raise SpecError("score", self.score, rule, problem)
        if queries.negatives is not None:
            if self.score == FUSED:
                rule = "maxsim, single_vector or hybrid with a negative query"
                raise SpecError("score", self.score, rule)
            self.check_vectors(queries.negatives, pooled_column)

    def check_candidates(self, queries: Queries) -> None:
        """Raises `SpecError` if the queries lack single vectors or texts that candidates need."""
        names = self.candidates.split(UNION)
        problem = None
        if BM25 in names and queries.texts is None:
            problem = "needs the text of the query"
        elif SINGLE in names and queries.pooled is None:
            problem = "needs a pooled query vector (pass the query as text)"
        if problem:
            raise SpecError("candidates", self.candidates, EXACT, problem)


def representation_info(index: IndexReader, name: str | None = None) -> RepresentationInfo:
    """Returns the metadata of a searchable representation.

    Args:
        name: Name of the representation, or `NAME@K` for a prefix. Defaults to `full` if it exists,
            otherwise the first.
    """
    infos = index.representations()
    if name is None:
        if not infos:
            problem = f"has no representations in version {index.version}"
            rule = "an index with at least one representation"
            raise SpecError("index", index.uri, rule, problem)
        return infos["full"] if "full" in infos else next(iter(infos.values()))
    if name in index.rerank_columns:
        raise SpecError.unknown_name("representation", name, infos, "is only for reranking")
    return index.representation(name)


def _check_bm25(index: IndexReader, info: RepresentationInfo) -> None:
    if BM25 not in generators(index, info):
        problem = f"needs {BM25}, which was not built for the texts of {info.name}"
        note = f"; build it with `maxray add candidates INDEX {BM25}`"
        raise SpecError("score", FUSED, "maxsim", problem, note)


def check_count(field: str, value: int) -> None:
    """Raises `SpecError` unless a value is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(field, value, "an integer >= 1")
