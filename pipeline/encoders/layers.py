"""Hidden layers of a model, as specs name them, and the token vectors computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator

from pipeline.config import SpecError
from pipeline.encoders import Attention
from pipeline.tokens import normalise


def _are_numbers(layer: Any) -> Any:
    each = layer if isinstance(layer, list | tuple) else [layer]
    if not each or not all(type(number) is int for number in each):
        raise SpecError("", layer, "a layer number or a list of layer numbers")
    return layer


#: Layers whose hidden states are the token vectors: one, or several concatenated.
Layers = Annotated[int | tuple[int, ...], BeforeValidator(_are_numbers)]


def check_layers(layer: int | tuple[int, ...], depth: int) -> None:
    """Raises `SpecError` if a model of `depth` layers lacks one of these."""
    for number in (layer,) if isinstance(layer, int) else layer:
        if not -depth - 1 <= number <= depth:
            rule = f"from {-depth - 1} to {depth} (the model has {depth} layers)"
            raise SpecError("layer", number, rule)


def layer_states(
    hidden_states: Sequence[torch.Tensor], layer: int | tuple[int, ...]
) -> torch.Tensor:
    """Returns the states of a layer; of N layers (..., N D) float32, each of unit length.

    The cosine of two tokens is then the mean of the cosines of their layers.
    """
    if isinstance(layer, int):
        return hidden_states[layer]
    return torch.cat([normalise(hidden_states[number].float()) for number in layer], dim=-1)


def attention_info(settings: Any, statistics: Sequence[str]) -> Attention:
    """Returns the attention statistics of a model whose language model has these settings."""
    return Attention(tuple(statistics), settings.num_hidden_layers)


def make_bidirectional(language_model: Any) -> None:
    """Lets every position of a causal model attend to all others."""
    language_model.config.is_causal = False  # read by the library to build its masks
    for module in language_model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
