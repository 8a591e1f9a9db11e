"""LoRA through peft: low-rank matrices beside linear layers alone are trained (Hu et al., 2021)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import Field, field_validator

from pipeline import config
from pipeline.config import SpecError

#: The linear layers of a language model, and not of the tower of its pictures.
LANGUAGE_MODEL = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
#: How peft's names of weights begin.
PREFIX = "base_model.model."


class Lora(config.Spec):
    """The low-rank matrices.

    Rank and alpha are those of SMART (section 4.4).

    Attributes:
        rank: of the matrices.
        alpha: their product counts alpha / rank times.
        dropout: of their input.
        targets: a regular expression that the whole name of each layer matches which gets them.
    """

    rank: int = Field(128, ge=1)
    alpha: float = Field(256, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str = LANGUAGE_MODEL

    @field_validator("targets")
    @classmethod
    def _is_an_expression(cls, targets: str) -> str:
        try:
            re.compile(targets)
        except re.error as error:
            raise SpecError("", targets, f"a regular expression ({error})") from None
        return targets


def check() -> None:
    """Raises `SpecError` if peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        legal = "another kind, or the package peft installed (the extra `training`)"
        raise SpecError("trains", "lora", legal, "needs peft") from None


def attach(model: torch.nn.Module, spec: Lora) -> Any:
    """Puts the matrices into a model, whose other weights no longer train; gives peft's model.

    Raises:
        SpecError: no layer's name matches.
    """
    from peft import LoraConfig, get_peft_model

    linear = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    if not any(re.fullmatch(spec.targets, name) for name in linear):
        ends = sorted({name.rpartition(".")[2] for name in linear})
        legal = f"an expression that a layer's whole name matches, such as {linear[0]};"
        legal += f" the layers end in {', '.join(ends)}"
        raise SpecError("lora.targets", spec.targets, legal, "matches no linear layer")
    settings = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=spec.targets,
    )
    return get_peft_model(model, settings)


def save(tuned: Any, folder: Path, within: str = "") -> None:
    """Writes an adapter in peft's form, as the field `adapter` of an encoder's spec reads it.

    Args:
        tuned: what `attach` gave.
        within: how the names of the model's weights begin in the checkpoint that it is part of.
    """
    from peft import get_peft_model_state_dict

    weights = {
        PREFIX + within + name.removeprefix(PREFIX): tensor.detach().cpu().contiguous()
        for name, tensor in get_peft_model_state_dict(tuned).items()
    }
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
    tuned.peft_config[tuned.active_adapter].save_pretrained(str(folder))
