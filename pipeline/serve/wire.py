"""Schemas of the HTTP API that the server and its client share.

Requests that contain unknown fields are rejected. The limits in this module apply to all servers. A
server can lower them in its settings (`pipeline.serve.settings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pipeline.config import Spec, SpecError
from pipeline.search.federation import Join
from pipeline.search.fusion import Fusion
from pipeline.search.options import VECTORS, SearchOptions
from pipeline.search.results import Hit, Response
from pipeline.search.scores import Score

#: Id of an item, a parent or a query.
Id = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
#: Name of an index, a representation, a benchmark or a measure.
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=100_000)]
#: Relevance grade of a document.
Grade = Annotated[int, Field(ge=-1000, le=1000)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Request(Spec):
    """Base class of the bodies of requests. Requests with unknown fields are rejected."""


# -- errors ----------------------------------------------------------------------------------------

ErrorCode = Literal[
    "invalid_argument",  # 422: a field is invalid; `field` names it
    "bad_request",  # 400: the request is malformed
    "unauthenticated",  # 401: the access key is missing or invalid
    "forbidden",  # 403: the access key does not allow the request
    "not_found",  # 404
    "method_not_allowed",  # 405
    "conflict",  # 409
    "gone",  # 410: the source file of a preview was removed or modified
    "too_large",  # 413
    "unsupported_media_type",  # 415: the encoding of the body is not supported
    "range_not_satisfiable",  # 416: the requested range of bytes is not in the file
    "rate_limited",  # 429
    "internal",  # 500
    "unavailable",  # 503: overloaded, restarting or a stage is down; see `Retry-After`
    "timeout",  # 504: a stage exceeded its time limit
]


class Problem(Response):
    """Description of an error."""

    code: ErrorCode
    """Error code, independent of the message."""
    message: str
    """Error message."""
    field: str | None = None
    """Path of the invalid field of the request, such as `rerank.top`."""
    request_id: str | None = None
    """Id of the request in the logs of the server."""


class ErrorResponse(Response):
    """Error response."""

    error: Problem
    """The error."""


# -- search ----------------------------------------------------------------------------------------


class Vectors(Request):
    """Query given as token vectors."""

    vectors: Annotated[list[list[Finite]], Field(min_length=1, max_length=4096)]
    """Token vectors, all of the dimension of the representation."""


#: Base64-encoded file.
File = Annotated[str, StringConstraints(min_length=1)]


class Media(Request):
    """Query of one or several parts. The encoder of the representation must support them."""

    text: Text | None = None
    """Text of the query."""
    image: File | None = None
    """Base64-encoded PNG, JPEG or WebP file."""
    audio: File | None = None
    """Base64-encoded audio file. Encoders of texts read the recognised speech."""
    video: File | None = None
    """Base64-encoded video file. Encoders of texts read the recognised speech."""

    @model_validator(mode="after")
    def _check_parts(self) -> Media:
        has_part = any((self.text, self.image, self.audio, self.video))
        self.require(has_part, "text", "a text unless there is an image, audio or a video")
        return self


class StoredItem(Request):
    """Query given as an item of the index, whose stored vectors are the token vectors."""

    item: Id
    """Id of the item. Its vectors in the searched representation are used."""
    box: tuple[Fraction, Fraction, Fraction, Fraction] | None = None
    """Part of the page, image or frame as (x0, y0, x1, y1) in [0, 1]. Only the vectors of tokens
    whose centre is in the box are used."""
    times: tuple[Seconds, Seconds] | None = None
    """Start and end in the parent, in seconds. Only the vectors of tokens that overlap with the
    interval are used."""

    @model_validator(mode="after")
    def _check_order(self) -> StoredItem:
        box, times = self.box, self.times
        is_ordered = box is None or (box[0] < box[2] and box[1] < box[3])
        self.require(is_ordered, "box", "x0, y0, x1, y1 with x0 < x1 and y0 < y1")
        self.require(times is None or times[0] < times[1], "times", "a start before an end")
        return self


def query_kind(query: Any) -> str:
    """Returns the kind of a query, which determines the schema for its validation."""
    if isinstance(query, Mapping):
        if Media.model_fields.keys() & query.keys():
            return "media"
        return "item" if "item" in query else "vectors"
    classes: dict[type, str] = {Vectors: "vectors", Media: "media", StoredItem: "item"}
    return classes.get(type(query), "text")


Query = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Vectors, Tag("vectors")]
    | Annotated[Media, Tag("media")]
    | Annotated[StoredItem, Tag("item")],
    Discriminator(query_kind),
]
#: Kinds of queries, which pydantic inserts into the paths of validation errors.
QUERY_KINDS = ("text", "vectors", "media", "item")


def query_text(query: Query) -> str | None:
    """Returns the text that a query contains, or None if it has no text."""
    return query.text if isinstance(query, Media) else query if isinstance(query, str) else None


#: Maximum values of numbers, and maximum lengths of texts and lists, in a search.
MAXIMA = {"k": 10_000, "num_candidates": 1_000_000}
MAX_LENGTHS = {
    "representation": 256,
    "candidates": 256,
    "filter": 10_000,
    "ids": 100_000,
    "parents": 100_000,
}


class MemberOptions(Request):
    """Options of a member of a federation that replace those of its settings, unless null."""

    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """Weight of the member in the scores of the federation."""
    representation: Name | None = None
    """Name of the representation to search."""
    score: Score | None = None
    """Score of the items, as `score` of a search."""
    candidates: Name | None = None
    """Candidate generator, as `candidates` of a search."""
    num_candidates: Annotated[int, Field(ge=1, le=MAXIMA["num_candidates"])] | None = None
    """Number of candidates per query and shard."""


class SearchFields(SearchOptions):
    """Options that single searches and batch searches have in common."""

    index: Name | None = None
    """Name of the index or federation. Optional if the access key can access only one index."""
    negative: Query | None = None
    """Query that the hits should not match. Its score, multiplied by `negative_weight`, is
    subtracted from that of the query. Null for a federation, for reranking and for `fused`."""
    members: Annotated[dict[Name, MemberOptions], Field(max_length=256)] | None = None
    """Options of members of a federation by name. Null for an index."""
    join: Join | None = None
    """Hits of a federation that are joined: those of the same `item` or `parent`, or of ranges that
    `overlap`. Default: that of its settings. Null for an index."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        """Lets null select the default of the server, as in the other fields."""
        if not isinstance(data, Mapping):
            return data
        names = ("candidates", "fusion")
        return {name: v for name, v in data.items() if v is not None or name not in names}

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Bounds the work that a request can cause before anything is computed."""
        for name, maximum in MAXIMA.items():
            if (getattr(self, name) or 0) > maximum:
                raise SpecError(name, getattr(self, name), f"at most {maximum:,}")
        for name, maximum in MAX_LENGTHS.items():
            if (length := len(getattr(self, name) or ())) > maximum:
                rule = f"at most {maximum:,} characters or values long"
                raise SpecError(name, length, rule)
        return self


