"""Sources, which list the items of a collection and decode their content.

Listing is cheap and deterministic. Only new and changed items are decoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO, ClassVar, Generic, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.config import ComponentSpec, ComponentSpecT, SpecError, digest
from pipeline.data.decode import Unreadable
from pipeline.data.decode.process import RETRYABLE
from pipeline.schema import ITEM, Item, Reject

#: The reason of the error for items without an image or audio preview.
NO_PREVIEW = "no preview"
#: Bytes of UTF-8 text per token, an estimate.
BYTES_PER_TOKEN = 4


class ItemSize(NamedTuple):
    """Estimated size of an item in memory, which limits the units of the index job.

    Attributes:
        num_bytes: Decoded size, in bytes.
        num_tokens: Number of tokens of the text.
    """

    num_bytes: int = 0
    num_tokens: int = 0


class NoFiles(SpecError):
    """Raised if a folder has no files of the types that a source reads."""


class Source(ABC, Generic[ComponentSpecT]):
    """A collection of items, split into shards that are read independently.

    Subclasses define a nested `Spec` with `name: Literal["..."]`, `path: Uri` and `collection`.
    Sources are picklable, and paths are fsspec URIs. Repeated calls on an unchanged source return
    equal results in the same order.

    Args:
        spec: The spec of the source.
        wants: The inputs that the encoder reads, keys of `schema.PAYLOAD`. Other inputs are not
            decoded.
    """

    Spec: ClassVar[type[ComponentSpec]]
    provides: ClassVar[tuple[str, ...]]
    """The inputs that the source can provide, keys of `schema.PAYLOAD`."""
    payload: pa.Schema = pa.schema([])
    """The columns that `decode` adds to those of `ITEM`."""
    location_field: ClassVar[str] = "path"
    """The field of the spec with the location of the files."""
    max_unit_items: int = 1_000_000
    """Maximum number of items per unit."""

    def __init__(self, spec: ComponentSpecT, wants: tuple[str, ...] = ("text",)):
        self.spec, self.wants = spec, wants

    @classmethod
    def leaf_specs(cls, spec: ComponentSpecT) -> list[ComponentSpec]:
        """Returns the specs of the nested sources, or the spec itself if there are none."""
        return [spec]

    @classmethod
    def provided_inputs(cls, spec: ComponentSpecT) -> tuple[str, ...]:
        """Returns the inputs that the source of a spec can provide."""
        return cls.provides

    def unit_limit(self, shard: dict[str, Any]) -> int:
        """Returns the maximum number of items of a shard per unit."""
        return self.max_unit_items

    def item_size(self, shard: dict[str, Any], item: Item) -> ItemSize:
        """Returns the estimated decoded size of a listed item.

        It depends on the listing only, so that every run divides a shard in the same way.
        """
        num_bytes = len((item.text or "").encode(errors="replace"))
        return ItemSize(num_bytes, -(-num_bytes // BYTES_PER_TOKEN))

    @property
    def num_parts(self) -> int:
        """Number of parts, which are divided into shards separately."""
        return 1

    def covers(self, parent_id: str) -> bool:
        """Checks whether an indexed document would be listed if it still existed."""
        return True

    def hides_items(self, reject: Reject) -> bool:
        """Checks whether an entry that cannot be listed may contain any items of the source."""
        return reject.retryable

    @property
    def copies_files(self) -> bool:
        """True if reading an item copies its whole file to this machine."""
        return False

    @property
    def stores_listing(self) -> bool:
        """True if reading a stored listing is faster than listing the source again."""
        return False

    @property
    def collections(self) -> tuple[str, ...]:
        """All values of the column `source` of the items."""
        return (self.collection,)

    @property
    def collection(self) -> str:
        """The name of the collection: the spec's `collection`, or the last part of its path.

        An id belongs to the first collection of an index that lists it.
        """
        spec: Any = self.spec  # specs of single sources have both fields
        return spec.collection or PurePosixPath(spec.path).name

    @abstractmethod
    def check(self) -> None:
        """Raises `SpecError` if the path is missing or contains no items."""

    @abstractmethod
    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields shards, described by JSON values.

        A shard is listed by one task: 10,000 to 50,000 small items, or fewer items whose files are
        large.
        """

    @abstractmethod
    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields the items of a shard without payload, in a stable order.

        Items that cannot be listed are yielded as rejects.
        """

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Yields the given items with their payload, or as rejects, in order.

        Args:
            shard: The shard, as yielded by `shards`.
            items: (position, item) pairs with ascending positions. A position is an index into
                the results of `scan`, which include rejects.
        """
        yield from (item for _, item in items)

    def reject(
        self, item_id: str, revision: str, error: Unreadable | OSError, stage: str
    ) -> Reject:
        """Returns the reject of an item that cannot be read."""
        if isinstance(error, Unreadable):
            reason, detail = error.reason, error.detail
        else:
            reason, detail = "unreadable", str(error)
        detail = detail.encode("utf-8", "backslashreplace").decode()  # names of files
        return Reject(
            item_id=item_id,
            source=self.collection,
            stage=stage,
            reason=reason,
            detail=detail[:500],
            revision=revision,
            retryable=reason in RETRYABLE,
        )

    def read_content_hash(self, item: dict[str, Any]) -> str:
        """Returns the hash of the current content of an indexed item's file.

        It equals the `content_hash` of the item's revision if the file has not changed.

        Args:
            item: The row of the item, with the metadata as a mapping.

        Raises:
            Unreadable, OSError: The item has no file, or the file cannot be read.
        """
        raise Unreadable(NO_PREVIEW, f"modality {item['modality']} has no file")

    def file_state(self, item: dict[str, Any]) -> Any:
        """Returns a value that changes whenever the file of an indexed item is replaced or written.

        It is read without the content of the file. None means that there is no such value.

        Args:
            item: The row of the item, with the metadata as a mapping.

        Raises:
            Unreadable, OSError: The file cannot be read.
        """
        return None

    def open_file(self, item: dict[str, Any]) -> AbstractContextManager[tuple[BinaryIO, int, int]]:
        """Opens the media file of an indexed item.

        Args:
            item: The row of the item, with the metadata as a mapping.

        Returns:
            A context with a seekable stream, the position of the file in it, and its size in bytes.

        Raises:
            Unreadable, OSError: The item has no media file, or it cannot be read.
        """
        raise Unreadable(NO_PREVIEW, f"modality {item['modality']} has no media file")

    def preview_image(self, item: dict[str, Any], seconds: float | None = None) -> bytes:
        """Returns an encoded image of an indexed item, for previews.

        Args:
            item: The row of the item, with the metadata as a mapping.
            seconds: Time of the frame in the parent, in seconds (videos).

        Raises:
            Unreadable: The item has no image, or its file cannot be read.
        """
        raise Unreadable(NO_PREVIEW, f"modality {item['modality']} has no image")

    def preview_audio(self, item: dict[str, Any]) -> tuple[np.ndarray, int, float]:
        """Returns the audio of an indexed item, for previews.

        Args:
            item: The row of the item, with the metadata as a mapping.

        Returns:
            The samples (S,), their sample rate in Hz, and the time of the first sample in seconds.

        Raises:
            Unreadable: The item has no audio, or its file cannot be read.
        """
        raise Unreadable(NO_PREVIEW, f"modality {item['modality']} has no audio")


