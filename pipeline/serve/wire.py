"""Schemas of the HTTP API that the server and its client share.

Requests that contain unknown fields are rejected. The limits in this module apply to all servers. A
server can lower them in its settings (`pipeline.serve.settings`).
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

from pipeline.config import SpecError
from pipeline.scores import Score
from pipeline.search.fusion import Fusion

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


class Request(BaseModel):
    """Base class of all requests. Requests with unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Response(BaseModel):
    """Base class of all responses. Clients ignore unknown fields, which a newer server may add."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)


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
    """Path of the invalid field of the request, such as `rerank.rerank_depth`."""
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
    weights: Annotated[list[Finite], Field(max_length=4096)] | None = None
    """Weights of the token vectors in the MaxSim score, at least 0. Default: 1 for each."""


class Image(Request):
    """Image query. The encoder of the representation must support images."""

    image: Annotated[str, StringConstraints(min_length=1)]
    """Base64-encoded PNG, JPEG or WebP file."""


class Composed(Image):
    """Composed query of an image and a text. The encoder must support composed queries."""

    text: Text
    """Text of the query."""


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
        if self.box and (self.box[0] >= self.box[2] or self.box[1] >= self.box[3]):
            raise SpecError("box", list(self.box), "x0, y0, x1, y1 with x0 < x1 and y0 < y1")
        if self.times and self.times[0] >= self.times[1]:
            raise SpecError("times", list(self.times), "a start before an end")
        return self


def query_kind(query: Any) -> str:
    """Returns the kind of a query, which determines the schema for its validation."""
    if isinstance(query, Mapping):
        kinds = {"text": "composed", "image": "image", "item": "item"}
        return next((kind for field, kind in kinds.items() if field in query), "vectors")
    classes: dict[type, str] = {
        Vectors: "vectors",
        Image: "image",
        Composed: "composed",
        StoredItem: "item",
    }
    return classes.get(type(query), "text")


Query = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Vectors, Tag("vectors")]
    | Annotated[Image, Tag("image")]
    | Annotated[Composed, Tag("composed")]
    | Annotated[StoredItem, Tag("item")],
    Discriminator(query_kind),
]
#: Kinds of queries, which pydantic inserts into the paths of validation errors.
QUERY_KINDS = ("text", "vectors", "image", "composed", "item")


def query_text(query: Query) -> str | None:
    """Returns the text that a query contains, or None if it has no text."""
    return query.text if isinstance(query, Composed) else query if isinstance(query, str) else None


#: Default rerank depth of each method.
DEFAULT_RERANK_DEPTHS = {"vectors": 100, "edje": 10}
RerankMethod = Literal["vectors", "edje"]


def _check_method(value: Any, info: ValidationInfo) -> Any:
    """Checks that options of a reranking method are only used together with this method."""
    method = "edje" if info.field_name == "add_first_stage" else "vectors"
    if value and info.data.get("method", method) != method:
        raise ValueError(f"omitted unless method is {method!r}")
    return value


RerankRepresentation = Annotated[Name | None, AfterValidator(_check_method)]


class Rerank(Request):
    """Second stage, which rescores the best hits of the first stage."""

    method: RerankMethod = "vectors"
    """Reranking method. `vectors` computes exact MaxSim scores with another representation. `edje`
    applies EDJE's joint encoder to the query and each hit. Hits that it cannot read keep their
    rank, and hits beyond `rerank_depth` follow the reranked ones in their original order."""
    representation: RerankRepresentation = None
    """Representation that `vectors` scores with, or a prefix `NAME@K`. Default: the default
    representation."""
    rerank_depth: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Number of first-stage hits to rerank. Default: 100 for `vectors`, 10 for `edje`."""
    add_first_stage: Annotated[bool, AfterValidator(_check_method)] = False
    """Adds the first-stage score to the logit of `edje`."""
    optional: bool = False
    """If reranking fails, returns the hits of the first stage with `reranked: false` instead of an
    error."""

    @property
    def num_candidates(self) -> int:
        """Number of first-stage hits to rerank, with the default resolved."""
        return self.rerank_depth or DEFAULT_RERANK_DEPTHS[self.method]


