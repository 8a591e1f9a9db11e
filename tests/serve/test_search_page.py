"""Tests of the files of the search page over HTTP, without a browser."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import httpx2
import pytest

from pipeline.index.reader import IndexReader
from pipeline.search.projection import project_items
from pipeline.serve import search_page
from pipeline.serve.search_page import assets
from tests.conftest import ROOT

FOLDER = ROOT / "pipeline/serve/page"
#: Maximum size of all files of the page as browsers receive them, in bytes.
MAX_BYTES = 80_000


@pytest.fixture
def anonymous(url) -> httpx2.Client:
    with httpx2.Client(base_url=url, timeout=30) as http:
        yield http


def test_page_weight():
    assert set(assets()) == {path.name for path in FOLDER.iterdir()}
    assert sum(len(asset.compressed) for asset in assets().values()) < MAX_BYTES


def test_files_are_package_data():
    text = (ROOT / "pyproject.toml").read_text()
    (patterns,) = re.findall(r"^pipeline = \[(.*)\]", text, re.MULTILINE)
    suffixes = {Path(name).suffix for name in assets()}
    assert suffixes == set(re.findall(r'"serve/page/\*(\.\w+)"', patterns))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.js")), ids=lambda path: path.name)
def test_modules_insert_no_markup(path):
    """Texts of items are untrusted, so no function that parses markup is used."""
    text = path.read_text()
    for name in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "DOMParser",
    ):
        assert name not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_document(anonymous):
    response = anonymous.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
    for name in re.findall(r'(?:src|href)="(page/[^"]+)"', response.text):
        assert anonymous.get(f"/{name}").status_code == 200
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", response.text)


def test_pages_need_no_internet(anonymous):
    """No page loads anything from another origin, whose names are those of XML and of links."""
    for path in ("/", "/docs"):
        response = anonymous.get(path)
        assert response.headers["content-security-policy"] == search_page.POLICY
        for link in re.findall(r'(?:src|href)="([^"]+)"', response.text):
            assert not re.match(r"\w+:|//", link)
            assert anonymous.get(f"/{link}").status_code == 200
    assert anonymous.get("/redoc").status_code == 404


@pytest.mark.parametrize("name", sorted(search_page.assets()))
@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_assets(anonymous, name, encoding):
    anonymous.headers["Accept-Encoding"] = encoding
    response = anonymous.get(f"/page/{name}")
    assert response.headers.get("content-encoding", "identity") == encoding
    assert response.headers["vary"] == "Accept-Encoding"
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == assets()[name].media_type
    assert response.headers["content-security-policy"] == search_page.POLICY
    etag = response.headers["etag"]
    again = anonymous.get(f"/page/{name}", headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"") and again.headers["etag"] == etag
    changed = anonymous.get(f"/page/{name}", headers={"If-None-Match": '"other"'})
    assert changed.status_code == 200
    head = anonymous.head(f"/page/{name}")
    assert head.status_code == 200 and head.content == b""


@pytest.mark.parametrize("path", ["/page/app.py", "/page/..%2Fapp.py", "/page/", "/page/a/b.js"])
def test_serves_no_other_files(anonymous, path):
    response = anonymous.get(path)
    assert response.status_code == 404 and response.json()["error"]["code"] == "not_found"


def test_data_requires_key(anonymous):
    for path in (
        "/v1/indexes/texts/facets",
        "/v1/indexes/texts/map",
        "/v1/media/wing",
        "/v1/indexes",
    ):
        assert anonymous.get(path).status_code == 401


def test_facets(http, client):
    found = http.get("/v1/indexes/texts/facets").json()
    assert found["index"] == "texts" and found["num_items"] == 8
    assert found["facets"][0] == {
        "column": "modality",
        "values": [{"value": "text", "count": 8}],
        "num_values": 1,
    }
    sizes = {size["name"]: size["vectors_per_item"] for size in found["sizes"]}
    assert sizes["hpool_4"] == 4 and sizes["full"] > 4
    for example in found["examples"]:
        hits = client.search(**example, index="texts", k=1).hits
        assert hits[0].text.startswith(example["query"])


def test_map(http, index_uri):
    response = http.get("/v1/indexes/texts/map")
    assert response.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(response.text)))
    expected = project_items(IndexReader(index_uri)).to_pylist()
    assert [row["item_id"] for row in rows] == [row["item_id"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert (float(row["x"]), float(row["y"])) == (other["x"], other["y"])


@pytest.mark.parametrize("route", ["facets", "map"])
def test_browsing_respects_keys(url, route):
    with httpx2.Client(base_url=url, headers={"Authorization": "Bearer mr_few"}) as http:
        assert http.get(f"/v1/indexes/texts/{route}").status_code == 200
        assert http.get(f"/v1/indexes/whole/{route}").status_code == 404
