"""Base class of readers, which convert items and queries to model inputs without weights."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Self

import pyarrow as pa
import torch
from PIL import Image

from pipeline.encoders.images import png_file
from pipeline.encoders.loading import CheckpointSpecT
from pipeline.encoders.model_inputs import ModelInput, pack
from pipeline.encoders.templates import (
    DEFAULT_INSTRUCTION,
    Templates,
    image_template,
    text_template,
)
from pipeline.encoders.tokenizing import token_names
from pipeline.runtime.progress import counted_rows
from pipeline.schema import PAYLOAD
from pipeline.tokens import VISUAL

#: Column of the serialised model inputs of an item.
MODEL_INPUTS = "model_inputs"


class Reader(ABC, Generic[CheckpointSpecT]):
    """Base class of the preprocessing of a model family."""

    processor: Any  # processor of transformers, saved with a trained model
    tokenizer: Any  # tokenizer of texts
    instruction = DEFAULT_INSTRUCTION

    def __init__(self, spec: CheckpointSpecT):
        self.spec = spec

    def with_instruction(self, instruction: str) -> Self:
        """Returns the reader with another instruction in the template of queries."""
        instructed = copy.copy(self)
        instructed.instruction = instruction
        return instructed

    def save(self, folder: Path) -> None:
        """Saves the preprocessing files with a trained model."""
        self.processor.save_pretrained(folder)

    @abstractmethod
    def read_item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """Returns the sequences of an item. There are none if the item cannot be read.

        Raises:
            Unreadable: The item cannot be read by this model.
        """

    @abstractmethod
    def read_text_query(self, text: str) -> tuple[ModelInput, list[str]]:
        """Returns the sequence of a text query and the name of each token.

        Raises:
            SpecError: The text exceeds the token limit of the model.
        """

    def read_media_query(self, query: Mapping[str, Any]) -> tuple[list[ModelInput], list[str]]:
        """Returns the sequences of a query with media and the name of each token.

        By default, they are those of an item with the same content.

        Raises:
            Unreadable: The model cannot read the query.
        """
        sequences = self.read_item(query)
        return sequences, [n for inputs in sequences for n in token_names(self.tokenizer, inputs)]

    def templates(self, inputs: Collection[str]) -> Templates:
        """Returns the templates of queries and items, derived from their token ids."""

        def decode(ids: list[int]) -> str:
            return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

        def item_ids(text: str) -> list[int]:
            return self.read_item({"text": text})[0].sequence["input_ids"].tolist()

        def query_ids(text: str) -> list[int]:
            return self.read_text_query(text)[0].sequence["input_ids"].tolist()

        image = None
        if "image" in inputs:
            sequence = self.read_item({"image": png_file(Image.new("RGB", (64, 64)))})[0]
            ids = sequence.sequence.get("input_ids", sequence.kind)  # towers have no text tokens
            is_visual = sequence.kind == VISUAL if "input_ids" in sequence.sequence else ids >= 0
            image = image_template("{image}", ids.tolist(), is_visual.tolist(), decode)
        return Templates(
            text_template("{query}", query_ids, decode),
            text_template("{text}", item_ids, decode) if "text" in inputs else None,
            image,
        )

    def read_note(self, item: Mapping[str, Any], inputs: Sequence[ModelInput]) -> dict[str, Any]:
        """Returns metadata about content of an item that its sequences omit."""
        return {}

    def _cast_pixels(self, inputs: ModelInput) -> ModelInput:
        """Casts pixels to the dtype of the model, which halves their size in half precision."""
        dtype = getattr(torch, self.spec.dtype)
        media = {
            name: tensor.to(dtype) if name.startswith("pixel_values") else tensor
            for name, tensor in inputs.media.items()
        }
        return replace(inputs, media=media)

    def prepare(self, items: pa.Table) -> pa.Table:
        """Adds the column `model_inputs`, and the notes of the reader to the metadata.

        The columns with the content of images, audio and video are dropped.
        """
        known = [column.name for columns in PAYLOAD.values() for column in columns]
        payload = [name for name in known if name in items.column_names and name != "caption"]
        names = [
            name for name in dict.fromkeys(["text", "span", *payload]) if name in items.column_names
        ]
        # One row at a time, because the images of one item may be large.
        values, notes = [], []
        for row in counted_rows(items):
            item = {name: items[name][row].as_py() for name in names}
            inputs = self.read_item(item)
            values.append(pack(map(self._cast_pixels, inputs)))
            notes.append(self.read_note(item, inputs))
        items = add_notes(items, notes).drop_columns(
            [name for name in payload if name != "item_id"]
        )
        return items.append_column(MODEL_INPUTS, pa.array(values, pa.large_binary()))


def add_notes(items: pa.Table, notes: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Adds notes to the metadata of items, if they have that column."""
    if "metadata" not in items.column_names or not any(notes):
        return items
    metadata = [
        json.dumps({**json.loads(before or "{}"), **note}, ensure_ascii=False) if note else before
        for before, note in zip(items["metadata"].to_pylist(), notes, strict=True)
    ]
    index = items.column_names.index("metadata")
    return items.set_column(index, items.field(index), pa.array(metadata, pa.string()))
