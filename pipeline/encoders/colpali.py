"""ColPali: pages as 32 x 32 patches through PaliGemma, projected (Faysse et al., 2024).

Checkpoints are those of the transformers class, such as `vidore/colpali-v1.3-hf`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from PIL import Image
from transformers import ColPaliForRetrieval, ColPaliProcessor

from pipeline.encoders.images import grid_extents
from pipeline.encoders.loading import check_tokenizer
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.retrieval import Retrieval, RetrievalReader, RetrievalSpec
from pipeline.encoders.tokenizing import TOKENIZER_LOCK
from pipeline.tokens import PROMPT, VISUAL


class ColPaliReader(RetrievalReader["ColPali.Spec"]):
    """Reader that resizes an image to a square, so that its patches form a regular grid."""

    processor_class = ColPaliProcessor

    def __init__(self, spec: ColPali.Spec):
        super().__init__(spec)
        check_tokenizer(spec.model, self.processor.tokenizer, "bos_token")
        self.query_affixes = (self.processor.tokenizer.bos_token, "\n")

    def read_image(self, image: Image.Image, start: float, stop: float) -> ModelInput:
        """Returns the patches in row-major order, followed by the prompt."""
        with TOKENIZER_LOCK:
            output = self.processor.process_images([image], return_tensors="pt")
        is_visual = output["input_ids"][0] == self.processor.image_token_id
        side = math.isqrt(int(is_visual.sum()))
        extents = torch.full((len(is_visual), 6), torch.nan)
        extents[is_visual] = grid_extents(side, side, (start, stop))
        return ModelInput.create(
            {name: output[name][0] for name in ("input_ids", "token_type_ids")},
            {"pixel_values": output["pixel_values"]},
            torch.where(is_visual, VISUAL, PROMPT),
            keep=is_visual if self.spec.output_tokens == "visual" else None,
            extents=extents,
        )

    def query_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the token ids and the token types, which select the attention mask."""
        # Type 0 is bidirectional. Without token types, transformers 5.23 uses causal attention if
        # the implementation is eager or the batch has padding, and bidirectional attention
        # otherwise.
        types = torch.full_like(ids, 0 if self.spec.bidirectional_queries else 1)
        return {"input_ids": ids, "token_type_ids": types}


class ColPali(Retrieval["ColPali.Spec"]):
    """Encoder with ColPali. Patches and prompt tokens have 128 dimensions each."""

    class Spec(RetrievalSpec):
        """Checkpoint, the tokens that are kept, and the attention mask of queries.

        The default query prefix is "Question: ", as in transformers. The authors' public engine
        uses none.
        """

        name: Literal["colpali"] = "colpali"
        output_tokens: Literal["all", "visual"] = "all"
        """"all" keeps patches and prompt tokens, as the paper does; "visual" only patches."""
        bidirectional_queries: bool = True
        """Use bidirectional attention in queries, as transformers does. The authors' public engine
        uses causal attention.
        """

    model_class = ColPaliForRetrieval
    reader_class = ColPaliReader