class SearchRequest(SearchFields):
    """Search with one query."""

    query: Query
    """The query: a text; an image, audio, a video or several of these; token vectors; or an item of
    the index."""


class BatchSearchRequest(SearchFields):
    """Search for several queries that share the same options."""

    queries: Annotated[list[Query], Field(min_length=1, max_length=1024)]
    """The queries. Their kinds can differ."""


class MemberResult(Response):
    """Search of a member of a federation."""

    name: str
    """Name of the member."""
    index: str
    """Name of its index."""
    version: int
    """Version of the index that was searched."""
    representation: str | None = None
    """Name of the representation that was searched, or null if the member failed before."""
    candidates: str | None = None
    """Candidate generator that was used, or null if the member failed before."""
    error: str | None = None
    """Reason why the member was left out, or null."""


class _SearchResponse(Response):
    """Fields of the responses to single and batch searches, which `routes._search` fills."""

    request_id: str
    """Id of the request in the logs of the server."""
    index: str
    """Name of the index or federation."""
    version: int | None
    """Version of the index that was searched, or null for a federation, see `members`."""
    representation: str | None
    """Name of the representation that was searched, or null for a federation, see `members`."""
    candidates: str = "exact"
    """Candidate generator that was used, or `exact` if all items were scored."""
    reranked: bool
    """Whether the hits were reranked."""
    degraded: bool = False
    """Whether members of a federation were left out because they failed. `warnings` has reasons."""
    members: list[MemberResult] | None = None
    """Searches of the members of a federation, or null for an index."""
    warnings: list[str]
    """Warnings, for example that reranking failed or a text was truncated."""
    durations_ms: dict[str, float]
    """Duration of each stage (`encode`, `search`, `rerank` or the name of a reranker, `describe`,
    or `FEDERATION.MEMBER` for each member) and `total`, in milliseconds."""


