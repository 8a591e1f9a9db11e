"""ColQwen2: a page in its own shape through Qwen2-VL, projected.

Checkpoints are those of transformers' own class, such as `vidore/colqwen2-v1.0-hf`. As that class
does, tokens have plain positions, one after the other; the public engine of the model's authors
gives the patches of a picture positions in three dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from PIL import Image
from pydantic import Field
from transformers import ColQwen2ForRetrieval, ColQwen2Processor

from pipeline.decoding import Unreadable
from pipeline.encoders.images import grid_extents
from pipeline.encoders.layers import make_bidirectional
from pipeline.encoders.loading import check_patches
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.retrieval import Retrieval, RetrievalReader, RetrievalSpec
from pipeline.tokens import PROMPT, VISUAL


class ColQwen2Reader(RetrievalReader["ColQwen2.Spec"]):
    """A picture is scaled to sides that are multiples of its patches."""

    processor_class = ColQwen2Processor
    query_ends = ("", "\n")

    def __init__(self, spec: ColQwen2.Spec):
        bounds = {"min_pixels": spec.min_pixels, "max_pixels": spec.max_pixels}
        given = {name: value for name, value in bounds.items() if value is not None}
        super().__init__(spec, **given)
        check_patches(spec, self.processor.image_processor, self.settings.vision_config)

    def shown(self, picture: Image.Image, start: float, stop: float) -> ModelInput:
        """The merged patches row by row, between the parts of the prompt.

        Raises:
            Unreadable: the picture is too long and narrow.
        """
        try:
            read = self.processor.process_images([picture], return_tensors="pt")
        except ValueError as error:
            raise Unreadable("picture not legal for the model", str(error)) from None
        ids = read["input_ids"][0]
        is_visual = ids == self.processor.image_token_id
        merge = self.processor.image_processor.merge_size
        _, rows, columns = (read["image_grid_thw"][0] // torch.tensor([1, merge, merge])).tolist()
        extents = torch.full((len(ids), 6), torch.nan)
        extents[is_visual] = grid_extents(rows, columns, (start, stop))
        return ModelInput.of(
            {"input_ids": ids},
            {"pixel_values": read["pixel_values"][0], "image_grid_thw": read["image_grid_thw"]},
            torch.where(is_visual, VISUAL, PROMPT),
            keep=is_visual if self.spec.keep == "visual" else None,
            extents=extents,
        )


class ColQwen2(Retrieval["ColQwen2.Spec"]):
    """ColQwen2's merged patches and prompt, 128 numbers each."""

    class Spec(RetrievalSpec):
        """Which checkpoint, and how queries and pictures are put to it.

        Attributes:
            keep: "all" also keeps the tokens of the prompt, as transformers does; "visual" the
                patches alone.
            min_pixels, max_pixels: of a picture as the model sees it; null: the checkpoint's own.
            bidirectional: whether all tokens see each other; the checkpoints are trained causally.
        """

        name: Literal["colqwen2"] = "colqwen2"
        keep: Literal["all", "visual"] = "all"
        min_pixels: int | None = Field(None, ge=1)
        max_pixels: int | None = Field(None, ge=1)
        bidirectional: bool = False

    model_class = ColQwen2ForRetrieval
    reader_class = ColQwen2Reader
    padding_side = "left"

    def __init__(self, spec: Spec, device_map: str | None = None):
        super().__init__(spec, device_map)
        if spec.bidirectional:
            make_bidirectional(self.attending())

    def join_media(self, inputs: Sequence[ModelInput]) -> dict[str, torch.Tensor]:
        """The pixels of all pictures, padded to the largest, which the model takes apart again."""
        read = [one.media for one in inputs if one.media]
        if not read:
            return {}
        pixels = [media["pixel_values"] for media in read]
        return {
            "pixel_values": torch.nn.utils.rnn.pad_sequence(pixels, batch_first=True),
            "image_grid_thw": torch.cat([media["image_grid_thw"] for media in read]),
        }
