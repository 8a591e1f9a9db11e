"""Video and audio documents: decoding, and the formats on disk."""

from __future__ import annotations

import json
import logging

import fsspec
import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from pipeline.config import JobError, SpecError
from pipeline.registry import SOURCES
from pipeline.schema import ITEM
from pipeline.sources.annotations import read_csv
from pipeline.training_data.media import Decoding, decode_media
from pipeline.training_data.row_data import NO_DOCUMENT
from tests.conftest import ROOT
from tests.media import corrupt_frames, frequency, tone_at
from tests.train.runs import spec_of, trained
from tests.training_data.files import IMAGES, NAMES, build_data, epoch_batches, write_lines
from tests.training_data.media import QUERY, write_audio, write_clip, write_msrvtt, write_multivent

#: Twenty seconds of slides with speech.
TALK = ROOT / "jobs/data/clips/talk.mp4"


def indexed(name, path, wants, **options):
    """Returns the encoder input of the only item of a source, as in indexing."""
    spec = SOURCES.resolve({"name": name, "path": str(path), "window_seconds": None, **options})
    source = SOURCES.build(spec, wants)
    (shard,) = source.shards()
    (item,) = source.decode(shard, [(0, item) for item in source.scan(shard)])
    columns = pa.schema([ITEM.field("span"), *source.payload])
    (row,) = pa.Table.from_pylist([item.row()], columns).to_pylist()
    return row


@pytest.mark.parametrize(
    ("wants", "options", "number"),
    [
        (("frames", "audio"), {}, 10),
        (("frames",), {"sampling": "uniform", "num_frames": 3, "max_pixels": 10_000}, 3),
        (
            ("frames", "audio"),
            {"sampling": "scenes", "scene_threshold": 0.01, "num_frames": 3, "sample_rate": 8000},
            3,
        ),
        (("audio",), {}, 0),
    ],
)
def test_decodes_as_in_indexing(wants, options, number):
    found = decode_media(Decoding(inputs=wants, **options), str(TALK), None)
    assert found == indexed("video", TALK, wants, **options)
    assert found["span"] == {"unit": "seconds", "start": 0.0, "end": pytest.approx(20, abs=0.1)}
    assert len(found.get("frames", [])) == number


def test_audio_file_replaces_audio_of_video(tmp_path):
    audio = write_audio(tmp_path / "s.flac", 1.5)
    found = decode_media(Decoding(inputs=("audio",)), None, str(audio))
    assert found == indexed("audio", audio, ("audio",))
    video = write_clip(tmp_path / "v.mp4")
    both = decode_media(Decoding(sampling="uniform", num_frames=2), str(video), str(audio))
    assert both["audio"] == found["audio"] and len(both["frames"]) == 2
    assert both["span"]["end"] == pytest.approx(2, abs=0.1)


