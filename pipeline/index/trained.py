"""Trained compressors in an index: their requirements on the encoder, and their weights.

`pipeline.encoders.trained` is imported in functions because it imports transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pipeline.compression.memtok import MemTok
from pipeline.config import WEIGHTS_HASH, ComponentSpec, SpecError, TrainedSpec, within
from pipeline.encoders import Trainable
from pipeline.index.columns import Representation
from pipeline.index.info import EncoderInfo
from pipeline.registry import COMPRESSORS, ENCODERS

if TYPE_CHECKING:
    from pipeline.encoders.trained import TrainedCompressor


def check_compressors(representations: Iterable[Representation], encoder: ComponentSpec) -> None:
    """Checks that compressors and their weights fit an encoder, without loading it."""
    for r in representations:
        compressor = COMPRESSORS.build(r.compressor)
        compressor.check_encoder(encoder)
        field = f"representations.{r.id}.compressor"
        if isinstance(compressor, MemTok):
            with within(field):
                compressor.check_budget(_num_appended(encoder))
        if isinstance(r.compressor, TrainedSpec):
            with within(field):
                described = _read(r.compressor)
                described.check_settings(r.compressor)
            with within("encoder"):
                hashes = _weight_hashes(encoder)
            with within(field):
                described.check_encoder(encoder.name, hashes, "weights", str(r.compressor.weights))


def load_weights(compressor: ComponentSpec, encoder_info: EncoderInfo) -> dict[str, Any] | None:
    """Loads the trained weights of a compressor by name; None for compressors without weights."""
    if not isinstance(compressor, TrainedSpec):
        return None
    from pipeline.encoders.trained import load_parameters

    described = _read(compressor)
    if described.dim != encoder_info.dim:
        rule = f"the folder of a compressor of vectors of dimension {encoder_info.dim}"
        problem = f"was trained for dimension {described.dim}"
        raise SpecError("weights", compressor.weights, rule, problem)
    return load_parameters(str(compressor.weights))


def _weight_hashes(encoder: ComponentSpec) -> list[str]:
    """Returns the sorted hashes of the weight files of an encoder, if it can be trained."""
    from pipeline.encoders.trained import weight_hashes

    encoder_class = ENCODERS.load(encoder.name)
    return weight_hashes(encoder_class, encoder) if issubclass(encoder_class, Trainable) else []


def _read(compressor: TrainedSpec) -> TrainedCompressor:
    from pipeline.encoders.trained import TrainedCompressor

    if compressor.weights is None or compressor.weights.startswith(WEIGHTS_HASH):
        rule = "the folder of a training run with the weights of the compressor"
        raise SpecError("weights", compressor.weights, rule)
    return TrainedCompressor.read(compressor.weights, "weights")[0]


def _num_appended(encoder: Any) -> int:
    from pipeline.encoders.trained import appended_shape

    return appended_shape(encoder)[0]
