"""From pictures and sound to words that have places: recognisers of text and of speech.

A recogniser is one file with its nested `Spec`, named in the spec of the encoder `transcript`.
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
    """A word and where it is.

    Attributes:
        text: without white space.
        box: x0 y0 x1 y1 in [0, 1] of the upright picture from its upper left corner, or NaNs.
        times: t0 t1 in seconds of the file, or NaNs.
        kind: `tokens.TEXT` if it is to be seen, `tokens.AUDIO` if it is to be heard.
        confidence: The recogniser's probability that the word is right, or NaN.
    """

    text: str
    box: tuple[float, float, float, float] = (NAN,) * 4
    times: tuple[float, float] = (NAN,) * 2
    kind: int = TEXT
    confidence: float = NAN


@dataclass(frozen=True)
class Line:
    """Words that stand or are said together; the item's text has a line break behind each line."""

    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        """The words with blanks between them."""
        return " ".join(word.text for word in self.words)


def spread(
    text: str,
    times: tuple[float, float] = (NAN,) * 2,
    box: tuple[float, float, float, float] = (NAN,) * 4,
    kind: int = TEXT,
    confidence: float = NAN,
) -> Line:
    """A line of which only the whole is placed.

    Each word has the line's box and confidence. Text is there all the time; of speech each word has
    as much of the time as it has of the characters.

    >>> [word.times for word in spread("to be again", times=(0.0, 9.0), kind=AUDIO).words]
    [(0.0, 2.0), (2.0, 4.0), (4.0, 9.0)]
    """
    if kind != AUDIO:
        return Line(tuple(Word(string, box, times, kind, confidence) for string in text.split()))
    start, end = times
    strings = text.split()
    a_character = (end - start) / max(1, sum(map(len, strings)))
    words: list[Word] = []
    for string in strings:
        # Of the last word the very end: sums of fractions may pass it.
        stop = start + a_character * len(string) if len(words) < len(strings) - 1 else end
        words.append(Word(string, box, (start, stop), kind, confidence))
        start = stop
    return Line(tuple(words))


def confident(lines: Iterable[Line], min_confidence: float) -> list[Line]:
    """Returns the lines without words of less confidence; words of unknown confidence stay.

    >>> words = Word("so", confidence=0.4), Word("it"), Word("goes", confidence=0.1)
    >>> [line.text for line in confident([Line(words[:2]), Line(words[2:])], 0.3)]
    ['so it']
    """
    kept = (tuple(w for w in line.words if not w.confidence < min_confidence) for line in lines)
    return [Line(words) for words in kept if words]


class Recogniser(ABC, Generic[ComponentSpecT]):
    """Finds the words of items, in text to be seen or in speech.

    Subclasses carry a nested `Spec` with `name: Literal["..."]`. Constructing one may be slow;
    `check` is what a job calls first. What it finds in an item depends on that item alone.
    """

    Spec: ClassVar[type[ComponentSpec]]
    spec: ComponentSpecT
    #: Whether files name items by id: only then can `unmatched` find any.
    has_ids: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def check(cls, spec: ComponentSpecT) -> None:
        """Raises `SpecError` if it cannot be built here (missing package, file or checkpoint)."""

    @classmethod
    @abstractmethod
    def wants(cls, spec: ComponentSpecT) -> tuple[str, ...]:
        """What it reads of an item: of "scan", "frames" and "audio" (see `schema.PAYLOAD`)."""

    @classmethod
    def unmatched(cls, spec: ComponentSpecT, known_ids: Iterable[str]) -> tuple[int, list[str]]:
        """Returns the number of ids in the user's files that no item has, and a few of them.

        Args:
            spec: The spec.
            known_ids: Ids of all items and their parents, in any order; may repeat.
        """
        return 0, []

    @abstractmethod
    def lines(self, item: dict[str, Any]) -> list[Line]:
        """The lines of words of an item, in reading order, or in that of time.

        Args:
            item: a row: `item_id`, `parent_id`, `span`, and what it wants (None where it has none).
        """
