"""The source of COCO and Flickr30K on a miniature."""

from __future__ import annotations

import io

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
