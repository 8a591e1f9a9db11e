"""MultiVENT 2.0 on miniatures in the format of its distribution."""

from __future__ import annotations

import io
import json
import shutil
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.config import SpecError
from pipeline.datasets.multivent import MEASURES, Judgments, read_judgments, split_scores
from pipeline.eval import BenchmarkRow
from pipeline.eval.metrics import means, per_query
from tests import datasets
from tests.data.listing import build, read
from tests.datasets.loading import benchmark, load
from tests.media import frequency, make_tar, tone_at
from tests.train.data.files import build_data
from tests.train.data.media import QUERY, write_audio, write_clip, write_multivent


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
    captions = tmp_path / "captions.jsonl"
    captions.write_text('{"doc_id": "202", "text": "a dam"}\n')
    fields["captions"] = str(captions)
    items, _ = read(build("multivent", **fields, text=["caption", "ocr"]))
    assert items["202"].text == "a dam" and items["200"].text == "City hall"
    with pytest.raises(SpecError, match="captions must be null unless caption is in `text`"):
        build("multivent", **fields)


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


def test_training_videos_in_shards_equal_files(tmp_path):
    folder = write_multivent(tmp_path, 2)
    sound = write_audio(folder / "sound.wav", 1)
    sound.rename(folder / "train/000000/aB3_dE-fG10.m4a")
    (files,) = build_multivent(folder, 4).batches(0, 0, 0, 1)
    for shard in ("000000", "000001"):
        members = sorted((folder / "train" / shard).iterdir())
        data = make_tar([(path.name, path.read_bytes()) for path in members])
        (folder / f"train/{shard}.tar").write_bytes(data)
        shutil.rmtree(folder / "train" / shard)
    (batch,) = build_multivent(folder, 4).batches(0, 0, 0, 1)
    assert batch.queries == files.queries and batch.documents == files.documents
    assert all(".tar#" in key for key in batch.document_keys)
    (folder / "train/000001.tar").write_bytes(data[:700])
    with pytest.raises(SpecError, match=r"videos must be an uncompressed .tar archive, .*000001"):
        build_multivent(folder, 4)


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


def test_multivent(tmp_path):
    datasets.multivent(tmp_path)
    fields = {
        "path": str(tmp_path / "queries.csv"),
        "judgments": str(tmp_path / "judgments.jsonl"),
    }
    judged = load("multivent", **fields)
    assert judged.queries == {"q1": "City council vote, spring 2021", "q2": "flood"}
    assert judged.qrels == {"q1": {"200": 3, "201": 1, "202": 0}, "q2": {"201": 2}}
    assert judged.num_unjudged == 1 and judged.measure == "nDCG@10"
    with pytest.raises(SpecError, match=r"num_queries must be the number of judged queries .*2"):
        load("multivent", **fields, num_queries=2546)


def test_multivent_train_categories(tmp_path):
    ids = [
        f"internvid_{language}_{category}_edited_base_{number}"
        for language in ("korean", "arabic")
        for category in ("political", "sports")
        for number in range(2)
    ]
    rows = [[query_id, f"query, {query_id}"] for query_id in ids]
    (tmp_path / "q.csv").write_bytes(datasets.csv_text(["Query_id", "query"], rows, "\r\n"))
    lines = [{"query_id": query_id, "doc_id": "aB3_dE-fG12", "relevance": 1} for query_id in ids]
    (tmp_path / "j.jsonl").write_text("\n".join(map(json.dumps, lines)))
    judged = load("multivent", path=str(tmp_path / "q.csv"), judgments=str(tmp_path / "j.jsonl"))
    assert set(judged.categories) == {"language", "category"}
    assert judged.categories["language"]["korean"] == sorted(ids[:4])


def test_multivent_results(tmp_path):
    datasets.multivent(tmp_path)
    fields = {
        "path": str(tmp_path / "queries.csv"),
        "judgments": str(tmp_path / "judgments.jsonl"),
    }
    run = {"q1": {"201": 3.0, "999": 2.0, "200": 1.0}, "q2": {"202": 1.0, "201": 0.5}}
    row = BenchmarkRow("full", "e", run, 1000, 1.0)
    path = benchmark("multivent", **fields).write_result(str(tmp_path / "out"), row)
    with open(path) as file:
        assert json.load(file) == run
    splits = json.loads((tmp_path / "out/multivent/full_splits.json").read_text())
    assert set(splits) == {"video_language"}
    # Korean: 201 is relevant under another value and is removed, so 200 is second.
    assert splits["video_language"]["korean"]["RR"] == 0.5
    assert splits["video_language"]["korean"]["nDCG@10"] == pytest.approx(1 / np.log2(3))
    assert splits["video_language"]["arabic"]["RR"] == pytest.approx((1 + 1 / 2) / 2)
    magmar = benchmark("multivent", **fields, submission="magmar")
    with open(magmar.write_result(str(tmp_path / "magmar"), row)) as file:
        assert json.load(file)["q2"] == [
            {"video_id": "202", "relevance": 1.0},
            {"video_id": "201", "relevance": 0.5},
        ]


