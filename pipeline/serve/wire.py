"""What travels over HTTP: the requests and answers of the API, shared by the server and its client.

Requests refuse fields they do not know. The limits here hold for every server; what a server allows
of k, queries and bytes beyond them stands in its settings (`pipeline.serve.settings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    model_validator,
)

#: An id of an index, an item, an evaluation: never empty, never of unbounded length.
Id = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=100_000)]
#: How relevant a document is.
Grade = Annotated[int, Field(ge=-1000, le=1000)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Request(BaseModel):
    """Base of what comes in."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Answer(BaseModel):
    """Base of what goes out; a client ignores what a newer server adds."""

    model_config = ConfigDict(extra="ignore", frozen=True)


# -- errors ----------------------------------------------------------------------------------------

Code = Literal[
    "invalid_argument",  # 422: a field is invalid; `field` names it
    "bad_request",  # 400: no JSON, or not of this form
    "unauthenticated",  # 401: no key, or none that is known
    "forbidden",  # 403: the key is not for this
    "not_found",  # 404
    "method_not_allowed",  # 405
    "conflict",  # 409
    "gone",  # 410: the source of a preview moved or changed
    "too_large",  # 413
    "rate_limited",  # 429
    "internal",  # 500
    "unavailable",  # 503: overloaded, restarting, or a stage is down; `Retry-After` says when
    "timeout",  # 504: a stage took longer than it may
]


class Problem(Answer):
    """What went wrong."""

    code: Code
    message: str
    field: str | None = None
    request_id: str | None = None


class ErrorAnswer(Answer):
    """Every answer that is no success."""

    error: Problem


# -- search ----------------------------------------------------------------------------------------


class Vectors(Request):
    """A query as token vectors."""

    vectors: Annotated[list[list[Finite]], Field(min_length=1, max_length=4096)]


class Image(Request):
    """A query as an image, where the index's encoder reads images."""

    image: Annotated[str, StringConstraints(min_length=1)] = Field(
        description="the bytes of a PNG, JPEG or WebP file in base64"
    )


class Composed(Image):
    """A query as a text and an image together, where the index's encoder reads these."""

    text: Text


def kind_of(query: Any) -> str:
    """By which of its forms a query is read, so that what is wrong is said of that form."""
    if isinstance(query, Mapping):
        return "composed" if "text" in query else "image" if "image" in query else "vectors"
    forms: dict[type, str] = {Vectors: "vectors", Image: "image", Composed: "composed"}
    return forms.get(type(query), "text")


Query = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Vectors, Tag("vectors")]
    | Annotated[Image, Tag("image")]
    | Annotated[Composed, Tag("composed")],
    Discriminator(kind_of),
]
#: What stands in the places of errors for the form of a query.
QUERY_FORMS = ("text", "vectors", "image", "composed")


def text_of(query: Query) -> str | None:
    """The text of a query, if it has one."""
    return query.text if isinstance(query, Composed) else query if isinstance(query, str) else None


#: Default rerank depths of the second stages.
DEFAULT_RERANK_DEPTHS = {"vectors": 100, "edje": 10}
#: What scores again: more vectors, exactly; or EDJE's joint encoder, where the index has one.
By = Literal["vectors", "edje"]


def _means_something(value: Any, info: ValidationInfo) -> Any:
    """An option of one of the two ways to rerank alone."""
    by = "edje" if info.field_name == "add_first_stage" else "vectors"
    if value and info.data.get("by", by) != by:
        raise ValueError(f"it means nothing but to `by: {by}`")
    return value


Representing = Annotated[Name | None, AfterValidator(_means_something)]


class Rerank(Request):
    """A second stage: the first ones of the ranking are scored again.

    Attributes:
        by: `vectors`, exactly and by more of them; or `edje`, the joint encoder, which reads a text
            or a picture with each item. Items that it cannot read keep their rank, and those
            beyond `rerank_depth` stay behind the others.
        representation: by whose vectors it scores; default: `full`.
        rerank_depth: Number of first-stage hits that are scored again; default: 100, or 10 with
            `edje`.
        add_first_stage: whether the first stage's score is added to EDJE's.
        optional: whether hits of the first stage alone are an answer where reranking fails; the
            answer says `reranked: false` then.
    """

    by: By = "vectors"
    representation: Representing = None
    rerank_depth: Annotated[int, Field(ge=1, le=10_000)] | None = None
    add_first_stage: Annotated[bool, AfterValidator(_means_something)] = False
    optional: bool = False

    @property
    def num_candidates(self) -> int:
        """Number of first-stage hits that are scored again, with the default resolved."""
        return self.rerank_depth or DEFAULT_RERANK_DEPTHS[self.by]


