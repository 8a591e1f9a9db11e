"""Preprocesses audio for speech recognisers by resampling and splitting it at silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import soxr

#: Sample rate of speech recognisers, in Hz.
SAMPLE_RATE = 16_000
#: Number of samples per frame of 10 ms, in which loudness is measured.
FRAME = SAMPLE_RATE // 100
#: Maximum amplitude of digital silence: half a 16-bit step and its dither.
MAX_SILENCE = 1.5 / 32768
#: Minimum digital silence between utterances, in seconds. Shorter pauses belong to the speech.
MIN_PAUSE_SECONDS = 2.0


def decode_samples(audio: dict[str, Any], rate: int = SAMPLE_RATE) -> np.ndarray:
    """Returns the samples (T,) float32 of a row of `schema.AUDIO`, finite and in [-1, 1]."""
    samples = np.frombuffer(audio["samples"], "<f4")
    samples = np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0).clip(-1, 1)
    if audio["sample_rate"] != rate and len(samples):
        samples = soxr.resample(samples, audio["sample_rate"], rate).clip(-1, 1)
    return samples


def split_utterances(
    samples_T: np.ndarray, max_seconds: float
) -> Iterator[tuple[float, np.ndarray]]:
    """Yields the utterances in audio, without the surrounding digital silence.

    Recognisers hallucinate words in digital silence. Utterances longer than `max_seconds` are
    divided at the quietest time of their second half.

    Yields:
        Start of the utterance in seconds, and its samples.

    >>> rate = SAMPLE_RATE
    >>> samples = np.zeros(10 * rate, np.float32)
    >>> samples[rate : 2 * rate] = samples[6 * rate : 8 * rate] = 0.1
    >>> [(start, len(part) / rate) for start, part in split_utterances(samples, max_seconds=60)]
    [(1.0, 1.0), (6.0, 2.0)]
    """
    amplitudes = _amplitudes(samples_T)
    loud = np.flatnonzero(amplitudes > MAX_SILENCE)
    if not len(loud):
        return
    breaks = np.flatnonzero(np.diff(loud) > MIN_PAUSE_SECONDS * SAMPLE_RATE / FRAME)
    starts = np.concatenate([loud[:1], loud[breaks + 1]])
    ends = np.concatenate([loud[breaks], loud[-1:]]) + 1
    max_frames = round(max_seconds * SAMPLE_RATE / FRAME)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        while end - start > max_frames:
            middle = start + max_frames // 2
            cut = middle + _quietest(amplitudes[middle : start + max_frames])
            yield start * FRAME / SAMPLE_RATE, samples_T[start * FRAME : cut * FRAME]
            start = cut
        yield start * FRAME / SAMPLE_RATE, samples_T[start * FRAME : end * FRAME]


def _amplitudes(samples_T: np.ndarray) -> np.ndarray:
    """Returns the maximum amplitude of each frame."""
    if not len(samples_T):
        return np.zeros(0, np.float32)
    starts = np.arange(0, len(samples_T), FRAME)
    highest, lowest = (extreme.reduceat(samples_T, starts) for extreme in (np.maximum, np.minimum))
    return np.maximum(highest, -lowest)


def _quietest(amplitudes: np.ndarray) -> int:
    """Finds the quietest 0.2 seconds and returns their middle as a frame number."""
    width = min(20, len(amplitudes))
    sums = np.convolve(amplitudes, np.ones(width), mode="valid")
    return int(sums.argmin()) + width // 2
