"""Tests of previews over HTTP, including that no other files are accessible."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import numpy as np
import pytest
import soundfile
from PIL import Image

from pipeline import config
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search.previews import MAX_PART_BYTES
from pipeline.serve import wire
from tests import media
from tests.pdfs import Page, pdf

PAGE, PHOTO, LETTER = "a.pdf#page=1", "red.png", "letter.txt"
AUDIO, CLIP = "talk.wav#t=0,3", "clip.mp4#t=0,3.033"
LONG = "long.wav#t=0,80"

pytestmark = pytest.mark.heavy


def write_corpus(folder: Path) -> list[dict[str, Any]]:
    """Writes a page, a letter, a photo, a video of four frames and audio, with transcripts."""
    for name in ("pages", "texts", "photos", "clips", "sound"):
        (folder / name).mkdir()
    (folder / "pages/a.pdf").write_bytes(pdf(Page([(20, 50, "the harbour of Lisbon")])))
    (folder / "texts/letter.txt").write_text("Dear Ada, fish is cheap in Lisbon.")
    Image.new("RGB", (64, 48), (200, 10, 10)).save(folder / "photos/red.png")
    line = {"image": "red.png", "caption": "A red photo"}
    (folder / "photos/photos.jsonl").write_text(json.dumps(line))
    media.write_video(folder / "clips/clip.mp4", media.frame_times(4, 1), keyframe_every=1)
    media.write_audio(folder / "sound/talk.wav", media.tones(3))
    media.write_audio(folder / "sound/long.wav", media.tones(80))
    names = ("clip.mp4", "talk.wav", "long.wav")
    transcripts = [{"id": i, "text": "some words", "start": 0, "end": 3} for i in names]
    (folder / "transcripts.jsonl").write_text("\n".join(map(json.dumps, transcripts)))
    clips = {"name": "video", "path": str(folder / "clips"), "window_seconds": 10, "fps": 1}
    return [
        {"name": "pages", "path": str(folder / "pages")},
        {"name": "text", "path": str(folder / "texts")},
        {"name": "images", "path": str(folder / "photos/photos.jsonl"), "collection": "photos"},
        clips,
        {"name": "audio", "path": str(folder / "sound"), "window_seconds": 80},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("previews")


@pytest.fixture(scope="module")
def http(serving_here, folder) -> httpx2.Client:
    precomputed = {"name": "precomputed", "path": str(folder / "transcripts.jsonl")}
    data = {
        "index": str(folder / "index"),
        "source": write_corpus(folder),
        "encoder": {"name": "transcript", "ocr": precomputed, "speech": precomputed},
        "representations": [{"compressor": "none"}, {"compressor": "none", "field": "caption"}],
    }
    spec = config.parse(IndexSpec, data)
    progress = job.run(spec, IndexResources(), job="1", report=lambda line: None)
    assert progress.indexed == 6
    settings = {"indexes": {"previews": {"uri": str(folder / "index")}}, "single_process": True}
    url = serving_here(settings, "previews")
    with httpx2.Client(base_url=url, timeout=60) as http:
        yield http


def preview(http: httpx2.Client, item_id: str, **parameters: Any) -> httpx2.Response:
    return http.get(f"/v1/previews/{quote(item_id, safe='')}", params=parameters)


def read_image(response: httpx2.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("image/")
    assert response.headers["x-content-type-options"] == "nosniff"
    return np.asarray(Image.open(io.BytesIO(response.content)).convert("RGB"))


def error_message(response: httpx2.Response, status: int, code: str) -> str:
    error = wire.ErrorResponse.model_validate_json(response.content).error
    assert (response.status_code, error.code) == (status, code)
    return error.message


def test_page(http):
    pixels = read_image(preview(http, PAGE))
    assert pixels.shape[1] == 2 * pixels.shape[0]  # 200 x 100 points
    assert (pixels < 100).any() and (pixels > 200).mean() > 0.8  # black on white


def test_photo(http):
    pixels = read_image(preview(http, PHOTO))
    assert pixels.shape == (48, 64, 3) and abs(pixels.mean((0, 1)) - (200, 10, 10)).max() < 3


@pytest.mark.parametrize("seconds", [0.0, 1.0, 3.0])
def test_video_frame(http, seconds):
    pixels = read_image(preview(http, CLIP, seconds=seconds))
    assert media.read_number(pixels) == seconds  # one frame per second, showing its number


def test_audio(http):
    response = preview(http, AUDIO, media="audio")
    assert response.status_code == 200 and response.headers["content-type"] == "audio/wav"
    samples, rate = soundfile.read(io.BytesIO(response.content))
    assert len(samples) == pytest.approx(3 * rate, rel=0.01)
    second = samples[rate + rate // 10 : 2 * rate - rate // 10]
    assert media.frequency(second, rate) == pytest.approx(float(media.tone_at(1.5)), abs=4)


@pytest.mark.parametrize(
    ("item_id", "parameters"),
    [
        (LETTER, {}),
        (AUDIO, {}),
        (PHOTO, {"media": "audio"}),
        ("nobody", {}),
        ("../transcripts.jsonl", {}),
    ],
)
def test_rejects_items_without_preview(http, item_id, parameters):
    error_message(preview(http, item_id, **parameters), 404, "not_found")


def test_rejects_invalid_parameters(http):
    for parameters in ({"media": "smell"}, {"seconds": -1}, {"seconds": "nan"}):
        error_message(preview(http, CLIP, **parameters), 422, "invalid_argument")


@pytest.mark.parametrize(("item_id", "width"), [(PAGE, 40), (PHOTO, 32), (CLIP, 24)])
def test_thumbnails(http, item_id, width):
    full = read_image(preview(http, item_id))
    small = read_image(preview(http, item_id, width=width))
    assert max(small.shape[:2]) == width < max(full.shape[:2])
    assert small.shape[0] / small.shape[1] == pytest.approx(full.shape[0] / full.shape[1], rel=0.06)
    for wrong in (0, 15, 5000, "wide"):
        error_message(preview(http, item_id, width=wrong), 422, "invalid_argument")


def test_entity_tags_of_previews(http):
    response = preview(http, PAGE, width=40)
    etag = response.headers["etag"]
    url = f"/v1/previews/{quote(PAGE, safe='')}"
    headers = {"If-None-Match": etag}
    again = http.get(url, params={"width": 40}, headers=headers)
    assert (again.status_code, again.content) == (304, b"")
    assert http.get(url, params={"width": 41}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("item_id", "file", "kind"),
    [
        (PAGE, "pages/a.pdf", "application/pdf"),
        (PHOTO, "photos/red.png", "image/png"),
        (CLIP, "clips/clip.mp4", "video/mp4"),
        (AUDIO, "sound/talk.wav", "audio/wav"),
    ],
)
def test_media_files(http, folder, item_id, file, kind):
    content, url = (folder / file).read_bytes(), f"/v1/media/{quote(item_id, safe='')}"
    response = http.get(url)
    assert response.status_code == 200 and response.content == content
    assert response.headers["content-type"] == kind
    assert response.headers["accept-ranges"] == "bytes"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-security-policy"] == "default-src 'none'; sandbox"
    size, etag = len(content), response.headers["etag"]
    for header, start, end in (
        ("bytes=0-", 0, size),
        ("bytes=10-19", 10, 20),
        (f"bytes={size - 5}-{size + 100}", size - 5, size),
        ("bytes=-7", size - 7, size),
    ):
        part = http.get(url, headers={"Range": header})
        assert part.status_code == 206 and part.content == content[start:end]
        assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
    part = http.get(url, headers={"Range": f"bytes={size}-"})
    assert part.status_code == 416 and part.headers["content-range"] == f"bytes */{size}"
    head = http.head(url, headers={"Range": "bytes=1-2"})  # ranges apply to GET only
    assert head.status_code == 200 and head.headers["content-length"] == str(size)
    assert head.content == b"" and head.headers["accept-ranges"] == "bytes"
    assert http.get(url, headers={"If-None-Match": etag}).status_code == 304
    headers = {"Range": "bytes=1-2", "If-Range": etag}
    assert http.get(url, headers=headers).status_code == 206
    headers["If-Range"] = '"other"'
    assert http.get(url, headers=headers).content == content


def test_media_of_large_files(http, folder):
    """A file of several parts is sent completely, and a range in parts of 2 MiB."""
    part = http.get(f"/v1/media/{quote(LONG, safe='')}", headers={"Range": "bytes=0-"})
    long = (folder / "sound/long.wav").read_bytes()
    assert part.content == long[:MAX_PART_BYTES]
    assert part.headers["content-range"] == f"bytes 0-{MAX_PART_BYTES - 1}/{len(long)}"
    assert http.get(f"/v1/media/{quote(LONG, safe='')}").content == long


@pytest.mark.parametrize("item_id", [LETTER, "nobody", "../transcripts.jsonl"])
def test_rejects_items_without_media_file(http, item_id):
    error_message(http.get(f"/v1/media/{quote(item_id, safe='')}"), 404, "not_found")


def test_part_of_an_item_as_query(http):
    """A region of a page, and an interval of audio, are queries."""
    page = {"query": {"item": PAGE, "box": [0, 0, 1, 1]}, "explain": "matches", "k": 2}
    hits = http.post("/v1/search", json=page).json()["hits"]
    assert hits[0]["item_id"] == PAGE and hits[0]["modality"] == "page"
    whole = {match["query_token"] for match in hits[0]["matches"]}
    assert {"harbour", "Lisbon"} <= whole
    # "the" begins at 20 of 200 points, and "harbour" is at 44 to 86 points.
    page["query"]["box"] = [0.2, 0, 0.45, 1]
    hits = http.post("/v1/search", json=page).json()["hits"]
    assert {match["query_token"] for match in hits[0]["matches"]} == {"harbour"}
    audio = {"query": {"item": AUDIO, "times": [0, 3]}, "k": 3}
    hits = http.post("/v1/search", json=audio).json()["hits"]
    assert {hit["item_id"] for hit in hits} == {AUDIO, CLIP, LONG}  # with the same words


def test_facets(http):
    facets = http.get("/v1/indexes/previews/facets").json()
    counts = {facet["column"]: facet["values"] for facet in facets["facets"]}
    modalities = {value["value"]: value["count"] for value in counts["modality"]}
    assert modalities == {"text": 1, "page": 1, "image": 1, "video": 1, "audio": 2}


@pytest.mark.parametrize(
    ("item_id", "file", "parameters"),
    [
        (PAGE, "pages/a.pdf", {}),
        (PHOTO, "photos/red.png", {}),
        (CLIP, "clips/clip.mp4", {}),
        (AUDIO, "sound/talk.wav", {"media": "audio"}),
    ],
)
def test_rejects_removed_or_modified_file(http, folder, item_id, file, parameters):
    path = folder / file
    content, stat = path.read_bytes(), path.stat()
    assert preview(http, item_id, **parameters).status_code == 200
    try:
        path.unlink()
        assert str(folder) not in error_message(preview(http, item_id, **parameters), 410, "gone")
        # A modified file with the same name, size and modification time.
        other = bytearray(content)
        other[len(other) // 2] ^= 0xFF
        path.write_bytes(bytes(other))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        error_message(preview(http, item_id, **parameters), 410, "gone")
        error_message(http.get(f"/v1/media/{quote(item_id, safe='')}"), 410, "gone")
    finally:
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert preview(http, item_id, **parameters).status_code == 200


def test_rejects_symbolic_link(http, folder):
    """A link cannot expose another file of the server."""
    path, secret = folder / "photos/red.png", folder / "secret.png"
    content = path.read_bytes()
    Image.new("RGB", (64, 48), (1, 2, 3)).save(secret)
    try:
        path.unlink()
        path.symlink_to(secret)
        response = preview(http, PHOTO)
        error_message(response, 410, "gone")
        assert response.headers["Cache-Control"] == "no-store"
    finally:
        path.unlink()
        path.write_bytes(content)