class SearchResponse(_SearchResponse):
    """Hits of a query."""

    hits: list[Hit]
    """Hits, best first."""


class BatchSearchResponse(_SearchResponse):
    """Hits of several queries."""

    results: list[list[Hit]]
    """Hits of each query, best first, in the order of the queries."""


# -- encoding, reranking, items --------------------------------------------------------------------


class EncodeRequest(Request):
    """Queries to encode."""

    index: Name | None = None
    """Name of the index. Optional if the access key can access only one index."""
    representation: Name | None = None
    """Name of the representation whose encoder is used. Default: `full` if the index has it, else
    the first."""
    queries: Annotated[list[Query], Field(min_length=1, max_length=256)]
    """The queries. Their kinds can differ."""


class EncodedQuery(Response):
    """Encoded query."""

    vectors: list[list[float]]
    """Token vectors of unit length, one per query token."""
    token_texts: list[str]
    """Texts of the query tokens."""
    single_vector: list[float] | None
    """Single vector of the query, or null if the encoder has none."""


class EncodeResponse(Response):
    """Encoded queries."""

    request_id: str
    """Id of the request in the logs of the server."""
    index: str
    """Name of the index."""
    representation: str
    """Name of the representation."""
    fingerprint: str
    """Fingerprint of the encoder. Vectors of encoders with different fingerprints are not
    comparable."""
    queries: list[EncodedQuery]
    """Encoded queries, in the order of the request."""