def test_remote_file_system(tmp_path):
    video = write_clip(tmp_path / "a.mp4")
    fs = fsspec.filesystem("memory")
    fs.put(str(video), "/clips/a.mp4")
    found, expected = (
        decode_media(Decoding(), uri, None) for uri in ("memory://clips/a.mp4", str(video))
    )
    assert found == expected
    fs.pipe_file("/clips/pairs.jsonl", b'{"query": "a", "video": "a.mp4"}\n')
    (batch,) = epoch_batches(build_data(1, name="pairs", path="memory://clips/pairs.jsonl"))
    assert batch["documents"][0] == {"text": None, **expected}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_pairs_of_video_and_audio(form, tmp_path):
    write_clip(tmp_path / "a.mp4")
    write_clip(tmp_path / "b.mp4", has_audio=False)
    write_audio(tmp_path / "c.wav")
    rows = [
        {"query": "a", "video": "a.mp4", "text": "a title"},
        {"query": "b", "video": "b.mp4"},
        {"query": "b with c", "video": "b.mp4", "audio": "c.wav", "document_id": "both"},
        {"query": "c", "audio": "c.wav", "document_id": "c"},
        {"query": "photo", "image": str(IMAGES / NAMES[0])},
    ]
    media = {"sampling": "uniform", "num_frames": 2}
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    if form == "parquet":
        names = ("query", "text", "image", "video", "audio", "document_id")
        path = tmp_path / "pairs.parquet"
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)
    data = build_data(5, name="pairs", path=path, media=media)
    (batch,) = data.batches(0, 0, 0, 1)
    documents = dict(zip(batch.queries, batch.documents, strict=True))
    has = {
        query: [name for name in ("text", "image", "frames", "audio") if document[name]]
        for query, document in documents.items()
    }
    assert has == {
        "a": ["text", "frames", "audio"],
        "b": ["frames"],
        "b with c": ["frames", "audio"],
        "c": ["audio"],
        "photo": ["image"],
    }
    # All documents have the same columns.
    assert len({tuple(document) for document in batch.documents}) == 1
    assert [frame["seconds"] for frame in documents["b"]["frames"]] == [0.5, 1.5]
    assert len(set(batch.document_keys)) == 5


def test_video_negatives(tmp_path):
    for name in "ab":
        write_clip(tmp_path / f"{name}.mp4")
    rows = [{"query": "q", "video": "a.mp4", "negatives": ["b.mp4"]}] * 2
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    data = build_data(
        2, name="pairs", path=path, negatives_are="videos", media={"inputs": ["frames"]}
    )
    (batch,) = epoch_batches(data)
    assert [sorted(d) for d in batch["documents"]] == [["frames", "span", "text"]] * 2


def test_keys_depend_on_decoding_options(tmp_path):
    write_clip(tmp_path / "a.mp4")
    rows = [{"query": "a", "video": "a.mp4"}, {"query": "t", "text": "t"}]
    path = write_lines(tmp_path / "pairs.jsonl", rows)

    def keys(**media):
        (batch,) = build_data(2, name="pairs", path=path, media=media).batches(0, 0, 0, 1)
        return dict(zip(batch.queries, batch.document_keys, strict=True))

    one, other = keys(), keys(num_frames=1)
    assert one["t"] == other["t"] and one["a"] != other["a"]
    assert one == keys(scene_detection_fps=1.0)  # an option of another sampling


def test_audio_documents_need_audio(tmp_path):
    write_audio(tmp_path / "c.wav")
    path = write_lines(tmp_path / "pairs.jsonl", [{"query": "c", "audio": "c.wav"}])
    with pytest.raises(SpecError) as error:
        build_data(1, name="pairs", path=path, media={"inputs": ["frames"]})
    assert str(error.value) == (
        "data.media.inputs must be a list with audio if documents have only audio, got ['frames']"
    )
    with pytest.raises((SpecError, ValidationError), match="media.inputs"):
        build_data(1, name="pairs", path=path, media={"inputs": []})


