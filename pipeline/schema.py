"""The Arrow schema of every hop and the id rules: the contract between the parts.

    source --ITEM--> encoder --TokenBatch--> compressors --representation columns--> index row

An *item* is what a search can return (a passage, a page, a video window); its `parent_id` names the
document it is part of. What cannot become an item's row becomes a row of `REJECT`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

#: Of what is written; older versions are read. 2: extents as `index.positions.STORED_EXTENTS`.
FORMAT_VERSION = 2
METADATA_KEY = b"maxray"

#: Where in its parent an item lies: unit "page", "seconds", "characters" or "" (the whole).
SPAN = pa.struct(
    [
        pa.field("unit", pa.string()),
        pa.field("start", pa.float64()),
        pa.field("end", pa.float64()),
    ]
)

#: One item, as a source lists it. Sources add payload columns behind these, see `PAYLOAD`.
ITEM = pa.schema(
    [
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("parent_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("modality", pa.string(), nullable=False),
        pa.field("span", SPAN),
        pa.field("title", pa.string()),
        pa.field("text", pa.string()),
        pa.field("caption", pa.string()),  # what somebody said of it, apart from what is in it
        pa.field("revision", pa.string(), nullable=False),
        pa.field("metadata", pa.string()),  # a JSON object
    ]
)

WORD_SPANS = pa.list_(pa.list_(pa.int32(), 2))  # characters in the text, ascending
WORD_BOXES = pa.list_(pa.list_(pa.float32(), 4))  # x0 y0 x1 y1 in [0, 1], or NaN
WORD_TIMES = pa.list_(pa.list_(pa.float32(), 2))  # t0 t1 in seconds of the parent, or NaN
WORD_CONFIDENCES = pa.list_(pa.float32())  # probability that a recognised word is right, or NaN
WORD_KINDS = pa.list_(pa.int8())  # codes of `tokens.KINDS`: to be seen, or to be heard

#: A frame of a video: its number and its time in the file, and upright RGB pixels, row by row.
FRAME = pa.struct(
    [
        pa.field("index", pa.int32()),
        pa.field("seconds", pa.float64()),
        pa.field("height", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("pixels", pa.binary()),
    ]
)
#: Sound: one channel of little-endian float32 samples, from `start` seconds of the file on.
AUDIO = pa.struct(
    [
        pa.field("start", pa.float64()),
        pa.field("sample_rate", pa.int32()),
        pa.field("samples", pa.binary()),
    ]
)

#: What an encoder can want of a source, and the columns that bring it. A source fills those of the
#: wanted ones that it has.
PAYLOAD = {
    "item_id": [],
    "text": [pa.field("word_spans", WORD_SPANS), pa.field("word_boxes", WORD_BOXES)],
    "caption": [],
    "image": [pa.field("image", pa.binary())],  # an upright RGB picture, as JPEG, PNG or WebP
    "scan": [pa.field("scan", pa.binary())],  # the same where its text is not known otherwise
    "frames": [pa.field("frames", pa.list_(FRAME))],
    "audio": [pa.field("audio", AUDIO)],
}


def payload_of(gives: Iterable[str], wants: Container[str]) -> pa.Schema:
    """The columns that bring what a source gives and an encoder wants."""
    return pa.schema([column for kind in gives if kind in wants for column in PAYLOAD[kind]])


#: One thing that did not become a row. `retryable`: the next run tries it again by itself.
REJECT = pa.schema(
    [
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),  # list, decode, encode, compress
        pa.field("reason", pa.string(), nullable=False),  # a short class, good for grouping
        pa.field("detail", pa.string()),
        pa.field("revision", pa.string()),
        pa.field("spec", pa.string()),  # digest of the resolved spec that rejected it
        pa.field("retryable", pa.bool_(), nullable=False),
    ]
)

MAX_ID_LENGTH = 512
_ILLEGAL_IN_IDS = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")  # Arrow cannot store surrogates


def item_id_problem(item_id: Any) -> str | None:
    """What is wrong with an item id, or None.

    >>> item_id_problem("docs/a.txt")
    >>> item_id_problem("")
    'an id is a string of 1 to 512 characters'
    """
    if not isinstance(item_id, str) or not 0 < len(item_id) <= MAX_ID_LENGTH:
        return f"an id is a string of 1 to {MAX_ID_LENGTH} characters"
    if _ILLEGAL_IN_IDS.search(item_id):
        return "an id holds no control characters and no halves of surrogate pairs"
    return None


@dataclass(frozen=True)
class Item:
    """One row of `ITEM`, for sources that build items one by one; payload columns in `payload`."""

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
    handle: Any = None  # where the source found it, a JSON value; not stored

    def row(self) -> dict[str, Any]:
        """The item as a row for `pa.Table.from_pylist`."""
        span = self.span and dict(zip(("unit", "start", "end"), self.span, strict=True))
        metadata = json.dumps(self.metadata, ensure_ascii=False) if self.metadata else None
        row = {name: getattr(self, name) for name in ITEM.names if name not in ("span", "metadata")}
        return {**row, "span": span, "metadata": metadata, **self.payload}


#: Modalities whose metadata names the item's file as `file` where the id does not.
MEDIA = ("image", "video", "audio")


def detail_in(detail: str, file: str | None) -> str:
    """Returns the detail of a reject with the name of the item's file, where it has one to add.

    >>> detail_in("cut short", "1.tar"), detail_in("", "1.tar"), detail_in("cut short", None)
    ('cut short (file 1.tar)', 'file 1.tar', 'cut short')
    """
    if not file:
        return detail
    return f"{detail[:400]} (file {file})" if detail else f"file {file}"


def file_in(modality: str, metadata: str | None) -> str | None:
    """Returns the file of a stored item, such as its archive; None where the id names the file."""
    return json.loads(metadata).get("file") if metadata and modality in MEDIA else None


@dataclass(frozen=True)
class Reject:
    """One row of `REJECT`; the index job fills in `spec`."""

    item_id: str
    source: str
    stage: str
    reason: str
    detail: str = ""
    revision: str = ""
    retryable: bool = False

    def row(self) -> dict[str, Any]:
        """The reject as a row for `pa.Table.from_pylist`."""
        return {name: getattr(self, name, None) for name in REJECT.names}


def vectors_type(dim: int, value_type: pa.DataType | None = None) -> pa.ListType:
    """The column type of a multi-vector representation: `list<fixed_size_list<float16>[dim]>`."""
    return pa.list_(pa.list_(value_type or pa.float16(), dim))


def with_metadata(column: pa.Field, metadata: dict[str, Any]) -> pa.Field:
    """`column` carrying `metadata` as JSON under the key `maxray`."""
    return column.with_metadata({METADATA_KEY: json.dumps(metadata, ensure_ascii=False).encode()})


def metadata_of(column: pa.Field) -> dict[str, Any]:
    """The metadata that `with_metadata` put on a column; empty for other columns."""
    return json.loads((column.metadata or {}).get(METADATA_KEY, b"{}"))


@dataclass(frozen=True)
class Place:
    """Where something of an item is: in a picture, at a time, or both (a frame).

    Attributes:
        span: its characters in the item's text.
        box: x0 y0 x1 y1 in [0, 1] of the page, picture or frame; None: it is heard, not seen.
        times: t0 t1 in seconds of the parent; None: it has no time.
        confidence: The recogniser's probability that the words are right, their mean; None if they
            were not recognised or the index does not hold it.
    """

    span: tuple[int, int]
    box: tuple[float, float, float, float] | None
    times: tuple[float, float] | None
    confidence: float | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Match:
    """The vector of a hit that a query token matched best, and the words it stands for.

    Attributes:
        similarity: Best similarity of the query token with a vector of the hit: its term of MaxSim.
        document_token: Index among the vectors of the item in the searched representation.
        spans: Character ranges in the item's text; may be empty.
        places: Locations of the words that have one, in the order of the text.
        contribution: `similarity` minus the mean similarity of the query token with all vectors of
            the hit. It is small for a token that is about as similar to everything, a stop word.
    """

    query_token: str
    similarity: float
    document_token: int
    spans: tuple[tuple[int, int], ...]
    places: tuple[Place, ...] = ()
    contribution: float = 0.0


@dataclass(frozen=True)
class Mark:
    """The word of a passage that a query token matches best.

    Attributes:
        span: Characters of the encoder's token in the item's text.
        contribution: As in `Match`, with the best similarity inside the passage.
    """

    query_token: str
    span: tuple[int, int]
    contribution: float


@dataclass(frozen=True)
class Passage(Place):
    """Contiguous part of a hit that matches the query: consecutive words, or an image region.

    Attributes:
        contribution: Sum of the contributions of the query tokens inside the passage, as far as
            they exceed those inside the passages before it.
        marks: At most one per query token, in the order of the query; empty for an image region.
    """

    contribution: float
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Parts:
    """What the score of a hit is made of; None where that was not asked for.

    Attributes:
        late: MaxSim: the sum over the query tokens.
        late_mean: the same divided by the number of query tokens, as the hybrid score has it.
        single: the similarity of the pooled vectors.
    """

    late: float | None = None
    late_mean: float | None = None
    single: float | None = None


#: What EDJE's joint encoder may compute in; int8 on a CPU alone.
Precision = Literal["float32", "bfloat16", "float16", "int8"]
#: Default number of items that EDJE reranks (the paper's k).
DEFAULT_RERANK_DEPTH = 10


@dataclass(frozen=True)
class Reranked:
    """What reranking did with a hit.

    Attributes:
        first_rank, first_score: those of the first stage.
        joint: the joint encoder's logit that query and hit match; None: it did not read the hit.
        num_truncated_tokens: Number of tokens truncated from the text: of the query, or of the hit
            if the query is an image.
        problem: why a hit within the rerank depth was not read; such a hit keeps its first rank.
    """

    first_rank: int
    first_score: float
    joint: float | None = None
    num_truncated_tokens: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Composed:
    """A query of a text and a picture together, such as a photo and "but in red".

    Attributes:
        picture: a file of PNG, JPEG or WebP.
    """

    text: str
    picture: bytes


@dataclass(frozen=True)
class Hit:
    """One search result; `pipeline.search.score` defines its score."""

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