class RerankRequest(Request):
    """Items to score for a query."""

    index: Name | None = None
    """Name of the index. Optional if the access key can access only one index."""
    name: str = Field(VECTORS, max_length=256)
    """Name of a reranker of the index, or `vectors` for exact MaxSim scores."""
    representation: str | None = None
    """Representation that `vectors` scores with, or a prefix `NAME@K`. Default: the default
    representation."""
    query: Query
    """The query: a text; an image, audio, a video or several of these; token vectors; or an item of
    the index."""
    item_ids: Annotated[list[Id], Field(min_length=1, max_length=10_000)]
    """Ids of the items to score."""
    k: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Maximum number of items to return. Null means all."""

    @model_validator(mode="after")
    def _check_name(self) -> RerankRequest:
        is_valid = self.name == VECTORS or self.representation is None
        self.require(is_valid, "representation", f"omitted unless name is {VECTORS}")
        return self


class ScoredItem(Response):
    """Item with its score."""

    item_id: str
    """Id of the item."""
    score: float
    """MaxSim score, or score of the reranker."""


class RerankResponse(Response):
    """Scored items."""

    request_id: str
    """Id of the request in the logs of the server."""
    index: str
    """Name of the index."""
    version: int
    """Version of the index."""
    representation: str | None
    """Name of the representation, or null for a reranker."""
    results: list[ScoredItem]
    """Items, best first."""
    missing: list[str]
    """Items that could not be scored: items that are not in the index, or without vectors or the
    content that the reranker reads."""
    warnings: list[str] = Field(default_factory=list)
    """Warnings, for example that a reranker truncated a text."""


class Item(Response):
    """Stored fields of an item, without its vectors."""

    index: str
    """Name of the index."""
    version: int
    """Version of the index."""
    item_id: str
    """Id of the item."""
    parent_id: str
    """Id of the parent, such as the document of a page."""
    source: str
    """Name of the source that the item was read from."""
    modality: str
    """Modality of the item, such as `text` or `image`."""
    title: str | None
    """Title of the item."""
    text: str | None
    """Text of the item."""
    span: dict[str, Any] | None
    """Location of the item in its parent, such as a page number or a time range."""
    metadata: dict[str, Any]
    """Metadata of the item."""


class Representation(Response):
    """Representation of the items of an index as vectors."""

    name: str
    """Name of the representation."""
    role: Literal["search", "rerank"]
    """`search` representations can be searched. `rerank` representations hold the tokens of an EDJE
    model."""
    encoder: str | None
    """Name of the encoder."""
    field: str | None = None
    """Field of the items that is represented: content or caption. Null for the tokens of an EDJE
    model."""
    compressor: str | None
    """Name of the compressor, or null for the tokens of an EDJE model."""
    num_vectors: int | None = None
    """Maximum number of vectors per item, or null if it depends on the item."""
    codec: str | None
    """Name of the codec, or null for the tokens of an EDJE model."""
    dim: int | None
    """Dimension of the vectors."""
    scores: list[str]
    """Scores that the representation supports."""
    queries: list[Literal["text", "image", "audio", "video", "composed", "vectors", "item"]]
    """Kinds of queries that the representation supports."""
    candidates: list[str] = Field(default_factory=list)
    """Values of `candidates` that the representation supports: `exact` and the names of its
    candidate generators."""
    default_candidates: str | None = None
    """Value of `candidates` that is used by default."""


class IndexInfo(Response):
    """Served index."""

    name: str
    """Name of the index."""
    version: int
    """Version that is served."""
    num_items: int
    """Number of items."""
    default_representation: str | None
    """Name of the default representation. Null before the first representation."""
    representations: list[Representation]
    """Representations of the items."""
    rerankers: list[str] = Field(default_factory=list)
    """Names of the rerankers of the index."""
    columns: dict[str, str]
    """Columns that a filter can use, with their Arrow types."""


class FacetValue(Response):
    """Value of a column with the number of items that have it."""

    value: str
    """The value."""
    count: int
    """Number of items."""


class Facet(Response):
    """Values of a column that a filter can use."""

    column: str
    """Name of the column."""
    values: list[FacetValue]
    """The most frequent values, in descending order of their counts."""
    num_values: int
    """Number of different values."""


class RepresentationSize(Response):
    """Size of a representation, estimated from a sample of the items."""

    name: str
    """Name of the representation."""
    vectors_per_item: float
    """Mean number of vectors per item."""
    bytes_per_item: float
    """Mean size of the vectors of an item, in bytes."""


class ExampleQuery(Response):
    """Example query."""

    query: str
    """Text of the query."""
    representation: str
    """Name of the representation that answers it."""


class SampleItem(Response):
    """Item that shows what an index contains."""

    item_id: str
    """Id of the item."""
    modality: str
    """Modality of the item, such as `text` or `image`."""
    title: str
    """Title or caption of the item, else the beginning of its text or its id."""


class IndexFacets(Response):
    """Facets and samples of an index, sizes of its representations, and example queries."""

    index: str
    """Name of the index."""
    version: int
    """Version of the index."""
    num_items: int
    """Number of items."""
    facets: list[Facet]
    """Facets."""
    sizes: list[RepresentationSize]
    """Sizes of the representations."""
    examples: list[ExampleQuery]
    """Example queries: those in the settings of the server, else short texts of some items."""
    samples: list[SampleItem]
    """Items of as many modalities and sources as possible."""


class MemberInfo(Response):
    """Member of a federation."""

    name: str
    """Name of the member."""
    index: str
    """Name of its index."""
    weight: float
    """Weight in the scores of the federation."""
    representation: str | None
    """Name of the representation that is searched, or null for the default one."""
    score: str
    """Score of the items."""
    filter: str | None
    """Filter of the items, or null if all are searched."""


class FederationInfo(Response):
    """Several indexes that are searched as one."""

    name: str
    """Name of the federation."""
    join: str
    """Hits that are joined: `item`, `parent` or `overlap`."""
    members: list[MemberInfo]
    """Members."""
    rerankers: list[str] = Field(default_factory=list)
    """Names of the rerankers of the indexes of the members."""


class IndexList(Response):
    """Indexes and federations that the access key can access."""

    indexes: list[IndexInfo]
    """The indexes."""
    federations: list[FederationInfo] = Field(default_factory=list)
    """The federations, if the access key can access all of their indexes."""


# -- evaluations -----------------------------------------------------------------------------------


class DeleteRequest(Request):
    """Items to delete, selected by either `item_ids` or `filter`."""

    index: Name | None = None
    """Name of the index. Optional if the access key can access only one index."""
    item_ids: Annotated[list[Id], Field(min_length=1, max_length=100_000)] | None = None
    """Ids of the items to delete."""
    filter: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    """Lance SQL expression over the columns of the items, such as `source = 'old'`. All items that
    satisfy it are deleted."""
    dry_run: bool = False
    """Counts the items without deleting them."""

    @model_validator(mode="after")
    def _check_selection(self) -> DeleteRequest:
        if (self.item_ids is None) == (self.filter is None):
            rule = "Input should be a request with either item_ids or filter"
            raise PydanticCustomError("selection", rule)
        return self


class DeleteResponse(Response):
    """Result of a deletion."""

    request_id: str
    """Id of the request."""
    index: str
    """Name of the index."""
    version: int
    """Version that this gateway serves after the deletion. Other gateways follow within
    `reload_interval_s`."""
    selected: int
    """Number of items that were selected."""
    unknown: int
    """Number of given ids that the index does not contain."""
    deleted: int
    """Number of items that were deleted."""


class EvaluationRequest(Request):
    """Evaluation of an index, either on `queries` with `qrels` or on a benchmark of the server."""

    index: Name | None = None
    """Name of the index. Optional if the access key can access only one index."""
    benchmark: Name | None = None
    """Name of a benchmark that is configured on the server."""
    queries: Annotated[dict[Id, Text], Field(max_length=100_000)] | None = None
    """Texts of the queries by query id."""
    qrels: Annotated[dict[Id, dict[Id, Grade]], Field(max_length=100_000)] | None = None
    """Relevance grades by query id and by the id of an item or parent. See `judged`."""
    ignore_identical_ids: bool = True
    """Removes the document that has the id of a query from its ranking, unless it is judged
    relevant. False if the ids of `queries` and documents coincide by chance."""
    representations: list[Name] = Field(default_factory=list, max_length=256)
    """Names of the representations to evaluate, which may be prefixes `NAME@K`. Empty means all
    stored representations."""
    scores: list[Score] = Field(default_factory=list)
    """Scores to evaluate. If empty, all that the representations support, without `fused`."""
    fusion: Fusion | None = None
    """Settings of the `fused` score. Default: those of the server for the index."""
    measures: list[Name] = Field(default_factory=list, max_length=64)
    """Names of ir-measures, such as `nDCG@10`. If empty, the default measures are used."""
    k: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Number of hits per query. It must be at least the largest cutoff of the measures."""
    judged: Literal["auto", "parent", "item"] = "auto"
    """Type of the ids in `qrels`. `auto` selects the type whose ids are in the index. The best item
    of a parent determines the rank of the parent."""
    diagnostics: bool = False
    """Computes diagnostics of MaxSim searches, such as score retention and the use of vectors;
    roughly doubles the duration."""
    bm25: bool = True
    """Evaluates BM25 on the texts of the items as a baseline."""

    @model_validator(mode="after")
    def _check_queries(self) -> EvaluationRequest:
        has_queries = self.queries is not None and self.qrels is not None
        is_partial = (self.queries is None) != (self.qrels is None)
        if has_queries == (self.benchmark is not None) or is_partial:
            rule = "Input should be a request with either benchmark or both queries and qrels"
            raise PydanticCustomError("queries", rule)
        return self


State = Literal["queued", "running", "done", "failed", "cancelled"]


class EvaluationResult(Response):
    """Result of one representation with one score."""

    representation: str
    """Name of the representation, or of the baseline."""
    score: str
    """Name of the score."""
    measures: dict[str, float]
    """Mean of each measure over the queries."""
    bytes_per_item: float | None
    """Mean size of an item in bytes, including assignments and token positions."""


class Evaluation(Response):
    """Evaluation and its state."""

    id: str
    """Id of the evaluation."""
    state: State
    """State of the evaluation. `done`, `failed` and `cancelled` are final."""
    index: str
    """Name of the index."""
    created: str
    """Time of creation in UTC, ISO 8601."""
    finished: str | None
    """Time at which the evaluation finished, in UTC, ISO 8601, or null if it has not finished."""
    progress: list[str]
    """Last lines of the log."""
    error: str | None
    """Error message of a failed evaluation."""
    results: list[EvaluationResult]
    """Results of a completed evaluation."""
    files: list[str]
    """Names of the files that can be downloaded, such as `report.html`."""


class EvaluationList(Response):
    """Evaluations created with the access key, and those of jobs."""

    evaluations: list[Evaluation]
    """Evaluations, newest first."""
