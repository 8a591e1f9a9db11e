"""Video: which frame is shown when, upright, with its sound, and what is damaged."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.decoding import Unreadable
from pipeline.decoding.process import DecodingProcess, Limits
from pipeline.decoding.video import (
    DecordFrames,
    FFmpegFrames,
    decord,
    describe,
    read_picture,
    read_windows,
)
from tests.conftest import ROOT
from tests.decoding.test_audio import peak
from tests.media import (
    every,
    heard,
    hide_beginning,
    number_of,
    numbers_of,
    picture,
    spoil,
    tone_of,
    tones,
    write_sound,
    write_video,
)

DATA = ROOT / "tests/data"
SETTINGS = {
    "frames": True,
    "audio": True,
    "sampling": "fps",
    "fps": 1.0,
    "num_frames": 16,
    "look_fps": 5.0,
    "scene_threshold": 0.1,
    "max_pixels": 1_000_000,
    "sample_rate": 16_000,
}


def read(path: Path, *windows: tuple[float, float | None], **settings: Any) -> list[Any]:
    spans = [list(window) for window in windows]
    return list(read_windows(str(path), spans, {**SETTINGS, **settings}))


def one(path: Path, start: float = 0.0, end: float | None = None, **settings: Any) -> Any:
    (window,) = read(path, (start, end), **settings)
    return window


def shown(window: dict[str, Any]) -> list[int]:
    """The numbers that the frames of a window show, which it says are theirs."""
    numbers = numbers_of(window["pixels"])
    assert numbers == window["indices"].tolist()
    return numbers


# -- which frame -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.mp4", "a.mov", "a.mkv", "a.webm", "a.avi", "a.m4v"])
def test_the_frame_of_a_time_is_the_one_that_is_shown_then(tmp_path, name):
    codec = {"a.webm": "libvpx-vp9", "a.avi": "mpeg4"}.get(name, "libx264")
    path = write_video(tmp_path / name, every(4, 25), codec=codec)
    about = describe(str(path))
    assert (about["width"], about["height"], about["num_frames"]) == (192, 108, 100)
    assert about["duration"] == pytest.approx(4, abs=0.05)
    assert about["fps"] == pytest.approx(25, abs=0.5)
    first, second = read(path, (0, 1.5), (1.5, 4), fps=3.0)
    assert shown(first) == [0, 8, 16, 25, 33]  # 0, 0.33, 0.67, 1, 1.33 s
    assert shown(second) == [37, 45, 54, 62, 70, 79, 87, 95]
    assert second["seconds"].tolist() == [i / 25 for i in second["indices"]]


def test_a_rate_that_varies(tmp_path):
    times = [0, 0.1, 0.5, 0.52, 0.9, 2, 2.01, 3, 3.5, 3.6, 5]
    path = write_video(tmp_path / "a.mp4", times)
    assert shown(one(path, 0, 2.5, fps=2.0)) == [0, 2, 4, 5]  # at 1.5 s still the fifth is shown
    window = one(path, 0, 5, sampling="uniform", num_frames=5)
    assert shown(window) == [2, 4, 6, 8, 9]  # at 0.5, 1.5, 2.5, 3.5 and 4.5 s
    assert window["seconds"].tolist() == [0.5, 0.9, 2.01, 3.5, 3.6]
    assert describe(str(path))["duration"] > 5  # the header says 4.03


def test_frames_shorter_than_rounded_times(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(4, 30))  # decord says 0.033 and 0.067
    assert shown(one(path, 0, 1, fps=30.0, num_frames=100)) == list(range(30))
    assert shown(one(path, 2, 3, fps=30.0, num_frames=100)) == list(range(60, 90))


def test_uniform_frames(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(4, 10))
    assert shown(one(path, sampling="uniform", num_frames=4)) == [5, 15, 25, 35]
    assert shown(one(path, 1, 1.2, sampling="uniform", num_frames=9)) == [10, 11]


def test_no_more_frames_than_are_wanted(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(8, 10))
    assert shown(one(path, fps=10.0, num_frames=4)) == [10, 30, 50, 70]


def test_scenes(tmp_path):
    brightness = [20] * 15 + [120] * 5 + [220] * 20 + [60] * 10  # at 10 frames a second
    still = [np.full((108, 192, 3), value, np.uint8) for value in brightness]
    path = write_video(tmp_path / "a.mp4", every(5, 10), frames=still)
    window = one(path, sampling="scenes", look_fps=10.0)
    assert window["indices"].tolist() == [7, 17, 30, 45]
    assert [round(float(p.mean()) / 20) for p in window["pixels"]] == [1, 6, 11, 3]
    longest = one(path, sampling="scenes", look_fps=10.0, num_frames=2)
    assert longest["indices"].tolist() == [7, 30]
    same = one(path, sampling="scenes", look_fps=10.0, scene_threshold=0.9)
    assert same["indices"].tolist() == [25]


def test_what_is_not_shown_does_not_count(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(6, 10))
    hide_beginning(path, 1.5)  # in the middle of a group of frames
    window = one(path, fps=2.0)
    first, *_ = numbers_of(window["pixels"])
    assert first in (14, 15)
    assert numbers_of(window["pixels"]) == [first + 5 * i for i in range(len(window["indices"]))]
    assert window["seconds"][0] == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("times", [every(3, 24), [0, 0.3, 0.31, 1, 2.5, 2.9]])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_both_readers_give_the_same_frames(tmp_path, times, rotation):
    path = str(write_video(tmp_path / "a.mp4", times, rotation=rotation))
    fast, slow = DecordFrames(path, 0.0), FFmpegFrames(path, 0.0)
    assert np.abs(fast.times - slow.times).max() < 0.001
    for indices in ([0, 1, 4, len(times) - 1], [2, 3], [0]):
        (found, pixels), (others, again) = fast.read(indices), slow.read(indices)
        assert found == others == indices
        assert np.array_equal(pixels, again)


def test_a_turned_video_is_upright(tmp_path):
    for rotation in (90, 180, 270):
        path = write_video(tmp_path / f"{rotation}.mp4", every(1, 10), rotation=rotation)
        window = one(path, sampling="uniform", num_frames=2)
        laid = [np.rot90(frame, rotation // 90) for frame in window["pixels"]]
        assert [number_of(frame) for frame in laid] == [2, 7]
        about = describe(str(path))
        assert about["rotation"] == rotation
        assert window["pixels"].shape[1:3] == (about["height"], about["width"])
        small = one(path, sampling="uniform", num_frames=2, max_pixels=5000)["pixels"]
        height, width = small.shape[1:3]
        assert height * width <= 5000
        assert width / height == pytest.approx(about["width"] / about["height"], rel=0.03)
        laid = [np.rot90(frame, rotation // 90) for frame in small]
        assert [number_of(frame) for frame in laid] == [2, 7]
        slow = FFmpegFrames(str(path), 0.0, (width, height)).read([2])[1][0]
        assert np.abs(slow.astype(int) - small[0]).mean() < 3


def test_a_turned_video_of_a_phone():
    window = one(DATA / "video_90.mov", sampling="uniform", num_frames=1)
    assert window["pixels"].shape == (1, 568, 320, 3)
    slow = FFmpegFrames(str(DATA / "video_90.mov"), 0.0).read([1])[1]
    assert np.abs(slow.astype(int) - window["pixels"]).mean() < 2


def test_large_frames_are_made_smaller(tmp_path):
    path = write_video(tmp_path / "a.mp4", [0, 0.5], size=(1920, 1080))
    assert one(path)["pixels"].shape == (1, 750, 1333, 3)
    assert number_of(one(path, 0.5)["pixels"][0]) == 1


def test_a_picture_for_a_preview(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(2, 10))
    found = read_picture(str(path), 1.55, 5000)
    assert (found["index"], found["seconds"]) == (15, 1.5)
    image = np.asarray(Image.open(io.BytesIO(found["jpeg"])))
    assert image.shape[0] * image.shape[1] <= 5000 and number_of(image) == 15
    assert read_picture(str(path), 99.0, 10_000)["index"] == 19


# -- sound -----------------------------------------------------------------------------------


def test_sound_and_pictures_are_of_one_time(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(8, 10), sound=tones(8, 44_100, 2), rate=44_100)
    about = describe(str(path))
    assert about["has_video"] and about["has_audio"]
    assert about["audio_duration"] == pytest.approx(8, abs=0.1)
    for window in read(path, (0, 3), (3, 6), fps=1.0):
        for second, (number, start) in enumerate(
            zip(shown(window), window["seconds"], strict=True)
        ):
            assert number == 10 * start
            samples = window["samples"][second * 16_000 + 3200 : second * 16_000 + 12_800]
            assert heard(samples, 16_000) == pytest.approx(tone_of(start), abs=4)


def test_the_track_is_that_of_decord(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(5, 10), sound=tones(5))
    theirs = decord.AudioReader(str(path), sample_rate=16_000, mono=True)[:].asnumpy()[0]
    ours = np.concatenate([w["samples"] for w in read(path, (0, 1.7), (1.7, 5), frames=False)])
    assert len(ours) == 80_000
    assert np.abs(ours - theirs[: len(ours)]).max() < 1e-4


def test_the_track_at_another_rate_is_that_of_decord(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(5, 10), sound=tones(5, 44_100), rate=44_100)
    theirs = decord.AudioReader(str(path), sample_rate=16_000, mono=True)[:].asnumpy()[0]
    ours = np.concatenate([w["samples"] for w in read(path, (0, 1.7), (1.7, 5), frames=False)])
    # Its resampler is late by a millisecond.
    alike = [np.corrcoef(theirs[lag : lag + 70_000], ours[:70_000])[0, 1] for lag in range(32)]
    assert max(alike) > 0.98


def test_sound_without_pictures_and_pictures_without_sound(tmp_path):
    silent = write_video(tmp_path / "silent.mp4", every(2, 10))
    assert not len(one(silent)["samples"]) and len(one(silent)["indices"]) == 2
    assert not describe(str(silent))["has_audio"]
    blind = write_video(tmp_path / "blind.mp4", [], sound=tones(3))
    window = one(blind, 0, 2)
    assert len(window["samples"]) == 32_000 and window["pixels"].shape == (0, 0, 0, 3)
    assert describe(str(blind))["duration"] == pytest.approx(3, abs=0.1)
    for path, unwanted, reason in (
        (silent, {"frames": False}, "no audio track"),
        (blind, {"audio": False}, "no video track"),
    ):
        with pytest.raises(Unreadable) as error:
            read(path, (0, 1), **unwanted)
        assert error.value.reason == reason


def test_sound_that_goes_on_behind_the_pictures(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(2, 10), sound=tones(6))
    first, second = read(path, (0, 3), (3, None))
    assert shown(first) == [0, 10]
    assert not len(second["indices"]) and len(second["samples"]) >= 3 * 16_000


def test_what_nobody_wants_is_not_read(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(2, 10), sound=tones(2))
    assert not len(one(path, audio=False)["samples"])
    assert not len(one(path, frames=False)["indices"])


# -- what is damaged -------------------------------------------------------------------------


def test_one_frame(tmp_path):
    path = write_video(tmp_path / "a.mp4", [0])
    for sampling in ("fps", "uniform", "scenes"):
        assert shown(one(path, sampling=sampling)) == [0]


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_cut_video_gives_what_is_there(tmp_path, name):
    noise = np.random.default_rng(0).integers(0, 255, (54, 192, 3), np.uint8)
    pictures = [picture(number) for number in range(80)]
    for number, pixels in enumerate(pictures):
        pixels[54:] = np.roll(noise, number, axis=1)  # so that each frame takes its bytes
    options = {"movflags": "faststart"} if name == "a.mp4" else {}
    path = write_video(tmp_path / name, every(8, 10), frames=pictures, options=options)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    duration = describe(str(path))["duration"]
    assert 2 < duration < 6
    first, last = read(path, (0, 2), (7, 8))
    assert shown(first) == [0, 10]
    assert isinstance(last, Unreadable) and last.reason == "nothing in this window"


def test_a_video_with_damaged_frames():
    """decord gives none of them."""
    with pytest.raises(decord.DECORDError):
        decord.VideoReader(str(DATA / "corrupted.mp4"), num_threads=1).get_batch(range(50))
    window = one(DATA / "corrupted.mp4", audio=False, fps=10.0, num_frames=50)
    assert len(window["indices"]) >= 1 and window["pixels"].shape[1:] == (720, 1280, 3)


def test_frames_that_nobody_can_decode(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(2, 10), sound=tones(2))
    silent = write_video(tmp_path / "b.mp4", every(2, 10))
    spoil(path)
    spoil(silent)
    assert len(one(path)["samples"]) and not len(one(path)["indices"])
    result = one(silent)
    assert isinstance(result, Unreadable) and result.reason == "damaged video"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"Dear Ada, this is no film.", "not a video"),
        (b"\x00\x00\x00\x20ftypisom nothing that can be played", "damaged video"),
        (b"\x1aE\xdf\xa3 nothing", "damaged video"),
    ],
)
def test_what_is_no_video(tmp_path, content, reason):
    (tmp_path / "a.mp4").write_bytes(content)
    for ask in (lambda path: describe(path), lambda path: read(Path(path), (0, 1))):
        with pytest.raises(Unreadable) as error:
            ask(str(tmp_path / "a.mp4"))
        assert error.value.reason == reason


def test_a_photo_under_the_name_of_a_video(tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    with pytest.raises(Unreadable, match="not a video"):
        describe(str((tmp_path / "a.png").rename(tmp_path / "a.mp4")))


def test_sound_under_the_name_of_a_video(tmp_path):
    path = write_sound(tmp_path / "a.wav", tones(2)).rename(tmp_path / "a.mp4")
    assert len(one(path)["samples"]) == 32_000
    with pytest.raises(Unreadable, match="no video track"):
        one(path, audio=False)


def test_frames_out_of_order():
    assert one(DATA / "unordered.mov", fps=32.0)["indices"].tolist() == [0, 1, 2, 3]


# -- memory ----------------------------------------------------------------------------------


def peak_of(path: Path, seconds: float, **settings: Any) -> int:
    process = DecodingProcess("video", Limits())
    windows = [[start, start + 30] for start in range(0, round(seconds), 30)]
    options = {**SETTINGS, **settings}
    for window in process.stream(len(windows), "read_windows", str(path), windows, options):
        assert len(window["indices"]) and len(window["samples"])
    result = peak(process)
    process.stop()
    return result


def long_video(path: Path, seconds: int) -> Path:
    return write_video(
        path, every(seconds, 5), size=(96, 54), sound=tones(seconds, 8000), rate=8000
    )


@pytest.mark.parametrize("sampling", ["fps", "scenes"])
def test_memory_does_not_grow_with_the_video(tmp_path, sampling):
    short, long = (long_video(tmp_path / f"{s}.mp4", s) for s in (60, 480))
    once = peak_of(short, 60, sampling=sampling)
    # Peaks of one video differ by a fifth with the load; all frames and sound would add a half.
    assert peak_of(long, 480, sampling=sampling) < 1.35 * once


@pytest.mark.heavy
def test_memory_does_not_grow_with_half_an_hour(tmp_path):
    short, long = (long_video(tmp_path / f"{s}.mp4", s) for s in (60, 1800))
    for sampling in ("fps", "scenes"):
        once = peak_of(short, 60, sampling=sampling)
        assert peak_of(long, 1800, sampling=sampling) < 1.3 * once


def test_a_process_reads_many_videos(tmp_path):
    path = write_video(tmp_path / "a.mp4", every(1, 10), sound=tones(1))
    process = DecodingProcess("video", Limits())
    peaks = []
    for _ in range(2):
        for _ in range(60):
            (window,) = process.stream(1, "read_windows", str(path), [[0, 1]], SETTINGS)
            assert len(window["indices"]) == 1
        peaks.append(peak(process))
    process.stop()
    assert peaks[1] < 1.05 * peaks[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.mp4", {"movflags": "faststart"}),
        ("a.mov", {"movflags": "faststart"}),
        ("a.mp4", {"movflags": "frag_keyframe+empty_moov"}),
        ("a.mkv", {}),
    ],
)
def test_a_truncated_video_is_marked(tmp_path, name, options):
    path = write_video(tmp_path / name, every(20, 10), sound=tones(20), options=options)
    whole = describe(str(path))
    assert not {"truncated", "stated_duration"} & whole.keys()
    data = path.read_bytes()
    path.write_bytes(data[: int(0.6 * len(data))])
    about = describe(str(path))
    assert about["truncated"] and 10 < about["duration"] < 14
    if "frag" not in str(options):  # there each fragment has a duration of its own
        assert about["stated_duration"] == pytest.approx(whole["duration"], abs=0.1)
    window, rest = read(path, (0, about["duration"]), (15, 20), audio=True)
    assert window["about"] == about and isinstance(rest, Unreadable)