class SearchOptions(Request):
    """How to search: the same for one query and for many."""

    index: Name | None = Field(None, description="default: the only one there is")
    representation: Name | None = Field(None, description="default: full, else the first")
    k: Annotated[int, Field(ge=1, le=10_000)] = 10
    score: Literal["late", "single", "hybrid"] = "late"
    weights: tuple[Finite, Finite] = Field(
        (1.0, 1.0), description="of the single and the late score in the hybrid one"
    )
    group_by: Literal["parent"] | None = None
    filter: Annotated[str, StringConstraints(max_length=10_000)] | None = Field(
        None, description="a Lance SQL expression over the items' columns"
    )
    ids: Annotated[list[Id], Field(max_length=100_000)] | None = Field(
        None, description="the items that can be hits"
    )
    parents: Annotated[list[Id], Field(max_length=100_000)] | None = Field(
        None, description="the parents whose items can be hits"
    )
    rerank: Rerank | None = None
    explain: Literal["matches", "map"] | None = Field(
        None,
        description="matches: each query token's best vector, and the passages; map: each word too",
    )


class SearchRequest(SearchOptions):
    """One query."""

    query: Query


class BatchRequest(SearchOptions):
    """Several queries, searched alike."""

    queries: Annotated[list[Query], Field(min_length=1, max_length=1024)]


class Place(Answer):
    """Where a match is to be seen (x0 y0 x1 y1 in [0, 1]) or heard (seconds)."""

    span: tuple[int, int]
    box: tuple[float, float, float, float] | None
    times: tuple[float, float] | None
    confidence: float | None = None  # of the recogniser in the words; None: not known


class Match(Answer):
    """The vector of a hit that a query token matched best.

    Attributes:
        similarity: the query token's term of the late score.
        contribution: `similarity` minus the mean similarity of the query token with all vectors of
            the hit; small for stop words.
        document_token: number of the vector among those of the hit.
        spans: characters of the words it stands for, in the hit's text.
        places: locations of those words.
    """

    query_token: str
    similarity: float
    contribution: float
    document_token: int
    spans: list[tuple[int, int]]
    places: list[Place]


class Mark(Answer):
    """The word of a passage that a query token matches best, and its contribution there."""

    query_token: str
    span: tuple[int, int]
    contribution: float


class Passage(Place):
    """A contiguous part of a hit that matches the query.

    Attributes:
        contribution: sum of the query tokens' contributions inside the passage, as far as they
            exceed those inside the passages before it.
        marks: at most one per query token; empty for an image region.
    """

    contribution: float
    marks: list[Mark]


class Word(Answer):
    """A word of a hit, and how it matches each query token; None where no vector stands for it."""

    text: str
    span: tuple[int, int]
    box: tuple[float, float, float, float] | None
    times: tuple[float, float] | None
    similarities: list[float | None]
    credit: float
    contribution: float


class Map(Answer):
    """The words of a hit under a query."""

    query_tokens: list[str]
    words: list[Word]


class ScoreParts(Answer):
    """The components of the score of a hit."""

    late: float | None
    late_mean: float | None
    single: float | None


class FirstStage(Answer):
    """Where a reranked hit stood before."""

    rank: int
    score: float


class Joint(Answer):
    """What EDJE's joint encoder said of a hit.

    Attributes:
        logit: that it matches the query; null: it was not read, or is beyond `rerank_depth`.
        num_truncated_tokens: Number of tokens truncated from the text: of the query, or of the hit
            if the query is an image.
        problem: why a hit that should have been read was not; it keeps its rank.
    """

    logit: float | None
    num_truncated_tokens: int
    problem: str | None


class Hit(Answer):
    """One item found."""

    rank: int
    score: float
    item_id: str
    parent_id: str
    title: str | None
    text: str | None
    span: dict[str, Any] | None
    parts: ScoreParts | None = None
    first_stage: FirstStage | None = None
    edje: Joint | None = None
    matches: list[Match] | None = None
    passages: list[Passage] | None = None
    map: Map | None = None


class SearchAnswer(Answer):
    """The hits of a query, best first.

    Attributes:
        version: of the index, which all of the answer is about.
        reranked: whether the scores are those of the second stage.
        warnings: what was asked and not done, a sentence each.
        milliseconds: by stage: encode, search, rerank or edje, describe, total.
    """

    request_id: str
    index: str
    version: int
    representation: str
    reranked: bool
    hits: list[Hit]
    warnings: list[str]
    milliseconds: dict[str, float]


