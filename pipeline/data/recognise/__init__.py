"""Recognisers of text and speech (OCR and ASR), which also return the locations of words.

A recogniser is a module with a class and its nested `Spec`. The spec of the encoder `transcript`
selects recognisers by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from pipeline.config import ComponentSpec, ComponentSpecT
from pipeline.tokens import AUDIO, TEXT

NAN = float("nan")


@dataclass(frozen=True)
class Word:
    """A recognised word and its location.

    Attributes:
        text: The word, without white space.
        box: x0 y0 x1 y1 in [0, 1] of the upright image from its upper left corner, or NaNs.
        times: Start and end in seconds of the file, or NaNs.
        kind: `tokens.TEXT` for visible text, `tokens.AUDIO` for speech.
        confidence: Probability that the word is correct, according to the recogniser, or NaN.
    """

    text: str
    box: tuple[float, float, float, float] = (NAN,) * 4
    times: tuple[float, float] = (NAN,) * 2
    kind: int = TEXT
    confidence: float = NAN


@dataclass(frozen=True)
class Line:
    """Line of text, or utterance. Lines are separated by line breaks in the text of the item."""

    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        """The words, separated by spaces."""
        return " ".join(word.text for word in self.words)


def make_line(
    text: str,
    times: tuple[float, float] = (NAN,) * 2,
    box: tuple[float, float, float, float] = (NAN,) * 4,
    kind: int = TEXT,
    confidence: float = NAN,
) -> Line:
    """Returns the words of a line whose location is known only as a whole.

    Every word has the box and the confidence of the line. Visible words have its times; spoken
    words divide its duration in proportion to their number of characters.

    >>> [word.times for word in make_line("to be again", times=(0.0, 9.0), kind=AUDIO).words]
    [(0.0, 2.0), (2.0, 4.0), (4.0, 9.0)]
    """
    if kind != AUDIO:
        return Line(tuple(Word(string, box, times, kind, confidence) for string in text.split()))
    start, end = times
    strings = text.split()
    seconds_per_character = (end - start) / max(1, sum(map(len, strings)))
    words: list[Word] = []
    for string in strings:
        is_last = len(words) == len(strings) - 1  # ends exactly at `end`, despite rounding errors
        stop = end if is_last else start + seconds_per_character * len(string)
        words.append(Word(string, box, (start, stop), kind, confidence))
        start = stop
    return Line(tuple(words))


def filter_words(lines: Iterable[Line], min_confidence: float) -> list[Line]:
    """Returns lines without the words below a minimum confidence.

    Words of unknown confidence are kept, and empty lines are dropped.

    >>> words = Word("a", confidence=0.4), Word("red"), Word("fish", confidence=0.1)
    >>> [line.text for line in filter_words([Line(words[:2]), Line(words[2:])], 0.3)]
    ['a red']
    """
    words = (tuple(w for w in line.words if not w.confidence < min_confidence) for line in lines)
    return [Line(line_words) for line_words in words if line_words]


class Recogniser(ABC, Generic[ComponentSpecT]):
    """Base class of recognisers of visible text or speech.

    Subclasses define a nested `Spec` with `name: Literal["..."]`. Construction may load models.
    Jobs call `check` first. The words of an item depend only on that item.
    """

    Spec: ClassVar[type[ComponentSpec]]
    spec: ComponentSpecT
    has_ids: ClassVar[bool] = False
    """Whether the recogniser reads files with item ids, which `find_unmatched` checks."""

    @classmethod
    @abstractmethod
    def check(cls, spec: ComponentSpecT) -> None:
        """Raises `SpecError` if a required package, file or checkpoint is missing."""

    @classmethod
    @abstractmethod
    def wants(cls, spec: ComponentSpecT) -> tuple[str, ...]:
        """Returns the inputs that it reads, some of "scan", "frames" and "audio"."""

    @classmethod
    def find_unmatched(
        cls, spec: ComponentSpecT, known_ids: Iterable[str]
    ) -> tuple[int, list[str]]:
        """Counts the ids in the user's files that belong to no item. Also returns some examples.

        `known_ids` are those of all items and parents, in any order, possibly with duplicates.
        """
        return 0, []

    @abstractmethod
    def lines(self, item: dict[str, Any]) -> list[Line]:
        """Returns the lines of an item, in reading order or in order of time.

        Args:
            item: Row of the item: `item_id`, `parent_id`, `span` and the inputs that the recogniser
                reads, None if the item has none.
        """
