"""Trained compressors in an index: their requirements on the encoder, and their weights.

Weights are read once from the folder of a training run. The index stores them as the artefact of
the representation.

`pipeline.encoders.trained` is imported in functions because it imports transformers, which most
jobs do not need.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.numpy

from pipeline.compression.memtok import MemTok
from pipeline.config import WEIGHTS_HASH, ComponentSpec, SpecError, TrainedSpec, dump, within
from pipeline.encoders import Trainable
from pipeline.index.columns import Representation
from pipeline.index.info import EncoderInfo
from pipeline.registry import COMPRESSORS, ENCODERS

if TYPE_CHECKING:
    from pipeline.encoders.trained import TrainedCompressor


def check_compressors(representations: Iterable[Representation], encoder: ComponentSpec) -> None:
    """Checks that compressors fit an encoder, without loading it.

    Raises:
        SpecError: A compressor needs another encoder, or its weights are missing or were trained
            with another encoder or other settings.
    """
    for r in representations:
        compressor = COMPRESSORS.build(r.compressor)
        compressor.check_encoder(encoder)
        with within(f"representations.{r.id}.compressor"):
            if isinstance(compressor, MemTok):
                compressor.check_budget(_num_appended(encoder))
            if isinstance(r.compressor, TrainedSpec):
                _check_weights(r.compressor, encoder)


def load_weights(compressor: ComponentSpec, encoder_info: EncoderInfo) -> dict[str, Any] | None:
    """Loads the trained weights of a compressor by name; None for compressors without weights.

    Raises:
        SpecError: They are missing or were trained for vectors of another dimension.
    """
    if not isinstance(compressor, TrainedSpec):
        return None
    from pipeline.encoders.trained import MODULE

    described, path = _read(compressor)
    if described.dim != encoder_info.dim:
        rule = f"the folder of a compressor of vectors of dimension {encoder_info.dim}"
        problem = f"was trained for dimension {described.dim}"
        raise SpecError("weights", compressor.weights, rule, problem)
    return safetensors.numpy.load_file(path / MODULE)


def _check_weights(compressor: TrainedSpec, encoder: ComponentSpec) -> None:
    """Checks that trained weights exist, and fit the spec of the compressor and the encoder."""
    from pipeline.encoders.trained import check_trained_with

    described, _ = _read(compressor)
    folder = str(compressor.weights)
    if described.compressor["name"] != compressor.name:
        rule = f"the folder of a trained {compressor.name}"
        problem = f"has a trained {described.compressor['name']}"
        raise SpecError("weights", folder, rule, problem)
    trained = dump(COMPRESSORS.resolve(described.compressor))
    for field, value in dump(compressor).items():
        if field != "weights" and value != trained[field]:
            note = "; it cannot be changed after training"
            raise SpecError(field, value, f"{trained[field]}, as in {folder}", note=note)
    encoder_class = ENCODERS.load(encoder.name)
    if issubclass(encoder_class, Trainable):
        check_trained_with(folder, "weights", encoder_class, encoder)
    else:
        described.check_encoder(encoder.name, [], "weights", folder)


def _read(compressor: TrainedSpec) -> tuple[TrainedCompressor, Path]:
    """Reads the description of trained weights, and returns it with the folder of the files."""
    from pipeline.encoders.trained import TrainedCompressor

    if compressor.weights is None or compressor.weights.startswith(WEIGHTS_HASH):
        rule = "the folder of a training run with the weights of the compressor"
        raise SpecError("weights", compressor.weights, rule)
    return TrainedCompressor.read(compressor.weights, "weights")


def _num_appended(encoder: Any) -> int:
    """Returns the number of tokens that an encoder appends to items."""
    from pipeline.encoders.trained import TOKENS, TrainedCompressor

    _, path = TrainedCompressor.read(encoder.appended_tokens, "appended_tokens")
    with safetensors.safe_open(path / TOKENS, "np") as file:
        return int(file.get_slice("weight").get_shape()[0])