class SearchOptions(Request):
    """Options that single searches and batch searches have in common."""

    index: Name | None = None
    """Name of the index. Optional if the access key can access only one index."""
    representation: Name | None = None
    """Name of the representation to search, or `NAME@K` for the first K vectors of each item of a
    representation with nested vectors. Default: `full` if the index has it, else the first."""
    k: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Maximum number of hits per query."""
    score: Score = "maxsim"
    """Score of the first stage: `maxsim` is the MaxSim score of the token vectors, `single_vector`
    the similarity of the single vectors, and `hybrid` their weighted sum. `fused` combines the
    rankings by MaxSim, BM25 and single vectors, see `fusion`."""
    weights: tuple[Finite, Finite] = (1.0, 1.0)
    """Weights of the `single_vector` and the `maxsim` score in the `hybrid` score."""
    fusion: Fusion | None = None
    """Settings of the `fused` score. Default: those of the server for the index."""
    group_by: Literal["parent"] | None = None
    """`parent` returns only the best item of each parent, such as the best page of a document."""
    filter: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    """Lance SQL expression over the columns of the items, such as `modality = 'text'`. Only the
    items that satisfy it are searched."""
    ids: Annotated[list[Id], Field(max_length=100_000)] | None = None
    """Ids of the items to search. If null, all items are searched."""
    parents: Annotated[list[Id], Field(max_length=100_000)] | None = None
    """Ids of the parents whose items are searched. If null, all items are searched."""
    candidates: Name | None = None
    """`exact` scores all items. The name of a candidate generator of the representation, or several
    joined by `+` or `:`, score only the items that they find, which is faster and may miss hits.
    Default: the generator that the settings of the server name for the representation, else
    `exact`."""
    num_candidates: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Number of candidates per query, shard and generator, at least `k`. Default: that of the
    settings of the server if they name the generator, else 1,000, or 16 `k` if that is more."""
    idf_power: Annotated[float, Field(gt=0, le=4)] | None = None
    """Weights the tokens of text queries in the MaxSim score by their inverse document frequency to
    this power. The token frequencies of the index must have been counted. If null, all weights are
    1."""
    rerank: Rerank | None = None
    """Second stage. If null, hits are not reranked."""
    explain: Literal["matches", "map"] | None = None
    """Explanations to return: `matches` adds the best-matching vector of each query token and the
    best-matching passages of each hit, `map` additionally a similarity map of its words."""


class SearchRequest(SearchOptions):
    """Search with one query."""

    query: Query
    """The query: a text, an image, a text with an image, token vectors, or an item of the index."""


class BatchSearchRequest(SearchOptions):
    """Search for several queries that share the same options."""

    queries: Annotated[list[Query], Field(min_length=1, max_length=1024)]
    """The queries. Their kinds can differ."""


class Location(Response):
    """Location of words or of an image region in an item."""

    span: tuple[int, int]
    """Character range (start, end) in the text of the item."""
    box: tuple[float, float, float, float] | None
    """Bounding box (x0, y0, x1, y1) in [0, 1], or null if the location is not visible."""
    times: tuple[float, float] | None
    """Start and end time in the parent, in seconds, or null if the item has no time axis."""
    confidence: float | None = None
    """Mean confidence of the OCR or speech recognition, or null if it is unknown."""


class Match(Response):
    """Vector of a hit that is most similar to a query token."""

    query_token: str
    """Text of the query token."""
    similarity: float
    """Similarity of the vector and the query token, whose product with `weight` is a term of the
    MaxSim score."""
    contribution: float
    """`weight` times the difference between `similarity` and the mean similarity of the query token
    to all vectors of the hit. It is small for stop words."""
    document_token: int
    """Position of the vector among the vectors of the hit."""
    spans: list[tuple[int, int]]
    """Character ranges of the words that the vector represents, in the text of the hit."""
    locations: list[Location]
    """Locations of these words."""
    weight: float = 1.0
    """Weight of the query token in the MaxSim score."""


