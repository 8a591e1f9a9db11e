"""ColQwen2: a page in its own shape through Qwen2-VL, projected.

Checkpoints are those of transformers' own class, such as `vidore/colqwen2-v1.0-hf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from PIL import Image
from pydantic import Field
from transformers import ColQwen2ForRetrieval, ColQwen2Processor

from pipeline.decoding import Unreadable
from pipeline.encoders import Attention
from pipeline.encoders.loading import (
    CheckpointSpec,
    check_checkpoint,
    fingerprint_of,
    load_model,
    load_processor,
)
from pipeline.encoders.sequences import (
    ModelInput,
    Reader,
    SequenceEncoder,
    layers_of,
    make_bidirectional,
    names_of,
    pictures_of,
    raster,
    text_kinds,
)
from pipeline.tokens import PROMPT, VISUAL


class ColQwen2(SequenceEncoder):
    """One vector a merged patch of a picture, and one a token of the prompt around it.

    A picture keeps its shape: the processor scales it to at most `max_pixels` and sides that are
    multiples of its patches. Of what has several pictures each is read by itself.
    """

    class Spec(CheckpointSpec):
        """Which checkpoint, and how queries and pictures are put to it.

        Attributes:
            keep: "all" also keeps the tokens of the prompt, as transformers does; "visual" the
                patches alone.
            min_pixels, max_pixels: of a picture as the model sees it; null: the checkpoint's own.
            query_prefix: put before each query; null: the checkpoint's own.
            num_augmentation: tokens put behind each query, which count in MaxSim.
            bidirectional: whether all tokens see each other; the checkpoints are trained causally.
        """

        name: Literal["colqwen2"] = "colqwen2"
        keep: Literal["all", "visual"] = "all"
        min_pixels: int | None = Field(None, ge=1)
        max_pixels: int | None = Field(None, ge=1)
        query_prefix: str | None = None
        num_augmentation: int = Field(10, ge=0)
        bidirectional: bool = False

    normalised = True
    pooled_dim = None
    nothing = "no picture"
    padding_side = "left"

    def __init__(self, spec: Spec, device_map: str | None = None):
        super().__init__(spec, device_map)
        if spec.bidirectional:
            make_bidirectional(self.attending())
        self.dim = self.model.config.embedding_dim
        self.fingerprint = fingerprint_of(spec)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the checkpoint is not there, or is none of a ColQwen2."""
        check_checkpoint(spec, "colqwen2")
        cls.reader(spec)

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Pictures, and the frames of videos."""
        return ("image", "frames")

    @classmethod
    def attention(cls, spec: Spec) -> Attention:
        """Column sums, and the row of the last token; it has no pooled vector."""
        settings = check_checkpoint(spec, "colqwen2").vlm_config.text_config
        return layers_of(settings, ("column_sums", "eos_row"))

    @classmethod
    def query_kinds(cls, spec: Spec) -> tuple[str, ...]:
        """A picture is read as a page is."""
        return ("text", "image")

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> ColQwen2ForRetrieval:
        """The model."""
        return load_model(spec, ColQwen2ForRetrieval, device_map)

    @classmethod
    def reader(cls, spec: Spec) -> ColQwen2Reader:
        """What reads pictures and queries."""
        return ColQwen2Reader(spec)

    def attending(self) -> torch.nn.Module:
        """The language model, behind the vision tower."""
        return self.model.vlm.language_model

    def joined(self, inputs: list[ModelInput]) -> dict[str, torch.Tensor]:
        """The pixels of all pictures, padded to the largest, which the model takes apart again."""
        read = [one for one in inputs if one.media]
        if not read:
            return {}
        pixels = [one.media["pixel_values"] for one in read]
        return {
            "pixel_values": torch.nn.utils.rnn.pad_sequence(pixels, batch_first=True),
            "image_grid_thw": torch.cat([one.media["image_grid_thw"] for one in read]),
        }

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The projected states."""
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        return self.model(**inputs).embeddings, None


class ColQwen2Reader(Reader):
    """Pictures and queries through the checkpoint's processor."""

    def __init__(self, spec: ColQwen2.Spec):
        super().__init__(spec)
        bounds = {"min_pixels": spec.min_pixels, "max_pixels": spec.max_pixels}
        given = {name: value for name, value in bounds.items() if value is not None}
        self.processor = load_processor(spec, ColQwen2Processor, **given)
        if spec.query_prefix is not None:
            self.processor.query_prefix = spec.query_prefix

    def item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """A sequence a picture.

        Raises:
            Unreadable: a picture is too long and narrow for the model's patches.
        """
        return [self._picture(*shown) for shown in pictures_of(item)]

    def _picture(self, picture: Image.Image, start: float, stop: float) -> ModelInput:
        try:
            read = self.processor(images=[picture], return_tensors="pt")
        except ValueError as error:
            raise Unreadable("picture not legal for the model", str(error)) from None
        ids = read["input_ids"][0]
        is_visual = ids == self.processor.image_token_id
        merge = self.processor.image_processor.merge_size
        _, rows, columns = (read["image_grid_thw"][0] // torch.tensor([1, merge, merge])).tolist()
        extents = torch.full((len(ids), 6), torch.nan)
        extents[is_visual] = raster(rows, columns, (start, stop))
        return ModelInput.of(
            {"input_ids": ids},
            {"pixel_values": read["pixel_values"][0], "image_grid_thw": read["image_grid_thw"]},
            torch.where(is_visual, VISUAL, PROMPT),
            keep=is_visual if self.spec.keep == "visual" else None,
            extents=extents,
        )

    def picture(self, picture: Image.Image) -> tuple[ModelInput, list[str]]:
        """A query picture, read as a page is."""
        read = self._picture(picture, torch.nan, torch.nan)
        return read, names_of(self.processor.tokenizer, read)

    def text(self, text: str) -> tuple[ModelInput, list[str]]:
        """A query with its prefix, and augmentation tokens behind it."""
        suffix = self.processor.query_augmentation_token * self.spec.num_augmentation
        read = self.processor(text=[text], suffix=suffix, return_tensors="pt")
        ids = read["input_ids"][0]
        query = ModelInput.of({"input_ids": ids}, {}, text_kinds(self.processor.tokenizer, ids))
        return query, names_of(self.processor.tokenizer, query)
