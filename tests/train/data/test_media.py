"""Video and audio documents: decoding, and rows that contain them."""

from __future__ import annotations

import logging

import fsspec
import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from pipeline.config import JobError, SpecError
from pipeline.registry import SOURCES
from pipeline.schema import ITEM
from pipeline.train.data.media import Decoding, decode_media
from pipeline.train.data.row_data import NO_DOCUMENT
from tests.conftest import ROOT
from tests.media import corrupt_frames
from tests.train.data.files import IMAGES, NAMES, build_data, epoch_batches, write_lines
from tests.train.data.media import write_audio, write_clip
from tests.train.runs import spec_of, trained

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


def test_adapter_caches_states_of_images_and_videos(checkpoint, tmp_path):
    """The first cached entry is empty, which must not affect the others."""
    write_clip(tmp_path / "a.mp4", has_audio=False)
    rows = [{"query": "a", "video": "a.mp4"}, {"query": "p", "image": str(IMAGES / NAMES[0])}]
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    encoder = {"name": "colpali", "model": checkpoint("colqwen2"), "dtype": "float32"}
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
