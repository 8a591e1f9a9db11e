"""Decoding of videos: frame selection, rotation, audio, corrupted files, and memory."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.data.decode import Unreadable
from pipeline.data.decode.process import DecodingProcess, Limits
from pipeline.data.decode.video import (
    DecordFrames,
    FFmpegFrames,
    decord,
    describe,
    read_frame,
    read_windows,
)
from tests.conftest import ROOT
from tests.data.decode.test_audio import peak
from tests.media import (
    corrupt_frames,
    frame_times,
    frequency,
    hide_first_frames,
    numbered_image,
    read_number,
    read_numbers,
    tone_at,
    tones,
    write_audio,
    write_video,
)

DATA = ROOT / "tests/files"
SETTINGS = {
    "frames": True,
    "audio": True,
    "sampling": "fps",
    "fps": 1.0,
    "num_frames": 16,
    "scene_detection_fps": 5.0,
    "scene_threshold": 0.1,
    "max_pixels": 1_000_000,
    "sample_rate": 16_000,
}


def read(path: Path, *windows: tuple[float, float | None], **settings: Any) -> list[Any]:
    spans = [list(window) for window in windows]
    return list(read_windows(str(path), spans, {**SETTINGS, **settings}))


def read_window(path: Path, start: float = 0.0, end: float | None = None, **settings: Any) -> Any:
    (window,) = read(path, (start, end), **settings)
    return window


def frame_numbers(window: dict[str, Any]) -> list[int]:
    """Returns the numbers encoded in the frames of a window, which equal their indices."""
    numbers = read_numbers(window["pixels"])
    assert numbers == window["indices"].tolist()
    return numbers


# -- frames ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.mp4", "a.mov", "a.mkv", "a.webm", "a.avi", "a.m4v"])
def test_frames_of_window(tmp_path, name):
    codec = {"a.webm": "libvpx-vp9", "a.avi": "mpeg4"}.get(name, "libx264")
    path = write_video(tmp_path / name, frame_times(4, 25), codec=codec)
    info = describe(str(path))
    assert (info["width"], info["height"], info["num_frames"]) == (192, 108, 100)
    assert info["duration"] == pytest.approx(4, abs=0.05)
    assert info["fps"] == pytest.approx(25, abs=0.5)
    first, second = read(path, (0, 1.5), (1.5, 4), fps=3.0)
    assert frame_numbers(first) == [0, 8, 16, 25, 33]  # 0, 0.33, 0.67, 1, 1.33 s
    assert frame_numbers(second) == [37, 45, 54, 62, 70, 79, 87, 95]
    assert second["seconds"].tolist() == [i / 25 for i in second["indices"]]


def test_variable_frame_rate(tmp_path):
    times = [0, 0.1, 0.5, 0.52, 0.9, 2, 2.01, 3, 3.5, 3.6, 5]
    path = write_video(tmp_path / "a.mp4", times)
    assert frame_numbers(read_window(path, 0, 2.5, fps=2.0)) == [
        0,
        2,
        4,
        5,
    ]  # the fifth frame is displayed until 2 s
    window = read_window(path, 0, 5, sampling="uniform", num_frames=5)
    assert frame_numbers(window) == [2, 4, 6, 8, 9]  # at 0.5, 1.5, 2.5, 3.5 and 4.5 s
    assert window["seconds"].tolist() == [0.5, 0.9, 2.01, 3.5, 3.6]
    assert describe(str(path))["duration"] > 5  # the header declares 4.03 s


def test_frame_times_beyond_rounding(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(4, 30))  # decord returns 0.033 and 0.067
    assert frame_numbers(read_window(path, 0, 1, fps=30.0, num_frames=100)) == list(range(30))
    assert frame_numbers(read_window(path, 2, 3, fps=30.0, num_frames=100)) == list(range(60, 90))


def test_uniform_frames(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(4, 10))
    assert frame_numbers(read_window(path, sampling="uniform", num_frames=4)) == [5, 15, 25, 35]
    assert frame_numbers(read_window(path, 1, 1.2, sampling="uniform", num_frames=9)) == [10, 11]


def test_num_frames_limits_fps(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(8, 10))
    assert frame_numbers(read_window(path, fps=10.0, num_frames=4)) == [10, 30, 50, 70]


def test_scenes(tmp_path):
    brightness = [20] * 15 + [120] * 5 + [220] * 20 + [60] * 10  # 10 frames per second
    still = [np.full((108, 192, 3), value, np.uint8) for value in brightness]
    path = write_video(tmp_path / "a.mp4", frame_times(5, 10), frames=still)
    window = read_window(path, sampling="scenes", scene_detection_fps=10.0)
    assert window["indices"].tolist() == [7, 17, 30, 45]
    assert [round(float(p.mean()) / 20) for p in window["pixels"]] == [1, 6, 11, 3]
    longest = read_window(path, sampling="scenes", scene_detection_fps=10.0, num_frames=2)
    assert longest["indices"].tolist() == [7, 30]
    same = read_window(path, sampling="scenes", scene_detection_fps=10.0, scene_threshold=0.9)
    assert same["indices"].tolist() == [25]


@pytest.mark.parametrize("are_stored", [True, False])
def test_equal_frames_are_removed_before_the_limit(tmp_path, are_stored):
    """Equal frames of screen recordings are stored again, or the frames have long durations."""
    starts = [0, 1, 2, 3, 30, 31, 32, 33]  # of eight distinct frames, in seconds
    times = [float(start) for start in starts] + [40.0]
    images = [numbered_image(n) for n in [*range(8), 7]]
    if are_stored:
        times = frame_times(40, 10)
        images = [images[sum(start <= time + 1e-6 for start in starts) - 1] for time in times]
    path = write_video(tmp_path / "a.mp4", times, frames=iter(images))
    window = read_window(path, 0, 40, fps=1.0, num_frames=8)
    assert read_numbers(window["pixels"]) == list(range(8))
    assert window["seconds"].tolist() == starts
    fewer = read_window(path, 0, 40, fps=1.0, num_frames=5)
    assert read_numbers(fewer["pixels"]) == [0, 2, 4, 5, 7]


def test_hidden_frames(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(6, 10))
    hide_first_frames(path, 1.5)  # in the middle of a group of frames
    window = read_window(path, fps=2.0)
    first, *_ = read_numbers(window["pixels"])
    assert first in (14, 15)
    assert read_numbers(window["pixels"]) == [first + 5 * i for i in range(len(window["indices"]))]
    assert window["seconds"][0] == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("times", [frame_times(3, 24), [0, 0.3, 0.31, 1, 2.5, 2.9]])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_readers_return_equal_frames(tmp_path, times, rotation):
    path = str(write_video(tmp_path / "a.mp4", times, rotation=rotation))
    fast, slow = DecordFrames(path, 0.0), FFmpegFrames(path, 0.0)
    assert np.abs(fast.times - slow.times).max() < 0.001
    for indices in ([0, 1, 4, len(times) - 1], [2, 3], [0]):
        (results, pixels), (others, again) = fast.read(indices), slow.read(indices)
        assert results == others == indices
        assert np.array_equal(pixels, again)


def test_rotated_video_is_upright(tmp_path):
    for rotation in (90, 180, 270):
        path = write_video(tmp_path / f"{rotation}.mp4", frame_times(1, 10), rotation=rotation)
        window = read_window(path, sampling="uniform", num_frames=2)
        rotated_back = [np.rot90(frame, rotation // 90) for frame in window["pixels"]]
        assert [read_number(frame) for frame in rotated_back] == [2, 7]
        info = describe(str(path))
        assert info["rotation"] == rotation
        assert window["pixels"].shape[1:3] == (info["height"], info["width"])
        small = read_window(path, sampling="uniform", num_frames=2, max_pixels=5000)["pixels"]
        height, width = small.shape[1:3]
        assert height * width <= 5000
        assert width / height == pytest.approx(info["width"] / info["height"], rel=0.03)
        rotated_back = [np.rot90(frame, rotation // 90) for frame in small]
        assert [read_number(frame) for frame in rotated_back] == [2, 7]
        slow = FFmpegFrames(str(path), 0.0, (width, height)).read([2])[1][0]
        assert np.abs(slow.astype(int) - small[0]).mean() < 3


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
@pytest.mark.parametrize("max_pixels", [1_000_000, 3000])
def test_mirrored_video_is_upright(tmp_path, rotation, max_pixels):
    path = write_video(
        tmp_path / "a.mp4", frame_times(1, 10), rotation=rotation, mirrored=True, audio=tones(1)
    )
    info = describe(str(path))
    assert (info["rotation"], info["mirrored"]) == (rotation, True)
    pixels = read_window(path, sampling="uniform", num_frames=2, max_pixels=max_pixels)["pixels"]
    assert pixels.shape[1] * pixels.shape[2] <= max_pixels
    assert pixels.shape[2] / pixels.shape[1] == pytest.approx(
        info["width"] / info["height"], rel=0.1
    )
    stored = [np.rot90(frame, rotation // 90)[:, ::-1] for frame in pixels]
    assert [read_number(frame) for frame in stored] == [2, 7]
    image = np.asarray(Image.open(io.BytesIO(read_frame(str(path), 0.75, max_pixels)["jpeg"])))
    assert image.shape[:2] == pixels.shape[1:3]
    assert read_number(np.rot90(image, rotation // 90)[:, ::-1]) == 7


def test_matrix_of_mirrored_video(tmp_path):
    """Checks the matrix that phones write for the front camera."""
    path = write_video(tmp_path / "a.mp4", frame_times(1, 10), mirrored=True)
    assert struct.pack(">5i", -1 << 16, 0, 0, 0, 1 << 16) in path.read_bytes()
    assert read_number(read_window(path, 0.5, 0.6)["pixels"][0][:, ::-1]) == 5


@pytest.mark.parametrize(
    ("ratio", "width"),
    [
        (Fraction(64, 45), 273),
        (Fraction(8, 9), 171),
        (Fraction(2), 384),
        (Fraction(1280, 1281), 192),  # the rounding of a size
        (Fraction(1, 50), 192),  # invalid
    ],
)
@pytest.mark.parametrize("rotation", [0, 90])
@pytest.mark.parametrize("mirrored", [False, True])
def test_pixels_that_are_not_square(tmp_path, ratio, width, rotation, mirrored):
    shape = {"rotation": rotation, "mirrored": mirrored, "pixel_ratio": ratio}
    path = write_video(tmp_path / "a.mp4", frame_times(1, 10), **shape)
    info = describe(str(path))
    size = (width, 108) if rotation == 0 else (108, width)
    assert (info["width"], info["height"]) == size
    for max_pixels in (1_000_000, 5000):
        window = read_window(path, sampling="uniform", num_frames=2, max_pixels=max_pixels)
        height, width = window["pixels"].shape[1:3]
        assert height * width <= max_pixels
        assert width / height == pytest.approx(size[0] / size[1], rel=0.03)
        stored = [np.rot90(frame, rotation // 90) for frame in window["pixels"]]
        stored = [frame[:, ::-1] if mirrored else frame for frame in stored]
        assert [read_number(frame) for frame in stored] == [2, 7]
        slow = FFmpegFrames(str(path), 0.0, (width, height)).read([2])[1][0]
        assert np.abs(slow.astype(int) - window["pixels"][0]).mean() < 3
        image = Image.open(io.BytesIO(read_frame(str(path), 0.2, max_pixels)["jpeg"]))
        assert image.size == (width, height)


@pytest.mark.parametrize("name", ["a.mkv", "a.mov"])
def test_scenes_of_pixels_that_are_not_square(tmp_path, name):
    path = write_video(tmp_path / name, frame_times(1, 10), pixel_ratio=Fraction(64, 45))
    assert describe(str(path))["width"] == 273
    assert read_window(path, sampling="scenes")["pixels"].shape[1:] == (108, 273, 3)


def test_rotated_phone_video():
    window = read_window(DATA / "video_90.mov", sampling="uniform", num_frames=1)
    assert window["pixels"].shape == (1, 568, 320, 3)
    slow = FFmpegFrames(str(DATA / "video_90.mov"), 0.0).read([1])[1]
    assert np.abs(slow.astype(int) - window["pixels"]).mean() < 2


def test_max_pixels(tmp_path):
    path = write_video(tmp_path / "a.mp4", [0, 0.5], size=(1920, 1080))
    assert read_window(path)["pixels"].shape == (1, 750, 1333, 3)
    assert read_number(read_window(path, 0.5)["pixels"][0]) == 1


def test_preview_frame(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(2, 10))
    results = read_frame(str(path), 1.55, 5000)
    assert (results["index"], results["seconds"]) == (15, 1.5)
    image = np.asarray(Image.open(io.BytesIO(results["jpeg"])))
    assert image.shape[0] * image.shape[1] <= 5000 and read_number(image) == 15
    assert read_frame(str(path), 99.0, 10_000)["index"] == 19


# -- audio -----------------------------------------------------------------------------------


def test_audio_and_frames_are_synchronised(tmp_path):
    path = write_video(
        tmp_path / "a.mp4", frame_times(8, 10), audio=tones(8, 44_100, 2), rate=44_100
    )
    info = describe(str(path))
    assert info["has_video"] and info["has_audio"]
    assert info["audio_duration"] == pytest.approx(8, abs=0.1)
    for window in read(path, (0, 3), (3, 6), fps=1.0):
        for second, (number, start) in enumerate(
            zip(frame_numbers(window), window["seconds"], strict=True)
        ):
            assert number == 10 * start
            samples = window["samples"][second * 16_000 + 3200 : second * 16_000 + 12_800]
            assert frequency(samples, 16_000) == pytest.approx(tone_at(start), abs=4)


def test_audio_equals_decord(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(5, 10), audio=tones(5))
    theirs = decord.AudioReader(str(path), sample_rate=16_000, mono=True)[:].asnumpy()[0]
    ours = np.concatenate([w["samples"] for w in read(path, (0, 1.7), (1.7, 5), frames=False)])
    assert len(ours) == 80_000
    assert np.abs(ours - theirs[: len(ours)]).max() < 1e-4


def test_resampled_audio_equals_decord(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(5, 10), audio=tones(5, 44_100), rate=44_100)
    theirs = decord.AudioReader(str(path), sample_rate=16_000, mono=True)[:].asnumpy()[0]
    ours = np.concatenate([w["samples"] for w in read(path, (0, 1.7), (1.7, 5), frames=False)])
    # decord's resampler has a delay of about a millisecond.
    alike = [np.corrcoef(theirs[lag : lag + 70_000], ours[:70_000])[0, 1] for lag in range(32)]
    assert max(alike) > 0.98


def test_audio_only_and_video_only(tmp_path):
    silent = write_video(tmp_path / "silent.mp4", frame_times(2, 10))
    assert not len(read_window(silent)["samples"]) and len(read_window(silent)["indices"]) == 2
    assert not describe(str(silent))["has_audio"]
    blind = write_video(tmp_path / "blind.mp4", [], audio=tones(3))
    window = read_window(blind, 0, 2)
    assert len(window["samples"]) == 32_000 and window["pixels"].shape == (0, 0, 0, 3)
    assert describe(str(blind))["duration"] == pytest.approx(3, abs=0.1)
    for path, unwanted, reason in (
        (silent, {"frames": False}, "no audio track"),
        (blind, {"audio": False}, "no video track"),
    ):
        with pytest.raises(Unreadable) as error:
            read(path, (0, 1), **unwanted)
        assert error.value.reason == reason


def test_audio_longer_than_video(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(2, 10), audio=tones(6))
    first, second = read(path, (0, 3), (3, None))
    assert frame_numbers(first) == [0, 10]
    assert not len(second["indices"]) and len(second["samples"]) >= 3 * 16_000


def test_unrequested_inputs_are_not_read(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(2, 10), audio=tones(2))
    assert not len(read_window(path, audio=False)["samples"])
    assert not len(read_window(path, frames=False)["indices"])


# -- corrupted files -------------------------------------------------------------------------


def test_single_frame(tmp_path):
    path = write_video(tmp_path / "a.mp4", [0])
    for sampling in ("fps", "uniform", "scenes"):
        assert frame_numbers(read_window(path, sampling=sampling)) == [0]


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_truncated_video(tmp_path, name):
    noise = np.random.default_rng(0).integers(0, 255, (54, 192, 3), np.uint8)
    images = [numbered_image(number) for number in range(80)]
    for number, pixels in enumerate(images):
        pixels[54:] = np.roll(noise, number, axis=1)  # makes all frames equally large
    options = {"movflags": "faststart"} if name == "a.mp4" else {}
    path = write_video(tmp_path / name, frame_times(8, 10), frames=images, options=options)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    duration = describe(str(path))["duration"]
    assert 2 < duration < 6
    first, last = read(path, (0, 2), (7, 8))
    assert frame_numbers(first) == [0, 10]
    assert isinstance(last, Unreadable) and last.reason == "nothing in this window"


def test_corrupted_frames_are_skipped():
    """decord decodes none of the frames."""
    with pytest.raises(decord.DECORDError):
        decord.VideoReader(str(DATA / "corrupted.mp4"), num_threads=1).get_batch(range(50))
    window = read_window(DATA / "corrupted.mp4", audio=False, fps=10.0, num_frames=50)
    assert len(window["indices"]) >= 1 and window["pixels"].shape[1:] == (720, 1280, 3)


def test_undecodable_frames(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(2, 10), audio=tones(2))
    silent = write_video(tmp_path / "b.mp4", frame_times(2, 10))
    corrupt_frames(path)
    corrupt_frames(silent)
    assert len(read_window(path)["samples"]) and not len(read_window(path)["indices"])
    result = read_window(silent)
    assert isinstance(result, Unreadable) and result.reason == "corrupted video"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"Dear Ada, this is no film.", "not a video"),
        (b"\x00\x00\x00\x20ftypisom nothing that can be played", "corrupted video"),
        (b"\x1aE\xdf\xa3 nothing", "corrupted video"),
    ],
)
def test_invalid_videos(tmp_path, content, reason):
    (tmp_path / "a.mp4").write_bytes(content)
    for function in (lambda path: describe(path), lambda path: read(Path(path), (0, 1))):
        with pytest.raises(Unreadable) as error:
            function(str(tmp_path / "a.mp4"))
        assert error.value.reason == reason


def test_image_with_video_suffix(tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    with pytest.raises(Unreadable, match="not a video"):
        describe(str((tmp_path / "a.png").rename(tmp_path / "a.mp4")))


def test_audio_with_video_suffix(tmp_path):
    path = write_audio(tmp_path / "a.wav", tones(2)).rename(tmp_path / "a.mp4")
    assert len(read_window(path)["samples"]) == 32_000
    with pytest.raises(Unreadable, match="no video track"):
        read_window(path, audio=False)


def test_frames_out_of_order():
    assert read_window(DATA / "unordered.mov", fps=32.0)["indices"].tolist() == [0, 1, 2, 3]


# -- memory ----------------------------------------------------------------------------------


def peak_memory(path: Path, seconds: float, **settings: Any) -> int:
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
        path, frame_times(seconds, 5), size=(96, 54), audio=tones(seconds, 8000), rate=8000
    )


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> list[Path]:
    """Returns a video of a minute and one of eight."""
    folder = tmp_path_factory.mktemp("videos")
    return [long_video(folder / f"{s}.mp4", s) for s in (60, 480)]


@pytest.mark.parametrize("sampling", ["fps", pytest.param("scenes", marks=pytest.mark.heavy)])
def test_memory_is_independent_of_duration(videos, sampling):
    short, long = videos
    limit = 1.35 * peak_memory(short, 60, sampling=sampling)
    # Keeping all frames and audio would add a half in every run. On a busy machine, buffers of the
    # decoder add almost as much in some runs.
    assert any(peak_memory(long, 480, sampling=sampling) < limit for _ in range(3))


@pytest.mark.heavy
def test_memory_of_half_an_hour(tmp_path):
    short, long = (long_video(tmp_path / f"{s}.mp4", s) for s in (60, 1800))
    for sampling in ("fps", "scenes"):
        limit = 1.3 * peak_memory(short, 60, sampling=sampling)
        assert any(peak_memory(long, 1800, sampling=sampling) < limit for _ in range(3))


def test_memory_of_many_videos(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(1, 10), audio=tones(1))
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
def test_truncated_video_is_marked(tmp_path, name, options):
    path = write_video(tmp_path / name, frame_times(20, 10), audio=tones(20), options=options)
    whole = describe(str(path))
    assert not {"truncated", "stated_duration"} & whole.keys()
    data = path.read_bytes()
    path.write_bytes(data[: int(0.6 * len(data))])
    info = describe(str(path))
    assert info["truncated"] and 10 < info["duration"] < 14
    if "frag" not in str(options):  # each fragment declares its own duration
        assert info["stated_duration"] == pytest.approx(whole["duration"], abs=0.1)
    window, rest = read(path, (0, info["duration"]), (15, 20), audio=True)
    assert window["info"] == info and isinstance(rest, Unreadable)
