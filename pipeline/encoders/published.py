"""Table of published models, with what the files of their checkpoints do not tell."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

#: Hub names of the models that packages contain, by their names in specs.
BUNDLED_MODELS = {
    "bundled": "sentence-transformers/all-MiniLM-L6-v2",
    "multilingual": "intfloat/multilingual-e5-small",
}


@functools.cache
def published_fields() -> dict[str, dict[str, Any]]:
    """Returns the fields of `models.yaml` by hub name."""
    text = resources.files("pipeline.encoders").joinpath("models.yaml").read_text("utf-8")
    return yaml.safe_load(text)


def bundled_fields(model: Any) -> dict[str, Any]:
    """Returns the fields of the encoder of a bundled model, or an empty dict for others."""
    name = BUNDLED_MODELS.get(model) if isinstance(model, str) else None
    return published_fields()[name].get("encoder", {}) if name else {}


def model_languages(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the languages of an encoder as ISO 639 codes, or an empty tuple if unknown.

    Args:
        spec: Settings of the encoder. Those of an adapter are unknown.
    """
    if isinstance(spec.get("text"), Mapping):  # of the text encoder of `transcript`
        spec = spec["text"]
    if spec.get("adapter"):
        return ()
    model = spec.get("model", "")
    fields = published_fields().get(BUNDLED_MODELS.get(model, model), {})
    return tuple(fields.get("languages", ()))