class Highlight(Response):
    """Word of a passage that best matches a query token."""

    query_token: str
    """Text of the query token."""
    span: tuple[int, int]
    """Character range of the word in the text of the hit."""
    contribution: float
    """Contribution of the query token, with the best similarity inside the passage."""


class Passage(Location):
    """Contiguous part of a hit that matches the query."""

    contribution: float
    """Sum of the contributions of the query tokens inside the passage, each reduced by its
    contribution inside the preceding passages."""
    highlights: list[Highlight]
    """Best-matching words, at most one per query token, or empty for an image region."""


class Word(Response):
    """Word or image patch of a hit and its similarities to the query tokens."""

    text: str
    """Text of the word, or empty for an image patch."""
    span: tuple[int, int]
    """Character range in the text of the hit."""
    box: tuple[float, float, float, float] | None
    """Bounding box (x0, y0, x1, y1) in [0, 1], or null if the word is not visible."""
    times: tuple[float, float] | None
    """Start and end time in the parent, in seconds, or null if the item has no time axis."""
    similarities: list[float | None]
    """Similarity to each query token, or null if no vector represents the word."""
    credit: float
    """Share of the MaxSim score that the vectors of the word add, summed over the query tokens.
    Each of several words that share a vector has all of its credit."""
    highlight: float
    """Value of the word in a map of the whole query: its part of the contribution of its vector,
    which all words of the vector share, or its contribution to a passage if that is higher."""
    contribution: float
    """Like `credit`, for the score beyond its mean. It is small for stop words."""
    vector: int | None = None
    """Position of the vector that represents the word, or null if no vector represents it."""


class Map(Response):
    """Similarity map of the words of a hit."""

    query_tokens: list[str]
    """Texts of the query tokens."""
    words: list[Word]
    """Words in the order of the text, or image patches."""


class ScoreParts(Response):
    """Components of the score of a hit, or null for components that were not computed."""

    maxsim: float | None
    """MaxSim score."""
    maxsim_mean: float | None
    """MaxSim score divided by the sum of the weights of the query tokens, as used in the hybrid
    score."""
    single_vector: float | None
    """Similarity of the single vectors."""
    bm25: float | None = None
    """BM25 score, which is 0 if no term of the query occurs in the text."""


class FirstStage(Response):
    """Rank and score of a reranked hit in the first stage."""

    rank: int
    """Rank, from 1."""
    score: float
    """Score."""


class JointScore(Response):
    """Result of EDJE's joint encoder for a hit."""

    logit: float | None
    """Logit of the match of query and hit, or null if the hit was not read or is beyond
    `rerank_depth`."""
    num_truncated_tokens: int
    """Number of tokens truncated from the text: that of the query, or that of the hit if the query
    is an image."""
    problem: str | None
    """Reason why a hit within `rerank_depth` could not be read. Such a hit keeps its rank."""


class Hit(Response):
    """Search result."""

    rank: int
    """Rank, from 1."""
    score: float
    """Score of the last stage. Scores of hits that EDJE reranked and of other hits are not
    comparable."""
    item_id: str
    """Id of the item."""
    parent_id: str
    """Id of the parent, such as the document of a page."""
    title: str | None
    """Title of the item."""
    text: str | None
    """Text of the item."""
    span: dict[str, Any] | None
    """Location of the item in its parent, such as a page number or a time range."""
    modality: str | None = None
    """Modality of the item, such as `text` or `image`."""
    source: str | None = None
    """Name of the source that the item was read from."""
    parts: ScoreParts | None = None
    """Components of the score."""
    first_stage: FirstStage | None = None
    """Rank and score in the first stage, or null if the hits were not reranked."""
    edje: JointScore | None = None
    """Result of EDJE, or null if the hits were not reranked by EDJE."""
    matches: list[Match] | None = None
    """Best-matching vector of each query token, or null unless `explain` is set."""
    passages: list[Passage] | None = None
    """Best-matching passages, best first, or null unless `explain` is set."""
    map: Map | None = None
    """Similarity map, or null unless `explain` is `map` and the item supports one."""


