"""Tests of the index job on images, video and audio: OCR, speech recognition and captions."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image, ImageDraw, ImageFont

from jobs import search
from pipeline import config
from pipeline.config import SpecError
from pipeline.index import job
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search.map_images import highlight
from pipeline.search.maps import similarity_map
from pipeline.search.previews import Previews
from pipeline.search.results import Hit
from pipeline.search.searcher import open_index
from tests.conftest import ROOT, actor_pools
from tests.media import frame_times, make_tar, tones, write_video

pytestmark = pytest.mark.heavy

FULL = {"compressor": "none"}
CAPTION = {"compressor": "none", "field": "caption"}
NOTHING = "nothing to index: no text, no speech"


def run(uri: Path, source: Any, encoder: Any, *representations: dict, **resources: Any):
    """Runs the index job and returns its progress and its report lines."""
    given = {"index": str(uri), "source": source, "encoder": encoder, "commit_items": 8}
    spec = config.parse(IndexSpec, {**given, "representations": list(representations)})
    profile = config.parse(IndexResources, resources)
    lines: list[str] = []
    return job.run(spec, profile, job="1", report=lines.append), lines


def rejects(uri: Path) -> dict[str, str]:
    table = IndexReader(str(uri)).rejects()
    return dict(zip(table["item_id"].to_pylist(), table["reason"].to_pylist(), strict=True))


def sign(text: str) -> Image.Image:
    """Returns an image with text at a quarter of the width and a third of the height."""
    image = Image.new("RGB", (800, 600), (200, 210, 200))
    ImageDraw.Draw(image).text((200, 200), text, "black", ImageFont.load_default(60))
    return image


def write_corpus(folder: Path) -> list[dict[str, Any]]:
    """Writes images with and without text and captions, video, audio and corrupted files."""
    for name in ("photos", "clips", "sound"):
        (folder / name).mkdir()
    sign("road closed").save(folder / "photos/sign.png")
    Image.fromarray(np.full((90, 160, 3), 90, np.uint8)).save(folder / "photos/wall.jpg")
    Image.fromarray(np.full((90, 160, 3), 60, np.uint8)).save(folder / "photos/sea.jpg")
    (folder / "photos/torn.jpg").write_bytes((folder / "photos/sea.jpg").read_bytes()[:400])
    captions = {
        "sea.jpg": "Two riders on horses at the beach",
        "gone.jpg": "A dog",
        "wall.jpg": None,
    }
    captions |= {"sign.png": "A sign in the rain", "torn.jpg": "A torn photo"}
    lines = [json.dumps({"image": name, "caption": text}) for name, text in captions.items()]
    (folder / "photos/photos.jsonl").write_text("\n".join(lines))
    shutil.copy(ROOT / "jobs/data/clips/talk.mp4", folder / "clips")
    (folder / "clips/cut.mp4").write_bytes((folder / "clips/talk.mp4").read_bytes()[:9000])
    shutil.copy(ROOT / "jobs/data/speech/jfk.flac", folder / "sound")
    soundfile.write(folder / "sound/silence.wav", np.zeros(16_000), 16_000)
    (folder / "sound/empty.wav").touch()
    quiet = (folder / "sound/silence.wav").read_bytes()
    (folder / "sound/x.tar").write_bytes(make_tar([("quiet.wav", quiet)]))
    return source_specs(folder)


def source_specs(folder: Path) -> list[dict[str, Any]]:
    clips = {"name": "video", "path": str(folder / "clips"), "window_seconds": 10, "fps": 0.25}
    return [
        {"name": "images", "path": str(folder / "photos/photos.jsonl"), "collection": "photos"},
        clips,
        {"name": "audio", "path": str(folder / "sound")},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def uri(cluster, folder) -> Path:
    progress, lines = run(folder / "index", write_corpus(folder), "transcript", FULL, CAPTION)
    assert (progress.listed, progress.indexed) == (12, 5)
    assert lines[-1].startswith("listed 12 = indexed 5 (5 new")
    assert progress.seconds["prepare"] > progress.seconds["encode"]
    return folder / "index"


def first(uri: Path, query: str, representation: str = "full", **options: Any) -> Hit:
    return open_index(str(uri)).search(query, representation, k=1, **options)[0]


def test_reject_reasons(uri):
    assert rejects(uri) == {
        "gone.jpg": "missing file",
        "torn.jpg": "corrupted image",
        "wall.jpg": NOTHING,
        "cut.mp4": "corrupted video",
        "silence.wav#t=0,1": NOTHING,
        "empty.wav": "empty file",
        "quiet#t=0,1": NOTHING,
    }
    details = {r["item_id"]: r["detail"] for r in IndexReader(str(uri)).rejects().to_pylist()}
    assert (details["quiet#t=0,1"], details["silence.wav#t=0,1"]) == ("file x.tar", "")


def test_rejects_are_not_recognised_again(uri, folder):
    progress, lines = run(uri, source_specs(folder), "transcript", FULL, CAPTION)
    assert (progress.to_do, progress.commits, progress.rejected_before) == (0, 0, 7)
    assert lines[-1].startswith("listed 12 = indexed 5 (0 new")


def test_spoken_phrase_is_found_with_its_time(uri):
    hit = first(uri, "what you can do for your country")
    assert hit.item_id == "jfk.flac#t=0,11"
    passage = hit.passages[0]  # the clause of the sentence in which "country" was recognised
    assert hit.text[slice(*passage.span)] == "what your country can do for you"
    assert passage.box is None and passage.times == pytest.approx((5.4, 7.7), abs=0.2)
    # The talk contains the same words at an offset of five seconds; times refer to the file.
    hit = first(uri, "what you can do for your country", filter="source = 'clips'")
    assert hit.item_id == "talk.mp4#t=10,20"
    assert hit.text[slice(*hit.passages[0].span)] == "what you can do for your country"
    assert hit.passages[0].times == pytest.approx((13.5, 15.5), abs=0.2)


def test_text_in_a_video_is_found_with_its_frame(uri):
    hit = first(uri, "wildlife criterion for otters and ospreys", filter="source = 'clips'")
    passage = hit.passages[0]
    assert hit.item_id == "talk.mp4#t=10,20"
    assert 14 <= passage.times[0] <= 18 and passage.times[1] == 20  # shown from 15 to 20 seconds
    assert 0 < passage.box[0] < passage.box[2] < 1


def test_text_in_an_image_is_found_with_its_box(uri):
    hit = first(uri, "the road is closed", filter="source = 'photos'")
    passage = hit.passages[0]
    assert (hit.item_id, hit.text, passage.times) == ("sign.png", "road closed", None)
    assert passage.box[:2] == pytest.approx((0.25, 0.36), abs=0.03)


def test_image_is_found_by_its_caption(uri):
    hit = first(uri, "people riding along the sea", "caption_full")
    assert (hit.item_id, hit.text) == ("sea.jpg", "Two riders on horses at the beach")
    assert {m.query_token for m in hit.matches} >= {"people", "riding", "sea"}
    assert hit.matches[1].spans and not hit.matches[1].locations
    row = IndexReader(str(uri)).items(["sea.jpg"], ["full", "caption_full", "text"]).to_pylist()[0]
    assert row["full"] is None and row["text"] is None and len(row["caption_full"]) > 6


def test_image_with_text_and_caption_has_both_representations(uri):
    sign = IndexReader(str(uri)).items(["sign.png"]).to_pylist()[0]
    assert sign["text"] == "road closed" and sign["caption"] == "A sign in the rain"
    assert len(sign["full"]) == 2 and len(sign["caption_full"]) == 5
    assert sign["minilm_pooled"] != sign["minilm_caption_pooled"]


def test_grouping_keeps_the_best_window_of_a_video(uri):
    searcher = open_index(str(uri))
    options = {"filter": "source = 'clips'", "k": 5}
    query = "what you can do for your country"
    ungrouped = searcher.search(query, "full", **options)
    grouped = searcher.search(query, "full", group_by="parent", **options)
    assert [hit.item_id for hit in ungrouped] == ["talk.mp4#t=10,20", "talk.mp4#t=0,10"]
    assert [hit.item_id for hit in grouped] == ["talk.mp4#t=10,20"]


def test_highlights_of_a_frame_an_image_and_audio(uri):
    searcher = open_index(str(uri))
    previews = Previews(searcher.index, only_indexed=True)
    for query, item_id, size in [
        ("wildlife criterion", "talk.mp4#t=10,20", (1280, 720)),
        ("road closed", "sign.png", (800, 600)),
        ("country", "jfk.flac#t=0,11", (1200, 264)),
    ]:
        map = similarity_map(searcher, query, item_id, "full")
        image = Image.open(io.BytesIO(highlight(previews, map)))
        assert image.size == size
        pixels = np.asarray(image.convert("RGB")).astype(int)
        assert ((pixels[..., 0] - pixels[..., 2]) > 90).sum() > 500  # highlighted pixels


def test_search_from_the_command_line(uri, tmp_path, capsys):
    options = ["--representation", "full", "--k", "1", "--filter", "source = 'sound'"]
    search.main([str(uri), "your country", *options, "--save-maps", str(tmp_path / "maps")])
    output = capsys.readouterr().out
    assert "jfk.flac#t=0,11  (seconds 0-11)" in output
    assert "     audio " in output and "map 1:" in output
    assert (tmp_path / "maps/1.png").exists()
    options[1], options[-1] = "caption_full", "source = 'photos'"
    search.main([str(uri), "horses", *options, "--save-maps", str(tmp_path / "caption")])
    names = sorted(path.name for path in (tmp_path / "caption").iterdir())
    assert names == ["1.json", "1.png"]  # captions have no position in the image


@pytest.mark.heavy
def test_separate_compression_actors_write_the_same_rows(uri, folder, tmp_path):
    resources = {"compress": {"num_cpus": 0.5}}
    sources = [
        {"name": "images", "path": str(folder / "photos/photos.jsonl"), "collection": "photos"}
    ]
    with actor_pools():
        run(tmp_path / "index", sources, "transcript", FULL, CAPTION, **resources)
    columns = ["item_id", "text", "caption", "full", "caption_full", "minilm_caption_pooled"]
    expected, actual = (
        IndexReader(str(path)).dataset.to_table(columns=columns, filter="source = 'photos'")
        for path in (uri, tmp_path / "index")
    )
    assert expected.sort_by("item_id").equals(actual.sort_by("item_id"))


@pytest.mark.heavy
def test_scanned_pages_are_added_by_an_encoder_with_ocr(cluster, tmp_path):
    (tmp_path / "pages").mkdir()
    sign("harbour\nof Lisbon").save(tmp_path / "pages/scan.pdf")  # an image without text layer
    shutil.copy(ROOT / "jobs/data/pages/pdf/us-005.pdf", tmp_path / "pages")
    source = {"name": "pages", "path": str(tmp_path / "pages")}
    run(tmp_path / "index", source, "minilm", FULL)
    assert rejects(tmp_path / "index") == {"scan.pdf#page=1": "no text layer"}
    progress, _ = run(tmp_path / "index", source, "transcript", FULL)
    assert (progress.new, progress.unchanged) == (1, progress.listed - 1)
    assert rejects(tmp_path / "index") == {}
    hit = first(tmp_path / "index", "the port of Lisbon")
    assert (hit.item_id, hit.text) == ("scan.pdf#page=1", "harbour\nof Lisbon")
    passage = hit.passages[0]
    assert passage.times is None and 0 < passage.box[1] < 0.6
    row = (
        IndexReader(str(tmp_path / "index")).items([hit.item_id], ["minilm_pooled"]).to_pylist()[0]
    )
    assert row["minilm_pooled"] is not None


def test_reports_transcripts_with_unknown_ids(cluster, folder, tmp_path):
    texts = [{"id": "sign.png", "text": "detour"}, {"id": "unknown", "text": "lost"}]
    (tmp_path / "ocr.jsonl").write_text("\n".join(map(json.dumps, texts)))
    ocr = {"name": "precomputed", "path": str(tmp_path / "ocr.jsonl")}
    encoder = {"name": "transcript", "ocr": ocr, "speech": None}
    source = {"name": "images", "path": str(folder / "photos/photos.jsonl")}
    _, lines = run(tmp_path / "index", source, encoder, FULL)
    assert lines[-1].startswith("ocr: 1 ids of ") and lines[-1].endswith("no item: unknown")
    assert first(tmp_path / "index", "detour").item_id == "sign.png"


def test_hits_have_recognition_confidences(uri, folder, tmp_path, capsys):
    lines = [
        {"id": "sign.png", "text": "detour", "confidence": 0.75, "box": [0, 0, 0.5, 0.5]},
        {"id": "sign.png", "text": "ahead", "confidence": 0.1, "box": [0.5, 0, 1, 0.5]},
    ]
    (tmp_path / "ocr.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ocr = {"name": "precomputed", "path": str(tmp_path / "ocr.jsonl")}
    source = {"name": "images", "path": str(folder / "photos/photos.jsonl")}
    texts = {}
    for name, min_confidence in (("all", 0.0), ("sure", 0.5)):
        encoder = {
            "name": "transcript",
            "ocr": {**ocr, "min_confidence": min_confidence},
            "speech": None,
        }
        run(tmp_path / name, source, encoder, FULL)
        texts[name] = first(tmp_path / name, "a detour").text
    assert texts == {"all": "detour\nahead", "sure": "detour"}

    def confidences() -> tuple[set[float | None], set[float | None]]:
        hit = first(tmp_path / "all", "detour")
        locations = [location for match in hit.matches for location in match.locations]
        return {location.confidence for location in locations}, {p.confidence for p in hit.passages}

    assert confidences() == ({0.75}, {0.75})
    search.main([str(tmp_path / "all"), "detour", "--k", "1"])
    assert "confidence 0.75" in capsys.readouterr().out
    search.main(
        [str(tmp_path / "all"), "detour", "--k", "1", "--save-maps", str(tmp_path / "maps")]
    )
    (passage,) = json.loads((tmp_path / "maps/1.json").read_text())["passages"]
    assert passage["confidence"] == 0.75
    IndexReader(str(tmp_path / "all")).dataset.drop_columns(
        ["minilm_confidence"]
    )  # as in older indexes
    assert confidences() == ({None}, {None})


def test_truncated_video_is_indexed_and_reported(cluster, tmp_path):
    (tmp_path / "clips").mkdir()
    options = {"audio": tones(20), "options": {"movflags": "faststart"}}
    path = write_video(tmp_path / "clips/cut.mp4", frame_times(20, 5), **options)
    path.write_bytes(path.read_bytes()[: int(0.6 * path.stat().st_size)])
    write_video(tmp_path / "clips/whole.mp4", frame_times(2, 5))
    texts = [{"id": name, "text": "good evening"} for name in ("cut.mp4", "whole.mp4")]
    (tmp_path / "asr.jsonl").write_text("\n".join(map(json.dumps, texts)))
    speech = {"name": "precomputed", "path": str(tmp_path / "asr.jsonl")}
    encoder = {"name": "transcript", "ocr": None, "speech": speech}
    source = {"name": "video", "path": str(tmp_path / "clips")}
    progress, lines = run(tmp_path / "index", source, encoder, FULL)
    assert (progress.indexed, progress.truncated) == (2, 1)
    (line,) = (line for line in lines if line.startswith("truncated files"))
    assert re.search(r": 1 \(cut.mp4 \(1\d(\.\d+)? of 20 s\)\), indexed", line)
    stored = IndexReader(str(tmp_path / "index")).dataset.to_table(columns=["item_id", "metadata"])
    metadata = {row["item_id"]: json.loads(row["metadata"]) for row in stored.to_pylist()}
    assert [metadata[item].get("truncated", False) for item in sorted(metadata)] == [True, False]


@pytest.mark.parametrize(
    ("encoder", "representation", "message"),
    [
        (
            "minilm",
            FULL,
            "encoder must be an encoder that reads .*image.*, which the source images provides, got"
            " 'minilm', which reads text",
        ),
        (
            "minilm",
            {"compressor": "none", "field": "title"},
            r"representations\[0\].field must be 'content' or 'caption', got 'title'",
        ),
    ],
)
def test_rejects_unsuitable_encoder_and_field(
    folder, uri, tmp_path, encoder, representation, message
):
    source = {"name": "images", "path": str(folder / "photos/photos.jsonl")}
    with pytest.raises(SpecError, match=message):
        run(tmp_path / "index", source, encoder, representation)


def test_rejects_captions_of_a_source_without_captions(folder, uri, tmp_path):
    source = {"name": "audio", "path": str(folder / "sound")}
    with pytest.raises(
        SpecError,
        match="representations.field must be content, got 'caption', which is not provided by the"
        " source audio",
    ):
        run(tmp_path / "index", source, "minilm", CAPTION)
