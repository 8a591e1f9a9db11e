"""Selects hidden layers and computes token vectors from their states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator

from pipeline.config import ComponentSpec, SpecError
from pipeline.encoders import AttentionInfo
from pipeline.taps import APPENDED_STATISTICS
from pipeline.tokens import normalise


def _check_layer_type(layer: Any) -> Any:
    numbers = layer if isinstance(layer, list | tuple) else [layer]
    if not numbers or not all(type(number) is int for number in numbers):
        raise SpecError("", layer, "a layer number or a list of layer numbers")
    return layer


#: Layers whose hidden states are the token vectors: one, or several concatenated.
Layers = Annotated[int | tuple[int, ...], BeforeValidator(_check_layer_type)]


def check_layers(layer: int | tuple[int, ...], depth: int, field: str = "layer") -> None:
    """Checks that a model of some depth has the layers; negative numbers count from the last."""
    for number in (layer,) if isinstance(layer, int) else layer:
        if not -depth - 1 <= number <= depth:
            rule = f"from {-depth - 1} to {depth} (the model has {depth} layers)"
            raise SpecError(field, number, rule)


def layer_states(
    hidden_states: Sequence[torch.Tensor], layer: int | tuple[int, ...]
) -> torch.Tensor:
    """Returns the hidden states (..., D) of one layer, or those of N layers, (..., N * D).

    With several layers each part is float32 and has unit length, so the cosine similarity of two
    tokens is the mean of the cosine similarities of their layers. `hidden_states` starts with the
    output of the embeddings.
    """
    if isinstance(layer, int):
        return hidden_states[layer]
    return torch.cat([normalise(hidden_states[number].float()) for number in layer], dim=-1)


def attention_info(
    settings: Any, statistics: Sequence[str], spec: ComponentSpec | None = None
) -> AttentionInfo:
    """Returns the attention info of a model, including the statistics of `spec.appended_tokens`."""
    appended = APPENDED_STATISTICS if getattr(spec, "appended_tokens", None) else ()
    return AttentionInfo((*statistics, *appended), settings.num_hidden_layers)


def make_bidirectional(language_model: Any) -> None:
    """Allows all positions of a causal model to attend to each other."""
    language_model.config.is_causal = False  # used by transformers to build attention masks
    for module in language_model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
