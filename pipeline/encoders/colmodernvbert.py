"""ColModernVBert: a page as tiles and as a whole through ModernVBERT, projected.

Checkpoints are those of transformers' own class, such as `ModernVBERT/colmodernvbert`.
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
from pipeline.tokens import PROMPT, VISUAL

#: The processor names tiles of at most so many rows and columns.
MOST_TILES = 6


class ColModernVBertReader(RetrievalReader["ColModernVBert.Spec"]):
    """A picture is cut into tiles, each seen in full resolution, and shown once more as a whole.

    A token of a tile has its place in the whole picture, so every spot is covered twice.
    """

    processor_class = ColModernVBertProcessor

    def shown(self, picture: Image.Image, start: float, stop: float) -> ModelInput:
        """The tokens of the tiles, row by row, then those of the whole picture."""
        read = self.processor.process_images([picture], return_tensors="pt")
        ids = read["input_ids"][0]
        is_visual = ids == self.processor.image_token_id
        boxes = self._boxes(ids)
        extents = torch.full((len(ids), 6), torch.nan)
        extents[is_visual] = torch.cat(boxes)
        extents[is_visual, 4], extents[is_visual, 5] = start, stop
        keep = torch.ones_like(is_visual) if self.spec.keep == "all" else is_visual.clone()
        if self.spec.keep == "tiles" and len(boxes) > 1:
            keep[is_visual.nonzero()[-len(boxes[-1]) :]] = False  # the whole comes last
        return ModelInput.of(
            {"input_ids": ids},
            {name: read[name][0] for name in ("pixel_values", "pixel_attention_mask")},
            torch.where(is_visual, VISUAL, PROMPT),
            keep=keep,
            extents=extents,
        )

    def _boxes(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """(T, 6) extents of the tokens of each tile, in order; the whole picture's come last."""
        side = math.isqrt(self.processor.image_seq_len)
        numbers = {number: tile for tile, number in enumerate(self.processor.row_col_ids)}
        tiles = [divmod(numbers[i], MOST_TILES) for i in ids.tolist() if i in numbers]
        whole = grid_extents(side, side)
        if not tiles:
            return [whole]
        rows, columns = (1 + max(number) for number in zip(*tiles, strict=True))
        scale = torch.tensor([columns, rows, columns, rows, 1, 1])
        shifts = (torch.tensor([c, r, c, r, 0, 0]) for r, c in tiles)
        return [*((whole + shift) / scale for shift in shifts), whole]


class ColModernVBert(Retrieval["ColModernVBert.Spec"]):
    """ColModernVBert's merged patches and prompt, 128 numbers each."""

    class Spec(RetrievalSpec):
        """Which checkpoint, and how queries and pictures are put to it.

        Attributes:
            keep: "all" also keeps the tokens of the prompt and the boundaries of tiles, as
                transformers does; "visual" the patches alone; "tiles" those of the tiles, which
                form one grid, without the picture as a whole (of a picture that is not cut: all).
        """

        name: Literal["colmodernvbert"] = "colmodernvbert"
        keep: Literal["all", "visual", "tiles"] = "all"

    model_class = ColModernVBertForRetrieval
    reader_class = ColModernVBertReader

    def attending(self) -> PreTrainedModel:
        """The language model, behind the vision tower."""
        return self.model.vlm.text_model

    def join_media(self, inputs: Sequence[ModelInput]) -> dict[str, torch.Tensor]:
        """The tiles of all pictures; where one has fewer than another, tiles of zeros are added.

        The model leaves those out.
        """
        read = [one.media for one in inputs if one.media]
        if not read:
            return {}
        return {
            name: torch.nn.utils.rnn.pad_sequence([one[name] for one in read], batch_first=True)
            for name in ("pixel_values", "pixel_attention_mask")
        }
