"""Arrow schemas and result types shared by sources, encoders, the index and search.

    source --ITEM--> encoder --TokenBatch--> compressors --representation columns--> index row

An *item* is a unit of retrieval, such as a passage, a page or a video window. Its `parent_id` names
the document that contains it. Items that cannot be indexed are recorded as rows of `REJECT`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

#: Version of the index format that is written; older versions can be read. Version 2 stores extents
#: as `index.positions.STORED_EXTENTS`.
FORMAT_VERSION = 2
METADATA_KEY = b"maxray"

#: Location of an item in its parent. The unit is "page", "seconds", "characters" or "" (the whole).
SPAN = pa.struct(
    [
        pa.field("unit", pa.string()),
        pa.field("start", pa.float64()),
        pa.field("end", pa.float64()),
    ]
)

#: Items listed by a source. Sources append payload columns, see `PAYLOAD`.
ITEM = pa.schema(
    [
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("parent_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("modality", pa.string(), nullable=False),
        pa.field("span", SPAN),
        pa.field("title", pa.string()),
        pa.field("text", pa.string()),
        pa.field("caption", pa.string()),  # text about the item that is not part of its content
        pa.field("revision", pa.string(), nullable=False),
        pa.field("metadata", pa.string()),  # a JSON object
    ]
)

WORD_SPANS = pa.list_(pa.list_(pa.int32(), 2))  # character offsets in the text, ascending
WORD_BOXES = pa.list_(pa.list_(pa.float32(), 4))  # x0 y0 x1 y1 in [0, 1], or NaN
WORD_TIMES = pa.list_(pa.list_(pa.float32(), 2))  # t0 t1 in seconds of the parent, or NaN
WORD_CONFIDENCES = pa.list_(pa.float32())  # probability of correct recognition, or NaN
WORD_KINDS = pa.list_(pa.int8())  # indices into `tokens.KINDS`: visual or audio

#: Video frame: index and timestamp in the file, and upright RGB pixels in row-major order.
FRAME = pa.struct(
    [
        pa.field("index", pa.int32()),
        pa.field("seconds", pa.float64()),
        pa.field("height", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("pixels", pa.binary()),
    ]
)
#: Mono audio: little-endian float32 samples that begin at `start` seconds of the file.
AUDIO = pa.struct(
    [
        pa.field("start", pa.float64()),
        pa.field("sample_rate", pa.int32()),
        pa.field("samples", pa.binary()),
    ]
)

#: Columns of each kind of payload that an encoder can request from a source. A source fills the
#: requested columns that it supports.
PAYLOAD = {
    "item_id": [],
    "text": [pa.field("word_spans", WORD_SPANS), pa.field("word_boxes", WORD_BOXES)],
    "caption": [],
    "image": [pa.field("image", pa.binary())],  # upright RGB image as JPEG, PNG or WebP
    "scan": [pa.field("scan", pa.binary())],  # image of an item whose text must be recognised
    "frames": [pa.field("frames", pa.list_(FRAME))],
    "audio": [pa.field("audio", AUDIO)],
}


def payload_schema(provided: Iterable[str], requested: Container[str]) -> pa.Schema:
    """Returns the payload columns that a source provides and an encoder requests."""
    kinds = [kind for kind in provided if kind in requested]
    return pa.schema([column for kind in kinds for column in PAYLOAD[kind]])


#: Inputs that were not indexed. The next run retries those with `retryable`.
REJECT = pa.schema(
    [
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),  # list, decode, encode, compress
        pa.field("reason", pa.string(), nullable=False),  # short category
        pa.field("detail", pa.string()),
        pa.field("revision", pa.string()),
        pa.field("spec", pa.string()),  # digest of the resolved spec
        pa.field("retryable", pa.bool_(), nullable=False),
    ]
)

MAX_ID_LENGTH = 512
_INVALID_ID_CHARACTERS = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")  # Arrow rejects surrogates


def item_id_problem(item_id: Any) -> str | None:
    """Returns the rule that an item id violates, or None if it is valid.

    >>> item_id_problem("docs/a.txt")
    >>> item_id_problem("")
    'an id is a string of 1 to 512 characters'
    """
    if not isinstance(item_id, str) or not 0 < len(item_id) <= MAX_ID_LENGTH:
        return f"an id is a string of 1 to {MAX_ID_LENGTH} characters"
    if _INVALID_ID_CHARACTERS.search(item_id):
        return "an id must not contain control characters or unpaired surrogates"
    return None


@dataclass(frozen=True)
class Item:
    """Row of `ITEM`, for sources that build items individually; `payload` has payload columns."""

    item_id: str
    parent_id: str
    source: str
    modality: str
    revision: str
    span: tuple[str, float, float] | None = None
    title: str | None = None
    text: str | None = None
    metadata: dict[str, Any] | None = None
    payload: dict[str, Any] = field(default_factory=dict)
    caption: str | None = None
    handle: Any = None  # location in the source, a JSON value; not stored

    def row(self) -> dict[str, Any]:
        """Returns the item as a row for `pa.Table.from_pylist`."""
        span = self.span and dict(zip(("unit", "start", "end"), self.span, strict=True))
        metadata = json.dumps(self.metadata, ensure_ascii=False) if self.metadata else None
        row = {name: getattr(self, name) for name in ITEM.names if name not in ("span", "metadata")}
        return {**row, "span": span, "metadata": metadata, **self.payload}


#: Modalities whose metadata has a field `file` if the file of an item differs from its id.
MEDIA = ("image", "video", "audio")


def detail_with_file(detail: str, file: str | None) -> str:
    """Appends the file of an item to the detail of a reject, unless it is None.

    >>> detail_with_file("truncated", "1.tar"), detail_with_file("", "1.tar")
    ('truncated (file 1.tar)', 'file 1.tar')
    >>> detail_with_file("truncated", None)
    'truncated'
    """
    if not file:
        return detail
    return f"{detail[:400]} (file {file})" if detail else f"file {file}"


def metadata_file(modality: str, metadata: str | None) -> str | None:
    """Returns the file of a stored item, such as its archive, or None if the id names the file."""
    return json.loads(metadata).get("file") if metadata and modality in MEDIA else None


@dataclass(frozen=True)
class Reject:
    """Row of `REJECT`; the index job sets the column `spec`."""

    item_id: str
    source: str
    stage: str
    reason: str
    detail: str = ""
    revision: str = ""
    retryable: bool = False

    def row(self) -> dict[str, Any]:
        """Returns the reject as a row for `pa.Table.from_pylist`."""
        return {name: getattr(self, name, None) for name in REJECT.names}


def vectors_type(dim: int, value_type: pa.DataType | None = None) -> pa.ListType:
    """Returns the type of a multi-vector column, `list<fixed_size_list<value_type>[dim]>`."""
    return pa.list_(pa.list_(value_type or pa.float16(), dim))


def with_metadata(column: pa.Field, metadata: dict[str, Any]) -> pa.Field:
    """Returns `column` with `metadata` as JSON under the key `maxray`."""
    return column.with_metadata({METADATA_KEY: json.dumps(metadata, ensure_ascii=False).encode()})


def column_metadata(column: pa.Field) -> dict[str, Any]:
    """Returns the metadata set by `with_metadata`; empty for other columns."""
    return json.loads((column.metadata or {}).get(METADATA_KEY, b"{}"))


@dataclass(frozen=True)
class Place:
    """Location of words or of a region in an image, an audio interval or a video frame.

    Attributes:
        span: Character range in the text of the item.
        box: Bounding box x0, y0, x1, y1 in [0, 1] of the page, image or frame; None for audio.
        times: Interval t0, t1 in seconds of the parent; None for pages and images.
        confidence: Mean probability that the words were recognised correctly; None if they were not
            recognised by OCR or ASR, or if the index does not store it.
    """

    span: tuple[int, int]
    box: tuple[float, float, float, float] | None
    times: tuple[float, float] | None
    confidence: float | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Match:
    """Best-matching vector of a hit for a query token, and the words that the vector represents.

    Attributes:
        query_token: Text of the query token.
        similarity: Maximum similarity of the query token over the vectors of the hit, its term of
            the MaxSim score.
        document_token: Index of the vector in the searched representation of the item.
        spans: Character ranges in the item's text; may be empty.
        places: Locations of the words, where known, in the order of the text.
        contribution: `similarity` minus the mean similarity of the query token with all vectors of
            the hit. It is small for tokens that are similar to all vectors, such as stop words.
    """

    query_token: str
    similarity: float
    document_token: int
    spans: tuple[tuple[int, int], ...]
    places: tuple[Place, ...] = ()
    contribution: float = 0.0


@dataclass(frozen=True)
class Mark:
    """Word of a passage that matches a query token best.

    Attributes:
        query_token: Text of the query token.
        span: Character range of the encoder's token in the item's text.
        contribution: As in `Match`, with the maximum similarity within the passage.
    """

    query_token: str
    span: tuple[int, int]
    contribution: float


@dataclass(frozen=True)
class Passage(Place):
    """Contiguous part of a hit that matches the query: consecutive words, or an image region.

    Attributes:
        contribution: Sum over query tokens of the increase in contribution over the preceding
            passages.
        marks: At most one mark per query token, in query order; empty for an image region.
    """

    contribution: float
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Parts:
    """Components of the score of a hit; None for components that were not requested.

    Attributes:
        late: MaxSim score, the sum over query tokens.
        late_mean: MaxSim score divided by the number of query tokens, as in the hybrid score.
        single: Single-vector score, the similarity of the pooled vectors.
    """

    late: float | None = None
    late_mean: float | None = None
    single: float | None = None


#: Precision of EDJE's joint encoder; int8 only on CPUs.
Precision = Literal["float32", "bfloat16", "float16", "int8"]
#: Default number of items that EDJE reranks (the paper's k).
DEFAULT_RERANK_DEPTH = 10


@dataclass(frozen=True)
class Reranked:
    """Reranking result of a hit.

    Attributes:
        first_rank: Rank in the first stage.
        first_score: Score in the first stage.
        joint: Logit of the joint encoder; None if the hit was not reranked.
        num_truncated_tokens: Number of tokens truncated from the text: of the query, or of the hit
            if the query is an image.
        problem: Reason why a hit within the rerank depth was not reranked; it keeps its first rank.
    """

    first_rank: int
    first_score: float
    joint: float | None = None
    num_truncated_tokens: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Composed:
    """Composed query of a text and an image, such as an image of a shoe and "but in red".

    Attributes:
        text: Text of the query.
        image: Image file in PNG, JPEG or WebP format.
    """

    text: str
    image: bytes


@dataclass(frozen=True)
class Hit:
    """Search result. The score is defined in `pipeline.search.score`."""

    rank: int
    score: float
    item_id: str
    parent_id: str
    title: str | None = None
    text: str | None = None
    span: dict[str, Any] | None = None
    matches: tuple[Match, ...] = ()
    passages: tuple[Passage, ...] = ()  # best first
    parts: Parts = Parts()
    reranked: Reranked | None = None
