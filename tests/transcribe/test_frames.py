"""Text in frames: what is read, and what is one line over time."""

import numpy as np
import pytest

from pipeline.transcribe import Line, Word
from pipeline.transcribe.frames import Reading, change, read_frames, similarity

TITLE, BELOW = (0.1, 0.1, 0.6, 0.2), (0.1, 0.7, 0.6, 0.8)


def frame(seconds: float, shade: int) -> dict:
    pixels = np.full((48, 64, 3), shade, np.uint8).tobytes()
    return {"index": 0, "seconds": seconds, "height": 48, "width": 64, "pixels": pixels}


def reading(text: str, box=TITLE, confidence: float = 0.9) -> Reading:
    return Reading(Line(tuple(Word(part, box) for part in text.split())), box, confidence)


def follow(*shown: list[Reading], end: float | None = None, min_change: float = 0.01) -> list:
    """(text, times) of lines; the frames come every second, and each differs from the last."""
    frames = [frame(i, 20 * i) for i in range(len(shown))]
    lines = read_frames(frames, end, lambda picture: shown[picture[0, 0, 0] // 20], min_change)
    return [(line.text, *{word.times for word in line.words}) for line in lines]


def test_a_line_that_stays_is_one_line():
    stays = [reading("good evening")]
    assert follow(stays, stays, stays, end=3.5) == [("good evening", (0, 3.5))]


def test_a_line_ends_with_the_frame_that_lacks_it():
    news = [reading("good evening"), reading("news at ten", BELOW)]
    lines = follow(news, news[:1], news[1:], [], end=9)
    assert lines == [
        ("good evening", (0, 2)),
        ("news at ten", (0, 1)),
        ("news at ten", (2, 3)),
    ]


def test_the_surest_reading_counts():
    lines = follow(
        [reading("g00d evening", confidence=0.6)],
        [reading("good evening", confidence=0.95)],
        [reading("good evenlng", confidence=0.7)],
    )
    assert lines == [("good evening", (0, 2))]


def test_equal_text_elsewhere_is_another_line():
    lines = follow([reading("yes")], [reading("yes", BELOW)])
    assert lines == [("yes", (0, 1)), ("yes", (1, 1))]


def test_another_text_at_the_same_place_is_another_line():
    lines = follow([reading("good evening")], [reading("good night")])
    assert [text for text, _ in lines] == ["good evening", "good night"]


def test_two_equal_lines_stay_two():
    box = (0.1, 0.19, 0.6, 0.29)  # detected boxes of neighbours overlap a little
    twice = [reading("repeat"), reading("repeat", box)]
    assert follow(twice, twice) == [("repeat", (0, 1)), ("repeat", (0, 1))]


def test_a_frame_that_shows_nothing_new_is_not_read():
    read = []

    def reader(picture):
        read.append(picture[0, 0, 0])
        return [reading("good evening")]

    frames = [frame(0, 100), frame(1, 101), frame(2, 102), frame(3, 140)]
    (line,) = read_frames(frames, 4.0, reader, min_change=0.05)
    assert read == [100, 140]
    assert line.words[0].times == (0, 4)


def test_what_changes_slowly_is_read_in_the_end():
    read = []
    frames = [frame(i, 100 + 5 * i) for i in range(9)]
    read_frames(frames, None, lambda picture: read.append(picture[0, 0, 0]) or [], min_change=0.05)
    assert read == [100, 115, 130]


def test_frames_of_equal_times_and_of_none():
    frames = [frame(2.0, 0), frame(2.0, 100)]
    (line,) = read_frames(frames, None, lambda picture: [reading("once")], min_change=0.0)
    assert line.words[0].times == (2.0, 2.0)
    assert read_frames([], None, lambda picture: [reading("never")], min_change=0.0) == []


def test_a_small_line_of_text_is_a_change():
    before = np.full((720, 1280, 3), 30, np.uint8)
    noise = np.random.default_rng(0).integers(-2, 3, before.shape)
    assert change(before, (before + noise).astype(np.uint8)) < 0.02
    after = before.copy()
    after[600:616, 100:140:5] = 220  # eight thin strokes
    assert change(before, after) > 0.03
    assert change(before, before[:360]) == 1.0


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [("", "", 1.0), ("abc", "", 0.0), ("Good  Day", "good day", 1.0), ("abcde", "abXde", 0.8)],
)
def test_similarity(first, second, expected):
    assert similarity(first, second) == similarity(second, first) == pytest.approx(expected)
