"""Text lines of frames: detection of changes, and tracking."""

import itertools

import av
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from pipeline.data.recognise import Line, Word
from pipeline.data.recognise.frames import (
    OcrLine,
    has_changed,
    is_same_text,
    max_change,
    read_frames,
)
from tests.media import frame_times, write_video

TITLE, BELOW = (0.1, 0.1, 0.6, 0.2), (0.1, 0.7, 0.6, 0.8)


def frame(seconds: float, shade: int) -> dict:
    pixels = np.full((48, 64, 3), shade, np.uint8).tobytes()
    return {"index": 0, "seconds": seconds, "height": 48, "width": 64, "pixels": pixels}


def reading(text: str, box=TITLE, confidence: float = 0.9) -> OcrLine:
    return OcrLine(Line(tuple(Word(part, box) for part in text.split())), box, confidence)


def follow(*shown: list[OcrLine], end: float | None = None, step: int = 20) -> list:
    """Returns (text, times) of lines in frames at 1 s intervals that differ by `step` levels."""
    frames = [frame(i, step * i) for i in range(len(shown))]
    span = None if end is None else (0.0, end)
    readings = iter(shown)
    lines = read_frames(frames, span, lambda image: next(readings), min_change=0.0)
    return [(line.text, *{word.times for word in line.words}) for line in lines]


def test_persistent_line_is_one_line():
    stays = [reading("good evening")]
    assert follow(stays, stays, stays, end=3.5) == [("good evening", (0, 3.5))]


def test_lines_appear_and_disappear_halfway_between_frames():
    news = [reading("good evening"), reading("news at ten", BELOW)]
    lines = follow(news, news[:1], news[1:], [], end=9)
    assert lines == [
        ("good evening", (0, 1.5)),
        ("news at ten", (0, 0.5)),
        ("news at ten", (1.5, 2.5)),
    ]


def test_lines_of_first_and_last_frame_extend_to_span():
    frames = [frame(11.0, 0), frame(13.0, 50)]
    (line,) = read_frames(frames, (10.0, 15.0), lambda image: [reading("always")], 0.01)
    assert line.words[0].times == (10.0, 15.0)


def test_most_confident_reading_is_kept():
    lines = follow(
        [reading("g00d evening", confidence=0.6)],
        [reading("Good evening", confidence=0.95)],
        [reading("good eve ning", confidence=0.7)],
        step=0,
    )
    assert lines == [("Good evening", (0, 2))]


@pytest.mark.parametrize("step", [0, 20])
@pytest.mark.parametrize(
    "texts",
    [
        ("part 1", "part 2", "part 3", "part 4"),
        ("10:59:58", "10:59:59", "11:00:00"),
        ("total price $1,299.00", "total price $1,298.00"),
        ("Speaker: Anna Berg", "Speaker: Anne Berg"),
        ("the bank is open today", "the band is open today"),
        ("counter 9", "counter 10"),
    ],
)
def test_different_digits_and_words_are_different_lines(texts, step):
    lines = follow(*([reading(text)] for text in texts), step=step)
    assert [text for text, _ in lines] == [*texts]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("level 1", "level l"),
        ("3.5 m", "35 m"),
        ("S0 on", "50 on"),
        ("now here", "nowhere"),
        ("version C", "version C++"),
    ],
)
def test_similar_readings_are_equal_only_if_image_is_unchanged(first, second):
    assert is_same_text(first, second, lambda: True)
    assert not is_same_text(first, second, lambda: False)


@pytest.mark.parametrize(
    ("first", "second"),
    [("Good Evening", "good evening."), ("\u201cso it goes\u201d", "so it goes"), ("a  b", "a b")],
)
def test_case_spaces_and_punctuation_are_ignored(first, second):
    assert is_same_text(first, second, lambda: False)


def test_equal_text_at_different_location_is_different_line():
    lines = follow([reading("yes")], [reading("yes", BELOW)])
    assert lines == [("yes", (0, 0.5)), ("yes", (0.5, 1))]