class _SearchResult(Response):
    request_id: str
    """Id of the request in the logs of the server."""
    index: str
    """Name of the index."""
    version: int
    """Version of the index that was searched."""
    representation: str
    """Name of the representation that was searched."""
    candidates: str = "exact"
    """Candidate generator that was used, or `exact` if all items were scored."""
    reranked: bool
    """Whether the hits were reranked."""
    warnings: list[str]
    """Warnings, for example that reranking failed or a text was truncated."""
    durations_ms: dict[str, float]
    """Duration of each stage (`encode`, `search`, `rerank` or `edje`, `describe`) and `total`, in
    milliseconds."""


class SearchResponse(_SearchResult):
    """Hits of a query."""

    hits: list[Hit]
    """Hits, best first."""


class BatchSearchResponse(_SearchResult):
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
    method: RerankMethod = "vectors"
    """Scoring method: `vectors` computes exact MaxSim scores, `edje` applies EDJE's joint
    encoder."""
    representation: RerankRepresentation = None
    """Representation that `vectors` scores with, or a prefix `NAME@K`. Default: the default
    representation."""
    query: Query
    """The query: a text, an image, a text with an image, token vectors, or an item of the index."""
    item_ids: Annotated[list[Id], Field(min_length=1, max_length=10_000)]
    """Ids of the items to score."""
    k: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Maximum number of items to return. Null means all."""


class ScoredItem(Response):
    """Item with its score."""

    item_id: str
    """Id of the item."""
    score: float
    """MaxSim score, or logit of EDJE."""


class RerankResponse(Response):
    """Scored items."""

    request_id: str
    """Id of the request in the logs of the server."""
    index: str
    """Name of the index."""
    version: int
    """Version of the index."""
    representation: str | None
    """Name of the representation, or null for `edje`."""
    results: list[ScoredItem]
    """Items, best first."""
    missing: list[str]
    """Items that could not be scored: items that are not in the index, or without vectors, EDJE
    tokens or, for an image query by EDJE, a text."""
    warnings: list[str] = []
    """Warnings, for example that EDJE truncated a text."""


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
    codec: str | None
    """Name of the codec, or null for the tokens of an EDJE model."""
    dim: int | None
    """Dimension of the vectors."""
    scores: list[str]
    """Scores that the representation supports."""
    queries: list[Literal["text", "image", "composed", "vectors", "item"]]
    """Kinds of queries that the representation supports."""
    candidates: list[str] = []
    """Values of `candidates` that the representation supports: `exact` and the names of its
    candidate generators."""
    default_candidates: str | None = None
    """Value of `candidates` that is used by default."""
    has_token_frequencies: bool = False
    """Whether query tokens can be weighted by `idf_power`."""


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
    edje: bool = False
    """Whether hits can be reranked by EDJE."""
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


class IndexFacets(Response):
    """Facets of the items of an index, sizes of its representations, and example queries."""

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


class IndexList(Response):
    """Indexes that the access key can access."""

    indexes: list[IndexInfo]
    """The indexes."""


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
            raise ValueError("a request with either item_ids or filter")
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
    representations: Annotated[list[Name], Field(max_length=256)] = []
    """Names of the representations to evaluate, which may be prefixes `NAME@K`. Empty means all
    stored representations."""
    scores: list[Score] = []
    """Scores to evaluate. If empty, all that the representations support, without `fused`."""
    fusion: Fusion | None = None
    """Settings of the `fused` score. Default: those of the server for the index."""
    measures: Annotated[list[Name], Field(max_length=64)] = []
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
            raise ValueError("a request with either benchmark or both queries and qrels")
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
