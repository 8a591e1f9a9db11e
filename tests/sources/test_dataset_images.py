"""Sources of annotated images: Karpathy's splits, ImageCoDe and MMEB-V2."""

from __future__ import annotations

import io
import zipfile

import pytest
from PIL import Image

from pipeline.config import SpecError
from tests import datasets
from tests.sources.listing import build, read

IMAGE = ("image", "text")


@pytest.mark.parametrize("as_zip", [False, True])
def test_karpathy_images(tmp_path, as_zip):
    folder = datasets.karpathy(tmp_path / "coco", as_zip=as_zip)
    images = {"images": str(folder / "val2014.zip")} if as_zip else {}
    path = str(folder / "dataset_coco.json")
    source = build("karpathy", IMAGE, path=path, **images, num_documents=4)
    items, rejects = read(source)
    assert list(items) == ["100", "101", "102", "103"] and not rejects
    for item, data in zip(items.values(), datasets.photos(4), strict=True):
        stored = Image.open(io.BytesIO(item.payload["image"]))
        assert stored.size == Image.open(io.BytesIO(data)).size
        assert source.preview_image({**item.row(), "metadata": item.metadata})


def test_karpathy_captions(tmp_path):
    path = str(datasets.karpathy(tmp_path) / "dataset_coco.json")
    items, rejects = read(build("karpathy", IMAGE, path=path, content="captions", split="restval"))
    assert {key: item.text for key, item in items.items()} == {
        "104#0": "Photo 4, sentence 0.",
        "104#1": "Photo 4, sentence 1.",
    }
    assert not rejects and items["104#0"].modality == "text"


def test_missing_files_are_named(tmp_path):
    folder = datasets.karpathy(tmp_path)
    (folder / "val2014/COCO_val2014_000000000002.jpg").unlink()
    fields = {"path": str(folder / "dataset_coco.json")}
    with pytest.raises(SpecError, match=r"lacks 1 of them: val2014/COCO_val2014_000000000002\.jpg"):
        build("karpathy", **fields)
    items, (reject,) = read(build("karpathy", **fields, missing="skip"))
    assert len(items) == 3 and (reject.item_id, reject.reason) == ("102", "missing file")
    with pytest.raises(SpecError, match=r"num_documents must be the number of documents .*\(4\)"):
        build("karpathy", **fields, num_documents=5000)
    with pytest.raises(SpecError, match=r"must be one of restval, test.* is not a split of"):
        build("karpathy", **fields, split="dev")


def test_imagecode_frames_are_sorted_as_numbers(tmp_path):
    folder = datasets.imagecode(tmp_path)
    fields = {"path": str(folder / "valid_data.json"), "images": str(folder / "image-sets.zip")}
    items, rejects = read(build("imagecode", IMAGE, **fields, num_documents=20))
    assert not rejects
    assert [f"{name}/{i}" for name in datasets.SETS for i in range(10)] == list(items)
    for name in datasets.SETS:
        for index, data in enumerate(datasets.photos(10)):
            item = items[f"{name}/{index}"]
            assert Image.open(io.BytesIO(item.payload["image"])).size == (
                Image.open(io.BytesIO(data)).size
            )
            assert item.metadata["is_video"] == name.startswith("MSR-VTT")
    # The folder that the archive contains is read as well, and a missing image is reported.
    with zipfile.ZipFile(folder / "image-sets.zip") as archive:
        archive.extractall(folder)
    fields["images"] = str(folder / "image-sets")
    assert list(read(build("imagecode", **fields))[0]) == list(items)
    (folder / "image-sets" / datasets.SETS[0] / "img2.jpg").unlink()
    with pytest.raises(SpecError, match=r"images.*has 9 images of the set open-images-1a"):
        build("imagecode", **fields)


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
    assert [len(item_id) for item_id in texts] == [3, 3, 32]  # a long text is no id


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
