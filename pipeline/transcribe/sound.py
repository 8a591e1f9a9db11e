"""What recognisers of speech share: samples at their rate, cut where nothing is said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import soxr

#: What recognisers of speech hear: samples a second.
RATE = 16_000
#: Samples a frame: loudness is looked at in hundredths of a second.
FRAME = RATE // 100
#: What is no louder is digital silence: half a step of 16 bits and its dither.
SILENT = 1.5 / 32768
#: Seconds of digital silence that divide utterances; a shorter pause is part of the speech.
PAUSE = 2.0


def samples_of(audio: dict[str, Any], rate: int = RATE) -> np.ndarray:
    """(T,) float32 samples at `rate` of a row of `schema.AUDIO`, in [-1, 1] and finite."""
    samples = np.frombuffer(audio["samples"], "<f4")
    samples = np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0).clip(-1, 1)
    if audio["sample_rate"] != rate and len(samples):
        samples = soxr.resample(samples, audio["sample_rate"], rate).clip(-1, 1)
    return samples


def utterances(samples_T: np.ndarray, longest: float) -> Iterator[tuple[float, np.ndarray]]:
    """Stretches of sound without the digital silence around them, and their starts in seconds.

    Recognisers hear words in pure silence and are misled by it. A stretch of more than `longest`
    seconds is cut where its second half is quietest.

    >>> sound = np.zeros(10 * RATE, np.float32)
    >>> sound[RATE : 2 * RATE] = sound[6 * RATE : 8 * RATE] = 0.1
    >>> [(start, len(stretch) / RATE) for start, stretch in utterances(sound, longest=60)]
    [(1.0, 1.0), (6.0, 2.0)]
    """
    energies = _energies(samples_T)
    loud = np.flatnonzero(energies > SILENT)
    if not len(loud):
        return
    breaks = np.flatnonzero(np.diff(loud) > PAUSE * RATE / FRAME)
    starts = np.concatenate([loud[:1], loud[breaks + 1]])
    ends = np.concatenate([loud[breaks], loud[-1:]]) + 1
    most = round(longest * RATE / FRAME)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        while end - start > most:
            middle = start + most // 2
            cut = middle + _quietest(energies[middle : start + most])
            yield start * FRAME / RATE, samples_T[start * FRAME : cut * FRAME]
            start = cut
        yield start * FRAME / RATE, samples_T[start * FRAME : end * FRAME]


def _energies(samples_T: np.ndarray) -> np.ndarray:
    """The largest sample of each hundredth of a second, without its sign."""
    if not len(samples_T):
        return np.zeros(0, np.float32)
    starts = np.arange(0, len(samples_T), FRAME)
    highest, lowest = (extreme.reduceat(samples_T, starts) for extreme in (np.maximum, np.minimum))
    return np.maximum(highest, -lowest)


def _quietest(energies: np.ndarray) -> int:
    """The middle of the fifth of a second that is quietest."""
    width = min(20, len(energies))
    sums = np.convolve(energies, np.ones(width), mode="valid")
    return int(sums.argmin()) + width // 2
