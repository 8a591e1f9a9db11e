"""Queries of audio, videos and their combinations, with the clips of the repository."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from jobs import search
from pipeline import Composed
from pipeline.config import SpecError
from pipeline.encoders.qwen_spec import DOCUMENT_PROMPT
from pipeline.registry import ENCODERS, SOURCES
from pipeline.schema import Item
from pipeline.search.media import read_content
from pipeline.search.query import encode
from pipeline.search.searcher import open_index
from tests.encoders.batches import assert_close
from tests.images import noise, png
from tests.media import frame_times, write_video

DATA = Path(__file__).parents[2] / "jobs/data"
SAMPLES, RATE = soundfile.read(DATA / "speech/jfk.flac", 3 * 44_100, dtype="float32")
PHOTO = png(noise(40, 40))
KINDS = "a text or audio or a video"


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV")
    return file.getvalue()


JFK = wav(SAMPLES, RATE)


@functools.cache
def minilm():
    return ENCODERS.build(ENCODERS.resolve("minilm"))


@pytest.fixture(scope="module")
def omni(checkpoint):
    """Encoder whose queries and items have the same prompt."""
    fields = {"model": checkpoint("qwen2_5_omni"), "query_prompt": DOCUMENT_PROMPT}
    return ENCODERS.build(ENCODERS.resolve({"name": "qwen_omni", "dtype": "float32", **fields}))


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> bytes:
    """A video of three seconds with the first three seconds of the speech."""
    path, audio = tmp_path_factory.mktemp("clip") / "a.mp4", SAMPLES[:, :1]
    return write_video(path, frame_times(3, 10), audio=audio, rate=RATE).read_bytes()


@functools.cache
def spoken() -> str:
    return read_content(Composed(audio=JFK), minilm())["text"]


def test_speech_is_the_text_for_an_encoder_of_texts(clip, tmp_path):
    assert "my fellow" in spoken()
    queries = [spoken(), Composed("the moon", audio=JFK), Composed("a wing")]
    encoded = encode(minilm(), queries)
    assert encoded.texts == [spoken(), f"the moon\n{spoken()}", "a wing"]
    expected = minilm().encode_queries(encoded.texts)
    assert torch.equal(encoded.tokens.vectors, expected.tokens.vectors)
    content = read_content(Composed(video=clip), minilm())
    assert content.keys() == {"text"} and "my fellow" in content["text"]
    silent = write_video(tmp_path / "a.mp4", [0.0, 1.0]).read_bytes()
    both = Composed(audio=JFK, video=silent)
    assert read_content(both, minilm())["text"] == spoken()
    with pytest.raises(SpecError, match=r"^query.video must be a readable .*[(]no audio track"):
        read_content(Composed(video=silent), minilm())


def test_video_is_encoded_like_an_item(omni, clip, tmp_path):
    (tmp_path / "a.mp4").write_bytes(clip)
    fields = {"name": "video", "path": str(tmp_path), "window_seconds": None}
    source = SOURCES.build(SOURCES.resolve(fields), ("frames", "audio"))
    (shard,) = source.shards()
    items = [item for item in source.scan(shard) if isinstance(item, Item)]
    (item,) = source.decode(shard, list(enumerate(items)))
    content = read_content(Composed(video=clip), omni)
    assert content["frames"] == item.payload["frames"].to_pylist()
    assert content["audio"] == item.payload["audio"]
    expected = encode(omni, [Composed(video=clip)]).tokens
    ((_, found),) = omni.encode(pa_table(content))
    assert_close(expected.vectors, found.vectors)
    other = read_content(Composed("but louder", audio=JFK, video=clip), omni)
    assert other["audio"] == read_content(Composed(audio=JFK), omni)["audio"] != content["audio"]
    assert other["text"] == "but louder" and other["frames"] == content["frames"]


def pa_table(content):
    import pyarrow as pa

    from pipeline.schema import AUDIO, FRAME, SPAN

    columns = {"frames": pa.list_(FRAME), "audio": AUDIO, "span": SPAN}
    return pa.table({name: pa.array([content[name]], type) for name, type in columns.items()})


def test_kinds_are_encoded_in_order(omni, clip):
    queries = [PHOTO, Composed(video=clip), "a wing", Composed(audio=JFK), Composed("red", PHOTO)]
    together = encode(omni, queries)
    assert together.texts == [None, None, "a wing", None, "red"]
    for row, query in enumerate(queries):
        alone = encode(omni, [query]).tokens
        assert_close(together.tokens.pooled[row], alone.pooled[0])
        mask = together.tokens.mask[row]
        assert_close(together.tokens.vectors[row][mask], alone.vectors[0][alone.mask[0]])


def test_frames_for_an_encoder_of_images(checkpoint, clip):
    encoder = ENCODERS.build(ENCODERS.resolve({"name": "dual", "model": checkpoint("siglip")}))
    content = read_content(Composed(video=clip), encoder)
    assert content.keys() == {"frames", "span"}
    video = encode(encoder, [Composed(video=clip)]).tokens
    frames = encoder.encode_media(
        [
            {"image": png(Image.frombytes("RGB", (f["width"], f["height"]), f["pixels"]))}
            for f in content["frames"]
        ]
    )
    assert_close(video.vectors[0], frames.tokens.vectors.flatten(0, 1))
    rule = "query must be a text or an image or audio or a video, got 'a text with an image'"
    with pytest.raises(SpecError, match=f"^{rule}, which is not supported by Dual$"):
        encode(encoder, [Composed("red", PHOTO)])


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (Composed(), "query must be a text, an image, audio, a video or a combination of these"),
        (Composed(image=PHOTO, video=b"x"), "query must be an image or a video, got 'an image wi"),
        (Composed("red", PHOTO), f"query must be {KINDS}, got 'a text with an image', which is n"),
        (Composed(image=PHOTO), f"query must be {KINDS}, got 'an image', which is not supported"),
        (Composed(audio=b"text"), "query.audio must be a readable audio file, got 'the audio', wh"),
        (Composed(audio=JFK[:20]), "query.audio must be a readable audio file, got 'the audio', w"),
        (Composed(audio=b""), "query.audio must be a readable audio file, .* [(]empty file[)]"),
        (
            Composed(audio=wav(np.zeros(0))),
            "query.audio must be a readable audio file, .*no samples",
        ),
        (
            Composed(audio=wav(np.zeros(16_000))),
            "query.audio must be audio with speech for MiniLM, got 'the a",
        ),
        (Composed(video=b"text"), "query.video must be a readable video file, got 'the video', wh"),
        (
            Composed(video=PHOTO),
            "query.video must be a readable video file, .*the file is an image",
        ),
    ],
)
def test_errors_are_one_sentence(query, message):
    with pytest.raises(SpecError, match=f"^{message}") as error:
        encode(minilm(), [query])
    assert "\n" not in str(error.value)


def test_long_videos_are_refused(tmp_path):
    times = [0.0, 5400.0, 10_799.0]
    video = write_video(tmp_path / "long.mp4", times, keyframe_every=1).read_bytes()
    with pytest.raises(SpecError) as error:
        read_content(Composed(video=video), minilm())
    message = "query.video must be at most 300 s long, got 'video of 10,799 s'"
    assert str(error.value) == message
    with pytest.raises(SpecError, match="at most 2 s long, got 'audio of 3 s'"):
        read_content(Composed(audio=JFK), minilm(), max_seconds=2)


def test_corrupted_videos(omni):
    video = (DATA / "../../tests/files/corrupted.mp4").read_bytes()
    with pytest.raises(SpecError, match="^query.video must be a readable video file"):
        encode(omni, [Composed(video=video[:200])])
    with pytest.raises(SpecError, match="^query.video must be a readable video file"):
        encode(omni, [Composed(video=JFK[: len(JFK) // 2][100:])])


def test_search_command(index_uri, tmp_path, capsys):
    audio, image = tmp_path / "question.wav", tmp_path / "photo.png"
    audio.write_bytes(JFK)
    image.write_bytes(PHOTO)
    expected = open_index(index_uri).search(spoken(), k=3)
    search.main([index_uri, "--audio", str(audio), "-k", "3", "--json"])
    printed = [json.loads(line)["item_id"] for line in capsys.readouterr().out.splitlines()]
    assert printed == [hit.item_id for hit in expected]
    with pytest.raises(SpecError, match="^query must be .*got 'an image', which is not supported"):
        search.main([index_uri, "--image", str(image)])
    run = tmp_path / "run.trec"
    search.main(
        [index_uri, "wing", "--not", "bread", "--negative-weight", "0.25", "--run", str(run)]
    )
    ranking = open_index(index_uri).search("wing", negative="bread", negative_weight=0.25)
    assert [line.split()[2] for line in run.read_text().splitlines()] == [
        hit.item_id for hit in ranking
    ]
    with pytest.raises(SpecError, match="^audio must be a file of at most 67,108,864 bytes"):
        (tmp_path / "large.wav").touch()
        with (tmp_path / "large.wav").open("r+b") as file:
            file.truncate((64 << 20) + 1)
        search.main([index_uri, "--audio", str(tmp_path / "large.wav")])
