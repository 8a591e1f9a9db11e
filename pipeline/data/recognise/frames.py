"""Tracking of text lines across the frames of a video."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.data.recognise import Line

#: Side of the cells in which frames are compared, in pixels.
CELL = 32
#: A pixel of a line has changed if it differs by this share of the contrast of the line, and by
#: more levels than compression noise.
PIXEL_CHANGE, NOISE_LEVELS = 0.35, 16
#: A line has changed if this many pixels of one character have changed, as a share of the squared
#: height. A 3 and an 8 differ by at least 0.02 in the fonts tested.
CHARACTER_CHANGE = 0.008
#: Characters that OCR confuses, mapped to one of them.
CONFUSED = str.maketrans("oilszb", "011528")
#: Punctuation that is ignored at the ends of words. Other signs are not, as in C and C++.
PUNCTUATION = ".,;:!?'\"`\u2018\u2019\u201c\u201d\u2026()[]-\u2013\u2014\u00b7\u2022|"

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class OcrLine:
    """A recognised line of an image.

    Attributes:
        box: x0 y0 x1 y1 in [0, 1] of the image.
        confidence: Confidence of the line, 0 to 1.
    """

    line: Line
    box: Box
    confidence: float


@dataclass
class _TrackedLine:
    """Line across frames, with its best reading and the times at which it is visible."""

    reading: OcrLine
    latest: OcrLine  # compared with the next frame, because a line may move
    start: float
    end: float


def read_frames(
    frames: Sequence[dict[str, Any]],
    span: tuple[float, float] | None,
    read: Callable[[np.ndarray], list[OcrLine]],
    min_change: float,
) -> list[Line]:
    """Returns the lines visible in frames, each once, in order of first appearance.

    Lines of consecutive frames are the same line if their boxes overlap and `is_same_text` holds. A
    line has the words and boxes of its most confident reading. It appears and disappears halfway
    between the frames around the change, so its times are accurate to half a sampling interval.
    Lines of the first and last frame extend to the start and end of `span`.

    Args:
        frames: Rows of `schema.FRAME`, times ascending.
        span: Start and end of the item in seconds; None: the times of the first and last frame.
        read: Returns the lines of an image (height, width, 3) uint8 RGB, in reading order.
        min_change: A frame is read if its `max_change` from the last frame that was read is at
            least this value, or if one of the lines of that frame has changed (`has_changed`).
    """
    if not frames:
        return []
    times = np.array([frame["seconds"] for frame in frames])
    first, last = span or (times[0], times[-1])
    between = (times[:-1] + times[1:]) / 2
    borders = [min(first, times[0]), *between, max(last, times[-1])]
    tracked: list[_TrackedLine] = []
    current: list[_TrackedLine] = []  # lines of the previous frame
    last_read: np.ndarray | None = None
    for i, frame in enumerate(frames):
        image = frame_pixels(frame)
        # Compared with the last frame that was read: slow changes would not be detected otherwise.
        if (
            last_read is None
            or max_change(last_read, image) >= min_change
            or any(has_changed(last_read, image, line.latest.box) for line in current)
        ):
            previous = image if last_read is None else last_read
            current, new = _track(current, read(image), float(borders[i]), previous, image)
            tracked += new
            last_read = image
        for line in current:
            line.end = float(borders[i + 1])
    return [_timed(line) for line in tracked]


def frame_pixels(frame: dict[str, Any]) -> np.ndarray:
    """Returns the pixels (height, width, 3) uint8 RGB of a row of `schema.FRAME`."""
    shape = (frame["height"], frame["width"], 3)
    return np.frombuffer(frame["pixels"], np.uint8).reshape(shape)


def max_change(before: np.ndarray, image: np.ndarray) -> float:
    """Returns the difference of two images, the largest mean difference of a cell, 0 to 1.

    The mean over the image would not detect a small line of text.

    >>> grey = np.full((64, 64, 3), 100, np.uint8)
    >>> other = grey.copy()
    >>> other[:16, :16] = 151
    >>> round(max_change(grey, other), 3)
    0.05
    """
    if before.shape != image.shape:
        return 1.0
    # Every other pixel of the green channel, which carries most of the brightness.
    first, second = before[::2, ::2, 1], image[::2, ::2, 1]
    difference = np.maximum(first, second) - np.minimum(first, second)
    rows = np.arange(0, difference.shape[0], CELL // 2)
    columns = np.arange(0, difference.shape[1], CELL // 2)
    sums = np.add.reduceat(difference, rows, axis=0, dtype=np.int64)
    sums = np.add.reduceat(sums, columns, axis=1)
    heights = np.diff(rows, append=difference.shape[0])
    widths = np.diff(columns, append=difference.shape[1])
    return float((sums / np.outer(heights, widths)).max() / 255)


def has_changed(before: np.ndarray, image: np.ndarray, box: Box) -> bool:
    """Checks whether the text in a box differs between two images by at least one character.

    Compression changes many pixels slightly. A different character changes few pixels by the
    contrast of the text. `max_change` does not detect a small digit, which is a few pixels of a
    cell.

    >>> before = np.full((40, 200, 3), 255, np.uint8)
    >>> before[10:30, 20:180:10] = 5
    >>> after = before.copy()
    >>> after[15:25, 100:104] = 0
    >>> has_changed(before, before - 5, (0, 0, 1, 1)), has_changed(before, after, (0, 0, 1, 1))
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
    """Checks whether two readings at the same location are of the same text.

    Readings with equal words are, independent of case. Words without digits may also differ in
    surrounding punctuation. Other readings are the same text only if the image is unchanged and
    they differ only in spaces, punctuation and characters that OCR confuses, such as `l` and `1`.
    Different digits and different words are never the same text. `is_unchanged` is called only if
    needed.

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
    """Reduces a text to letters and digits, in which characters that OCR confuses are unified."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in text if c.isalnum()).translate(CONFUSED)


