"""Base of the readers, which turn items and queries into model inputs without the weights."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic

import pyarrow as pa
import torch
from PIL import Image

from pipeline.config import SpecError
from pipeline.encoders.loading import CheckpointSpecT
from pipeline.encoders.model_inputs import ModelInput, pack
from pipeline.schema import PAYLOAD

#: Column that holds the model inputs of an item.
READ = "model_inputs"


class Reader(ABC, Generic[CheckpointSpecT]):
    """Turns items and queries into the inputs of a model family."""

    processor: Any  # of the transformers library; saved with a trained model

    def __init__(self, spec: CheckpointSpecT):
        self.spec = spec

    @abstractmethod
    def item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """Returns the sequences of an item, in order; none if it has nothing that the model reads.

        Raises:
            Unreadable: The item cannot be read, or not by this model.
        """

    @abstractmethod
    def text(self, text: str) -> tuple[ModelInput, list[str]]:
        """Returns the sequence of a query text, and a name for each kept position.

        Raises:
            SpecError: The text has more tokens than the model reads.
        """

    def picture(self, picture: Image.Image) -> tuple[ModelInput, list[str]]:
        """Returns the sequence of a query image, and a name for each kept position.

        Raises:
            SpecError: The model reads no image queries, or not this one.
        """
        raise SpecError("query", "an image", "a text", f"is not supported by {self.spec.name}")

    def composed(self, text: str, picture: Image.Image) -> tuple[ModelInput, list[str]]:
        """Returns the sequence of a query text and an image, and a name for each kept position.

        Raises:
            SpecError: The model reads no such queries, or not this one.
        """
        raise SpecError(
            "query", text, "a text", f"cannot be combined with an image in {self.spec.name}"
        )

    def note(self, item: Mapping[str, Any], read: Sequence[ModelInput]) -> dict[str, Any]:
        """Returns metadata about the content of an item that is missing from its sequences."""
        return {}

    def _lean(self, read: ModelInput) -> ModelInput:
        """Returns the input with pixels in the model's dtype, which halves their size."""
        dtype = getattr(torch, self.spec.dtype)
        media = {
            name: tensor.to(dtype) if name.startswith("pixel_values") else tensor
            for name, tensor in read.media.items()
        }
        return replace(read, media=media)

    def prepare(self, items: pa.Table) -> pa.Table:
        """Adds the column `model_inputs` and notes in the metadata; drops the columns it read."""
        there = [c.name for columns in PAYLOAD.values() for c in columns]
        payload = [name for name in there if name in items.column_names and name != "caption"]
        read = ["text", "span", *payload]
        names = [name for name in dict.fromkeys(read) if name in items.column_names]
        # Row by row: the images of one item may be large.
        values, notes = [], []
        for row in range(items.num_rows):
            item = {name: items[name][row].as_py() for name in names}
            inputs = self.item(item)
            values.append(pack(map(self._lean, inputs)))
            notes.append(self.note(item, inputs))
        items = with_notes(items, notes).drop_columns(
            [name for name in payload if name != "item_id"]
        )
        return items.append_column(READ, pa.array(values, pa.large_binary()))


def with_notes(items: pa.Table, notes: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Returns items with notes added to the metadata of each, if they have that column."""
    if "metadata" not in items.column_names or not any(notes):
        return items
    metadata = [
        json.dumps({**json.loads(before or "{}"), **note}, ensure_ascii=False) if note else before
        for before, note in zip(items["metadata"].to_pylist(), notes, strict=True)
    ]
    place = items.column_names.index("metadata")
    return items.set_column(place, items.field(place), pa.array(metadata, pa.string()))
