"""English speech recognition with PocketSphinx on the CPU.

The wheel includes the model.
"""

from __future__ import annotations

import re
import threading
from typing import Any, Literal

import numpy as np
from pydantic import Field

from pipeline import config, extras
from pipeline.data.recognise import Line, Recogniser, Word, filter_words
from pipeline.data.recognise.audio import SAMPLE_RATE, decode_samples, split_utterances
from pipeline.tokens import AUDIO

#: Frames per second of word times.
FRAMES = 100
#: Non-words in the output: <s>, <sil>, [NOISE], ++BREATH++.
FILLER = re.compile(r"<.*>|\[.*\]|\+\+.*\+\+")
#: Suffix of alternative pronunciations, as in `and(2)`.
PRONUNCIATION = re.compile(r"\(\d+\)$")


class Sphinx(Recogniser["Sphinx.Spec"]):
    """Speech recognition with PocketSphinx. It supports clearly spoken US English only.

    Audio is divided into utterances of at most `max_utterance_seconds`, which are recognised
    independently, so memory does not grow with the duration. The times of words are in seconds of
    the file.
    """

    class Spec(config.ComponentSpec):
        """Options of PocketSphinx."""

        name: Literal["pocketsphinx"] = "pocketsphinx"
        max_utterance_seconds: float = Field(20.0, ge=2, le=120)
        """Maximum duration of an utterance, in seconds. Longer ones are divided at the quietest
        time."""
        min_pause_seconds: float = Field(0.5, gt=0)
        """Minimum pause between lines, in seconds."""
        min_confidence: float = Field(0.0, ge=0, le=1)
        """Minimum posterior probability of a word. Other words are omitted. Many correct words have
        a low probability."""

    def __init__(self, spec: Spec):
        self.check(spec)
        from pocketsphinx import Decoder

        self.spec = spec
        self._decoder = Decoder(samprate=SAMPLE_RATE, loglevel="FATAL")
        self._lock = threading.Lock()  # queries of several threads share the decoder

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `MissingExtra` if the package is not installed."""
        extras.require("pocketsphinx")

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Returns "audio"."""
        return ("audio",)

    def lines(self, item: dict[str, Any]) -> list[Line]:
        """Returns the recognised speech, divided into lines at pauses."""
        audio = item.get("audio")
        if audio is None:
            return []
        with self._lock:
            words = [
                word
                for start, samples in split_utterances(
                    decode_samples(audio), self.spec.max_utterance_seconds
                )
                for word in self._recognise_utterance(samples, audio["start"] + start)
            ]
        return filter_words(
            split_at_pauses(words, self.spec.min_pause_seconds), self.spec.min_confidence
        )

    def _recognise_utterance(self, samples: np.ndarray, start: float) -> list[Word]:
        """Recognises an utterance that begins at `start` seconds of the file."""
        self._decoder.reinit_feat()  # resets the estimate of loudness and noise
        self._decoder.start_utt()
        pcm = (samples * 32767).round().astype("<i2").tobytes()
        self._decoder.process_raw(pcm, no_search=False, full_utt=True)
        self._decoder.end_utt()
        if self._decoder.hyp() is None:
            return []
        return [
            Word(
                text=PRONUNCIATION.sub("", segment.word),
                times=(
                    start + segment.start_frame / FRAMES,
                    start + (segment.end_frame + 1) / FRAMES,
                ),
                kind=AUDIO,
                confidence=min(1.0, segment.prob),
            )
            for segment in self._decoder.seg()
            if not FILLER.fullmatch(segment.word)
        ]


def split_at_pauses(words: list[Word], pause: float) -> list[Line]:
    """Splits words, which are ordered by time, into lines at pauses of at least `pause` seconds.

    >>> words = [Word("a", times=(0, 1)), Word("red", times=(1.2, 2)), Word("fish", times=(3, 4))]
    >>> [line.text for line in split_at_pauses(words, pause=0.5)]
    ['a red', 'fish']
    """
    lines: list[list[Word]] = []
    for word in words:
        if lines and word.times[0] - lines[-1][-1].times[1] < pause:
            lines[-1].append(word)
        else:
            lines.append([word])
    return [Line(tuple(line)) for line in lines]
