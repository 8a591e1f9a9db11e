"""Base classes for the visual retrieval models of transformers, such as `ColPaliForRetrieval`.

Each is a vision-language model with a projection (`embedding_proj_layer`), which returns the token
vectors as `embeddings`, and a processor with `process_images` and `process_queries`.
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
from pipeline.encoders import AttentionInfo, check_query_size
from pipeline.encoders.appended import AppendedTokensSpec
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
    check_tokenizer,
    checkpoint_fingerprint,
    checkpoint_folder,
    hash_files,
    load_json,
    load_linear,
    load_model,
    load_model_config,
    load_processor,
    require_one_of,
)
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.reader import Reader
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.encoders.templates import (
    TemplateSpec,
    check_declared,
    check_special_tokens,
    fill_template,
)
from pipeline.encoders.tokenizing import ids_between, text_kinds, token_names
from pipeline.encoders.trained import appended_hashes, check_appended_tokens


class RetrievalSpec(TemplateSpec, AppendedTokensSpec, CheckpointSpec):
    """Settings of query formatting and of the projection."""

    query_prefix: str | None = None
    """Prefix of each query. If null, the checkpoint's prefix is used. `{instruction}` is replaced
    with the instruction of the benchmark's task."""
    num_augmentation: int = Field(10, ge=0)
    """Number of augmentation tokens appended to each query, whose vectors contribute to MaxSim."""
    projection: str | None = None
    """Folder with a projection in a safetensors file, `weight` and optionally `bias`, as training
    writes it. Null: the checkpoint's projection.
    """

    @field_validator("projection")
    @classmethod
    def _make_projection_absolute(cls, projection: str | None) -> str | None:
        return None if projection is None else config.absolute(projection)


RetrievalSpecT = TypeVar("RetrievalSpecT", bound=RetrievalSpec)


