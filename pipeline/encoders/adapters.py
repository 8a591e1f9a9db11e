"""Merges LoRA adapters into models whose layers may have other names than in training."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import PreTrainedModel

from pipeline import extras
from pipeline.config import SpecError, reading
from pipeline.runtime.checkpoint import LOAD_ERRORS

#: Prefix of peft's names of weights.
PREFIX = "base_model.model."


def canonical(name: str) -> str:
    """Returns the name of a layer without the differences between libraries and their versions.

    >>> canonical("model.layers.0.mlp.up_proj")
    'language_model.layers.0.mlp.up_proj'
    >>> canonical("vlm.language_model.model.layers.0.mlp.up_proj")
    'language_model.layers.0.mlp.up_proj'
    >>> canonical("embedding_proj_layer")
    'custom_text_proj'
    """
    name = re.sub(r"^((thinker|vlm|model)\.)+", "", name)
    name = name.replace("language_model.model.", "language_model.")
    name = re.sub(r"^(?=(layers|embed_tokens|norm)\b)", "language_model.", name)
    return re.sub(r"^(linear|embedding_proj_layer)\b", "custom_text_proj", name)


def merge_adapter(model: PreTrainedModel, path: Path, field: str, value: str) -> PreTrainedModel:
    """Merges the weights of a LoRA adapter into the model that it was trained on.

    Layers are found by their canonical names. peft itself ignores weights whose names differ.

    Args:
        path: Weights of the adapter, beside its adapter_config.json.
        field, value: Field of the spec that names the adapter, for messages.

    Raises:
        MissingExtra: peft is not installed.
        SpecError: The adapter does not fit the model.
    """
    extras.require("peft")
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict

    rule = "a LoRA adapter of the model"
    with reading(field, value, rule, *LOAD_ERRORS):
        settings: Any = PeftConfig.from_pretrained(str(path.parent))
        stored = safetensors.torch.load_file(path)

    layers = {canonical(name): name for name, _ in model.named_modules()}
    parameters = {canonical(name): parameter for name, parameter in model.named_parameters()}
    matrices: dict[str, torch.Tensor] = {}
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []  # whole layers and biases
    adapted: set[str] = set()
    saved: set[str] = set()  # layers with weights of their own
    for key, tensor in stored.items():
        # Some checkpoints keep the name of the adapter.
        name = key.removeprefix(PREFIX).replace(".default.", ".")
        layer, is_matrix, matrix = name.partition(".lora_")
        known: dict[str, Any] = layers if is_matrix else parameters
        found = known.get(canonical(layer))
        if found is None:
            raise SpecError(field, value, rule, f"has weights of an unknown layer: {key}")
        if is_matrix:
            adapted.add(found)
            matrices[f"{PREFIX}{found}.lora_{matrix}"] = tensor
        elif found.shape != tensor.shape:
            shapes = (" x ".join(map(str, shape)) for shape in (tensor.shape, found.shape))
            raise SpecError(field, value, rule, f"has {key} of shape {' instead of '.join(shapes)}")
        else:
            replaced.append((found, tensor))
            if layer.endswith(".weight"):
                saved.add(layers[canonical(layer.removesuffix(".weight"))])
    with reading(field, value, rule, *LOAD_ERRORS, re.error), torch.no_grad():
        if missing := _missing_layer(model, settings, adapted | saved):
            raise SpecError(field, value, rule, f"has no weights of the layer {missing}")
        settings.target_modules, settings.bias = adapted, "none"
        settings.modules_to_save = settings.layers_to_transform = settings.exclude_modules = None
        for pattern in (settings.rank_pattern, settings.alpha_pattern):
            for name in [name for name in pattern if canonical(name) in layers]:
                pattern[layers[canonical(name)]] = pattern.pop(name)
        for parameter, tensor in replaced:
            parameter.copy_(tensor)
        tuned = PeftModel(model, settings)
        loaded: Any = set_peft_model_state_dict(tuned, matrices)
    if missing := min((key for key in loaded.missing_keys if ".lora_" in key), default=None):
        raise SpecError(field, value, rule, f"has no weights {missing}")
    return tuned.merge_and_unload().requires_grad_(True)  # which peft freezes


def _missing_layer(model: PreTrainedModel, settings: Any, adapted: Collection[str]) -> str | None:
    """Returns a layer that the settings of an adapter select and that has no weights, if any."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if settings.target_modules in (None, "all-linear"):
        return None
    # The projection has another name in ColIdefics3, whose adapters do not contain it.
    without = "custom_text_proj" if model.config.model_type == "idefics3" else None
    linear = (
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != without
    )
    selected = (name for name in linear if check_target_module_exists(settings, canonical(name)))
    return next((name for name in selected if name not in adapted), None)
