"""Fits compressors and codecs to a sample and stores the result in the index."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from pipeline.compression.random import sample_tokens
from pipeline.config import within
from pipeline.index.artefacts import Sample, load_artefact, load_sample, save_artefact
from pipeline.index.columns import Representation, representation_fields, representation_info
from pipeline.index.info import EncoderInfo, RepresentationInfo
from pipeline.index.trained import load_weights
from pipeline.registry import CODECS, COMPRESSORS
from pipeline.tokens import TokenBatch


class LearnedState(NamedTuple):
    """Learned state of a representation.

    Attributes:
        compressor: Fitted state or trained weights of the compressor, or None if it has neither.
        codec: Fitted state of the codec, or None if it needs no fitting.
    """

    compressor: dict[str, np.ndarray] | None = None
    codec: dict[str, np.ndarray] | None = None
    sample: Sample | None = None


def needs_fit(representation: Representation) -> bool:
    """Checks whether the compressor or the codec must be fitted before items can be stored."""
    compressor = COMPRESSORS.build(representation.compressor)
    return compressor.needs_fit or CODECS.build(representation.codec).needs_fit


def trained_state(representation: Representation, encoder_info: EncoderInfo) -> LearnedState:
    """Returns the learned state of a representation that needs no fitting: its trained weights."""
    with within(f"representations.{representation.id}.compressor"):
        return LearnedState(load_weights(representation.compressor, encoder_info))


@torch.no_grad()
def fit(
    representation: Representation,
    encoder_info: EncoderInfo,
    sample: Callable[[], Iterable[TokenBatch]],
    seed: int,
) -> LearnedState:
    """Fits the compressor, and then the codec to the compressed vectors.

    Args:
        encoder_info: Encoder of the token vectors.
        sample: Returns the batches of the sample, with the attention statistics that the compressor
            needs. It is called twice if both are fitted, so that the sample need not fit in memory.
        seed: Seed of the sample of tokens on which the codec is fitted.

    Raises:
        SpecError: The sample is too small for the settings.
    """
    compressor = COMPRESSORS.build(representation.compressor)
    compressor_state = (
        compressor.fit(compressor.spec, sample())
        if compressor.needs_fit
        else trained_state(representation, encoder_info).compressor
    )
    codec = CODECS.build(representation.codec)
    if not codec.needs_fit:
        return LearnedState(compressor_state)
    compressor = COMPRESSORS.build(representation.compressor, compressor_state)
    compressed = map(compressor.compress, sample())
    tokens_TD = sample_tokens(compressed, seed, codec.num_fit_tokens, normalised=False)
    with within(f"representations.{representation.id}"):
        return LearnedState(compressor_state, codec.fit(codec.spec, tokens_TD, seed))


def fitted_fields(
    index: str, representation: Representation, encoder_info: EncoderInfo, learned: LearnedState
) -> list[pa.Field]:
    """Stores the fitted state. Returns the columns, whose metadata refer to it."""
    info = representation_info(representation, encoder_info)
    artefact = codec_artefact = None
    if learned.compressor is not None:
        sample = None if info.has_trained_weights else learned.sample
        artefact = save_artefact(index, learned.compressor, info.compressor_fit, sample)
    if learned.codec is not None:
        codec_fit = replace(info, artefact=artefact).codec_fit
        codec_artefact = save_artefact(index, learned.codec, codec_fit, learned.sample)
    return representation_fields(representation, encoder_info, artefact, codec_artefact)


def load_learned_state(index: str, info: RepresentationInfo) -> LearnedState:
    """Loads the fitted state of a stored representation."""
    compressor = codec = None
    if info.artefact:
        compressor = load_artefact(index, info.artefact, info.compressor_fit)
    if info.codec_artefact:
        codec = load_artefact(index, info.codec_artefact, info.codec_fit)
    return LearnedState(compressor, codec)


def load_fit_sample(index: str, info: RepresentationInfo) -> Sample | None:
    """Loads the sample to which a stored representation was fitted, or None without fitting."""
    name = (None if info.has_trained_weights else info.artefact) or info.codec_artefact
    return load_sample(index, name) if name else None
