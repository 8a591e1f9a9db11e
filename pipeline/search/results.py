"""Results of searches, in Python, on the command line and over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainSerializer

#: Start and end in the text of an item, in characters.
Span = tuple[int, int]
#: x0, y0, x1, y1 in [0, 1] of the page, image or frame.
Box = tuple[float, float, float, float]
#: Start and end in the parent, in seconds.
Times = tuple[float, float]


def _rounded(digits: int) -> PlainSerializer:
    """Rounds in JSON, because maps have a number for each word and query token."""
    return PlainSerializer(lambda value: round(value, digits), when_used="json")


Rounded = Annotated[float, _rounded(4)]
Side = Annotated[float, _rounded(5)]
Seconds = Annotated[float, _rounded(3)]


class Response(BaseModel):
    """Base class of results. Unknown fields, which a newer server may add, are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)


class Location(Response):
    """Location of words or of a region in an image, an audio interval or a video frame."""

    span: Span
    """Character range (start, end) in the text of the item."""
    box: Box | None = None
    """Bounding box (x0, y0, x1, y1) in [0, 1] of the page, image or frame, or null if the location
    is not visible."""
    times: Times | None = None
    """Start and end in the parent, in seconds, or null if the item has no time axis."""
    confidence: float | None = None
    """Mean confidence of the OCR or speech recognition, or null if it is unknown."""


class Match(Response):
    """Vector of a hit that is most similar to a query token."""

    query_token: str
    """Text of the query token."""
    similarity: float
    """Similarity of the vector and the query token. The MaxSim score is the sum of these maxima
    over the query tokens."""
    contribution: float
    """Difference between `similarity` and the mean similarity of the query token to all vectors of
    the hit. It is small for tokens that are similar to all vectors, such as stop words."""
    document_token: int
    """Position of the vector among the vectors of the hit."""
    spans: tuple[Span, ...] = ()
    """Character ranges of the words that the vector represents, in the text of the hit."""
    locations: tuple[Location, ...] = ()
    """Locations of these words, where known, in the order of the text."""


class Highlight(Response):
    """Word of a passage that best matches a query token."""

    query_token: str
    """Text of the query token."""
    span: Span
    """Character range of the word in the text of the hit."""
    contribution: float
    """Contribution of the query token, with the best similarity inside the passage."""


class Passage(Location):
    """Contiguous part of a hit that matches the query: consecutive words, or an image region."""

    contribution: float
    """Sum of the contributions of the query tokens inside the passage, each reduced by its
    contribution inside the preceding passages."""
    highlights: tuple[Highlight, ...] = ()
    """Best-matching words in query order, at most one per query token, or empty for an image
    region."""


class Word(Response):
    """Word or image patch of a hit and its similarities to the query tokens."""

    text: str
    """Text of the word, or empty for an image patch."""
    span: Span
    """Character range in the text of the hit."""
    box: tuple[Side, Side, Side, Side] | None
    """Bounding box (x0, y0, x1, y1) in [0, 1], or null if the word is not visible."""
    times: tuple[Seconds, Seconds] | None
    """Start and end time in the parent, in seconds, or null if the item has no time axis."""
    similarities: tuple[Rounded | None, ...]
    """Similarity to each query token, by the vectors of `evidence`, or null if no vector represents
    the word."""
    credit: Rounded
    """Share of the MaxSim score that the vectors of the word add, summed over the query tokens.
    Each of several words that share a vector has all of its credit."""
    highlight: Rounded
    """Value of the word in a map of the whole query: its contribution by the vectors of `evidence`,
    which all words of a vector share, or its contribution to a passage if that is higher."""
    contribution: Rounded
    """Like `credit`, for the score beyond its mean. It is small for stop words."""
    vector: int | None = None
    """Position of the vector that represents the word, or null if no vector represents it."""


class Map(Response):
    """Similarity map of the words of a hit."""

    query_tokens: tuple[str, ...]
    """Texts of the query tokens."""
    words: tuple[Word, ...]
    """Words in the order of the text, or image patches."""
    evidence: str
    """Name of the representation by whose vectors the words are compared: an uncompressed one for
    words of merged vectors, if the index has one of the same tokens, else that of the search."""


class ScoreParts(Response):
    """Components of the score of a hit, or null for components that were not computed."""

    maxsim: float | None = None
    """MaxSim score."""
    maxsim_mean: float | None = None
    """MaxSim score divided by the number of query tokens, as used in the hybrid score."""
    single_vector: float | None = None
    """Similarity of the single vectors."""
    bm25: float | None = None
    """BM25 score, which is 0 if no term of the query occurs in the text."""
    negative: float | None = None
    """Score of the negative query, if there is one. The other components are those of the query."""


class FirstStage(Response):
    """Rank and score of a reranked hit in the first stage."""

    rank: int
    """Rank, from 1."""
    score: float
    """Score."""


class RerankScore(Response):
    """Score of a hit by the last reranker that read it."""

    score: float | None = None
    """Score of the query and the hit by the model: a logit or a probability. Null if the hit was
    not read or is below the reranked ones."""
    num_truncated_tokens: int = 0
    """Number of tokens truncated from the text: that of the query, or that of the hit if the query
    is an image."""
    problem: str | None = None
    """Reason why a hit among the best could not be read. Such a hit keeps its rank."""


class MemberHit(Response):
    """Hit of a member of a federation that is part of a joined hit."""

    member: str
    """Name of the member."""
    rank: int
    """Rank in the member, from 1."""
    score: float
    """Score in the member."""
    value: float
    """Comparable score times the weight of the member. The score of the joined hit is the sum over
    the encoders, compressors and scores of the members of the best value."""
    item_id: str
    """Id of the item of the member."""


class Hit(Response):
    """Item that was found. See `pipeline.search.score` for the definition of the score."""

    rank: int
    """Rank, from 1."""
    score: float
    """Score of the last stage. Scores of reranked and other hits are not comparable."""
    item_id: str
    """Id of the item."""
    parent_id: str
    """Id of the parent, such as the document of a page."""
    title: str | None = None
    """Title of the item."""
    text: str | None = None
    """Text of the item."""
    span: dict[str, Any] | None = None
    """Location of the item in its parent, such as a page number or a time range."""
    modality: str | None = None
    """Modality of the item, such as `text` or `image`."""
    source: str | None = None
    """Name of the source that the item was read from."""
    representation: str | None = None
    """Name of the representation by which the item was found."""
    parts: ScoreParts | None = None
    """Components of the score."""
    first_stage: FirstStage | None = None
    """Rank and score in the first stage, or null if the hits were not reranked."""
    rerank: RerankScore | None = None
    """Score of the reranker, or null if the hits were not reranked by a model."""
    matches: tuple[Match, ...] | None = None
    """Best-matching vector of each query token, or null unless `explain` is set."""
    passages: tuple[Passage, ...] | None = None
    """Best-matching passages, best first, or null unless `explain` is set."""
    map: Map | None = None
    """Similarity map, or null unless `explain` is `map` and the item supports one."""
    members: tuple[MemberHit, ...] | None = None
    """Hits of the members of a federation that found it, or null for an index. The first one is
    that of the member that describes the hit."""
