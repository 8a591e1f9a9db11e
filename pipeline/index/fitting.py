"""What compressors and codecs learn from a sample before the first commit, and where it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.compression.random import sample_tokens
from pipeline.config import within
from pipeline.index.artefacts import Sample, load_artefact, load_sample, save_artefact
from pipeline.index.columns import Representation, representation_fields, representation_info
from pipeline.index.info import EncoderInfo, RepresentationInfo
from pipeline.registry import CODECS, COMPRESSORS
from pipeline.tokens import TokenBatch


class Learned(NamedTuple):
    """What a representation's compressor and codec learned; None where they need nothing.

    Attributes:
        sample: The items that both were fitted on; None if it is not known here.
    """

    compressor: dict[str, np.ndarray] | None = None
    codec: dict[str, np.ndarray] | None = None
    sample: Sample | None = None


def needs_fit(representation: Representation) -> bool:
    """Whether a representation must learn from a sample before anything is stored."""
    compressor = COMPRESSORS.build(representation.compressor)
    return compressor.needs_fit or CODECS.build(representation.codec).needs_fit


def fit(
    representation: Representation, sample: Callable[[], Iterable[TokenBatch]], seed: int
) -> Learned:
    """Fits the compressor, and then the codec on the compressed vectors.

    Args:
        representation: Compressor and codec to fit.
        sample: Yields the batches of the sample, with the taps that the compressor needs. If both
            are fitted it is called twice, so that the sample is never in memory as a whole.
        seed: Seed of the codec's sample of tokens.

    Raises:
        SpecError: The sample is too small for the settings.
    """
    compressor = COMPRESSORS.build(representation.compressor)
    learned = compressor.fit(compressor.spec, sample()) if compressor.needs_fit else None
    codec = CODECS.build(representation.codec)
    if not codec.needs_fit:
        return Learned(learned)
    compressor = COMPRESSORS.build(representation.compressor, learned)
    compressed = map(compressor.compress, sample())
    tokens_TD = sample_tokens(compressed, seed, codec.num_fit_tokens, normalised=False)
    with within(f"representations.{representation.id}"):
        return Learned(learned, codec.fit(codec.spec, tokens_TD, seed))


def fitted_fields(
    index: str, representation: Representation, encoder_info: EncoderInfo, learned: Learned
) -> list[pa.Field]:
    """Stores the fitted state and returns the columns, whose metadata names it."""
    info = representation_info(representation, encoder_info)
    artefact = codec_artefact = None
    if learned.compressor is not None:
        artefact = save_artefact(index, learned.compressor, info.compressor_fit, learned.sample)
    if learned.codec is not None:
        codec_fit = replace(info, artefact=artefact).codec_fit
        codec_artefact = save_artefact(index, learned.codec, codec_fit, learned.sample)
    return representation_fields(representation, encoder_info, artefact, codec_artefact)


def stored_learned(index: str, info: RepresentationInfo) -> Learned:
    """Loads what the compressor and the codec of a stored representation learned.

    Raises:
        SpecError: The index has lost it, or it was fitted for something else.
    """
    compressor = codec = None
    if info.artefact:
        compressor = load_artefact(index, info.artefact, info.compressor_fit)
    if info.codec_artefact:
        codec = load_artefact(index, info.codec_artefact, info.codec_fit)
    return Learned(compressor, codec)


def stored_sample(index: str, info: RepresentationInfo) -> Sample | None:
    """Returns the sample that a stored representation was fitted on.

    Returns:
        None if it has learned nothing, or an older version of this software did not record it.
    """
    name = info.artefact or info.codec_artefact
    return load_sample(index, name) if name else None
