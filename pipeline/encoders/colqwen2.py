"""ColQwen2: pages in their aspect ratio through Qwen2-VL, projected.

Checkpoints are those of the transformers class, such as `vidore/colqwen2-v1.0-hf`. As in that
class, tokens have consecutive positions. The authors' public engine uses three-dimensional
positions for image patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from PIL import Image
from pydantic import Field
from transformers import ColQwen2ForRetrieval, ColQwen2Processor

from pipeline.data.decode import Unreadable
from pipeline.encoders.images import grid_extents
from pipeline.encoders.layers import make_bidirectional
from pipeline.encoders.loading import check_patches
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.retrieval import Retrieval, RetrievalReader, RetrievalSpec
from pipeline.encoders.tokenizing import TOKENIZER_LOCK
from pipeline.tokens import PROMPT, VISUAL


class ColQwen2Reader(RetrievalReader["ColQwen2.Spec"]):
    """Reader that resizes an image to multiples of the patch size."""

    processor_class = ColQwen2Processor
    query_affixes = ("", "\n")

    def __init__(self, spec: ColQwen2.Spec):
        limits = {"min_pixels": spec.min_pixels, "max_pixels": spec.max_pixels}
        options = {name: value for name, value in limits.items() if value is not None}
        super().__init__(spec, **options)
        check_patches(spec, self.processor.image_processor, self.settings.vision_config)

    def read_image(self, image: Image.Image, start: float, stop: float) -> ModelInput:
        """Returns the merged patches in row-major order, between the parts of the prompt."""
        try:
            with TOKENIZER_LOCK:
                output = self.processor.process_images([image], return_tensors="pt")
        except ValueError as error:
            raise Unreadable("image not supported by the model", str(error)) from None
        ids = output["input_ids"][0]
        is_visual = ids == self.processor.image_token_id
        merge = self.processor.image_processor.merge_size
        _, rows, columns = (output["image_grid_thw"][0] // torch.tensor([1, merge, merge])).tolist()
        extents = torch.full((len(ids), 6), torch.nan)
        extents[is_visual] = grid_extents(rows, columns, (start, stop))
        return ModelInput.create(
            {"input_ids": ids},
            {"pixel_values": output["pixel_values"][0], "image_grid_thw": output["image_grid_thw"]},
            torch.where(is_visual, VISUAL, PROMPT),
            keep=is_visual if self.spec.output_tokens == "visual" else None,
            extents=extents,
        )


class ColQwen2(Retrieval["ColQwen2.Spec"]):
    """Encoder with ColQwen2. Merged patches and prompt tokens have 128 dimensions each."""

    class Spec(RetrievalSpec):
        """Checkpoint, the tokens that are kept, the image size and the attention mask."""

        name: Literal["colqwen2"] = "colqwen2"
        output_tokens: Literal["all", "visual"] = "all"
        """"all" keeps patches and prompt tokens, as transformers does; "visual" only patches."""
        min_pixels: int | None = Field(None, ge=1)
        """Minimum number of pixels per image after resizing. If null, the checkpoint's value is
        used."""
        max_pixels: int | None = Field(None, ge=1)
        """Maximum number of pixels per image after resizing. If null, the checkpoint's value is
        used."""
        bidirectional: bool = False
        """Use bidirectional attention. The checkpoints are trained with causal attention."""

    model_class = ColQwen2ForRetrieval
    reader_class = ColQwen2Reader
    padding_side = "left"

    def __init__(self, spec: Spec, device_map: str | None = None):
        super().__init__(spec, device_map)
        if spec.bidirectional:
            make_bidirectional(self.attention_module())

    def join_media(self, inputs: Sequence[ModelInput]) -> dict[str, torch.Tensor]:
        """Stacks the pixels of all images. The model removes the padding."""
        images = [sequence.media for sequence in inputs if sequence.media]
        if not images:
            return {}
        pixels = [media["pixel_values"] for media in images]
        return {
            "pixel_values": torch.nn.utils.rnn.pad_sequence(pixels, batch_first=True),
            "image_grid_thw": torch.cat([media["image_grid_thw"] for media in images]),
        }
