"""ImageCoDe on a miniature."""

from __future__ import annotations

import io
import json
import zipfile

import pytest
from PIL import Image

from pipeline.config import SpecError
from pipeline.eval import BenchmarkRow
from tests import datasets
from tests.data.listing import build, read
from tests.datasets.loading import benchmark, load

IMAGE = ("image", "text")


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


def test_imagecode(tmp_path):
    folder = datasets.imagecode(tmp_path)
    valid = benchmark("imagecode", path=str(folder / "valid_data.json"), num_queries=3)
    judged = valid.load()
    still, video = datasets.SETS
    assert list(judged.queries) == [f"{still}/7", f"{video}/0", f"{video}/9"]
    assert judged.qrels[f"{video}/9"] == {f"{video}/9": 1}
    assert judged.pools[f"{video}/9"] == tuple(f"{video}/{i}" for i in range(10))
    assert judged.categories["media"] == {
        "image": [f"{still}/7"],
        "video": list(judged.queries)[1:],
    }
    run = {f"{still}/7": {f"{still}/3": 0.1, f"{still}/7": 0.2}, f"{video}/0": {f"{video}/4": 1.0}}
    path = valid.write_result(str(tmp_path), BenchmarkRow("full", "e", run, 10, 1.0))
    with open(path) as file:
        assert json.load(file) == {still: {"7": 7}, video: {"0": 4}}
    with pytest.raises(SpecError, match=r"has no labels"):
        load("imagecode", path=str(folder / "test_data_unlabeled.json"))
