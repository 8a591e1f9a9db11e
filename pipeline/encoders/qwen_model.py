"""Loads and runs Qwen-VL models without their language modelling head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

from pipeline.encoders.loading import CheckpointSpec, check_checkpoint, load_model
from pipeline.encoders.qwen_spec import Positions

#: Model classes by model type. The backbone is the submodule `model` of each.
MODELS = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}


def load_backbone(
    spec: CheckpointSpec,
    device_map: str | None,
    models: Mapping[str, type[PreTrainedModel]] = MODELS,
    unused: tuple[str, ...] = (),
) -> PreTrainedModel:
    """Loads the backbone of a checkpoint, which may be saved with or without its head.

    `unused` are prefixes of other weights that it may have.
    """
    # The full model is loaded because only its class maps the weight names of older versions, and
    # because adapters are trained on it. The head is unused.
    model_class = models[check_checkpoint(spec, *models).model_type]
    model = load_model(spec, model_class, device_map, optional_weights=("lm_head.", *unused)).model
    if device_map:  # moves the output to the device of the input, as in the full model
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module

        add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    return model


def run(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    positions: Positions = "3d",
    **options: Any,
) -> Any:
    """Runs a backbone with explicit position ids, see `positioned`."""
    return model(**positioned(model, inputs, positions), use_cache=False, **options)


def positioned(
    backbone: Any, inputs: dict[str, torch.Tensor], kind: Positions = "3d"
) -> dict[str, torch.Tensor]:
    """Returns inputs with position ids, counted from the first token that is not padding.

    By default the model counts the positions of text-only batches from the padding. `kind` is "3d",
    in time, row and column, or "1d", consecutive.
    """
    grids = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    types = inputs.pop("mm_token_type_ids")
    if kind == "1d":
        consecutive_BL = inputs["attention_mask"].cumsum(dim=1).sub(1).clamp_min(0)
        positions = consecutive_BL.expand(3, -1, -1)
    else:
        positions, _ = backbone.get_rope_index(
            inputs["input_ids"],
            mm_token_type_ids=types,
            attention_mask=inputs["attention_mask"],
            **{name: inputs[name] for name in grids if name in inputs},
        )
    inputs.pop("second_per_grid_ts", None)  # only used by get_rope_index
    return {**inputs, "position_ids": positions}
