"""Table of published models, with what the files of their checkpoints do not tell."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml


@functools.cache
def published_fields() -> dict[str, dict[str, Any]]:
    """Returns the fields of `models.yaml` by hub name."""
    text = resources.files("pipeline.encoders").joinpath("models.yaml").read_text("utf-8")
    return yaml.safe_load(text)


def model_languages(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the languages of an encoder as ISO 639 codes, or an empty tuple if unknown.

    Args:
        spec: Settings of the encoder. Those of an adapter are unknown.
    """
    if spec.get("adapter"):
        return ()
    return tuple(published_fields().get(spec.get("model", ""), {}).get("languages", ()))
