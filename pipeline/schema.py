"""Arrow schemas and types that sources, encoders, the index and search share.

    source --ITEM--> encoder --TokenBatch--> compressors --representation columns--> index row

An *item* is a unit of retrieval, such as a passage, a page or a video window. Its `parent_id`
identifies the document that contains it. Items that cannot be indexed are recorded as rows of
`REJECT`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

#: Version of the index format.
FORMAT_VERSION = 3
METADATA_KEY = b"maxray"

#: Location of an item in its parent. The unit is "page", "seconds" or "characters", or "" if the
#: item is the whole parent.
SPAN = pa.struct(
    [
        pa.field("unit", pa.string()),
        pa.field("start", pa.float64()),
        pa.field("end", pa.float64()),
    ]
)

#: Schema of the items that a source lists. Sources append payload columns, see `PAYLOAD`.
ITEM = pa.schema(
    [
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("parent_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("modality", pa.string(), nullable=False),
        pa.field("span", SPAN),
        pa.field("title", pa.string()),
        pa.field("text", pa.string()),
        pa.field("caption", pa.string()),  # describes the item, but is not part of its content
        pa.field("revision", pa.string(), nullable=False),
        pa.field("metadata", pa.string()),  # a JSON object
    ]
)

WORD_SPANS = pa.list_(pa.list_(pa.int32(), 2))  # character offsets in the text, in ascending order
WORD_BOXES = pa.list_(pa.list_(pa.float32(), 4))  # x0 y0 x1 y1 in [0, 1], or NaN
WORD_TIMES = pa.list_(pa.list_(pa.float32(), 2))  # t0 t1 in seconds of the parent, or NaN
WORD_CONFIDENCES = pa.list_(pa.float32())  # probability of being correct, or NaN
WORD_KINDS = pa.list_(pa.int8())  # indices into `tokens.KINDS`: visual or audio

#: Video frame, with its index and timestamp in the file and upright RGB pixels in row-major order.
FRAME = pa.struct(
    [
        pa.field("index", pa.int32()),
        pa.field("seconds", pa.float64()),
        pa.field("height", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("pixels", pa.binary()),
    ]
)
#: Mono audio as little-endian float32 samples. The first sample is at `start` seconds of the file.
AUDIO = pa.struct(
    [
        pa.field("start", pa.float64()),
        pa.field("sample_rate", pa.int32()),
        pa.field("samples", pa.binary()),
    ]
)

#: Columns of each kind of payload that an encoder can request. A source provides those of the
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
#: Input of the second encoder of an index, which sees images and frames (`IndexSpec.see`). It has
#: no column, but changes the revisions of images and videos, so that they are encoded again.
SEEN = "seen"


def payload_schema(provided: Iterable[str], requested: Container[str]) -> pa.Schema:
    """Returns the payload columns that the source provides and the encoder requests."""
    kinds = [kind for kind in provided if kind in requested]
    return pa.schema([column for kind in kinds for column in PAYLOAD[kind]])


#: Schema of the inputs that were not indexed. The next run retries those that are `retryable`.
REJECT = pa.schema(
    [
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),  # list, decode, encode, compress
        pa.field("reason", pa.string(), nullable=False),  # a short category
        pa.field("detail", pa.string()),
        pa.field("revision", pa.string()),
        pa.field("spec", pa.string()),  # digest of the spec
        pa.field("retryable", pa.bool_(), nullable=False),
    ]
)


MAX_ID_LENGTH = 512
#: Unpaired surrogates, which are valid in JSON, but not in UTF-8.
SURROGATES = re.compile("[\ud800-\udfff]")
_INVALID_ID_CHARACTERS = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")  # Arrow rejects surrogates


#: Unicode categories of separators, control and format characters, and marks without a letter.
_BLANK_CATEGORIES = {"Zs", "Zl", "Zp", "Cc", "Cf", "Mn", "Me"}
#: Letters and symbols that are drawn as space: the Hangul fillers and the blank Braille pattern.
_BLANK_LETTERS = "\u115f\u1160\u3164\uffa0\u2800"


def is_blank(text: str) -> bool:
    """Checks whether a text has no visible character.

    >>> is_blank(" \u200b\ufeff"), is_blank("?")
    (True, False)
    """
    return all(unicodedata.category(c) in _BLANK_CATEGORIES or c in _BLANK_LETTERS for c in text)


def item_id_problem(item_id: Any) -> str | None:
    """Returns the rule that an item id violates, or None if the id is valid.

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
    """Row of `ITEM`, for sources that create their items one at a time."""

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
    handle: Any = None  # JSON value that locates the item in the source

    def row(self) -> dict[str, Any]:
        """Converts the item to a row for `pa.Table.from_pylist`."""
        span = self.span and dict(zip(("unit", "start", "end"), self.span, strict=True))
        metadata = json.dumps(self.metadata, ensure_ascii=False) if self.metadata else None
        row = {name: getattr(self, name) for name in ITEM.names if name not in ("span", "metadata")}
        return {**row, "span": span, "metadata": metadata, **self.payload}