def _track(
    current: list[_TrackedLine],
    readings: list[OcrLine],
    start: float,
    before: np.ndarray,
    image: np.ndarray,
) -> tuple[list[_TrackedLine], list[_TrackedLine]]:
    """Matches the lines of a frame to tracked lines. Returns them and the lines that are new."""
    pairs = [
        (overlap, i, j)
        for i, line in enumerate(current)
        for j, reading in enumerate(readings)
        if (overlap := _overlap(line.latest.box, reading.box)) > 0
    ]
    followed: dict[int, _TrackedLine] = {}
    taken: set[int] = set()
    for _, i, j in sorted(pairs, key=lambda pair: -pair[0]):
        if i in taken or j in followed:
            continue
        line, reading = current[i], readings[j]
        box = _hull(line.latest.box, reading.box)
        texts = line.latest.line.text, reading.line.text

        def is_unchanged(box: Box = box) -> bool:
            return not has_changed(before, image, box)

        if is_same_text(*texts, is_unchanged):
            line.latest = reading
            if reading.confidence > line.reading.confidence:
                line.reading = reading
            followed[j] = line
            taken.add(i)
    new = {
        j: _TrackedLine(reading, reading, start, start)
        for j, reading in enumerate(readings)
        if j not in followed
    }
    lines = followed | new
    return [lines[j] for j in range(len(readings))], list(new.values())


def _hull(first: Box, second: Box) -> Box:
    x0, y0 = map(min, first[:2], second[:2])
    x1, y1 = map(max, first[2:], second[2:])
    return x0, y0, x1, y1


def _overlap(first: Box, second: Box) -> float:
    """Returns the intersection over union of two boxes."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second))
    return width * height / (areas - width * height)


def _timed(shown: _TrackedLine) -> Line:
    times = (shown.start, shown.end)
    return Line(tuple(replace(word, times=times) for word in shown.reading.line.words))
