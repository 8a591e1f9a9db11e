"""The source of MultiVENT 2.0 on a miniature in the format of its distribution."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipeline.config import SpecError
from tests import datasets
from tests.media import frequency, tone_at
from tests.sources.listing import build, read


def test_shard_with_features(tmp_path):
    fields = datasets.multivent(tmp_path)
    items, rejects = read(build("multivent", **fields))
    assert sorted(items) == ["200", "201"], rejects
    assert items["200"].text == "City hall\n\ngood evening from the council"  # lines are merged
    assert items["201"].text == "flood warning, stay home"
    assert items["200"].metadata["description"] == "Eng" and items["200"].title is None
    assert items["200"].parent_id == "200" and items["200"].metadata["file"] == "000003.tar"
    # A truncated archive, one corrupted member of the transcripts, and the video without its text.
    by_reason = {reject.reason: reject for reject in rejects}
    assert sorted(by_reason) == ["corrupted archive", "corrupted asr", "empty text"]
    corrupted = by_reason["corrupted asr"]
    assert corrupted.item_id == "asr/202.m4a.csv" and "columns" in corrupted.detail
    assert by_reason["empty text"].item_id == "202"
    assert by_reason["empty text"].detail.startswith("no ocr or asr")


def test_parts_of_the_text(tmp_path):
    fields = datasets.multivent(tmp_path)
    del fields["asr"]
    items, _ = read(build("multivent", **fields, text=["caption", "description", "ocr"]))
    assert items["200"].text == "a caption\n\nEng\n\nCity hall"


def test_separate_audio(tmp_path):
    fields = datasets.multivent(tmp_path)
    items, _ = read(build("multivent", ("frames", "audio"), **fields, sampling="uniform"))
    audio = items["200"].payload["audio"]
    samples = np.frombuffer(audio["samples"], "<f4")
    assert frequency(samples[:12_000], audio["sample_rate"]) == pytest.approx(tone_at(0), abs=20)
    assert len(items["200"].payload["frames"]) and items["200"].metadata["has_audio"]
    assert items["201"].payload["audio"] is None  # its video has no audio track


def test_plain_folder_and_ids(tmp_path):
    folder = tmp_path / "train/000001"
    folder.mkdir(parents=True)
    video = datasets.small_video(tmp_path)
    for name in ("aB3_dE-fG12", "zzzzzzzzzzz"):
        (folder / f"{name}.mp4").write_bytes(video)
    (folder / "aB3_dE-fG12.m4a").write_bytes(datasets.sound(tmp_path))
    info = {"yt_meta_dict": {"info": {"title": "A vote", "description": None}}}
    (folder / "aB3_dE-fG12.json").write_text(json.dumps(info))
    ids = tmp_path / "multivent_2_ids.csv"
    ids.write_text("id\naB3_dE-fG12\naB3_dE-fG12.mp4.json\n")
    source = build("multivent", ("audio",), path=str(tmp_path / "train"), video_ids=str(ids))
    items, rejects = read(source)
    assert list(items) == ["aB3_dE-fG12"] and not rejects
    item = items["aB3_dE-fG12"]
    assert item.title == "A vote" and item.payload["audio"]["sample_rate"] == 16_000
    assert source.find_file(item.parent_id, item.metadata).annotation["audio_file"]


def test_a_missing_archive_is_named(tmp_path):
    fields = datasets.multivent(tmp_path) | {"asr": str(tmp_path / "absent.zip")}
    with pytest.raises(SpecError, match=r"asr\.path .*absent\.zip.* does not exist"):
        build("multivent", **fields)
    with pytest.raises(SpecError, match=r"ocr.* is required; it must be the archive of ocr"):
        build("multivent", path=fields["path"], text=["ocr"])
