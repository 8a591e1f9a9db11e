"""Dual encoders of pictures and texts: SigLIP 2, SigLIP and CLIP.

Their single vectors find pictures by texts. The hidden states of the vision tower are what EDJE
keeps of a picture for its joint encoder.
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
from pipeline.decoding import Unreadable
from pipeline.encoders import Attention
from pipeline.encoders.images import grid_extents, item_images
from pipeline.encoders.layers import attention_info
from pipeline.encoders.loading import (
    NOT_IN_FINGERPRINTS,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    CheckpointSpec,
    check_checkpoint,
    fingerprint_of,
    load_model,
    load_processor,
    require_one_of,
)
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.reader import Reader
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.encoders.tokenizing import text_kinds, token_names
from pipeline.tokens import SPECIAL, TEXT, VISUAL

#: By the type of a checkpoint: its classes.
CLASSES = {
    "siglip": (SiglipModel, SiglipProcessor),
    "siglip2": (Siglip2Model, Siglip2Processor),
    "clip": (CLIPModel, CLIPProcessor),
}
#: By the type of a checkpoint: the hidden state that EDJE keeps (section 5.1).
EDJE_LAYERS = {"siglip": -1, "siglip2": -1, "clip": -2}


class Dual(SequenceEncoder["Dual.Spec"]):
    """The vision tower's state of each patch, and the model's own single vector.

    Checkpoints are SigLIP 2 of one resolution (which are of the class SigLIP) and NaFlex (which
    keep a picture's shape), SigLIP, and CLIP. Of what has several pictures (the frames of a video)
    each is read by itself.

    The score that these models are trained for is `single`: text and picture meet in the single
    vectors alone. A text's token vectors are as good as its model lets them be: the states of the
    text tower where both towers have one width; else the text's single vector, if that has the
    width of the vision tower; else there is none, and of the scores `single` alone can be had.
    Pictures as queries are read as items are.
    """

    class Spec(CheckpointSpec):
        """Which checkpoint, and what of a picture becomes its tokens.

        Attributes:
            layer: the hidden state of the vision tower: 0 is the embeddings' output, -1 the last
                layer's; null: the one that EDJE keeps, the last of SigLIP and the one before the
                last of CLIP. SigLIP's last state is behind its final norm, all others before it.
            keep_class: also keep CLIP's class token, as kind `SPECIAL`.
            normalise: bring the token vectors to unit length.
            max_patches: of a picture as a NaFlex model sees it; null: the checkpoint's own.
            lowercase: whether queries are lowercased, as the texts were that these models are
                trained on. The tokenizer of some checkpoints of SigLIP 2 leaves it to the caller.
        """

        name: Literal["dual"] = "dual"
        attention: Literal["sdpa", "eager"] = "sdpa"
        layer: int | None = None
        keep_class: bool = False
        normalise: bool = False
        max_patches: int | None = Field(None, ge=1)
        lowercase: bool = True

    nothing = "no picture"
    pooled_position = "first"

    def __init__(self, spec: Spec, device_map: str | None = None):
        super().__init__(spec, device_map)
        settings = self.model.config
        self._layer = layer_of(spec, settings)
        self.dim = settings.vision_config.hidden_size
        self.pooled_dim = pooled_dim_of(settings)
        self.logit_scale = self.model.logit_scale.exp().item()
        self.normalised = spec.normalise
        # Null and a number may name one layer.
        self.fingerprint = fingerprint_of(
            spec, ignored=(*NOT_IN_FINGERPRINTS, "layer"), layer=self._layer
        )

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the checkpoint is not there, is none, or lacks what is asked."""
        settings = check_checkpoint(spec, *CLASSES)
        if not getattr(settings.vision_config, "vision_use_head", True):
            rule = "a checkpoint whose vision tower has a pooling head"
            raise SpecError("model", spec.model, rule, "has none")
        layer_of(spec, settings)
        if spec.keep_class and settings.model_type != "clip":
            rule = f"false (a {settings.model_type} has no class token)"
            raise SpecError("keep_class", True, rule)
        if spec.max_patches is not None and settings.model_type != "siglip2":
            rule = f"null (a {settings.model_type} has a fixed grid)"
            raise SpecError("max_patches", spec.max_patches, rule)
        cls.reader(spec).check()

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Pictures, and the frames of videos."""
        return ("image", "frames")

    @classmethod
    def attention(cls, spec: Spec) -> Attention:
        """Column sums over the patches; of CLIP also the row of the class token.

        SigLIP pools by a head of its own behind the layers.
        """
        settings = check_checkpoint(spec, *CLASSES)
        pooled = ("pooled_row",) if settings.model_type == "clip" else ()
        return attention_info(settings.vision_config, ("column_sums", *pooled))

    @classmethod
    def query_kinds(cls, spec: Spec) -> tuple[str, ...]:
        """A picture is read as an item is."""
        return ("text", "image")

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> PreTrainedModel:
        """The model."""
        model_class, _ = CLASSES[check_checkpoint(spec, *CLASSES).model_type]
        return load_model(spec, model_class, device_map)

    @classmethod
    def reader(cls, spec: Spec) -> DualReader:
        """What reads pictures and queries."""
        return DualReader(spec)

    def attending(self) -> PreTrainedModel:
        """The vision tower."""
        return self.model.vision_model

    def join_media(self, inputs: Sequence[ModelInput]) -> dict[str, torch.Tensor]:
        """The pixels of all pictures; those of NaFlex padded to the most patches."""
        if self.model.config.model_type != "siglip2" or not inputs[0].media:
            return super().join_media(inputs)
        pixels = [one.media["pixel_values"] for one in inputs]
        return {
            "pixel_values": torch.nn.utils.rnn.pad_sequence(pixels, batch_first=True),
            "spatial_shapes": torch.cat([one.media["spatial_shapes"] for one in inputs]),
        }

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of a tower, and its projected pooled output."""
        if "pixel_values" in inputs:
            return self._see(inputs)
        return self._read(inputs["input_ids"])

    def _see(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        mask = inputs.pop("attention_mask")
        if "spatial_shapes" in inputs:
            inputs["pixel_attention_mask"] = mask
        num_layers = self.model.config.vision_config.num_hidden_layers
        is_last = self._layer == num_layers
        seen = self.model.get_image_features(**inputs, output_hidden_states=not is_last)
        states = seen.last_hidden_state if is_last else seen.hidden_states[self._layer]
        return states, seen.pooler_output

    def _read(self, ids_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Without a mask: SigLIP's texts are padded by the reader, and trained so that the padding
        # is seen; CLIP reads causally, so what is behind a text changes nothing in it.
        read = self.model.get_text_features(ids_BL)
        form = text_form(self.model.config)
        if form == "states":
            return read.last_hidden_state, read.pooler_output
        states = read.pooler_output.new_zeros(*ids_BL.shape, self.dim)
        if form == "pooled":
            states[:, 0] = read.pooler_output
        return states, read.pooler_output


def layer_of(spec: Dual.Spec, settings: PretrainedConfig) -> int:
    """The number from 0 of the vision tower's hidden state that gives the tokens.

    Raises:
        SpecError: there is no such one.
    """
    num_layers = settings.vision_config.num_hidden_layers
    layer = EDJE_LAYERS[settings.model_type] if spec.layer is None else spec.layer
    if not -num_layers - 1 <= layer <= num_layers:
        rule = f"from -{num_layers + 1} to {num_layers} (the model has {num_layers} layers)"
        raise SpecError("layer", layer, rule)
    return layer % (num_layers + 1)


def pooled_dim_of(settings: PretrainedConfig) -> int:
    """The width of the single vectors."""
    if settings.model_type == "clip":
        return settings.projection_dim
    return settings.vision_config.hidden_size


def text_form(settings: PretrainedConfig) -> Literal["states", "pooled", "nothing"]:
    """What the token vectors of a text are."""
    width = settings.vision_config.hidden_size
    if settings.text_config.hidden_size == width:
        return "states"
    return "pooled" if pooled_dim_of(settings) == width else "nothing"


class DualReader(Reader["Dual.Spec"]):
    """Pictures and queries through the checkpoint's image processor and tokenizer."""

    def __init__(self, spec: Dual.Spec):
        super().__init__(spec)
        self.settings = check_checkpoint(spec, *CLASSES)
        _, processor_class = CLASSES[self.settings.model_type]
        require_one_of(spec, PROCESSOR_FILES)
        require_one_of(spec, TOKENIZER_FILES)
        self.processor = load_processor(spec, processor_class)

    def check(self) -> None:
        """Raises `SpecError` if the model cannot see what the image processor gives."""
        vision = self.settings.vision_config
        read = self.processor.image_processor(images=[Image.new("RGB", (64, 64))])
        given = np.shape(read["pixel_values"][0])
        if self.settings.model_type == "siglip2":
            what, given = "patches", given[1:]
            fit: tuple[int, ...] = (vision.num_channels * vision.patch_size**2,)
        else:
            what, fit = "pictures", (vision.num_channels, vision.image_size, vision.image_size)
        if given != fit:
            wanted, made = (" x ".join(map(str, shape)) for shape in (fit, given))
            rule = f"a checkpoint whose image processor makes {what} of {wanted} numbers"
            problem = f"has one that makes {what} of {made} numbers"
            raise SpecError("model", self.spec.model, rule, problem)

    def item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """A sequence a picture.

        Raises:
            Unreadable: a picture is too long and narrow to be scaled.
        """
        return [self._picture(*shown) for shown in item_images(item)]

    def _picture(self, picture: Image.Image, start: float, stop: float) -> ModelInput:
        is_flexible = self.settings.model_type == "siglip2"
        most = {"max_num_patches": self.spec.max_patches} if self.spec.max_patches else {}
        try:
            read = self.processor.image_processor(images=[picture], return_tensors="pt", **most)
        except ValueError as error:
            raise Unreadable("picture not legal for the model", str(error)) from None
        if is_flexible:
            rows, columns = read["spatial_shapes"][0].tolist()
            media = {
                "pixel_values": read["pixel_values"][0, : rows * columns],
                "spatial_shapes": read["spatial_shapes"],
            }
        else:
            patch = self.settings.vision_config.patch_size
            rows, columns = (size // patch for size in read["pixel_values"].shape[2:])
            media = {"pixel_values": read["pixel_values"]}
        extents = grid_extents(rows, columns, (start, stop))
        extents[:, :4] = within_crop(extents[:, :4], self._crop(picture))
        kind = torch.full((len(extents),), VISUAL)
        keep = torch.ones(len(extents), dtype=torch.bool)
        if self.settings.model_type == "clip":  # its class token stands before the patches
            extents = torch.cat([torch.full((1, 6), torch.nan), extents])
            kind = torch.cat([torch.tensor([SPECIAL]), kind])
            keep = torch.cat([torch.tensor([self.spec.keep_class]), keep])
        return ModelInput.of({}, media, kind, keep, extents)

    def _crop(self, picture: Image.Image) -> tuple[float, float, float, float]:
        """The part x0 y0 x1 y1 of a picture that the model sees: the middle, or all of it."""
        images = self.processor.image_processor
        if not getattr(images, "do_center_crop", False):
            return (0.0, 0.0, 1.0, 1.0)
        width, height = picture.size
        if images.do_resize and images.size.shortest_edge:
            # As the library does it: the shorter side is exact, the longer one rounded down.
            edge, shorter = images.size.shortest_edge, min(picture.size)
            width, height = (int(edge * side / shorter) for side in picture.size)
        elif images.do_resize:
            width, height = images.size.width, images.size.height
        left = (width - images.crop_size.width) // 2
        top = (height - images.crop_size.height) // 2
        right, bottom = left + images.crop_size.width, top + images.crop_size.height
        return (left / width, top / height, right / width, bottom / height)

    def picture(self, picture: Image.Image) -> tuple[ModelInput, list[str]]:
        """A query picture, read as an item is."""
        read = self._picture(picture, torch.nan, torch.nan)
        numbers = torch.zeros(len(read), dtype=torch.int64)  # it has none; patches go by place
        named = dataclasses.replace(read, sequence={"input_ids": numbers})
        names = token_names(self.processor.tokenizer, named)
        if self.spec.keep_class and self.settings.model_type == "clip":
            names[0] = "[CLASS]"
        return read, names

    def text(self, text: str) -> tuple[ModelInput, list[str]]:
        """A query; for SigLIP padded to the length of the text tower.

        Raises:
            SpecError: it is longer than that.
        """
        tokenizer = self.processor.tokenizer
        most = self.settings.text_config.max_position_embeddings
        options = {} if self.settings.model_type == "clip" else {"padding": "max_length"}
        read = tokenizer(
            [text.lower() if self.spec.lowercase else text],
            max_length=most,
            truncation=False,
            split_special_tokens=True,  # those spelled out in it are its own characters
            return_tensors="pt",
            return_attention_mask=True,
            verbose=False,
            **options,
        )
        ids, is_text = read["input_ids"][0], read["attention_mask"][0].bool()
        if len(ids) > most:
            raise SpecError(
                "query", text, f"a text of at most {most} tokens", f"has {len(ids)} tokens"
            )
        form = text_form(self.settings)
        kind = torch.where(is_text, text_kinds(tokenizer, ids), SPECIAL)
        keep = torch.zeros_like(is_text)
        if form == "states":
            keep = is_text
        elif form == "pooled":  # in the first place, see `Dual.forward`
            kind[0], keep[0] = TEXT, True
        query = ModelInput.of({"input_ids": ids}, {}, kind, keep)
        return query, [text] if form == "pooled" else token_names(tokenizer, query)


def within_crop(boxes_N4: torch.Tensor, crop: tuple[float, float, float, float]) -> torch.Tensor:
    """Boxes in a part x0 y0 x1 y1 of a picture as boxes in the picture.

    >>> within_crop(torch.tensor([[0, 0, 0.5, 1]]), (0.25, 0, 0.75, 1)).tolist()
    [[0.25, 0.0, 0.5, 1.0]]
    """
    x0, y0, x1, y1 = crop
    origin = torch.tensor([x0, y0, x0, y0])
    size = torch.tensor([x1 - x0, y1 - y0, x1 - x0, y1 - y0])
    return (origin + boxes_N4 * size).clamp(0, 1)  # a picture smaller than the crop gets a margin