def test_different_text_at_same_location_is_different_line():
    lines = follow([reading("good evening")], [reading("good night")])
    assert [text for text, _ in lines] == ["good evening", "good night"]


def test_equal_lines_remain_separate():
    box = (0.1, 0.19, 0.6, 0.29)  # detected boxes of adjacent lines overlap slightly
    twice = [reading("repeat"), reading("repeat", box)]
    assert follow(twice, twice) == [("repeat", (0, 1)), ("repeat", (0, 1))]


def test_unchanged_frames_are_not_read():
    read = []

    def reader(image):
        read.append(image[0, 0, 0])
        return [reading("good evening")]

    frames = [frame(0, 100), frame(1, 101), frame(2, 102), frame(3, 140)]
    (line,) = read_frames(frames, (0.0, 4.0), reader, min_change=0.05)
    assert read == [100, 140]
    assert line.words[0].times == (0, 4)


def test_slow_changes_are_read():
    read = []
    frames = [frame(i, 100 + 5 * i) for i in range(9)]
    read_frames(frames, None, lambda image: read.append(image[0, 0, 0]) or [], min_change=0.05)
    assert read == [100, 115, 130]


def test_frames_with_equal_times():
    frames = [frame(2.0, 0), frame(2.0, 100)]
    (line,) = read_frames(frames, None, lambda image: [reading("once")], min_change=0.0)
    assert line.words[0].times == (2.0, 2.0)
    assert read_frames([], None, lambda image: [reading("never")], min_change=0.0) == []


def test_small_line_of_text_is_detected():
    before = np.full((720, 1280, 3), 30, np.uint8)
    noise = np.random.default_rng(0).integers(-2, 3, before.shape)
    assert max_change(before, (before + noise).astype(np.uint8)) < 0.02
    after = before.copy()
    after[600:616, 100:140:5] = 220  # eight thin strokes
    assert max_change(before, after) > 0.03
    assert max_change(before, before[:360]) == 1.0


@pytest.mark.parametrize("size", [12, 20, 40])
@pytest.mark.parametrize("digits", ["38", "56", "17", "60"])
def test_changed_digit_is_detected_despite_compression(tmp_path, size, digits):
    font = ImageFont.load_default(size)
    images = []
    for number, digit in enumerate(digits[0] * 3 + digits[1] * 3):
        image = Image.new("RGB", (320, 128), (60, 80, 120))
        ImageDraw.Draw(image).text((20, 40), f"Total {digit} of 9", (230, 230, 230), font)
        ImageDraw.Draw(image).ellipse((260, 10 * number, 280, 10 * number + 20), (200, 30, 30))
        images.append(np.asarray(image))
    path = write_video(tmp_path / "a.mp4", frame_times(6, 1), size=(320, 128), frames=images)
    with av.open(str(path)) as container:
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    left, top, right, bottom = font.getbbox("Total 8 of 9")
    box = ((20 + left) / 320, (38 + top) / 128, (20 + right) / 320, (42 + bottom) / 128)
    redrawn = [has_changed(a, b, box) for a, b in itertools.pairwise(shown)]
    assert redrawn == [False, False, True, False, False]


def test_frame_with_changed_digit_is_read():
    before = np.full((48, 64, 3), 200, np.uint8)
    before[8:18, 10:14] = 100
    after = before.copy()
    after[12:14, 10:14] = 200
    assert max_change(before, after) < 0.02
    frames = [frame(0, 0) | {"pixels": before.tobytes()}, frame(1, 0) | {"pixels": after.tobytes()}]
    readings = iter([[reading("0", (0.1, 0.1, 0.3, 0.5))], [reading("8", (0.1, 0.1, 0.3, 0.5))]])
    lines = read_frames(frames, None, lambda image: next(readings), min_change=0.02)
    assert [line.text for line in lines] == ["0", "8"]
