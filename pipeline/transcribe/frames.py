"""Text in the frames of a video: a line that stays is one line, with the time that it stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.transcribe import Line
from pipeline.transcribe.accuracy import num_edits

#: Two readings are of the same text if so much of the longer one is equal.
SAME_TEXT = 0.8
#: Sides of the cells in which frames are compared, in pixels.
CELL = 32


@dataclass(frozen=True)
class Reading:
    """A line as it was read in one picture.

    Attributes:
        box: x0 y0 x1 y1 around the line.
        confidence: 0 to 1.
    """

    line: Line
    box: tuple[float, float, float, float]
    confidence: float


@dataclass
class _Shown:
    """A line that is or was on the screen: how it was read best, and from when until when."""

    reading: Reading
    latest: Reading  # what the next frame is compared with: a line may move
    start: float
    end: float


def read_frames(
    frames: Sequence[dict[str, Any]],
    end: float | None,
    read: Callable[[np.ndarray], list[Reading]],
    min_change: float,
) -> list[Line]:
    """The lines to be seen in frames, each once, in order of their first appearance.

    A line of one frame and a line of the next are the same line if their boxes overlap and their
    texts are nearly equal. It has the words and boxes of its reading of highest confidence. Its
    time begins with the first frame that shows it and ends with the first that does not: the next
    sampled one, behind the last frame `end`. It was to be seen in between.

    Args:
        frames: rows of `schema.FRAME`, times ascending.
        end: when the last frame ends; None: that frame's time.
        read: gives the lines of a picture (height, width, 3) uint8 RGB, in reading order.
        min_change: a frame that differs less (`change`) from the last one that was read is not
            read: it shows what that one shows.
    """
    shown: list[_Shown] = []
    current: list[_Shown] = []  # in the frame before
    before: np.ndarray | None = None
    for i, frame in enumerate(frames):
        picture = pixels(frame)
        start = frame["seconds"]
        until = frames[i + 1]["seconds"] if i + 1 < len(frames) else end
        until = start if until is None else max(start, until)
        # Not the frame before: what changes slowly would never be read.
        if before is None or change(before, picture) >= min_change:
            current, new = _follow(current, read(picture), start)
            shown += new
            before = picture
        for line in current:
            line.end = until
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


def similarity(first: str, second: str) -> float:
    """1 - the least number of edits between two texts over the length of the longer one.

    Case and white space do not count.

    >>> similarity("Good evening", "good evenlng")
    0.9090909090909091
    """
    first, second = ("".join(text.casefold().split()) for text in (first, second))
    longest = max(len(first), len(second))
    if first == second:
        return 1.0
    return 1 - num_edits(first, second) / longest


def _follow(
    current: list[_Shown], readings: list[Reading], start: float
) -> tuple[list[_Shown], list[_Shown]]:
    """The lines of a frame, given those of the frame before: all, and those that are new."""
    pairs = [
        (overlap, i, j)
        for i, line in enumerate(current)
        for j, reading in enumerate(readings)
        if (overlap := _overlap(line.latest.box, reading.box)) > 0
    ]
    goes_on: dict[int, _Shown] = {}
    taken: set[int] = set()
    for _, i, j in sorted(pairs, key=lambda pair: -pair[0]):
        if i in taken or j in goes_on:
            continue
        line, reading = current[i], readings[j]
        if similarity(line.latest.line.text, reading.line.text) >= SAME_TEXT:
            line.latest = reading
            if reading.confidence > line.reading.confidence:
                line.reading = reading
            goes_on[j] = line
            taken.add(i)
    new = {
        j: _Shown(reading, reading, start, start)
        for j, reading in enumerate(readings)
        if j not in goes_on
    }
    lines = goes_on | new
    return [lines[j] for j in range(len(readings))], list(new.values())


def _overlap(first: tuple[float, ...], second: tuple[float, ...]) -> float:
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
