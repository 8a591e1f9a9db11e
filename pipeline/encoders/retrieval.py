"""What transformers' classes for visual retrieval have in common: `ColPaliForRetrieval` and others.

Each is a vision-language model with a projection (`embedding_proj_layer`), whose output has the
token vectors as `embeddings`, and a processor with `process_images` and `process_queries`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from PIL import Image
from pydantic import Field, field_validator
from transformers import PreTrainedModel, ProcessorMixin

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders import Attention
from pipeline.encoders.images import item_images
from pipeline.encoders.layers import attention_info
from pipeline.encoders.loading import (
    NOT_IN_FINGERPRINTS,
    PROCESSOR_FILES,
    SETTINGS,
    TOKENIZER_FILES,
    WEIGHTS,
    CheckpointSpec,
    check_checkpoint,
    fingerprint_of,
    folder_of,
    hashed,
    linear_in,
    load_model,
    load_processor,
    require_one_of,
    settings_of,
)
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.reader import Reader
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.encoders.tokenizing import ids_between, text_kinds, token_names


class RetrievalSpec(CheckpointSpec):
    """How queries are put to a model.

    Attributes:
        query_prefix: put before each query; null: the checkpoint's own.
        num_augmentation: tokens put behind each query, which count in MaxSim.
        projection: a folder with another projection in a safetensors file, `weight` and perhaps
            `bias`, as training writes it; null: the checkpoint's own.
    """

    query_prefix: str | None = None
    num_augmentation: int = Field(10, ge=0)
    projection: str | None = None

    @field_validator("projection")
    @classmethod
    def _make_projection_absolute(cls, projection: str | None) -> str | None:
        return None if projection is None else config.absolute(projection)


RetrievalSpecT = TypeVar("RetrievalSpecT", bound=RetrievalSpec)


class Retrieval(SequenceEncoder[RetrievalSpecT]):
    """One vector a token of a picture, and one a token of the prompt around it.

    Of what has several pictures, such as the frames of a video, each is read by itself. A picture
    as a query is read as a page is.
    """

    model_class: ClassVar[Any]  # of the transformers library
    reader_class: ClassVar[type[RetrievalReader[Any]]]

    normalised = True
    pooled_dim = None
    nothing = "no picture"
    has_projection = True

    def __init__(self, spec: RetrievalSpecT, device_map: str | None = None):
        super().__init__(spec, device_map)
        self.dim = self.projection.out_features
        own = {"projection": hashed(Path(spec.projection), WEIGHTS)} if spec.projection else {}
        # Without one the hash is that of a spec which does not know of projections.
        self.fingerprint = fingerprint_of(spec, (*NOT_IN_FINGERPRINTS, "projection"), **own)

    @classmethod
    def check(cls, spec: RetrievalSpecT) -> None:
        """Raises `SpecError` if the checkpoint is not there, or is one of another class."""
        settings = check_checkpoint(spec, cls.model_class.config_class.model_type)
        if spec.projection:
            width = settings.vlm_config.text_config.hidden_size
            linear_in(Path(spec.projection), width, "projection", spec.projection)
        cls.reader(spec)

    @classmethod
    def wants(cls, spec: RetrievalSpecT) -> tuple[str, ...]:
        """Pictures, and the frames of videos."""
        return ("image", "frames")

    @classmethod
    def attention(cls, spec: RetrievalSpecT) -> Attention:
        """Column sums, and the row of the last token; it has no pooled vector."""
        settings = check_checkpoint(spec, cls.model_class.config_class.model_type)
        return attention_info(settings.vlm_config.text_config, ("column_sums", "eos_row"))

    @classmethod
    def query_kinds(cls, spec: RetrievalSpecT) -> tuple[str, ...]:
        """Texts and pictures."""
        return ("text", "image")

    @classmethod
    def load(cls, spec: RetrievalSpecT, device_map: str | None) -> PreTrainedModel:
        """The model, with the spec's projection if it names one."""
        model = load_model(spec, cls.model_class, device_map)
        if spec.projection:
            own: Any = model.embedding_proj_layer
            folder = Path(spec.projection)
            layer = linear_in(folder, own.in_features, "projection", spec.projection)
            model.embedding_proj_layer = layer.to(own.weight.device, own.weight.dtype).eval()
        return model

    @classmethod
    def reader(cls, spec: RetrievalSpecT) -> RetrievalReader[RetrievalSpecT]:
        """What reads pictures and queries."""
        return cls.reader_class(spec)

    def attending(self) -> PreTrainedModel:
        """The language model, behind the vision tower."""
        return self.model.vlm.language_model

    @property
    def projection(self) -> torch.nn.Linear:
        """Behind the language model."""
        return self.model.embedding_proj_layer

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The projected states."""
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        return self.model(**inputs).embeddings, None


class RetrievalReader(Reader[RetrievalSpecT]):
    """Pictures and queries through the checkpoint's processor.

    A query is put together as the processor does it, but for this: special tokens that are spelled
    out in it are its own characters. The processor would take a picture's for a picture.

    Args:
        options: of the processor.
    """

    processor_class: ClassVar[type[ProcessorMixin]]
    #: What stands before the prefix of a query, and behind its augmentation tokens.
    query_ends: tuple[str, str] = ("", "")

    def __init__(self, spec: RetrievalSpecT, **options: Any):
        super().__init__(spec)
        for files in (PROCESSOR_FILES, TOKENIZER_FILES):
            require_one_of(spec, files)
        self.settings = settings_of(spec, folder_of(spec, SETTINGS)).vlm_config
        self.most = self.settings.text_config.max_position_embeddings
        self.processor = processor = load_processor(spec, self.processor_class, **options)
        if spec.query_prefix is not None:
            processor.query_prefix = spec.query_prefix
        if processor.query_augmentation_token is None:
            rule = "a checkpoint whose tokenizer has a pad_token"
            raise SpecError("model", spec.model, rule, "has none")

    @abstractmethod
    def shown(self, picture: Image.Image, start: float, stop: float) -> ModelInput:
        """A picture that is shown from one second to another, NaN if it has no time.

        Raises:
            Unreadable: it is none for this model.
        """

    def item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """A sequence a picture.

        Raises:
            Unreadable: one is none for this model.
        """
        return [self.shown(*shown) for shown in item_images(item)]

    def picture(self, picture: Image.Image) -> tuple[ModelInput, list[str]]:
        """A query picture, read as a page is."""
        read = self.shown(picture, torch.nan, torch.nan)
        return read, token_names(self.processor.tokenizer, read)

    def text(self, text: str) -> tuple[ModelInput, list[str]]:
        """A query with its prefix, and augmentation tokens behind it.

        Raises:
            SpecError: the model has no place for that many tokens.
        """
        processor, (first, last) = self.processor, self.query_ends
        suffix = processor.query_augmentation_token * self.spec.num_augmentation
        tokenizer = processor.tokenizer
        ids = ids_between(tokenizer, first + processor.query_prefix, text, suffix + last)
        if len(ids) > self.most:
            rule = f"a text of at most {self.most} tokens with the prompt"
            raise SpecError("query", text, rule, f"has {len(ids)} tokens")
        query = ModelInput.of(self.query_inputs(ids), {}, text_kinds(tokenizer, ids))
        return query, token_names(tokenizer, query)

    def query_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model reads of a query, by name."""
        return {"input_ids": ids}
