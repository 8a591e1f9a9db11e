"""Sources: where items come from.

Listing is cheap and stable; decoding is done only for what is new.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, ClassVar, Generic

import numpy as np
import pyarrow as pa

from pipeline.config import ComponentSpec, ComponentSpecT, digest
from pipeline.decoding import Unreadable
from pipeline.decoding.process import RETRYABLE
from pipeline.schema import ITEM, Item, Reject

#: The reason of items that have nothing to see or to hear.
NO_PREVIEW = "no preview"


class Source(ABC, Generic[ComponentSpecT]):
    """A collection of items, split into shards that are read independently.

    Subclasses carry a nested `Spec` with `name: Literal["..."]`, `path: Uri` and `collection`.
    Everything is picklable; paths are fsspec URIs. Two calls on an unchanged source give equal
    results in order.
    """

    Spec: ClassVar[type[ComponentSpec]]
    gives: ClassVar[tuple[str, ...]]  # what encoders can want of it, see `schema.PAYLOAD`
    payload: pa.Schema = pa.schema([])  # item columns behind `ITEM` that `decode` fills
    max_unit_items: int = 1_000_000  # decoded items that may be in memory together

    def __init__(self, spec: ComponentSpecT, wants: tuple[str, ...] = ("text",)):
        """Args: wants: what the encoder reads; nothing else is worth work."""
        self.spec, self.wants = spec, wants

    @classmethod
    def leaf_specs(cls, spec: ComponentSpecT) -> list[ComponentSpec]:
        """Returns the specs of the sources that a source consists of: its own, unless nested."""
        return [spec]

    def unit_limit(self, shard: dict[str, Any]) -> int:
        """How many decoded items of a shard may be in memory together."""
        return self.max_unit_items

    @property
    def keeps_listing(self) -> bool:
        """Whether listing again takes longer than reading the stored listing."""
        return False

    @property
    def collections(self) -> tuple[str, ...]:
        """Every value of its items' `source`."""
        return (self.collection,)

    @property
    def collection(self) -> str:
        """What the items' `source` says: the spec's `collection`, or the last part of its path.

        One index may hold several collections; an id belongs to the one that brought it first.
        """
        spec: Any = self.spec  # of one collection, thus with these fields
        return spec.collection or PurePosixPath(spec.path).name

    @abstractmethod
    def check(self) -> None:
        """Raises `SpecError` if there is nothing to read (missing path, empty folder, no ids)."""

    @abstractmethod
    def shards(self) -> Iterator[dict[str, Any]]:
        """Splits the source into parts of about a thousand items, described by JSON values."""

    @abstractmethod
    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Lists a shard in a stable order, payload left out; what cannot be listed is a reject."""

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Yields the given items with their payload, or rejects, in order.

        Args:
            shard: The shard, as `shards` yields it.
            items: (position, item) of listed items, positions ascending; the position in the scan
                of the shard counts rejects.
        """
        yield from (item for _, item in items)

    def reject(
        self, item_id: str, revision: str, error: Unreadable | OSError, stage: str
    ) -> Reject:
        """What is said of an item that cannot be read."""
        if isinstance(error, Unreadable):
            reason, detail = error.reason, error.detail
        else:
            reason, detail = "unreadable", str(error).encode("utf-8", "backslashreplace").decode()
        return Reject(
            item_id=item_id,
            source=self.collection,
            stage=stage,
            reason=reason,
            detail=detail[:500],
            revision=revision,
            retryable=reason in RETRYABLE,
        )

    def content_of(self, item: dict[str, Any]) -> str:
        """What a stored item's file holds now, in the form in which `revision_of` keeps it.

        Args:
            item: its row, with the metadata as a mapping.

        Raises:
            Unreadable, OSError: it has no file, or it cannot be read.
        """
        raise Unreadable(NO_PREVIEW, f"is a {item['modality']}, which has no file of its own")

    def picture(self, item: dict[str, Any], seconds: float | None = None) -> bytes:
        """What a stored item looks like, as an encoded picture: for previews.

        Args:
            item: its row, with the metadata as a mapping.
            seconds: of the parent, for what moves.

        Raises:
            Unreadable: it has no look, or its file cannot be read.
        """
        raise Unreadable(NO_PREVIEW, f"is a {item['modality']}, which has no picture")

    def sound(self, item: dict[str, Any]) -> tuple[np.ndarray, int, float]:
        """What a stored item sounds like: samples (S,), their rate, the second they start at.

        Raises:
            Unreadable: it has no sound, or its file cannot be read.
        """
        raise Unreadable(NO_PREVIEW, f"is a {item['modality']}, which has no sound")


def revision_of(settings: Any, content: Any) -> str:
    """A revision: a hash of all that bears on an item, and one of its file's content alone.

    By the second one who reads the file again later knows whether it is still the one that was
    indexed, whatever the settings were.
    """
    return f"{digest([settings, content])}.{digest(content)}"


def content_in(revision: str) -> str | None:
    """The hash of the content in a revision; None in one of an older version of this software.

    >>> content_in(revision_of({"dpi": 100}, "bytes")) == content_in(revision_of({}, "bytes"))
    True
    """
    return revision.partition(".")[2] or None


def items_table(items: Sequence[Item], payload: pa.Schema) -> pa.Table:
    """A table of items with the columns of `ITEM` and of `payload`.

    Equal to `pa.Table.from_pylist` of their rows, but arrays (N, D) in a payload column of vectors
    and Arrow arrays in one of lists are taken as they are, without a Python object for each number.

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
    if values and all(isinstance(v, np.ndarray) and v.ndim == 2 for v in values):
        return _vectors_column(values, type)
    if values and all(isinstance(v, pa.Array) for v in values):
        ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(ends), pa.concat_arrays(values)).cast(type)
    return pa.array(values, type)


def _vectors_column(arrays: Sequence[np.ndarray], type: pa.ListType) -> pa.Array:
    """Arrays (N, D) of any N -> `list<fixed_size_list<value>[D]>`."""
    dtype = type.value_type.value_type.to_pandas_dtype()
    flat = np.concatenate(arrays).astype(dtype, copy=False)
    if flat.shape[1] != type.value_type.list_size:
        raise ValueError(
            f"vectors of {flat.shape[1]} numbers, expected {type.value_type.list_size}"
        )
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])
    ends = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), vectors).cast(type)
