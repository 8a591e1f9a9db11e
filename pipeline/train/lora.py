"""LoRA with peft, which trains low-rank matrices beside linear layers (Hu et al., 2021)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import Field, field_validator

from pipeline import config, extras
from pipeline.config import SpecError, reading
from pipeline.encoders.adapters import PREFIX
from pipeline.encoders.loading import ADAPTER_WEIGHTS


class Lora(config.Spec):
    """Options of LoRA. The default rank and alpha are those of SMART (section 4.4)."""

    rank: int = Field(128, ge=1)
    """Rank of the matrices."""
    alpha: float = Field(256, gt=0)
    """Scaling factor. The product of the matrices is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability of their input."""
    targets: str | None = None
    """Regular expression that the full names of adapted layers match, or null for the linear layers
    of the language model."""

    @field_validator("targets")
    @classmethod
    def _is_an_expression(cls, targets: str | None) -> str | None:
        problem = "does not compile"
        with reading("", targets, "a regular expression", re.error, problem=problem):
            re.compile(targets or "")
        return targets


def check() -> None:
    """Raises `MissingExtra` if peft is not installed."""
    extras.require("peft")


def attach(model: torch.nn.Module, spec: Lora, default: str) -> Any:
    """Adds LoRA matrices to a model, freezes all other weights and returns the peft model.

    `default` are the targets if the spec names none.
    """
    from peft import LoraConfig, get_peft_model

    targets = spec.targets or default
    linear = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    if not any(re.fullmatch(targets, name) for name in linear):
        ends = sorted({name.rpartition(".")[2] for name in linear})
        rule = f"a regular expression of full layer names, such as {linear[0]}"
        note = f"; the layer names end in {', '.join(ends)}"
        raise SpecError("lora.targets", targets, rule, "matches no linear layer", note)
    settings: dict[str, Any] = {  # peft annotates alpha as an integer and takes any number
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": targets,
    }
    return get_peft_model(model, LoraConfig(**settings))


def train(model: torch.nn.Module, mode: bool) -> None:
    """Switches the dropout of the LoRA matrices, and no other, to training or evaluation mode."""
    for module in model.modules():
        dropout = getattr(module, "lora_dropout", None)
        if isinstance(dropout, torch.nn.Module):
            dropout.train(mode)


def leave_casts_to_autocast(model: torch.nn.Module) -> None:
    """Prevents peft from converting the inputs of LoRA matrices to float32.

    Autocast would convert them back: two copies of the activations per layer and pass.
    """
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if hasattr(layer, "lora_A"):
            layer.cast_input_dtype_enabled = False


def save(tuned: Any, folder: Path, within: str = "") -> None:
    """Writes an adapter in peft's form, as the field `adapter` of an encoder's spec reads it.

    `within` is the prefix of the model's weights in the checkpoint that it is part of.
    """
    from peft import get_peft_model_state_dict

    weights = {
        PREFIX + within + name.removeprefix(PREFIX): tensor.detach().cpu().contiguous()
        for name, tensor in get_peft_model_state_dict(tuned).items()
    }
    safetensors.torch.save_file(weights, folder / ADAPTER_WEIGHTS)
    tuned.peft_config[tuned.active_adapter].save_pretrained(str(folder))


def load(tuned: Any, folder: Path, within: str = "") -> None:
    """Loads the matrices of an adapter that was written by `save`, to train them further."""
    from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict

    settings, stored = (
        tuned.peft_config[tuned.active_adapter],
        PeftConfig.from_pretrained(str(folder)),
    )
    for field, name in (("rank", "r"), ("alpha", "lora_alpha"), ("targets", "target_modules")):
        value, wanted = getattr(settings, name), getattr(stored, name, None)
        if value != wanted:
            rule = f"{wanted!r}, as in the initial adapter"
            raise SpecError(f"lora.{field}", value, rule)
    weights = {
        PREFIX + name.removeprefix(PREFIX + within): tensor
        for name, tensor in safetensors.torch.load_file(folder / ADAPTER_WEIGHTS).items()
    }
    shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(tuned).items()}
    if {name: tensor.shape for name, tensor in weights.items()} != shapes:
        rule = "an adapter of this model"
        raise SpecError("encoder.adapter", str(folder), rule, "has other weights")
    set_peft_model_state_dict(tuned, weights)
