"""ColPali: a page as 32 x 32 patches through PaliGemma, projected (Faysse et al., 2024).

Checkpoints are those of transformers' own class, such as `vidore/colpali-v1.3-hf`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from PIL import Image
from transformers import ColPaliForRetrieval, ColPaliProcessor

from pipeline.config import SpecError
from pipeline.encoders.images import grid_extents
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.retrieval import Retrieval, RetrievalReader, RetrievalSpec
from pipeline.tokens import PROMPT, VISUAL


class ColPaliReader(RetrievalReader["ColPali.Spec"]):
    """A picture is squeezed into a square, so that each patch is a cell of the whole of it."""

    processor_class = ColPaliProcessor

    def __init__(self, spec: ColPali.Spec):
        super().__init__(spec)
        if self.processor.tokenizer.bos_token is None:
            rule = "a checkpoint whose tokenizer has a bos_token"
            raise SpecError("model", spec.model, rule, "has none")
        self.query_ends = (self.processor.tokenizer.bos_token, "\n")

    def shown(self, picture: Image.Image, start: float, stop: float) -> ModelInput:
        """The patches row by row, and the prompt behind them."""
        read = self.processor.process_images([picture], return_tensors="pt")
        is_visual = read["input_ids"][0] == self.processor.image_token_id
        side = math.isqrt(int(is_visual.sum()))
        extents = torch.full((len(is_visual), 6), torch.nan)
        extents[is_visual] = grid_extents(side, side, (start, stop))
        return ModelInput.of(
            {name: read[name][0] for name in ("input_ids", "token_type_ids")},
            {"pixel_values": read["pixel_values"]},
            torch.where(is_visual, VISUAL, PROMPT),
            keep=is_visual if self.spec.keep == "visual" else None,
            extents=extents,
        )

    def query_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tokens, and whether each sees those behind it."""
        # Zeros see each other. Without this input transformers 5.23 masks causally where its
        # attention is eager or a batch has padding, and else not at all.
        types = torch.full_like(ids, 0 if self.spec.bidirectional_queries else 1)
        return {"input_ids": ids, "token_type_ids": types}


class ColPali(Retrieval["ColPali.Spec"]):
    """ColPali's patches and prompt, 128 numbers each."""

    class Spec(RetrievalSpec):
        """Which checkpoint, and how queries and pictures are put to it.

        The prefix of a checkpoint's queries is transformers' "Question: "; the public engine of the
        paper's authors has none.

        Attributes:
            keep: "all" also keeps the tokens of the prompt, as the paper's model does; "visual"
                the patches alone.
            bidirectional_queries: whether a query's tokens see those behind them, which is
                transformers' reading; the public engine reads them causally.
        """

        name: Literal["colpali"] = "colpali"
        keep: Literal["all", "visual"] = "all"
        bidirectional_queries: bool = True

    model_class = ColPaliForRetrieval
    reader_class = ColPaliReader
