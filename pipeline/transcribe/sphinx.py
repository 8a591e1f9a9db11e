"""English speech by PocketSphinx, on the CPU; its wheel carries the model of US English."""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
from pydantic import Field

from pipeline import config, extras
from pipeline.tokens import AUDIO
from pipeline.transcribe import Line, Recogniser, Word, confident
from pipeline.transcribe.sound import RATE, samples_of, utterances

#: Frames a second of its word times.
FRAMES = 100
#: What it gives for what is no word: <s>, <sil>, [NOISE], ++BREATH++.
FILLER = re.compile(r"<.*>|\[.*\]|\+\+.*\+\+")
#: `and(2)` is the second way to say `and`.
PRONUNCIATION = re.compile(r"\(\d+\)$")


class Sphinx(Recogniser["Sphinx.Spec"]):
    """Speech recognition by PocketSphinx: clearly spoken US English, far from perfect.

    Sound is heard in utterances of at most `longest` seconds, each by itself, so memory does not
    grow with its length. A word's times are seconds of the file.
    """

    class Spec(config.ComponentSpec):
        """How speech is cut.

        Attributes:
            longest: seconds of an utterance; a longer one is cut where it is quietest.
            pause: seconds without a word that end a line.
            min_confidence: Least posterior probability of a word; others are left out. It is low
                for many words that are right.
        """

        name: Literal["pocketsphinx"] = "pocketsphinx"
        longest: float = Field(20.0, ge=2, le=120)
        pause: float = Field(0.5, gt=0)
        min_confidence: float = Field(0.0, ge=0, le=1)

    def __init__(self, spec: Spec):
        self.check(spec)
        from pocketsphinx import Decoder

        self.spec = spec
        self._decoder = Decoder(samprate=RATE, loglevel="FATAL")

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `MissingExtra` if the package is not installed."""
        extras.require("pocketsphinx")

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Sound."""
        return ("audio",)

    def lines(self, item: dict[str, Any]) -> list[Line]:
        """What is said, a line between two pauses."""
        audio = item.get("audio")
        if audio is None:
            return []
        words = [
            word
            for start, samples in utterances(samples_of(audio), self.spec.longest)
            for word in self._hear(samples, audio["start"] + start)
        ]
        return confident(lines_of(words, self.spec.pause), self.spec.min_confidence)

    def _hear(self, samples: np.ndarray, start: float) -> list[Word]:
        """The words of an utterance that starts at `start` seconds of the file."""
        self._decoder.reinit_feat()  # forget how loud and how noisy the last one was
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


def lines_of(words: list[Word], pause: float) -> list[Line]:
    """Words in the order of time as lines, apart where nothing is said for `pause` seconds.

    >>> words = [Word("so", times=(0, 1)), Word("it", times=(1.2, 2)), Word("goes", times=(3, 4))]
    >>> [line.text for line in lines_of(words, pause=0.5)]
    ['so it', 'goes']
    """
    lines: list[list[Word]] = []
    for word in words:
        if lines and word.times[0] - lines[-1][-1].times[1] < pause:
            lines[-1].append(word)
        else:
            lines.append([word])
    return [Line(tuple(line)) for line in lines]
