"""ColModernVBert: image tiles and the downscaled image through ModernVBERT, projected.

Checkpoints are those of the transformers class, such as `ModernVBERT/colmodernvbert`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from PIL import Image
from transformers import ColModernVBertForRetrieval, ColModernVBertProcessor, PreTrainedModel

from pipeline.encoders.images import grid_extents
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.retrieval import Retrieval, RetrievalReader, RetrievalSpec
from pipeline.encoders.tokenizing import TOKENIZER_LOCK
from pipeline.tokens import PROMPT, VISUAL

#: Maximum number of rows and columns of tiles with names in the processor.
MAX_TILES = 6


class ColModernVBertReader(RetrievalReader["ColModernVBert.Spec"]):
    """Reader that splits an image into full-resolution tiles and appends the downscaled image.

    Extents are relative to the whole image, so each location is covered twice.
    """

    processor_class = ColModernVBertProcessor

    def read_image(self, image: Image.Image, start: float, stop: float) -> ModelInput:
        """Returns the tokens of all tiles in row-major order, followed by the downscaled image."""
        with TOKENIZER_LOCK:
            output = self.processor.process_images([image], return_tensors="pt")
        ids = output["input_ids"][0]
        is_visual = ids == self.processor.image_token_id
        boxes = self._boxes(ids)
        extents = torch.full((len(ids), 6), torch.nan)
        extents[is_visual] = torch.cat(boxes)
        extents[is_visual, 4], extents[is_visual, 5] = start, stop
        keep = torch.ones_like(is_visual) if self.spec.output_tokens == "all" else is_visual.clone()
        if self.spec.output_tokens == "tiles" and len(boxes) > 1:
            keep[is_visual.nonzero()[-len(boxes[-1]) :]] = False  # the downscaled image is last
        return ModelInput.create(
            {"input_ids": ids},
            {name: output[name][0] for name in ("pixel_values", "pixel_attention_mask")},
            torch.where(is_visual, VISUAL, PROMPT),
            keep=keep,
            extents=extents,
        )

    def _boxes(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Returns the extents (T, 6) of the tokens of each tile, then of the downscaled image."""
        side = math.isqrt(self.processor.image_seq_len)
        numbers = {number: tile for tile, number in enumerate(self.processor.row_col_ids)}
        tiles = [divmod(numbers[i], MAX_TILES) for i in ids.tolist() if i in numbers]
        whole = grid_extents(side, side)
        if not tiles:
            return [whole]
        rows, columns = (1 + max(indices) for indices in zip(*tiles, strict=True))
        scale = torch.tensor([columns, rows, columns, rows, 1, 1])
        shifts = (torch.tensor([c, r, c, r, 0, 0]) for r, c in tiles)
        return [*((whole + shift) / scale for shift in shifts), whole]


class ColModernVBert(Retrieval["ColModernVBert.Spec"]):
    """Encoder with ColModernVBert. Merged patches and prompt tokens have 128 dimensions each."""

    class Spec(RetrievalSpec):
        """Checkpoint, and the tokens that are kept."""

        name: Literal["colmodernvbert"] = "colmodernvbert"
        output_tokens: Literal["all", "visual", "tiles"] = "all"
        """"all" keeps patches, prompt and tile boundaries, as transformers does. "visual" keeps
        only patches. "tiles" keeps only patches of tiles, which form one grid, without the
        downscaled image. An image that is not split keeps all its patches.
        """

    model_class = ColModernVBertForRetrieval
    reader_class = ColModernVBertReader

    def attention_module(self) -> PreTrainedModel:
        """Returns the language model."""
        return self.model.vlm.text_model

    def join_media(self, inputs: Sequence[ModelInput]) -> dict[str, torch.Tensor]:
        """Stacks the tiles of all images, padded with zero tiles, which the model ignores."""
        images = [sequence.media for sequence in inputs if sequence.media]
        if not images:
            return {}
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                [media[name] for media in images], batch_first=True
            )
            for name in ("pixel_values", "pixel_attention_mask")
        }