class Retrieval(SequenceEncoder[RetrievalSpecT]):
    """Encoder with one vector per image patch and per token of the prompt around the image.

    Items with several images, such as the frames of a video, are encoded one image at a time. Image
    queries are encoded like pages.
    """

    model_class: ClassVar[Any]  # model class of transformers
    reader_class: ClassVar[type[RetrievalReader[Any]]]

    normalised = True
    pooled_dim = None
    empty_reason = "no image"
    has_projection = True

    def __init__(self, spec: RetrievalSpecT, device_map: str | None = None):
        super().__init__(spec, device_map)
        self.dim = self.projection.out_features
        hashes = (
            {"projection": hash_files(Path(spec.projection), WEIGHTS)} if spec.projection else {}
        )
        # Without a projection the fingerprint equals that of specs that predate the field.
        self.fingerprint = checkpoint_fingerprint(
            spec, (*NOT_IN_FINGERPRINTS, "projection"), **hashes, **appended_hashes(spec)
        )

    @classmethod
    def check(cls, spec: RetrievalSpecT) -> None:
        """Checks that the checkpoint exists and has the expected model class."""
        settings = check_checkpoint(spec, cls.model_class.config_class.model_type)
        width = settings.vlm_config.text_config.hidden_size
        check_appended_tokens(spec, width)
        if spec.projection:
            load_linear(Path(spec.projection), width, "projection", spec.projection)
        cls.reader(spec)

    @classmethod
    def supported_inputs(cls, spec: RetrievalSpecT) -> tuple[str, ...]:
        """Returns images and video frames."""
        return ("image", "frames")

    @classmethod
    def attention(cls, spec: RetrievalSpecT) -> AttentionInfo:
        """Returns column sums and the row of the last token.

        The model has no pooled vector.
        """
        settings = check_checkpoint(spec, cls.model_class.config_class.model_type)
        return attention_info(settings.vlm_config.text_config, ("column_sums", "eos_row"), spec)

    @classmethod
    def query_kinds(cls, spec: RetrievalSpecT) -> tuple[str, ...]:
        """Returns "text" and "image"."""
        return ("text", "image")

    @classmethod
    def load(cls, spec: RetrievalSpecT, device_map: str | None) -> PreTrainedModel:
        """Loads the model, with the spec's projection if it names one."""
        model = load_model(spec, cls.model_class, device_map)
        if spec.projection:
            old: Any = model.embedding_proj_layer
            folder = Path(spec.projection)
            layer = load_linear(folder, old.in_features, "projection", spec.projection)
            model.embedding_proj_layer = layer.to(old.weight.device, old.weight.dtype).eval()
        return model

    @classmethod
    def reader(cls, spec: RetrievalSpecT) -> RetrievalReader[RetrievalSpecT]:
        """Returns the reader of images and queries."""
        return cls.reader_class(spec)

    def attention_module(self) -> PreTrainedModel:
        """Returns the language model."""
        return self.model.vlm.language_model

    @property
    def projection(self) -> torch.nn.Linear:
        """Linear layer that maps the language model's hidden states to token vectors."""
        return self.model.embedding_proj_layer

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Returns the projected hidden states."""
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        return self.model(**inputs).embeddings, None


class RetrievalReader(Reader[RetrievalSpecT]):
    """Reader of images and queries that uses the checkpoint's processor.

    Queries are formatted as the processor does, except that special tokens spelled out in a query
    are plain text. The processor would accept an image placeholder as an image.
    """

    processor_class: ClassVar[type[ProcessorMixin]]
    #: Texts before the prefix of a query and after its augmentation tokens.
    query_affixes: tuple[str, str] = ("", "")

    def __init__(self, spec: RetrievalSpecT, **options: Any):
        super().__init__(spec)
        for files in (PROCESSOR_FILES, TOKENIZER_FILES):
            require_one_of(spec, files)
        self.settings = load_model_config(spec.model, checkpoint_folder(spec, SETTINGS)).vlm_config
        self.max_positions = self.settings.text_config.max_position_embeddings
        self.processor = processor = load_processor(spec, self.processor_class, **options)
        self.tokenizer = processor.tokenizer
        self._check_query_prefix(processor.query_prefix)
        if spec.query_prefix is not None:
            processor.query_prefix = spec.query_prefix
        check_tokenizer(spec.model, self.tokenizer, "pad_token")

    def _check_query_prefix(self, declared: str) -> None:
        """Checks that the prefix of queries does not contradict the files of the processor."""
        spec, prefix = self.spec, self.spec.query_prefix
        folder = checkpoint_folder(spec, SETTINGS)
        for name in PROCESSOR_FILES:
            # The default of the processor's class is not a declaration of the checkpoint.
            if "query_prefix" in (load_json(folder / name, spec.model) or {}):
                check_declared(spec, "query_prefix", prefix, declared, name)
        check_special_tokens(
            "query_prefix", prefix or declared, self.tokenizer.get_vocab(), spec.model
        )

    @abstractmethod
    def read_image(self, image: Image.Image, start: float, stop: float) -> ModelInput:
        """Returns the model input of an image in RGB, displayed from `start` to `stop` s, or NaN.

        Raises:
            Unreadable: The model cannot read the image.
        """

    def read_item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """Returns one sequence per image."""
        return [self.read_image(*timed) for timed in item_images(item)]

    def read_image_query(self, image: Image.Image) -> tuple[ModelInput, list[str]]:
        """Returns the sequence of an image query, built like that of a page."""
        inputs = self.read_image(image, torch.nan, torch.nan)
        return inputs, token_names(self.processor.tokenizer, inputs)

    def read_text_query(self, text: str) -> tuple[ModelInput, list[str]]:
        """Returns the sequence of a text query, with its prefix and augmentation tokens."""
        processor, (start, end) = self.processor, self.query_affixes
        augmentation = processor.query_augmentation_token * self.spec.num_augmentation
        tokenizer = processor.tokenizer
        prefix = fill_template(processor.query_prefix, self.instruction)
        ids = ids_between(tokenizer, start + prefix, text, augmentation + end)
        check_query_size(text, len(ids), self.max_positions, " with the prompt")
        query = ModelInput.create(self.query_inputs(ids), {}, text_kinds(tokenizer, ids))
        return query, token_names(tokenizer, query)

    def query_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the model inputs of a query, by name."""
        return {"input_ids": ids}
