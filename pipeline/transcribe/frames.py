"""Text in the frames of a video: a line that stays is one line, with the time that it stays."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.transcribe import Line

#: Sides of the cells in which frames are compared, in pixels.
CELL = 32
#: A pixel of a line has changed if it differs by this share of the line's contrast, and by more
#: levels than compression noise.
PIXEL_CHANGE, NOISE_LEVELS = 0.35, 16
#: A line has changed if so many pixels of one character have, as a share of its squared height.
#: A 3 and an 8 differ by 0.02 of it or more in the fonts that were tried.
CHARACTER_CHANGE = 0.008
#: Characters that OCR confuses, mapped to one of them.
CONFUSED = str.maketrans("oilszb", "011528")
#: What may stand around a word without changing it; other signs do (C and C++).
PUNCTUATION = ".,;:!?'\"`\u2018\u2019\u201c\u201d\u2026()[]-\u2013\u2014\u00b7\u2022|"

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Reading:
    """A line as it was read in one picture.

    Attributes:
        box: x0 y0 x1 y1 around the line.
        confidence: 0 to 1.
    """

    line: Line
    box: Box
    confidence: float


@dataclass
class _Shown:
    """A line that is or was on the screen: its best reading and its time."""

    reading: Reading
    latest: Reading  # what the next frame is compared with: a line may move
    start: float
    end: float


def read_frames(
    frames: Sequence[dict[str, Any]],
    span: tuple[float, float] | None,
    read: Callable[[np.ndarray], list[Reading]],
    min_change: float,
) -> list[Line]:
    """Returns the lines visible in frames, each once, in order of first appearance.

    A line of one frame and a line of the next are the same line if their boxes overlap and
    `is_same_text` holds. The line has the words and boxes of its most confident reading. It
    appears and disappears halfway between the frames around the change, so its times are off by
    half a sampling step at most. Lines of the first and of the last frame last from the beginning
    and to the end of `span`.

    Args:
        frames: rows of `schema.FRAME`, times ascending.
        span: start and end of the item in seconds; None: the times of the first and last frame.
        read: returns the lines of an image (height, width, 3) uint8 RGB, in reading order.
        min_change: a frame is read if it differs at least so much (`change`) from the last one
            that was read, or if one of the lines of that frame has changed (`is_redrawn`).
    """
    if not frames:
        return []
    times = np.array([frame["seconds"] for frame in frames])
    first, last = span or (times[0], times[-1])
    between = (times[:-1] + times[1:]) / 2
    borders = [min(first, times[0]), *between, max(last, times[-1])]
    shown: list[_Shown] = []
    current: list[_Shown] = []  # in the frame before
    before: np.ndarray | None = None
    for i, frame in enumerate(frames):
        image = pixels(frame)
        # Not the frame before: what changes slowly would never be read.
        if (
            before is None
            or change(before, image) >= min_change
            or any(is_redrawn(before, image, line.latest.box) for line in current)
        ):
            previous = image if before is None else before
            current, new = _follow(current, read(image), float(borders[i]), previous, image)
            shown += new
            before = image
        for line in current:
            line.end = float(borders[i + 1])
    return [_timed(line) for line in shown]


def pixels(frame: dict[str, Any]) -> np.ndarray:
    """(height, width, 3) uint8 RGB of a row of `schema.FRAME`."""
    shape = (frame["height"], frame["width"], 3)
    return np.frombuffer(frame["pixels"], np.uint8).reshape(shape)


def change(before: np.ndarray, picture: np.ndarray) -> float:
    """How much two pictures differ, 0 to 1: the mean difference in the cell where it is largest.

    The mean over the whole picture would miss a small line of text.

    >>> grey = np.full((64, 64, 3), 100, np.uint8)
    >>> other = grey.copy()
    >>> other[:16, :16] = 151
    >>> round(change(grey, other), 3)
    0.05
    """
    if before.shape != picture.shape:
        return 1.0
    # Every other pixel of the green channel, which carries most of the brightness.
    first, second = before[::2, ::2, 1], picture[::2, ::2, 1]
    difference = np.maximum(first, second) - np.minimum(first, second)
    rows = np.arange(0, difference.shape[0], CELL // 2)
    columns = np.arange(0, difference.shape[1], CELL // 2)
    sums = np.add.reduceat(difference, rows, axis=0, dtype=np.int64)
    sums = np.add.reduceat(sums, columns, axis=1)
    heights = np.diff(rows, append=difference.shape[0])
    widths = np.diff(columns, append=difference.shape[1])
    return float((sums / np.outer(heights, widths)).max() / 255)


def is_redrawn(before: np.ndarray, image: np.ndarray, box: Box) -> bool:
    """Whether the text in a box differs between two images, by as little as one character.

    Compression changes many pixels slightly, another character changes few of them by the contrast
    of the text. `change` misses those: a small digit is a few pixels of a cell.

    >>> before = np.full((40, 200, 3), 255, np.uint8)
    >>> before[10:30, 20:180:10] = 5
    >>> after = before.copy()
    >>> after[15:25, 100:104] = 0
    >>> is_redrawn(before, before - 5, (0, 0, 1, 1)), is_redrawn(before, after, (0, 0, 1, 1))
    (False, True)
    """
    if before.shape != image.shape:
        return True
    height, width, _ = image.shape
    columns = slice(int(box[0] * width), max(1, round(box[2] * width)))
    rows = slice(int(box[1] * height), max(1, round(box[3] * height)))
    first, second = before[rows, columns, 1], image[rows, columns, 1]
    if not first.size:
        return False
    low, high = np.percentile(first, (2, 98))
    difference = np.maximum(first, second) - np.minimum(first, second)
    changed = (difference > max(NOISE_LEVELS, PIXEL_CHANGE * (high - low))).sum(axis=0)
    tall = len(first)
    in_a_character = np.convolve(changed, np.ones(min(len(changed), max(1, tall // 2))))
    return bool(in_a_character.max() >= max(2, CHARACTER_CHANGE * tall**2))


def is_same_text(first: str, second: str, is_unchanged: Callable[[], bool]) -> bool:
    """Whether two readings of a place are of the same text.

    Readings of equal words are, whatever their case; words without a digit may also differ in
    the punctuation around them. All else is the same text only if the image shows that nothing
    changed, and the readings differ in nothing but blanks, punctuation and characters that OCR
    confuses, such as `l` and `1`. So different digits and different words stay apart.

    Args:
        first: Text of the first reading.
        second: Text of the second reading.
        is_unchanged: Returns whether the image of the line is the same; called only if needed.

    >>> is_same_text("Good evening", "good evening.", lambda: False)
    True
    >>> [is_same_text("part 1", "part l", lambda: unchanged) for unchanged in (False, True)]
    [False, True]
    >>> is_same_text("part 1", "part 2", lambda: True)
    False
    """
    if _words(first) == _words(second):
        return True
    return _skeleton(first) == _skeleton(second) != "" and is_unchanged()


def _words(text: str) -> list[str]:
    words = unicodedata.normalize("NFKC", text).casefold().split()
    stripped = [word if re.search(r"\d", word) else word.strip(PUNCTUATION) for word in words]
    return [word for word in stripped if word]


def _skeleton(text: str) -> str:
    """The letters and digits of a text, those that OCR confuses alike."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in text if c.isalnum()).translate(CONFUSED)


