"""A server of items of all modalities, and a browser that opens its search page.

Titles, texts, ids and file names of some items contain markup, which must not be parsed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from pipeline import config
from pipeline.index import delete, job
from pipeline.index.delete import DeleteSpec
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.serve.client import Client
from tests import browser as browsers
from tests import media
from tests.browser import Browser
from tests.pdfs import Page, pdf

PAGE, AUDIO, CLIP = "harbour.pdf#page=1", "talk.wav#t=0,12", "clip.mp4#t=0,8.033"
#: Markup that sets a variable if it is parsed.
ATTACK = "<img src=x onerror='window.hacked=1'>"
TEXTS = [
    ("boats", "Boats in the harbour", "Fishing boats leave the harbour of Lisbon at dawn."),
    ("bread", "Bread", "Bake the bread until its crust is golden, and sell it at the market."),
    ("wing", "Wings", "The lift of a wing in a propeller slipstream was measured."),
    ("heat", "Heat", "Heat transfer to a blunt body at hypersonic speed."),
    ("fish", "Fish 🐟 market", "🐟 Fresh fish is sold at the market near the harbour each day."),
    (f"attack {ATTACK}", f"Attack {ATTACK}", f"<script>window.hacked=1</script> attack {ATTACK}"),
]
REPRESENTATIONS = [
    {"compressor": "none"},
    {"compressor": {"name": "hpool", "num_vectors": 2}},
    {"compressor": {"name": "random", "num_vectors": 1}},
    {"compressor": "none", "field": "caption"},
]


def write_corpus(folder: Path) -> list[dict[str, Any]]:
    """Writes texts, a page, photos, a video and audio. Returns the sources."""
    for name in ("texts", "pages", "photos", "clips", "sound"):
        (folder / name).mkdir()
    rows = [{"_id": i, "title": title, "text": text} for i, title, text in TEXTS]
    (folder / "texts/corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [(20, 80, "the harbour of Lisbon"), (20, 50, "sells fresh fish"), (20, 20, "every day")]
    (folder / "pages/harbour.pdf").write_bytes(pdf(Page(words), title="Port of Lisbon"))
    photos = {"red.png": (200, 10, 10), "<img src=x onerror=hacked=1>.png": (10, 10, 200)}
    for name, colour in photos.items():
        Image.new("RGB", (96, 64), colour).save(folder / "photos" / name)
    captions = ["A red photo of a boat in the harbour", f"A blue photo {ATTACK}"]
    lines = [
        {"image": name, "caption": caption} for name, caption in zip(photos, captions, strict=True)
    ]
    (folder / "photos/photos.jsonl").write_text("\n".join(map(json.dumps, lines)))
    media.write_video(folder / "clips/clip.mp4", media.frame_times(9, 1), keyframe_every=1)
    media.write_audio(folder / "sound/talk.wav", media.tones(12))
    speech = [
        {"id": "clip.mp4", "text": "a storm at the lighthouse", "start": 3, "end": 5},
        {"id": "talk.wav", "text": "ask what you can do for your country", "start": 6, "end": 9},
    ]
    (folder / "transcripts.jsonl").write_text("\n".join(map(json.dumps, speech)))
    return [
        {"name": "text", "path": str(folder / "texts"), "collection": "texts"},
        {"name": "pages", "path": str(folder / "pages"), "collection": "pages"},
        {"name": "images", "path": str(folder / "photos/photos.jsonl"), "collection": "photos"},
        {"name": "video", "path": str(folder / "clips"), "window_seconds": 10, "fps": 1},
        {"name": "audio", "path": str(folder / "sound"), "window_seconds": 20},
    ]


def write_items(folder: Path) -> str:
    """Indexes items of all modalities with an encoder of texts. Returns the URI."""
    precomputed = {"name": "precomputed", "path": str(folder / "transcripts.jsonl")}
    data = {
        "index": str(folder / "items"),
        "source": write_corpus(folder),
        "encoder": {"name": "transcript", "ocr": precomputed, "speech": precomputed},
        "representations": REPRESENTATIONS,
    }
    spec = config.parse(IndexSpec, data)
    progress = job.run(spec, IndexResources(), job="1", report=lambda line: None)
    assert progress.indexed == len(TEXTS) + 5
    return str(folder / "items")


def square(x: int, y: int, colour: str) -> bytes:
    """Returns an image of a square on white."""
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).rectangle((x, y, x + 24, y + 24), fill=colour)
    output = io.BytesIO()
    image.save(output, "PNG")
    return output.getvalue()


def write_squares(folder: Path, model: str) -> str:
    """Indexes images with a tiny encoder of texts and images. Returns the URI."""
    (folder / "squares").mkdir()
    for number, colour in enumerate(("red", "blue", "green", "orange", "black")):
        content = square(4 + 8 * number, 32 - 6 * number, colour)
        (folder / "squares" / f"{colour}.png").write_bytes(content)
    data = {
        "index": str(folder / "shapes"),
        "source": {"name": "images", "path": str(folder / "squares")},
        "encoder": {"name": "colpali", "model": model, "dtype": "float32"},
        "representations": [
            {"compressor": "none"},
            {"compressor": {"name": "hpool", "num_vectors": 4}},
        ],
    }
    spec = config.parse(IndexSpec, data)
    job.run(spec, IndexResources(), job="1", report=lambda line: None)
    return str(folder / "shapes")


def write_empty(folder: Path) -> str:
    """Indexes a text and deletes it. Returns the URI."""
    (folder / "text").mkdir()
    (folder / "text/corpus.jsonl").write_text('{"_id": "a", "text": "a text"}')
    data = {
        "index": str(folder / "empty"),
        "source": {"name": "text", "path": str(folder / "text")},
        "encoder": {"name": "minilm"},
        "representations": REPRESENTATIONS[:1],
    }
    job.run(config.parse(IndexSpec, data), IndexResources(), job="1", report=lambda line: None)
    spec = config.parse(DeleteSpec, {"index": data["index"], "ids": ["a"]})
    delete.run(spec, job="2", report=lambda line: None)
    return str(folder / "empty")


@pytest.fixture(scope="session")
def browser_is_installed() -> None:
    """Skips tests if no browser can be started."""
    if reason := browsers.missing():
        pytest.skip(reason)


@pytest.fixture(scope="package")
def corpus(browser_is_installed, tmp_path_factory) -> Path:
    """Folder of the indexed files."""
    return tmp_path_factory.mktemp("search_page")


@pytest.fixture(scope="package")
def page_url(serving, corpus, checkpoint) -> str:
    """URL of the search page of a server without access keys."""
    settings = {
        "indexes": {
            "items": {"uri": write_items(corpus)},
            "shapes": {"uri": write_squares(corpus, checkpoint("colqwen2"))},
            "empty": {"uri": write_empty(corpus)},
        },
        "federations": {
            "all": {
                "members": {
                    "things": {"index": "items"},
                    "captions": {"index": "items", "representation": "caption_full"},
                    "squares": {"index": "shapes", "weight": 2},
                }
            }
        },
        "limits": {"max_k": 50},
        "evaluations": {"folder": str(corpus / "evaluations")},
        "single_process": True,
    }
    url = serving(settings, "page")
    with Client(url, tries=20) as client:
        client.search("warm up", index="items")
        client.search("warm up", index="shapes")
    return f"{url}/"


@pytest.fixture(scope="package")
def _browser(browser_is_installed) -> Iterator[Browser]:
    with browsers.start() as browser:
        yield browser


@pytest.fixture
def browser(_browser) -> Iterator[Browser]:
    """Browser without state of earlier tests."""
    _browser.driver.execute_cdp_cmd("Network.enable", {})
    _browser.block()
    _browser.resize(1280)
    _browser.use_scheme("light")
    _browser.errors()
    _browser.requested_urls()
    yield _browser
    _browser.slow_down(0)
    _browser.block()
    _browser.run("localStorage.clear(); sessionStorage.clear()")
