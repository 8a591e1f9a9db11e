"""Late-interaction models of pages, images, video and audio (ColPali, Faysse et al., 2024).

A vision-language model and a linear projection give one vector per patch and per token of the
prompt. `families` declares the families, which the checkpoint selects.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    ColModernVBertForRetrieval,
    ColPaliForRetrieval,
    ColQwen2ForRetrieval,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils import ModelOutput

from pipeline.config import SpecError
from pipeline.encoders import AttentionInfo
from pipeline.encoders.families import FAMILIES, Family, projection_names
from pipeline.encoders.layers import attention_info, make_bidirectional
from pipeline.encoders.loading import (
    NOT_IN_FINGERPRINTS,
    SETTINGS,
    WEIGHTS,
    check_checkpoint,
    checkpoint_fingerprint,
    checkpoint_folder,
    hash_files,
    load_linear,
    load_model,
    load_model_config,
)
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.pages import PageReader, PageSpec, page_reader
from pipeline.encoders.qwen_model import positioned
from pipeline.encoders.qwen_omni import thinker_inputs
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.encoders.trained import appended_hashes, check_appended_tokens
from pipeline.runtime.checkpoint import check_safetensors, read_headers

#: Classes of transformers by the type of their vision-language models.
TRANSFORMERS: dict[str, type[PreTrainedModel]] = {
    "modernvbert": ColModernVBertForRetrieval,
    "paligemma": ColPaliForRetrieval,
    "qwen2_vl": ColQwen2ForRetrieval,
}
#: Names of weights in the model by patterns of those that colpali-engine and older versions save.
ENGINE_NAMES = {
    r"^(base_model\\?\.model\\?\.|model\.)?(custom_text_proj|linear)(?:\.base_layer)?\.": (
        "custom_text_proj."
    ),
    r"^embedding_proj_layer\.": "custom_text_proj.",
    r"^(?:base_model\.model\.)?model\.language_model\.model\.": "language_model.",
    r"^(?:base_model\.model\.|vlm\.)?model\.(?=(?:language|text)_model\.|vision_|visual\.)": "",
    r"^(?:base_model\.model\.)?model\.(?=connector\.|multi_modal_projector\.|audio_tower\.)": "",
    r"^(?:base_model\.model\.)?model\.(?=layers\.|embed_tokens\.|norm\.)": "language_model.",
}


class ColPali(SequenceEncoder[PageSpec]):
    """Encoder of pages, images and frames, and with ColQwen-Omni of video and audio.

    Items with several images, such as the frames of a video, are encoded one image at a time.
    Queries with media are encoded like items.
    """

    Spec = PageSpec

    pooled_dim = None
    empty_reason = "no image"
    has_projection = True
    lora_target_modules = r".*(language|text)_model.*\.(q|k|v|o|gate|up|down)_proj"

    def __init__(self, spec: PageSpec, device_map: str | None = None):
        self.settings, self.family = _declared(spec)
        super().__init__(spec, device_map)
        if spec.bidirectional:
            make_bidirectional(self.attention_module())
        self.dim = self.projection.out_features
        more: dict[str, Any] = {}
        if spec.projection:
            more["projection"] = hash_files(Path(spec.projection), WEIGHTS)
        # Fields of some families are hashed if they are not at their defaults.
        optional = ("min_pixels", "max_pixels", "positions", "bidirectional")
        fields = type(spec).model_fields
        more |= {n: getattr(spec, n) for n in optional if getattr(spec, n) != fields[n].default}
        count = spec.num_augmentation
        count = self.family.num_augmentation if count is None else count
        self.fingerprint = checkpoint_fingerprint(
            spec.model_copy(update={"num_augmentation": count}),
            (*NOT_IN_FINGERPRINTS, "projection", *optional),
            **more,
            **appended_hashes(spec),
        )

    @classmethod
    def check(cls, spec: PageSpec) -> None:
        """Checks the checkpoint, and the fields that only some families support."""
        check_checkpoint(spec, *FAMILIES, has_projection=True)
        settings, family = _declared(spec)
        is_qwen = family.media in ("grid", "omni")
        rules = dict.fromkeys(("min_pixels", "max_pixels", "positions", "bidirectional"), is_qwen)
        rules["bidirectional_queries"] = family.title == "ColPali"
        for field, is_supported in rules.items():
            default = cls.Spec.model_fields[field].default
            is_valid = is_supported or getattr(spec, field) == default
            spec.require(is_valid, field, f"{default} for {family.title}")
        is_evie = getattr(settings, "mrl_prefix", False)  # only EVIE-4.5B has this field
        spec.require(spec.bidirectional or not is_evie, "bidirectional", "true for EVIE")
        has_tiles = family.media == "tiles" or spec.output_tokens != "tiles"
        spec.require(has_tiles, "output_tokens", f"all or visual for {family.title}")
        width = settings.get_text_config().hidden_size
        check_appended_tokens(spec, width)
        if spec.projection:
            load_linear(Path(spec.projection), width, "projection", spec.projection)
        cls.reader(spec)

    @classmethod
    def supported_inputs(cls, spec: PageSpec) -> tuple[str, ...]:
        """Returns images and video frames, and audio for ColQwen-Omni."""
        _, family = _declared(spec)
        return ("image", "frames", "audio") if family.media == "omni" else ("image", "frames")

    @classmethod
    def query_kinds(cls, spec: PageSpec) -> tuple[str, ...]:
        """Returns texts, images and videos, and audio for ColQwen-Omni."""
        more = ("audio",) if "audio" in cls.supported_inputs(spec) else ()
        return ("text", "image", *more, "video")

    @classmethod
    def attention(cls, spec: PageSpec) -> AttentionInfo:
        """Returns column sums and the row of the last token.

        The model has no pooled vector.
        """
        settings, _ = _declared(spec)
        return attention_info(settings.get_text_config(), ("column_sums", "eos_row"), spec)

    @classmethod
    def load(cls, spec: PageSpec, device_map: str | None) -> PreTrainedModel:
        """Loads the model, with the spec's projection if it names one."""
        settings, family = _declared(spec)
        if family.library == "transformers":
            model = load_model(spec, TRANSFORMERS[settings.model_type], device_map)
        else:
            model = _load_engine_model(spec, settings, family.title, device_map)
        if spec.projection:
            name = projection_name(model)
            old: Any = model.get_submodule(name)
            folder = Path(spec.projection)
            layer = load_linear(folder, old.in_features, "projection", spec.projection)
            setattr(model, name, layer.to(old.weight.device, old.weight.dtype).eval())
        return model

    @classmethod
    def reader(cls, spec: PageSpec) -> PageReader:
        """Returns the reader of items and queries."""
        return page_reader(spec, *_declared(spec))

    def attention_module(self) -> PreTrainedModel:
        """Returns the language model."""
        return self.backbone.get_decoder()

    @property
    def backbone(self) -> Any:
        """Vision-language model without the projection."""
        return getattr(self.model, "vlm", self.model)

    @property
    def projection(self) -> torch.nn.Linear:
        """Linear layer that maps the language model's hidden states to token vectors."""
        return cast(torch.nn.Linear, self.model.get_submodule(projection_name(self.model)))

    def join_media(self, inputs: Sequence[ModelInput]) -> dict[str, torch.Tensor]:
        """Concatenates media, or stacks tiles padded with zero tiles, which the model ignores."""
        media = [sequence.media for sequence in inputs if sequence.media]
        if self.family.media != "tiles" or not media:
            return super().join_media(inputs)
        return {
            name: torch.nn.utils.rnn.pad_sequence([each[name] for each in media], batch_first=True)
            for name in media[0]
        }

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Returns the projected hidden states."""
        for name in ("pixel_values", "pixel_values_videos"):
            if name in inputs:
                inputs[name] = inputs[name].to(self.model.dtype)
        if self.family.media == "omni":
            inputs = thinker_inputs(inputs)
        elif self.family.media == "grid":
            inputs = positioned(self.backbone, inputs, self.spec.positions)
            if self.backbone is not self.model and "pixel_values" in inputs:
                # The class of transformers expects the patches of each image, padded.
                counts = inputs["image_grid_thw"].prod(dim=1).tolist()
                patches = inputs["pixel_values"].split(counts)
                inputs["pixel_values"] = torch.nn.utils.rnn.pad_sequence(
                    list(patches), batch_first=True
                )
        return self.model(**inputs, use_cache=False).embeddings, None


def projected(
    title: str, backbone: type[PreTrainedModel], settings_class: type[PretrainedConfig], width: int
) -> type[PreTrainedModel]:
    """Returns the class of a backbone with a projection, as colpali-engine names and saves it.

    `title` is that of the family.
    """

    class Projected(backbone):  # type: ignore[valid-type, misc]
        """Vision-language model with a projection of its last hidden states."""

        config_class = settings_class

        def __init__(self, settings: PretrainedConfig):
            super().__init__(settings)
            hidden = settings.get_text_config().hidden_size
            self.custom_text_proj = torch.nn.Linear(hidden, width)
            self.post_init()

        def forward(self, *args: Any, **inputs: Any) -> ModelOutput:
            """Returns the projected hidden states (B, L, D) as `embeddings`."""
            states_BLH = super().forward(*args, **inputs).last_hidden_state
            return ModelOutput(embeddings=self.custom_text_proj(states_BLH))

    Projected.__name__ = Projected.__qualname__ = re.sub(r"\W", "_", title)
    return Projected


def _load_engine_model(
    spec: PageSpec, settings: PretrainedConfig, title: str, device_map: str | None
) -> PreTrainedModel:
    # The width is that of the weights, because few checkpoints record it.
    folder = checkpoint_folder(spec, [*WEIGHTS, *SETTINGS])
    check_safetensors(spec.model, folder)
    headers = read_headers(folder)
    name = projection_names(headers).get("weight")
    if name is None:
        raise SpecError(
            "model", spec.model, f"a {title} with a projection", "has no weights of one"
        )
    width = next(iter(headers[name]["shape"]), 1)
    backbone: Any = MODEL_MAPPING[type(settings)]
    model_class = projected(title, backbone, type(settings), width)
    model: Any = load_model(spec, model_class, device_map, renamed=ENGINE_NAMES)
    model._weight_conversions = []  # saving would try to restore the former names
    if dims := getattr(settings, "dims", None):  # of Ops-ColQwen3, which keeps the first ones
        layer = model.custom_text_proj
        for name, parameter in layer.named_parameters():
            setattr(layer, name, torch.nn.Parameter(parameter[:dims]))
        layer.out_features = len(layer.weight)
    return model


def projection_name(model: torch.nn.Module) -> str:
    """Returns the name of the projection within a model."""
    names = ("custom_text_proj", "embedding_proj_layer")
    return next(name for name in names if hasattr(model, name))


def _declared(spec: PageSpec) -> tuple[PretrainedConfig, Family]:
    """Returns the settings of the vision-language model of a checkpoint, and its family."""
    settings = load_model_config(spec.model, checkpoint_folder(spec, SETTINGS))
    if settings.model_type not in FAMILIES:
        check_checkpoint(spec, *FAMILIES)  # raises an error that lists the types
    return getattr(settings, "vlm_config", settings), FAMILIES[settings.model_type]
