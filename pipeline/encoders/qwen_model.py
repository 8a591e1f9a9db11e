"""Loading and running of Qwen-VL models without their language modelling head."""

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

#: Language models by type; the model of hidden states is a part of each.
MODELS = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}


def load_backbone(
    spec: CheckpointSpec,
    device_map: str | None,
    models: Mapping[str, type[PreTrainedModel]] = MODELS,
) -> PreTrainedModel:
    """Loads the model of hidden states of a checkpoint, saved with or without its head.

    Raises:
        SpecError: The weights cannot be loaded, or some are missing.
    """
    # Names of weights have changed over the versions: only the whole model knows all of them, and
    # adapters are trained around it. The head is not used.
    whole = models[check_checkpoint(spec, *models).model_type]
    model = load_model(spec, whole, device_map, may_lack=("lm_head.",)).model
    if device_map:  # as in the whole model, the output moves to the device of the input
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module

        add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    return model


def run(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    """Runs a model of hidden states with positions counted from the first real token.

    They are passed explicitly because the model counts those of a batch of texts from its padding.
    """
    grids = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    whole: Any = model  # of a class that counts positions
    positions, _ = whole.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs.pop("mm_token_type_ids"),
        attention_mask=inputs["attention_mask"],
        **{name: inputs[name] for name in grids if name in inputs},
    )
    inputs.pop("second_per_grid_ts", None)  # it has no other use
    return model(**inputs, position_ids=positions, use_cache=False, **options)
