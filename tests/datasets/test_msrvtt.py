"""The source of MSR-VTT on a miniature."""

from __future__ import annotations

import pytest

from pipeline.config import SpecError
from tests import datasets
from tests.sources.listing import build, read


def test_videos_of_a_split(tmp_path):
    folder = datasets.msrvtt(tmp_path)
    videos = str(folder / "videos")
    for file, names in (
        ("MSRVTT_JSFUSION_test.csv", ["video9770", "video9771"]),
        ("MSRVTT_train.9k.csv", ["video0"]),
    ):
        items, rejects = read(
            build(
                "msrvtt", ("frames",), path=videos, video_ids=str(folder / file), sampling="uniform"
            )
        )
        assert list(items) == names and not rejects
        assert all(len(item.payload["frames"]) for item in items.values())


def test_zip_of_videos(tmp_path):
    folder = datasets.msrvtt(tmp_path)
    members = [(f"all/{file.name}", file.read_bytes()) for file in (folder / "videos").iterdir()]
    (folder / "zipped").mkdir()
    (folder / "zipped/MSRVTT.zip").write_bytes(datasets.make_zip(members))
    fields = {"path": str(folder / "zipped"), "video_ids": str(folder / "MSRVTT_JSFUSION_test.csv")}
    items, rejects = read(build("msrvtt", ("frames",), **fields, sampling="uniform"))
    assert sorted(items) == ["video9770", "video9771"] and not rejects


def test_missing_videos_are_named(tmp_path):
    folder = datasets.msrvtt(tmp_path)
    (folder / "videos/video9771.mp4").unlink()
    fields = {
        "path": str(folder / "videos"),
        "video_ids": str(folder / "MSRVTT_JSFUSION_test.csv"),
    }
    with pytest.raises(SpecError, match=r"lacks 1 of them: video9771\.mp4; add them"):
        build("msrvtt", **fields)
    assert list(read(build("msrvtt", **fields, missing="skip"))[0]) == ["video9770"]