def _follow(
    current: list[_Shown],
    readings: list[Reading],
    start: float,
    before: np.ndarray,
    image: np.ndarray,
) -> tuple[list[_Shown], list[_Shown]]:
    """Returns the lines of a frame, given those of the frame read before: all, and the new ones."""
    pairs = [
        (overlap, i, j)
        for i, line in enumerate(current)
        for j, reading in enumerate(readings)
        if (overlap := _overlap(line.latest.box, reading.box)) > 0
    ]
    followed: dict[int, _Shown] = {}
    taken: set[int] = set()
    for _, i, j in sorted(pairs, key=lambda pair: -pair[0]):
        if i in taken or j in followed:
            continue
        line, reading = current[i], readings[j]
        box = _hull(line.latest.box, reading.box)
        texts = line.latest.line.text, reading.line.text

        def is_unchanged(box: Box = box) -> bool:
            return not is_redrawn(before, image, box)

        if is_same_text(*texts, is_unchanged):
            line.latest = reading
            if reading.confidence > line.reading.confidence:
                line.reading = reading
            followed[j] = line
            taken.add(i)
    new = {
        j: _Shown(reading, reading, start, start)
        for j, reading in enumerate(readings)
        if j not in followed
    }
    lines = followed | new
    return [lines[j] for j in range(len(readings))], list(new.values())


def _hull(first: Box, second: Box) -> Box:
    """The smallest box around two boxes."""
    x0, y0 = map(min, first[:2], second[:2])
    x1, y1 = map(max, first[2:], second[2:])
    return x0, y0, x1, y1


def _overlap(first: Box, second: Box) -> float:
    """Intersection over union of two boxes."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second))
    return width * height / (areas - width * height)


def _timed(shown: _Shown) -> Line:
    times = (shown.start, shown.end)
    return Line(tuple(replace(word, times=times) for word in shown.reading.line.words))
