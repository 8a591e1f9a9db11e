"""ColPali: a page as 32 x 32 patches through PaliGemma, projected (Faysse et al., 2024).

Checkpoints are those of transformers' own class, such as `vidore/colpali-v1.3-hf`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from PIL import Image
from pydantic import Field
from transformers import ColPaliForRetrieval, ColPaliProcessor

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
    names_of,
    pictures_of,
    raster,
    text_kinds,
)
from pipeline.tokens import PROMPT, VISUAL

NAMES = ("input_ids", "token_type_ids")


class ColPali(SequenceEncoder):
    """One vector a patch of a picture, and one a token of the prompt behind it.

    A picture is squeezed into a square, so a patch of the grid is a cell of the whole page. Of what
    has several pictures (the frames of a video) each is read by itself.
    """

    class Spec(CheckpointSpec):
        """Which checkpoint, and how queries and pictures are put to it.

        Attributes:
            keep: "all" also keeps the tokens of the prompt, as the paper's model does; "visual"
                the patches alone.
            query_prefix: put before each query; null: the checkpoint's own. The public engine of
                the paper's authors has none, transformers has "Question: ".
            num_augmentation: tokens put behind each query, which count in MaxSim.
            bidirectional_queries: whether a query's tokens see those behind them, which is
                transformers' reading; the public engine reads them causally.
        """

        name: Literal["colpali"] = "colpali"
        keep: Literal["all", "visual"] = "all"
        query_prefix: str | None = None
        num_augmentation: int = Field(10, ge=0)
        bidirectional_queries: bool = True

    normalised = True
    pooled_dim = None
    nothing = "no picture"

    def __init__(self, spec: Spec, device_map: str | None = None):
        super().__init__(spec, device_map)
        self.dim = self.model.config.embedding_dim
        self.fingerprint = fingerprint_of(spec)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the checkpoint is not there, or is none of a ColPali."""
        check_checkpoint(spec, "colpali")
        cls.reader(spec)

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Pictures, and the frames of videos."""
        return ("image", "frames")

    @classmethod
    def attention(cls, spec: Spec) -> Attention:
        """Column sums, and the row of the last token; it has no pooled vector."""
        settings = check_checkpoint(spec, "colpali").vlm_config.text_config
        return layers_of(settings, ("column_sums", "eos_row"))

    @classmethod
    def query_kinds(cls, spec: Spec) -> tuple[str, ...]:
        """A picture is read as a page is."""
        return ("text", "image")

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> ColPaliForRetrieval:
        """The model."""
        return load_model(spec, ColPaliForRetrieval, device_map)

    @classmethod
    def reader(cls, spec: Spec) -> ColPaliReader:
        """What reads pictures and queries."""
        return ColPaliReader(spec)

    def attending(self) -> torch.nn.Module:
        """The language model, behind the vision tower."""
        return self.model.vlm.language_model

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The projected states."""
        return self.model(**inputs).embeddings, None


class ColPaliReader(Reader):
    """Pictures and queries through the checkpoint's processor."""

    def __init__(self, spec: ColPali.Spec):
        super().__init__(spec)
        self.processor = load_processor(spec, ColPaliProcessor)
        if spec.query_prefix is not None:
            self.processor.query_prefix = spec.query_prefix

    def item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """A sequence a picture."""
        return [self._picture(*shown) for shown in pictures_of(item)]

    def _picture(self, picture: Image.Image, start: float, stop: float) -> ModelInput:
        read = self.processor(images=[picture], return_tensors="pt")
        is_visual = read["input_ids"][0] == self.processor.image_token_id
        side = math.isqrt(int(is_visual.sum()))
        extents = torch.full((len(is_visual), 6), torch.nan)
        extents[is_visual] = raster(side, side, (start, stop))
        return ModelInput.of(
            {name: read[name][0] for name in NAMES},
            {"pixel_values": read["pixel_values"]},
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
        # Zeros see each other. Without this input transformers 5.23 masks causally where its
        # attention is eager or a batch has padding, and else not at all.
        types = torch.full_like(ids, 0 if self.spec.bidirectional_queries else 1)
        query = ModelInput.of(
            {"input_ids": ids, "token_type_ids": types},
            {},
            text_kinds(self.processor.tokenizer, ids),
        )
        return query, names_of(self.processor.tokenizer, query)