def test_missing_and_corrupted_videos(tmp_path, caplog):
    for name in "abc":
        write_clip(tmp_path / f"{name}.mp4", has_audio=False)
    corrupt_frames(tmp_path / "b.mp4")
    rows = [{"query": name, "video": f"{name}.mp4"} for name in "abcd"]
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    data = build_data(3, name="pairs", path=path)
    assert caplog.messages == [
        "1 of 4 rows and 1 of 4 documents are left out:"
        f" missing files, such as video {tmp_path}/d.mp4 (line 4 of {path})"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        (batch,) = data.batches(0, 0, 0, 1)
    (message,) = caplog.messages
    assert message.startswith(f"the video of b.mp4 (line 2 of {path}) cannot be read: ")
    lost = batch.queries.index("b")
    assert [key == NO_DOCUMENT for key in batch.document_keys] == [n == lost for n in range(3)]
    assert batch.documents[lost]["frames"] is None
    relevant = data.relevant(batch.query_labels, batch.document_labels)
    assert relevant.sum(dim=1).tolist() == [int(row != lost) for row in range(3)]
    for name in "abc":
        (tmp_path / f"{name}.mp4").write_bytes(b"not a video")
    with pytest.raises(
        JobError, match="^none of the 3 files of a batch can be read, such as the video in line "
    ):
        next(data.batches(0, 0, 0, 1))


# -- MSR-VTT ---------------------------------------------------------------------------------------

NINE, TESTS = "MSRVTT_train.9k.csv", "MSRVTT_JSFUSION_test.csv"


def build_msrvtt(folder, batch_size=2, **more):
    if "splits" not in more:
        more = {"ids": folder / NINE, **more}
    path, videos = folder / "MSRVTT_data.json", folder / "videos"
    return build_data(batch_size, name="msrvtt", path=path, videos=videos, **more)


def test_msrvtt_format(tmp_path):
    folder = write_msrvtt(tmp_path, trained=2, tested=2, has_audio=False)
    (folder / "videos/all").mkdir()  # any folder below
    (folder / "videos/video1.mp4").rename(folder / "videos/all/video1.mp4")
    data = build_msrvtt(
        folder, 4, validation={"path": str(folder / TESTS)}, media={"inputs": ["frames"]}
    )
    asked = {(row.query, data.training.documents[row.document].id) for row in data.training.rows}
    assert asked == {
        (f"{words} {n}", f"video{n}")
        for n in range(2)
        for words in ("a car drives", "somebody sings")
    }
    (batch,) = data.batches(0, 0, 0, 1)
    assert len(batch.documents) == 2 and all(document["frames"] for document in batch.documents)
    validation = data.validation()
    assert validation.queries == ["a car, red"] and len(validation.documents) == 2
    assert data.relevant(validation.query_labels, validation.document_labels).all()
    splits = build_msrvtt(folder, splits=["train"])
    assert [row.query for row in splits.training.rows] == [row.query for row in data.training.rows]
    # As written by spreadsheets.
    text = (folder / NINE).read_text().replace("\n", "\r\n")
    (folder / NINE).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert len(build_msrvtt(folder).training.rows) == 4


def change_file(folder, name, change):
    """Applies a change to a file."""
    path = folder / name
    if name.endswith(".json"):
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
    else:
        path.write_bytes(change(path.read_bytes()))


FORM = "MSR-VTT's {videos: [{video_id, split}], sentences: [{video_id, caption}]}"
BAD_MSRVTT = [
    (
        *("MSRVTT_data.json", lambda value: value.pop("videos")),
        f"data.path must be {FORM}, got '{{}}/MSRVTT_data.json', which has another format",
    ),
    (
        *("MSRVTT_data.json", lambda value: value["videos"].append({"id": 9})),
        f"data.path must be {FORM}, got None (video 3 of {{}}/MSRVTT_data.json)",
    ),
    (
        *("MSRVTT_data.json", lambda value: value["sentences"][3].update(video_id="video9")),
        "data.path must be the video_id of a video, got 'video9' (sentence 3 of"
        " {}/MSRVTT_data.json)",
    ),
    (
        *("MSRVTT_data.json", lambda value: value["sentences"][1].update(caption=" ")),
        "data.path must be a text with at least one word, got ' ' (sentence 1 of"
        " {}/MSRVTT_data.json)",
    ),
    (
        *(NINE, lambda data: data + b"video77\n"),
        "data.ids must be the id of a video of {}/MSRVTT_data.json, got 'video77' (line 4 of"
        f" {{}}/{NINE})",
    ),
    (
        *(NINE, lambda data: data.replace(b"video_id", b"id")),
        f"data.ids must be 'id', got 'video_id', which is not a column of {{}}/{NINE}",
    ),
    (
        *(NINE, lambda data: data + b'"video1'),
        f"data.ids must be a valid CSV file, got '{{}}/{NINE}', which is malformed in line 4"
        " (unexpected end of data)",
    ),
    (
        *(NINE, lambda data: data + b"vid\xff"),
        f"data.ids must be a UTF-8 file, got '{{}}/{NINE}', which is malformed in line 4",
    ),
    (
        *(TESTS, lambda data: data + b"ret9,msr9,video9\n"),
        "data.validation.path must be a row of key, vid_key, video_id, sentence, got ['ret9',"
        f" 'msr9', 'video9'] (line 3 of {{}}/{TESTS})",
    ),
]


@pytest.fixture(scope="module")
def small_msrvtt(tmp_path_factory):
    return write_msrvtt(tmp_path_factory.mktemp("msrvtt"), trained=2, tested=1, has_audio=False)


@pytest.mark.parametrize(("name", "change", "message"), BAD_MSRVTT)
def test_malformed_msrvtt_files(name, change, message, small_msrvtt, tmp_path):
    for path in small_msrvtt.iterdir():
        (tmp_path / path.name).symlink_to(path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(data)
    change_file(tmp_path, name, change)
    with pytest.raises(SpecError) as error:
        build_msrvtt(tmp_path, validation={"path": str(tmp_path / TESTS)})
    assert str(error.value) == message.replace("{}", str(tmp_path))


def test_invalid_msrvtt_specs(small_msrvtt, tmp_path):
    cases = {
        "data.splits must be one of test, train, got 'val', which is not a split of"
        " {}/MSRVTT_data.json": {"splits": ["val"]},
        "ids must be a file of ids such as MSRVTT_train.9k.csv, or null when splits is set, got"
        " None": {"ids": None},
    }
    for message, fields in cases.items():
        with pytest.raises(SpecError) as error:
            build_msrvtt(small_msrvtt, **fields)
        assert str(error.value) == message.replace("{}", str(small_msrvtt))
    with pytest.raises(
        SpecError, match="^data.videos must be an existing file or folder, got '/nowhere'"
    ):
        path = small_msrvtt / "MSRVTT_data.json"
        build_data(2, name="msrvtt", path=path, videos="/nowhere", splits=["train"])


# -- MultiVENT 2.0 ---------------------------------------------------------------------------------

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


RULE = 'a line {"query_id": "...", "doc_id": "...", "relevance": a number >= 0}'
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


def test_csv_quoting(tmp_path):
    path = tmp_path / "q.csv"
    path.write_bytes(b'id,query\r\n\r\n1,"a, ""b""\r\nc"\r\n2,d\r\n')
    rows = list(read_csv(str(path), ("query",), "path"))
    assert rows == [
        (f"line 4 of {path}", {"query": 'a, "b"\r\nc'}),
        (f"line 5 of {path}", {"query": "d"}),
    ]


# -- training --------------------------------------------------------------------------------------


def test_adapter_caches_states_of_images_and_videos(checkpoint, tmp_path):
    """The first cached entry is empty, which must not affect the others."""
    write_clip(tmp_path / "a.mp4", has_audio=False)
    rows = [{"query": "a", "video": "a.mp4"}, {"query": "p", "image": str(IMAGES / NAMES[0])}]
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    encoder = {"name": "colqwen2", "model": checkpoint("colqwen2"), "dtype": "float32"}
    states = tmp_path / "states"
    learner = {
        "encoder": encoder,
        "trainable": "adapter",
        "hidden_states_cache": str(states),
        "adapter_dim": 8,
    }
    data = {"name": "pairs", "path": str(path), "media": {"inputs": ["frames"]}}
    spec = spec_of(tmp_path / "out", "", learner, data=data, batch_size=2, max_steps=1)
    trained(spec)
    (cache,) = states.glob("*.lance")
    lengths = {
        row["key"]: len(row["states"]) for row in lance.dataset(cache).to_table().to_pylist()
    }
    empty = [key for key, length in lengths.items() if not length]
    assert empty == [NO_DOCUMENT] and len(lengths) == 5
