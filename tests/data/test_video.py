"""The video source."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

from pipeline.config import SpecError, parse
from pipeline.data.decode import Unreadable
from pipeline.data.video import Video
from pipeline.schema import Item, Reject
from tests.data.test_audio import read, samples, stored
from tests.media import (
    frame_times,
    frequency,
    make_tar,
    read_number,
    tone_at,
    tones,
    write_audio,
    write_video,
)

BOTH = ("frames", "audio")


def source(path: Path | str, wants: tuple[str, ...] = BOTH, **options: Any) -> Video:
    return Video(Video.Spec(path=str(path), **options), wants)


def frames(item: Item) -> list[np.ndarray]:
    return [
        np.frombuffer(frame["pixels"], np.uint8).reshape(frame["height"], frame["width"], 3)
        for frame in item.payload["frames"].to_pylist()
    ]


def test_window_is_item(tmp_path):
    (tmp_path / "folder").mkdir()
    write_video(tmp_path / "folder/a b.MP4", frame_times(10, 10), audio=tones(10))
    results = read(source(tmp_path, window_seconds=4, fps=1))
    ids = [f"folder/a b.MP4#t={span}" for span in ("0,4", "4,8", "8,10")]
    assert list(results)[:2] == ids[:2] and len(results) == 3
    item = results[ids[1]]
    assert (item.parent_id, item.modality) == ("folder/a b.MP4", "video")
    assert item.span == ("seconds", 4, 8)
    used = item.metadata["frames"]
    assert used == [[40, 4.0], [50, 5.0], [60, 6.0], [70, 7.0]]
    assert [[f["index"], f["seconds"]] for f in item.payload["frames"].to_pylist()] == used
    assert [read_number(frame) for frame in frames(item)] == [40, 50, 60, 70]
    info = {"width": 192, "height": 108, "rotation": 0, "has_audio": True, "num_frames": 100}
    assert info.items() <= item.metadata.items()
    assert item.metadata["fps"] == pytest.approx(10)
    assert item.payload["audio"]["start"] == pytest.approx(4, abs=1e-3)
    assert frequency(samples(item)[3200:12_800], 16_000) == pytest.approx(tone_at(4.0), abs=4)


@pytest.mark.parametrize("revision", ["content", "stat"])
def test_video_is_item_without_windows(tmp_path, revision):
    write_video(tmp_path / "a.mp4", frame_times(4, 10))
    media = source(
        tmp_path, window_seconds=None, sampling="uniform", num_frames=2, revision=revision
    )
    (item,) = read(media).values()
    assert (item.item_id, item.parent_id, item.span) == ("a.mp4", "a.mp4", ("seconds", 0.0, 4.0))
    assert [read_number(frame) for frame in frames(item)] == [10, 30]
    assert item.payload["audio"] is None
    assert item.revision


def test_payload_has_wanted_inputs_only(tmp_path):
    write_video(tmp_path / "a.mp4", frame_times(2, 10), audio=tones(2))
    for wants in (("frames",), ("audio",), ("item_id",)):
        media = source(tmp_path, wants)
        (item,) = read(media).values()
        assert list(item.payload) == [kind for kind in wants if kind != "item_id"]


def test_rotated_video_is_upright(tmp_path):
    write_video(tmp_path / "a.mov", frame_times(1, 10), rotation=90)
    (item,) = read(source(tmp_path)).values()
    assert (item.metadata["width"], item.metadata["height"]) == (108, 192)
    assert item.metadata["rotation"] == 90
    (frame,) = frames(item)
    assert frame.shape == (192, 108, 3) and read_number(np.rot90(frame)) == 0


def test_unreadable_files_are_rejected(tmp_path):
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mkv").write_text("no film")
    whole = write_video(tmp_path / "cut.mp4", frame_times(4, 10))
    whole.write_bytes(whole.read_bytes()[:-500])  # the index of frames is at the end
    write_audio(tmp_path / "blind.wav", tones(2)).rename(tmp_path / "blind.mp4")
    write_video(tmp_path / "good.mp4", [0])
    expected = {"empty.mp4": "empty file", "text.mkv": "not a video", "cut.mp4": "corrupted video"}
    results = read(source(tmp_path))
    reasons = {name: r.reason for name, r in results.items() if isinstance(r, Reject)}
    assert reasons == expected
    assert samples(results["blind.mp4#t=0,2"]).size == 32_000
    assert results["blind.mp4#t=0,2"].payload["frames"].to_pylist() == []
    assert len(frames(results["good.mp4#t=0,0.033"])) == 1
    only_frames = read(source(tmp_path, ("frames",)))
    assert only_frames["blind.mp4#t=0,2"].reason == "no video track"


def test_windows_beyond_readable_end_are_rejected(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(8, 10), audio=tones(2))
    items = read(source(tmp_path, window_seconds=2))
    assert [isinstance(item, Item) for item in items.values()] == [True] * 4
    assert items["a.mp4#t=4,6"].payload["audio"] is None
    media = source(tmp_path, window_seconds=2)
    (shard,) = media.shards()
    listed = list(enumerate(media.scan(shard)))
    write_video(path, frame_times(5, 10))
    results = list(media.decode(shard, listed))
    assert [isinstance(r, Item) for r in results] == [True, True, True, False]
    assert results[-1].reason == "nothing in this window"


def test_previews_of_indexed_items(tmp_path):
    path = write_video(tmp_path / "x.mp4", frame_times(6, 10), audio=tones(6))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.tar").write_bytes(make_tar([("clip.mp4", path.read_bytes())]))
    path.rename(tmp_path / "in/b.mp4")
    media = source(tmp_path / "in", window_seconds=3, max_pixels=5000)
    results = read(media)
    for name in ("clip#t=3,6", "b.mp4#t=3,6"):
        item = next(item for key, item in results.items() if key.startswith(name[:-1]))
        jpeg = media.preview_image(stored(item), 4.25)
        image = np.asarray(Image.open(io.BytesIO(jpeg)))
        assert read_number(image) == 42 and image.shape[0] * image.shape[1] <= 5000
        samples, rate, start = media.preview_audio(
            stored(replace(item, span=("seconds", 4.0, 4.9)))
        )
        assert frequency(samples, rate) == pytest.approx(tone_at(4.0), abs=4)
        assert start == pytest.approx(4.0, abs=0.01)
    write_video(tmp_path / "in/c.mp4", [0, 1])
    with pytest.raises(Unreadable, match="no audio track"):
        media.preview_audio({"parent_id": "c.mp4", "metadata": {}, "span": {"start": 0, "end": 1}})


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"fps": 1}, "windows longer than 16 s have more frames at fps 1 than num_frames (16)"),
        ({"window_seconds": None}, "videos longer than 32 s have more frames at fps 0.5"),
        ({"fps": 1, "num_frames": 30}, ""),
        ({}, ""),
        ({"window_seconds": None, "sampling": "uniform"}, ""),
    ],
)
def test_limit_of_frames_is_logged(tmp_path, caplog, options, warning):
    write_video(tmp_path / "a.mp4", [0])
    source(tmp_path, **options).check()
    assert (warning in caplog.text) if warning else not caplog.text
    caplog.clear()
    source(tmp_path, ("audio",), **options).check()
    assert not caplog.text


def test_videos_on_other_file_systems(tmp_path):
    path = write_video(tmp_path / "a.mp4", frame_times(2, 10))
    with fsspec.open("memory://films/deep/a.mp4", "wb") as file:
        file.write(path.read_bytes())
    (item,) = read(source("memory://films")).values()
    assert item.item_id == "deep/a.mp4#t=0,2" and len(frames(item)) == 1


def test_revision_depends_on_content_and_options(tmp_path):
    write_video(tmp_path / "a.mp4", frame_times(2, 10), audio=tones(2))

    def revision(*wants: str, **options: Any) -> str:
        (item,) = source(tmp_path, wants or BOTH, window_seconds=None, **options).scan(
            {"files": [["a.mp4", 1]]}
        )
        return item.revision

    assert revision() == revision(scene_detection_fps=9)  # has no effect without scene detection
    assert revision(fps=2) != revision() != revision(sample_rate=8000)
    assert revision("audio") == revision("audio", fps=2) != revision("frames")
    assert revision(sampling="scenes") != revision(sampling="scenes", scene_detection_fps=9)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"window_seconds": 10, "overlap_seconds": 10},
            "overlap_seconds must be at least .*, got 10.0",
        ),
        ({"sampling": "random"}, "sampling"),
        ({"fps": 0}, "fps"),
        ({"fps": float("nan")}, "fps"),
        ({"num_frames": 0}, "num_frames"),
        ({"scene_threshold": 1}, "scene_threshold"),
        ({"max_pixels": 3}, "max_pixels"),
    ],
)
def test_invalid_options(options, sentence):
    with pytest.raises(SpecError, match=sentence):
        parse(Video.Spec, {"path": "x", **options})


def test_item_size_is_that_of_frames_and_audio(tmp_path):
    write_video(tmp_path / "a.mp4", frame_times(4, 10), audio=tones(4))
    frame, second = 3 * 192 * 108, 4 * 16_000

    def num_bytes(*wants: str, **options: Any) -> list[int]:
        media = source(tmp_path, wants, **options)
        (shard,) = media.shards()
        return [media.item_size(shard, item).num_bytes for item in media.scan(shard)]

    uniform = {"sampling": "uniform", "num_frames": 3}
    assert num_bytes("frames", window_seconds=2, **uniform) == [3 * frame, 3 * frame]
    assert num_bytes("frames", window_seconds=None, **uniform) == [3 * frame]
    assert num_bytes("frames", window_seconds=None, fps=1) == [6 * frame]
    assert num_bytes("frames", window_seconds=None, max_pixels=1000, **uniform) == [3 * 3 * 1000]
    (audio,) = num_bytes("audio", window_seconds=None)
    assert audio == pytest.approx(4 * second, rel=0.05)
    (both,) = num_bytes(*BOTH, window_seconds=None, **uniform)
    assert both == audio + 3 * frame
    assert num_bytes("item_id", window_seconds=None) == [0]
    # Without its header, the largest size of a frame is assumed.
    (stat,) = num_bytes("frames", window_seconds=None, revision="stat", **uniform)
    assert stat == 3 * 3 * 1_000_000


def test_unreadable_header_is_left_to_decoding(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"not a video")
    media = source(tmp_path, window_seconds=None)
    (shard,) = media.shards()
    (item,) = media.scan(shard)
    assert media.item_size(shard, item).num_bytes > 0
    (reject,) = read(media).values()
    assert isinstance(reject, Reject) and reject.stage == "decode"
