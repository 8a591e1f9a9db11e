"""MMEB-V2 on a miniature."""

from __future__ import annotations

import pytest

from pipeline.config import SpecError
from pipeline.schema import Composed
from tests import datasets
from tests.data.listing import build, read
from tests.datasets.loading import load

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


def test_mmeb(tmp_path):
    folder = datasets.mmeb(tmp_path)
    fields = {"path": str(folder / "CIRR"), "images": str(folder / "image-tasks")}
    judged = load("mmeb", **fields)
    instruction = "Given an image, find a similar image:"
    assert judged.queries["0"] == f"{instruction} Show three bottles."
    assert judged.pools == {
        "0": ("CIRR/1.jpg", "CIRR/2.jpg", "CIRR/3.jpg"),
        "1": ("CIRR/3.jpg", "CIRR/2.jpg:a caption"),
    }
    assert judged.qrels == {"0": {"CIRR/1.jpg": 1}, "1": {"CIRR/3.jpg": 1}}
    (query,) = judged.inputs(["0"])
    assert query == Composed(judged.queries["0"], datasets.photos(1)[0])
    template = load("mmeb", **fields, instruction="template")
    assert template.queries["0"] == "Show three bottles." and template.instruction == instruction
    assert judged.instruction is None and judged.measure == "Success@1"
    images = {"path": str(folder / "ImageNet"), "instruction": "none"}
    classes = load("mmeb", **images, images=fields["images"])
    assert list(classes.inputs(["0"])) == [datasets.photos(1)[0]]
    with pytest.raises(SpecError, match=r"images.*is required in benchmark"):
        load("mmeb", **images)


def test_mmeb_videos(tmp_path):
    path = str(datasets.mmeb(tmp_path) / "MSR-VTT")
    judged = load("mmeb", path=path, video_instruction="Find a video:")
    assert judged.queries["1"] == "Find a video: caption of video2"
    assert judged.qrels["1"] == {"video2": 1} and judged.pools is None
