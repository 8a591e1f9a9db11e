"""The source of MMEB-V2 on a miniature."""

from __future__ import annotations

import pytest

from pipeline.config import SpecError
from tests import datasets
from tests.sources.listing import build, read

IMAGE = ("image", "text")


def test_mmeb_candidates_are_distinct_items(tmp_path):
    folder = datasets.mmeb(tmp_path)
    images = str(folder / "image-tasks")
    items, rejects = read(build("mmeb", IMAGE, path=str(folder / "CIRR"), images=images))
    assert not rejects
    assert list(items) == ["CIRR/1.jpg", "CIRR/2.jpg", "CIRR/3.jpg", "CIRR/2.jpg:a caption"]
    composed = items["CIRR/2.jpg:a caption"]
    assert composed.text == "a caption"
    assert composed.payload["image"] == items["CIRR/2.jpg"].payload["image"]
    texts, _ = read(build("mmeb", IMAGE, path=str(folder / "ImageNet")))
    assert [item.text for item in texts.values()] == ["cat", "dog", "x" * 600]
    assert [len(item_id) for item_id in texts] == [3, 3, 32]  # a hash, because the text is too long


def test_mmeb_frames(tmp_path):
    folder = datasets.mmeb(tmp_path)
    frames = folder / "video-tasks/frames/video_ret/MSR-VTT"
    fields = {"path": str(folder / "MSR-VTT"), "frames": str(frames)}
    items, rejects = read(build("mmeb", ("frames",), **fields, num_frames=3))
    assert list(items) == ["video1", "video2"] and not rejects
    found = items["video1"].payload["frames"]
    assert [(f["height"], f["width"]) for f in found] == [(24, 32)] * 3
    assert items["video1"].handle["frames"] == ["frame_0.png", "frame_6.png", "frame_11.png"]
    for file in (frames / "video2").iterdir():
        file.unlink()
    with pytest.raises(SpecError, match=r"frames .*lacks the frames of 1 videos, such as video2"):
        build("mmeb", ("frames",), **fields)
    items, (reject,) = read(build("mmeb", ("frames",), **fields, missing="skip"))
    assert list(items) == ["video1"] and reject.item_id == "video2"
