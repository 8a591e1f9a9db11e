"""Dual encoders of images and texts: SigLIP 2, SigLIP and CLIP.

Their single vectors retrieve images by text. EDJE stores the hidden states of the vision tower as
input of its joint encoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from transformers import (
    CLIPModel,
    CLIPProcessor,
    PretrainedConfig,
    PreTrainedModel,
    Siglip2Model,
    Siglip2Processor,
    SiglipModel,
    SiglipProcessor,
)

from pipeline.config import SpecError
from pipeline.data.decode import Unreadable
from pipeline.encoders import AttentionInfo, check_query_size
from pipeline.encoders.images import grid_extents, item_images
from pipeline.encoders.layers import attention_info, check_layers
from pipeline.encoders.loading import (
    NOT_IN_FINGERPRINTS,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    CheckpointSpec,
    check_checkpoint,
    checkpoint_fingerprint,
    load_model,
    load_processor,
    require_one_of,
)
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.reader import Reader
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.encoders.tokenizing import TOKENIZER_LOCK, text_kinds, token_names
from pipeline.tokens import SPECIAL, TEXT, VISUAL

#: Model and processor classes, by model type.
CLASSES = {
    "siglip": (SiglipModel, SiglipProcessor),
    "siglip2": (Siglip2Model, Siglip2Processor),
    "clip": (CLIPModel, CLIPProcessor),
}
#: Value of `layer` for single vectors.
SINGLE: Literal["single"] = "single"
#: Hidden state that EDJE stores, by model type (section 5.1).
EDJE_LAYERS = {"siglip": -1, "siglip2": -1, "clip": -2}


class Dual(SequenceEncoder["Dual.Spec"]):
    """Encoder that returns the hidden state of each image patch and the model's single vector.

    Supported checkpoints are SigLIP 2 with fixed resolution (which uses the class SigLIP) and
    NaFlex (which preserves the aspect ratio), SigLIP, and CLIP. Items with several images, such as
    the frames of a video, are encoded one image at a time.

    These models are trained for the score `single`: only the single vectors of texts and images
    share a space. The token vectors of a text are, in order of preference, the hidden states of the
    text tower if both towers have the same width, the text's single vector if it has the width of
    the vision tower, or none, which leaves only the score `single`. A text that is a document then
    has one token vector of zeros, because an index does not store items without vectors. Images and
    videos that are queries are encoded like items.
    """

    class Spec(CheckpointSpec):
        """Checkpoint of a dual encoder, and options for the token vectors of an image."""

        name: Literal["dual"] = "dual"
        attention: Literal["sdpa", "eager"] = "sdpa"
        layer: int | Literal["single"] | None = None
        """Hidden state of the vision tower: 0 is the output of the embeddings, -1 that of the last
        layer. Null: the layer that EDJE uses, the last of SigLIP and the second to last of CLIP.
        The last state of SigLIP includes the final layer norm, all others do not. "single": the
        single vector of each image and of each text is its only token vector, of unit length.
        """
        keep_class: bool = False
        """Also keep the class token of CLIP, with kind `SPECIAL`."""
        documents: Literal["images", "text"] = "images"
        """Content of an item that is encoded: its images, or its text for image-to-text retrieval.
        A text that exceeds the text tower is rejected, or truncated by `overlong`."""
        overlong: Literal["reject", "truncate"] = "reject"
        """Reject texts with more tokens than the text tower has positions, or "truncate" them as
        the models' own code does.
        """
        normalise: bool = False
        """Normalise the token vectors to unit length."""
        max_patches: int | None = Field(None, ge=1)
        """Maximum number of patches per image of a NaFlex model. If null, the checkpoint's value is
        used."""
        lowercase: bool = True
        """Lowercase queries, like the training texts of these models. The tokenizers of some SigLIP
        2 checkpoints do not.
        """

    default_query_kinds = ("text", "image", "video")
    empty_reason = "no image"
    pooled_position = "first"

    def __init__(self, spec: Spec, device_map: str | None = None):
        super().__init__(spec, device_map)
        settings = self.model.config
        self._layer = resolve_layer(spec, settings)
        self.dim = settings.vision_config.hidden_size
        self.pooled_dim: int | None = single_vector_dim(settings)
        if spec.layer == SINGLE:
            self.dim, self.pooled_dim, self.normalised = single_vector_dim(settings), None, True
        self.logit_scale = self.model.logit_scale.exp().item()
        # The resolved layer is hashed, because null and a number can select the same one.
        ignored = {*NOT_IN_FINGERPRINTS, "layer", "documents", "overlong"} - {"normalise"}
        self.fingerprint = checkpoint_fingerprint(spec, ignored, layer=self._layer)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Checks that the checkpoint exists and supports the settings of the spec."""
        settings = check_checkpoint(spec, *CLASSES)
        if not getattr(settings.vision_config, "vision_use_head", True):
            rule = "a checkpoint whose vision tower has a pooling head"
            raise SpecError("model", spec.model, rule, "has no pooling head")
        resolve_layer(spec, settings)
        family = settings.model_type
        rule = f"false (a {family} has no class token)"
        spec.require(family == "clip" or not spec.keep_class, "keep_class", rule)
        is_patch = spec.layer != SINGLE
        spec.require(is_patch or not spec.keep_class, "keep_class", "false with layer: single")
        rule = f"null (a {family} has a fixed grid)"
        spec.require(family == "siglip2" or spec.max_patches is None, "max_patches", rule)
        cls.reader(spec).check()

    @classmethod
    def supported_inputs(cls, spec: Spec) -> tuple[str, ...]:
        """Returns images and video frames, or texts."""
        return ("text",) if spec.documents == "text" else ("image", "frames")

    @classmethod
    def attention(cls, spec: Spec) -> AttentionInfo | None:
        """Returns column sums over the patches and, for CLIP, the row of the class token.

        SigLIP pools with an attention head after the last layer, which is not recorded.
        """
        settings = check_checkpoint(spec, *CLASSES)
        if spec.layer == SINGLE:
            return None
        pooled = ("pooled_row",) if settings.model_type == "clip" else ()
        return attention_info(settings.vision_config, ("column_sums", *pooled))

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> PreTrainedModel:
        """Loads the model."""
        model_class, _ = CLASSES[check_checkpoint(spec, *CLASSES).model_type]
        return load_model(spec, model_class, device_map)

    @classmethod
    def reader(cls, spec: Spec) -> DualReader:
        """Returns the reader of images and queries."""
        return DualReader(spec)

    def attention_module(self) -> PreTrainedModel:
        """Returns the vision tower."""
        return self.model.vision_model

    def join_media(self, inputs: Sequence[ModelInput]) -> dict[str, torch.Tensor]:
        """Concatenates the pixels of all images. NaFlex images are padded to equal length."""
        if self.model.config.model_type != "siglip2" or not inputs[0].media:
            return super().join_media(inputs)
        pixels = [sequence.media["pixel_values"] for sequence in inputs]
        shapes = [sequence.media["spatial_shapes"] for sequence in inputs]
        return {
            "pixel_values": torch.nn.utils.rnn.pad_sequence(pixels, batch_first=True),
            "spatial_shapes": torch.cat(shapes),
        }

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs a tower and returns its hidden states and its projected pooled output."""
        if "pixel_values" in inputs:
            return self._encode_images(inputs)
        return self._encode_texts(inputs["input_ids"])

    def _encode_images(
        self, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = inputs.pop("attention_mask")
        if "spatial_shapes" in inputs:
            inputs["pixel_attention_mask"] = mask
        num_layers = self.model.config.vision_config.num_hidden_layers
        is_last = self._layer in (num_layers, SINGLE)
        output = self.model.get_image_features(**inputs, output_hidden_states=not is_last)
        if self._layer == SINGLE:
            return self._first(output.pooler_output, mask), None
        states = output.last_hidden_state if is_last else output.hidden_states[self._layer]
        return states, output.pooler_output

    def _encode_texts(self, ids_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        # No attention mask: SigLIP is trained to attend to the padding, which the reader adds, and
        # the causal attention of CLIP ignores it.
        output = self.model.get_text_features(ids_BL)
        form = text_form(self.spec, self.model.config)
        if form == "states":
            return output.last_hidden_state, output.pooler_output
        if form == "none":
            states = output.pooler_output.new_zeros(*ids_BL.shape, self.dim)
        else:
            states = self._first(output.pooler_output, ids_BL)
        return states, None if self._layer == SINGLE else output.pooler_output

    def _first(self, vectors_BD: torch.Tensor, positions_BL: torch.Tensor) -> torch.Tensor:
        """Returns states (B, L, D) with the vectors at the first position."""
        states = vectors_BD.new_zeros(*positions_BL.shape, self.dim)
        states[:, 0] = vectors_BD
        return states


def resolve_layer(spec: Dual.Spec, settings: PretrainedConfig) -> int | str:
    """Returns the index of the hidden state that is used as token vectors, from 0, or "single"."""
    if spec.layer == SINGLE:
        return SINGLE
    num_layers = settings.vision_config.num_hidden_layers
    layer = EDJE_LAYERS[settings.model_type] if spec.layer is None else spec.layer
    check_layers(layer, num_layers)
    return layer % (num_layers + 1)


def single_vector_dim(settings: PretrainedConfig) -> int:
    """Returns the width of the single vectors."""
    if settings.model_type == "clip":
        return settings.projection_dim
    return settings.vision_config.hidden_size


def text_form(spec: Dual.Spec, settings: PretrainedConfig) -> Literal["states", "pooled", "none"]:
    """Returns the origin of the token vectors of texts."""
    if spec.layer == SINGLE:
        return "pooled"
    width = settings.vision_config.hidden_size
    if settings.text_config.hidden_size == width:
        return "states"
    return "pooled" if single_vector_dim(settings) == width else "none"


class DualReader(Reader["Dual.Spec"]):
    """Reader of images and queries that uses the checkpoint's image processor and tokenizer."""

    def __init__(self, spec: Dual.Spec):
        super().__init__(spec)
        self.settings = check_checkpoint(spec, *CLASSES)
        _, processor_class = CLASSES[self.settings.model_type]
        require_one_of(spec, PROCESSOR_FILES)
        require_one_of(spec, TOKENIZER_FILES)
        self.processor = load_processor(spec, processor_class)
        self.tokenizer = self.processor.tokenizer
        # OpenCLIP rounds the margin of a crop, transformers truncates it: see `open_clip`.
        self._rounds_crop = getattr(self.processor.image_processor, "rounds_crop", False)

    def check(self) -> None:
        """Checks that the output of the image processor fits the vision tower."""
        vision = self.settings.vision_config
        output = self.processor.image_processor(images=[Image.new("RGB", (64, 64))])
        actual = np.shape(output["pixel_values"][0])
        if self.settings.model_type == "siglip2":
            unit, actual = "patches", actual[1:]
            expected: tuple[int, ...] = (vision.num_channels * vision.patch_size**2,)
        else:
            unit, expected = "images", (vision.num_channels, vision.image_size, vision.image_size)
        if actual != expected:
            shapes = [" x ".join(map(str, shape)) for shape in (expected, actual)]
            rule = f"a checkpoint whose image processor returns {unit} of shape {shapes[0]}"
            problem = f"has one that returns {unit} of shape {shapes[1]}"
            raise SpecError("model", self.spec.model, rule, problem)

    def read_item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """Returns one sequence per image, or that of the text."""
        if self.spec.documents == "text":
            text = item.get("text") or ""
            try:
                sequences = [self.read_text_query(text)[0]] if text.strip() else []
            except SpecError as error:
                raise Unreadable("text too long", str(error)) from None
            if text_form(self.spec, self.settings) == "none":
                for sequence in sequences:
                    sequence.keep[0] = True  # a vector of zeros, see `Dual`
            return sequences
        return [self._read_image(*timed) for timed in item_images(item)]

    def _read_image(self, image: Image.Image, start: float, stop: float) -> ModelInput:
        is_flexible = self.settings.model_type == "siglip2"
        options: dict[str, Any] = {}
        if self.spec.max_patches:
            options["max_num_patches"] = self.spec.max_patches
        if self._rounds_crop:
            options["do_center_crop"] = False
        try:
            output = self.processor.image_processor(images=[image], return_tensors="pt", **options)
        except ValueError as error:
            raise Unreadable("image not supported by the model", str(error)) from None
        if is_flexible:
            rows, columns = output["spatial_shapes"][0].tolist()
            media = {
                "pixel_values": output["pixel_values"][0, : rows * columns],
                "spatial_shapes": output["spatial_shapes"],
            }
        else:
            patch, pixels = self.settings.vision_config.patch_size, output["pixel_values"]
            if self._rounds_crop:
                size = self.settings.vision_config.image_size
                top, left = (self._margin(side, size) for side in pixels.shape[2:])
                pixels = pixels[:, :, top : top + size, left : left + size]
            rows, columns = (size // patch for size in pixels.shape[2:])
            media = {"pixel_values": pixels}
        extents = grid_extents(rows, columns, (start, stop))
        extents[:, :4] = boxes_in_image(extents[:, :4], self._crop(image))
        kind = torch.full((len(extents),), VISUAL)
        keep = torch.ones(len(extents), dtype=torch.bool)
        if self.settings.model_type == "clip":  # the class token precedes the patches
            extents = torch.cat([torch.full((1, 6), torch.nan), extents])
            kind = torch.cat([torch.tensor([SPECIAL]), kind])
            keep = torch.cat([torch.tensor([self.spec.keep_class]), keep])
        if self.spec.layer == SINGLE:  # the first position has the vector of the whole image
            extents[0] = torch.tensor([*self._crop(image), start, stop])
            kind[0] = VISUAL
            keep = torch.arange(len(keep)) == 0
        return ModelInput.create({}, media, kind, keep, extents)

    def _margin(self, side: int, size: int) -> int:
        """Returns the pixels before a centred crop, rounded as in training."""
        return round((side - size) / 2) if self._rounds_crop else (side - size) // 2

    def _crop(self, image: Image.Image) -> tuple[float, float, float, float]:
        """Returns the region x0 y0 x1 y1 of an image that remains after centre cropping."""
        images = self.processor.image_processor
        if not getattr(images, "do_center_crop", False):
            return (0.0, 0.0, 1.0, 1.0)
        width, height = image.size
        if images.do_resize and images.size.shortest_edge:
            # As in transformers, the shorter side is exact and the longer one is rounded down.
            edge, shorter = images.size.shortest_edge, min(image.size)
            width, height = (int(edge * side / shorter) for side in image.size)
        elif images.do_resize:
            width, height = images.size.width, images.size.height
        left = self._margin(width, images.crop_size.width)
        top = self._margin(height, images.crop_size.height)
        right, bottom = left + images.crop_size.width, top + images.crop_size.height
        return (left / width, top / height, right / width, bottom / height)

    def read_media_query(self, query: Mapping[str, Any]) -> tuple[list[ModelInput], list[str]]:
        """Returns one sequence per image or frame, built like those of an item."""
        sequences = [self._read_image(*timed) for timed in item_images(query)]
        names = []
        for inputs in sequences:
            # Patches have no token ids. `token_names` names them by location.
            ids = torch.zeros(len(inputs), dtype=torch.int64)
            with_ids = dataclasses.replace(inputs, sequence={"input_ids": ids})
            names += token_names(self.processor.tokenizer, with_ids)
            if self.spec.keep_class and self.settings.model_type == "clip":
                names[-int(inputs.keep.sum())] = "[CLASS]"
        return sequences, names

    def read_text_query(self, text: str) -> tuple[ModelInput, list[str]]:
        """Builds the sequence of a text query, for SigLIP padded to the length of the tower."""
        tokenizer = self.processor.tokenizer
        max_length = self.settings.text_config.max_position_embeddings
        options = {} if self.settings.model_type == "clip" else {"padding": "max_length"}
        with TOKENIZER_LOCK:
            encoded = tokenizer(
                [text.lower() if self.spec.lowercase else text],
                max_length=max_length,
                truncation=self.spec.overlong == "truncate",
                split_special_tokens=True,  # special tokens spelled out in the text are plain text
                return_tensors="pt",
                return_attention_mask=True,
                verbose=False,
                **options,
            )
        ids, is_text = encoded["input_ids"][0], encoded["attention_mask"][0].bool()
        check_query_size(text, len(ids), max_length, " unless `overlong` is truncate")
        form = text_form(self.spec, self.settings)
        kind = torch.where(is_text, text_kinds(tokenizer, ids), SPECIAL)
        keep = torch.zeros_like(is_text)
        if form == "states":
            keep = is_text
        elif form == "pooled":  # at position 0, see `Dual.forward`
            kind[0], keep[0] = TEXT, True
        query = ModelInput.create({"input_ids": ids}, {}, kind, keep)
        return query, [text] if form == "pooled" else token_names(tokenizer, query)


def boxes_in_image(boxes_N4: torch.Tensor, crop: tuple[float, float, float, float]) -> torch.Tensor:
    """Converts boxes x0 y0 x1 y1 relative to a crop to boxes relative to the image.

    >>> boxes_in_image(torch.tensor([[0, 0, 0.5, 1]]), (0.25, 0, 0.75, 1)).tolist()
    [[0.25, 0.0, 0.5, 1.0]]
    """
    x0, y0, x1, y1 = crop
    origin = torch.tensor([x0, y0, x0, y0])
    size = torch.tensor([x1 - x0, y1 - y0, x1 - x0, y1 - y0])
    return (origin + boxes_N4 * size).clamp(0, 1)  # an image smaller than the crop is padded