def make_revision(settings: Any, content: Any) -> str:
    """Returns the revision of an item: a hash of settings and content, and one of the content only.

    The second one shows whether a file has changed since it was indexed, whatever the settings.
    """
    return f"{digest([settings, content])}.{digest(content)}"


def content_hash(revision: str) -> str:
    """Returns the content hash in a revision.

    >>> content_hash(make_revision({"dpi": 100}, "x")) == content_hash(make_revision({}, "x"))
    True
    """
    return revision.partition(".")[2]


def items_table(items: Sequence[Item], payload: pa.Schema) -> pa.Table:
    """Returns a table of items with the columns of `ITEM` and of `payload`.

    Equivalent to `pa.Table.from_pylist` of the rows, but NumPy arrays (N, D) in columns of vectors
    and Arrow arrays in columns of lists are not converted to Python objects.

    >>> vectors = pa.field("vectors", pa.list_(pa.list_(pa.float32(), 2)))
    >>> item = Item("a", "a", "s", "text", "r", payload={"vectors": np.ones((1, 2), np.float32)})
    >>> items_table([item], pa.schema([vectors]))["vectors"].to_pylist()
    [[[1.0, 1.0]]]
    """
    table = pa.Table.from_pylist([replace(item, payload={}).row() for item in items], ITEM)
    for field in payload:
        values = [item.payload.get(field.name) for item in items]
        table = table.append_column(field, _column(values, field.type))
    return table


def _column(values: list[Any], type: pa.DataType) -> pa.Array:
    """Converts the values of a payload column. None becomes null."""
    present = [value for value in values if value is not None]
    if present and all(isinstance(v, np.ndarray) and v.ndim == 2 for v in present):
        return _vectors_column(values, type)
    if any(isinstance(value, pa.Array) for value in present):
        arrays = [
            v if isinstance(v, pa.Array) else pa.array(v or [], type.value_type) for v in values
        ]
        return _lists(values, list(map(len, arrays)), pa.concat_arrays(arrays)).cast(type)
    return pa.array(values, type)


def _lists(values: list[Any], lengths: list[int], flat: pa.Array) -> pa.ListArray:
    """Returns lists of the given lengths; those of values that are None are null."""
    ends = pa.array(np.cumsum([0, *lengths], dtype=np.int32))
    return pa.ListArray.from_arrays(ends, flat, mask=pa.array([v is None for v in values]))


def _vectors_column(values: list[np.ndarray | None], type: pa.ListType) -> pa.Array:
    """Converts arrays (N, D), whose N may differ, to `list<fixed_size_list<value>[D]>`."""
    dtype = type.value_type.value_type.to_pandas_dtype()
    flat = np.concatenate([v for v in values if v is not None]).astype(dtype, copy=False)
    if flat.shape[1] != type.value_type.list_size:
        raise ValueError(
            f"vectors must have {type.value_type.list_size} dimensions, got {flat.shape[1]}"
        )
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])
    return _lists(values, [0 if v is None else len(v) for v in values], vectors).cast(type)