#: The metadata of these modalities has a field `file` if the item id does not name the file.
MEDIA = ("image", "video", "audio")


def detail_with_file(detail: str, file: str | None) -> str:
    """Adds the file of an item to the detail of a reject, if the file is known.

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
    """Row of `REJECT`. The index job fills in the column `spec`."""

    item_id: str
    source: str
    stage: str
    reason: str
    detail: str = ""
    revision: str = ""
    retryable: bool = False

    def row(self) -> dict[str, Any]:
        """Converts the reject to a row for `pa.Table.from_pylist`."""
        return {name: getattr(self, name, None) for name in REJECT.names}


def vectors_type(dim: int, value_type: pa.DataType | None = None) -> pa.ListType:
    """Returns the type of a column of multi-vectors: `list<fixed_size_list<value_type>[dim]>`."""
    return pa.list_(pa.list_(value_type or pa.float16(), dim))


def with_metadata(column: pa.Field, metadata: dict[str, Any]) -> pa.Field:
    """Returns a copy of `column` that stores `metadata` as JSON under the key `maxray`."""
    return column.with_metadata({METADATA_KEY: json.dumps(metadata, ensure_ascii=False).encode()})


def column_metadata(column: pa.Field) -> dict[str, Any]:
    """Reads the metadata written by `with_metadata`. It is empty for all other columns."""
    return json.loads((column.metadata or {}).get(METADATA_KEY, b"{}"))


#: Precision in which EDJE's joint encoder runs. int8 is supported on CPUs only.
Precision = Literal["float32", "bfloat16", "float16", "int8"]
#: Default number of items that EDJE reranks. The paper calls it k.
DEFAULT_RERANK_DEPTH = 10


#: Parts of a query that are files.
QUERY_FILES = ("image", "audio", "video")


@dataclass(frozen=True)
class Composed:
    """Query of one or several parts, such as an image of a shoe and the text "but in red".

    Attributes:
        text: Text of the query, or empty.
        image: Content of an image file in PNG, JPEG or WebP format, or None.
        audio: Content of an audio file, or None. It replaces the audio of the video.
        video: Content of a video file, or None. A query has no image besides a video.
    """

    text: str = ""
    image: bytes | None = None
    audio: bytes | None = None
    video: bytes | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that the query has."""
        parts = [name for name in QUERY_FILES if getattr(self, name) is not None]
        return ("text", *parts) if self.text else tuple(parts)


def compose(text: str, files: Mapping[str, bytes]) -> str | bytes | Composed:
    """Returns the simplest form of a query of a text, which may be empty, and files by part.

    >>> compose("a wing", {}), compose("", {"image": b"..."})
    ('a wing', b'...')
    """
    if not files:
        return text
    is_image = files.keys() == {"image"} and not text
    return files["image"] if is_image else Composed(text, **files)
