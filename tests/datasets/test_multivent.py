"""The source of MultiVENT 2.0 on a miniature in the format of its distribution."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipeline.config import SpecError
from tests import datasets
from tests.media import frequency, tone_at
from tests.sources.listing import build, read
from tests.training_data.files import build_data
from tests.training_data.media import QUERY, write_audio, write_clip, write_multivent


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


QUERIES, JUDGED = "multivent_2_train_queries.csv", "multivent_2_train_judgments.jsonl"


def build_multivent(folder, batch_size=2, **more):
    return build_data(
        batch_size,
        name="multivent",
        path=folder / QUERIES,
        judgments=folder / JUDGED,
        videos=folder / "train",
        **more,
    )


def test_multivent_format(tmp_path, caplog):
    graded = [
        {"query_id": QUERY.format(0), "doc_id": "247", "relevance": 3, "video_language": "korean"},
        {"query_id": QUERY.format(1), "doc_id": "aB3_dE-fG10", "relevance": 0},
    ]
    folder = write_multivent(tmp_path, 2, graded)
    write_clip(folder / "train/000000/247.mp4", has_audio=False)
    audio = write_audio(folder / "train/000000/247.wav", 1)
    audio.rename(audio.with_suffix(".m4a"))  # detected by content
    data = build_multivent(folder, 5)
    asked = {(row.query, data.training.documents[row.document].id) for row in data.training.rows}
    assert asked == {
        ("Vote 0, spring 2021", "aB3_dE-fG10"),
        ("Vote 0, spring 2021", "247"),
        ("Vote 1, spring 2021", "aB3_dE-fG11"),
        ("both of the first", "aB3_dE-fG10"),
        ("both of the first", "aB3_dE-fG11"),
    }
    assert caplog.messages == [
        f"1 of 4 queries of {folder / QUERIES} are left out: they have no relevant video"
    ]
    (batch,) = data.batches(0, 0, 0, 1)
    relevant = data.relevant(batch.query_labels, batch.document_labels)
    both = relevant[batch.queries.index("both of the first")]
    assert both.sum() == 2 and len(batch.documents) == 3
    found = {
        key.split("/")[-1].split()[0]: document["audio"]
        for key, document in zip(batch.document_keys, batch.documents, strict=True)
    }
    assert found["aB3_dE-fG10.mp4"] is None and len(found["aB3_dE-fG11.mp4"]["samples"])
    samples = found["247.m4a"]["samples"]  # from the audio file
    assert len(samples) == 4 * 16_000
    assert frequency(np.frombuffer(samples, "<f4"), 16_000) == pytest.approx(tone_at(0.5), abs=5)


def test_separate_validation_data(tmp_path):
    one, other = write_multivent(tmp_path / "one", 2), write_multivent(tmp_path / "other", 2)
    validation = {"path": str(other / QUERIES), "judgments": str(other / JUDGED)}
    batch = build_multivent(
        one, validation={**validation, "videos": str(other / "train")}
    ).validation()
    assert len(batch.queries) == 3 and all(str(other) in key for key in batch.document_keys)
    batch = build_multivent(one, validation=validation).validation()
    assert all(str(one) in key for key in batch.document_keys)
    share = build_multivent(one, validation=0.5)
    assert len(share.validation().documents) == 1


RULE = 'a line {"query_id": "...", "doc_id": "...", "relevance": an integer from 0 to 3}'


BAD_MULTIVENT = [
    (
        *(QUERIES, lambda data: data.replace(b"Query_id", b"id")),
        "data.path must be one of id, query, got 'Query_id', which is not a column of"
        f" {{}}/{QUERIES}",
    ),
    (
        *(QUERIES, lambda data: data + b"x,Vote, spring\r\n"),
        "data.path must be a row of Query_id, query, got ['x', 'Vote', ' spring'] (line 6 of"
        f" {{}}/{QUERIES})",
    ),
    (
        *(QUERIES, lambda data: data + data.splitlines(keepends=True)[1]),
        f"data.path must be a unique query id, got '{QUERY.format(0)}', which occurs twice (line 6"
        f" of {{}}/{QUERIES})",
    ),
    (
        *(QUERIES, lambda data: data + b"x,\r\n"),
        f"data.path must be a text with at least one word, got '' (line 6 of {{}}/{QUERIES})",
    ),
    (
        *(JUDGED, lambda data: b'{"query_id": "x", "doc_id": "y", "relevance": 1}\n' + data),
        f"data.judgments must be the id of a query of {{}}/{QUERIES}, got 'x' (line 1 of"
        f" {{}}/{JUDGED})",
    ),
    (
        *(JUDGED, lambda data: b'{"query_id": "x", "doc_id": "y", "relevance": "1"}\n' + data),
        f"data.judgments must be {RULE}, got {{'query_id': 'x', 'doc_id': 'y', 'relevance': '1'}}"
        f" (line 1 of {{}}/{JUDGED})",
    ),
    (
        *(JUDGED, lambda data: data.replace(b'"relevance": 1', b'"relevance": 0')),
        "data.judgments must be a file with at least one relevance above 0, got"
        f" '{{}}/{JUDGED}', which contains no such relevance",
    ),
    (
        *(JUDGED, lambda data: data[:-20]),
        f"which is truncated by the end of the file (line 4 of {{}}/{JUDGED})",
    ),
]


@pytest.fixture(scope="module")
def small_multivent(tmp_path_factory):
    return write_multivent(tmp_path_factory.mktemp("multivent"), 2)


@pytest.mark.parametrize(("name", "change", "message"), BAD_MULTIVENT)
def test_malformed_multivent_files(name, change, message, small_multivent, tmp_path):
    for path in small_multivent.iterdir():
        (tmp_path / path.name).symlink_to(path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(change(data))
    with pytest.raises(SpecError) as error:
        build_multivent(tmp_path)
    assert message.replace("{}", str(tmp_path)) in str(error.value)
    assert "\n" not in str(error.value)
