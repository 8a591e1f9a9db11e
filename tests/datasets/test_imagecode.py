"""The source of ImageCoDe on a miniature."""

from __future__ import annotations

import io
import zipfile

import pytest
from PIL import Image

from pipeline.config import SpecError
from tests import datasets
from tests.sources.listing import build, read

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