class BatchAnswer(Answer):
    """The hits of each query, in the order of the queries."""

    request_id: str
    index: str
    version: int
    representation: str
    reranked: bool
    results: list[list[Hit]]
    warnings: list[str]
    milliseconds: dict[str, float]


# -- encoding, reranking, items --------------------------------------------------------------------


class EncodeRequest(Request):
    """Queries to be encoded as an index wants them."""

    index: Name | None = None
    representation: Name | None = None
    queries: Annotated[list[Query], Field(min_length=1, max_length=256)]


class EncodedQuery(Answer):
    """A query as vectors of unit length, its tokens' texts, and its single vector if it has one."""

    vectors: list[list[float]]
    token_texts: list[str]
    pooled: list[float] | None


class EncodeAnswer(Answer):
    """The queries encoded, in their order."""

    request_id: str
    index: str
    representation: str
    fingerprint: str
    queries: list[EncodedQuery]


class RerankRequest(Request):
    """Items of an index, to be scored for a query: exactly by vectors, or by EDJE."""

    index: Name | None = None
    by: By = "vectors"
    representation: Representing = None
    query: Query
    item_ids: Annotated[list[Id], Field(min_length=1, max_length=10_000)]
    k: Annotated[int, Field(ge=1, le=10_000)] | None = Field(None, description="default: all")


class Scored(Answer):
    """An item and its score."""

    item_id: str
    score: float


class RerankAnswer(Answer):
    """The items by score.

    Attributes:
        representation: that of the vectors; null by EDJE.
        missing: items that are not in the index, or without what is scored: vectors, or by EDJE
            tokens (for a picture a text).
        warnings: what was asked and not done, a sentence each.
    """

    request_id: str
    index: str
    version: int
    representation: str | None
    results: list[Scored]
    missing: list[str]
    warnings: list[str] = []


class Item(Answer):
    """What is stored of an item, but for its vectors."""

    index: str
    version: int
    item_id: str
    parent_id: str
    source: str
    modality: str
    title: str | None
    text: str | None
    span: dict[str, Any] | None
    metadata: dict[str, Any]


class Representation(Answer):
    """One way in which an index stores its items."""

    name: str
    role: Literal["search", "rerank"]
    encoder: str | None
    compressor: str | None
    codec: str | None
    dim: int | None
    scores: list[str]
    queries: list[Literal["text", "image", "composed", "vectors"]]


class IndexInfo(Answer):
    """An index that is served."""

    name: str
    version: int
    num_items: int
    default_representation: str | None
    representations: list[Representation]
    edje: bool = Field(False, description="whether hits can be reranked by EDJE")
    columns: dict[str, str] = Field(description="what filters can name, and its type")


class IndexList(Answer):
    """The indexes that a key may see."""

    indexes: list[IndexInfo]


# -- evaluations -----------------------------------------------------------------------------------


class EvaluationRequest(Request):
    """An evaluation: judged queries of one's own, or a benchmark that the server knows.

    Attributes:
        queries: texts by query id.
        qrels: by query id, grades by the id of an item or of a parent, as `judged` says.
        benchmark: the name of a benchmark of the server, in place of the two.
    """

    index: Name | None = None
    benchmark: Name | None = None
    queries: Annotated[dict[Id, Text], Field(max_length=100_000)] | None = None
    qrels: Annotated[dict[Id, dict[Id, Grade]], Field(max_length=100_000)] | None = None
    representations: Annotated[list[Name], Field(max_length=256)] = []
    scores: list[Literal["late", "single", "hybrid"]] = []
    measures: Annotated[list[Name], Field(max_length=64)] = []
    k: Annotated[int, Field(ge=1, le=10_000)] = 100
    judged: Literal["auto", "parent", "item"] = "auto"
    diagnostics: bool = False
    bm25: bool = True

    @model_validator(mode="after")
    def _one_of_two(self) -> EvaluationRequest:
        own = self.queries is not None and self.qrels is not None
        if own == (self.benchmark is not None) or (self.queries is None) != (self.qrels is None):
            raise ValueError("needs either benchmark, or both queries and qrels")
        return self


State = Literal["queued", "running", "done", "failed", "cancelled"]


class Measured(Answer):
    """A row of the results: a representation under a score."""

    representation: str
    score: str
    measures: dict[str, float]
    bytes_per_item: float | None


class Evaluation(Answer):
    """An evaluation, and how far it is."""

    id: str
    state: State
    index: str
    created: str
    finished: str | None
    progress: list[str]
    error: str | None
    results: list[Measured]
    files: list[str]


class EvaluationList(Answer):
    """The evaluations that a key may see, newest first."""

    evaluations: list[Evaluation]