def literal_scores(ranked: list[str], grades: dict[str, int], k: int = 10) -> dict[str, float]:
    """Computes the official metrics of a query by their definitions, in float64."""
    gains = [float(grades.get(video, 0)) for video in ranked]
    ideal = sorted((float(g) for g in grades.values()), reverse=True)
    dcg = sum(gain / np.log2(rank + 2) for rank, gain in enumerate(gains[:k]))
    best = sum(gain / np.log2(rank + 2) for rank, gain in enumerate(ideal[:k]))
    relevant = {video for video, grade in grades.items() if grade > 0}
    hits = [video in relevant for video in ranked]
    precisions = [sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits) if hit]
    return {
        "nDCG@10": dcg / best if best else 0.0,
        **{f"R@{n}": sum(hits[:n]) / len(relevant) if relevant else 0.0 for n in (10, 100, 1000)},
        "AP": sum(precisions) / len(relevant) if relevant else 0.0,
        "RR": next((1 / (i + 1) for i, hit in enumerate(hits) if hit), 0.0),
        "Judged@10": sum(video in grades for video in ranked[:10]) / min(10, len(ranked)),
    }


def test_split_scores_equal_a_literal_implementation():
    rng = np.random.default_rng(0)
    videos = [str(number) for number in range(40)]
    judgments = Judgments()
    run: dict[str, dict[str, float]] = {}
    values = judgments.values.setdefault("video_type", {})
    for number in range(12):
        query_id = f"q{number}"
        judged = rng.choice(videos, 15, replace=False).tolist()
        judgments.qrels[query_id] = {video: int(rng.integers(4)) for video in judged}
        for video in judged:
            if kind := ("news", "raw", "")[rng.integers(3)]:
                values[query_id, video] = kind
        order = rng.permutation(videos)[:30].tolist()
        run[query_id] = {video: -float(rank) for rank, video in enumerate(order)}
    splits = split_scores(run, judgments)["video_type"]
    assert set(splits) == {"news", "raw"}
    for value, found in splits.items():
        expected = []
        for query_id, grades in judgments.qrels.items():
            selected = {v: g for v, g in grades.items() if values.get((query_id, v)) == value}
            others = {v for v, g in grades.items() if g > 0 and v not in selected}
            if selected:
                ranked = [video for video in run[query_id] if video not in others]
                expected.append(literal_scores(ranked, selected))
        for measure in MEASURES:
            mean = float(np.mean([scores[measure] for scores in expected]))
            assert found[measure] == pytest.approx(mean, abs=1e-9), (value, measure)
    whole = means(per_query(run, judgments.qrels, MEASURES))
    literal = [literal_scores(list(run[q]), grades) for q, grades in judgments.qrels.items()]
    for measure in MEASURES:
        assert whole[measure] == pytest.approx(np.mean([s[measure] for s in literal]))


@pytest.mark.parametrize(
    "line",
    [
        '{"query_id": "q", "doc_id": "1", "relevance": 4}',
        '{"query_id": "q"}',
        "[]",
        "{",
        "[" * 9999,
    ],
)
def test_malformed_judgments_name_the_line(tmp_path, line):
    path = tmp_path / "judgments.jsonl"
    path.write_text('{"query_id": "q", "doc_id": "1", "relevance": 1}\n' + line)
    with pytest.raises(SpecError, match=r"judgments must be .* \(line 2 of "):
        read_judgments(str(path), "judgments")


class CountedFile(io.BytesIO):
    """File that counts the bytes that are read from all of them."""

    num_bytes = 0

    def read(self, size=-1, /):
        data = super().read(size)
        CountedFile.num_bytes += len(data)
        return data


class CountedFiles(MemoryFileSystem):
    """Files in memory whose reads are counted."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def _open(self, path, mode="rb", **options):
        file = super()._open(path, mode, **options)
        return CountedFile(file.getvalue()) if mode == "rb" else file


@pytest.mark.parametrize("window_seconds", [None, 1.0])
def test_frames_and_audio_are_read_once_from_storage(tmp_path, window_seconds):
    """Also if the audio is a file of its own, and for several windows of a file."""
    fsspec.register_implementation("counted", CountedFiles, clobber=True)
    video, m4a = datasets.small_video(tmp_path, 3.0, sound=True), datasets.sound(tmp_path, 3.0)
    members = [("1.mp4", video), ("1.m4a", m4a), ("2.mp4", video)]
    CountedFiles().pipe_file("/videos/000001.tar", make_tar(members))
    fields = {"path": "counted://videos", "revision": "stat", "window_seconds": window_seconds}
    source = build("multivent", ("frames", "audio"), **fields)
    (shard,) = source.shards()
    listed = list(enumerate(source.scan(shard)))
    assert len(listed) == (2 if window_seconds is None else 6)
    CountedFile.num_bytes = 0
    items = list(source.decode(shard, listed))
    assert all(item.payload["frames"] and item.payload["audio"] for item in items)
    assert CountedFile.num_bytes == 2 * len(video) + len(m4a)
    # The encoder reads the text, which the listing contains.
    CountedFile.num_bytes = 0
    rejects = list(build("multivent", ("text",), **fields).decode(shard, listed))
    assert {reject.reason for reject in rejects} == {"empty text"} and not CountedFile.num_bytes
