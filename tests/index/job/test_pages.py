"""Tests of the index job on PDF pages: word boxes, and rejects of malformed documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import config
from pipeline.index import add, job, recompress
from pipeline.index.counts import Counts
from pipeline.index.positions import decode_positions
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from tests.conftest import actor_pools
from tests.pdfs import Page, bomb, pdf

SAMER = {"compressor": {"name": "samer", "num_vectors": 3}}
FULL = {"compressor": "none"}
WORDS = [(10, 80, "wings and tails"), (10, 60, "bread"), (100, 20, "yeast and flour")]


def index(folder: Path, uri: Path, *representations: dict, **resources: Any) -> Counts:
    given = {
        "index": str(uri),
        "source": {"name": "pages", "path": str(folder), "limits": {"max_seconds": 3}},
        "representations": list(representations),
    }
    spec = config.parse(IndexSpec, given)
    profile = config.parse(IndexResources, resources)
    return job.run(spec, profile, job="1", report=lambda line: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "a.pdf").write_bytes(pdf(Page(WORDS), Page([(10, 50, "crust")], rotate=90)))
    (pages / "b.pdf").write_bytes(pdf(Page(WORDS[1:])))
    return pages


def rows(uri: Path) -> dict[str, dict[str, Any]]:
    table = decode_positions(IndexReader(str(uri)).dataset.to_table())
    return {row["item_id"]: row for row in table.to_pylist()}


@pytest.mark.heavy
def test_malformed_documents_are_rejected(cluster, tmp_path, folder):
    (folder / "bomb.pdf").write_bytes(bomb())
    (folder / "letter.pdf").write_text("Dear Ada")
    (folder / "picture.pdf").write_bytes(pdf(Page(drawing="0 0 9 9 re f")))
    progress = index(folder, tmp_path / "index", FULL)
    assert (progress.listed, progress.indexed) == (7, 3)
    rejects = IndexReader(str(tmp_path / "index")).rejects()
    reasons = dict(zip(rejects["item_id"].to_pylist(), rejects["reason"].to_pylist(), strict=True))
    assert reasons == {
        "bomb.pdf#page=1": "timed out",
        "bomb.pdf#page=2": "timed out",
        "letter.pdf": "not a PDF",
        "picture.pdf#page=1": "no text layer",
    }


def test_word_boxes_are_stored(cluster, tmp_path, folder):
    index(folder, tmp_path / "index", FULL, SAMER)
    row = rows(tmp_path / "index")["a.pdf#page=1"]
    extents = np.array(row["minilm_extents"])
    assert len(extents) == len(row["full"]) == len(row["minilm_spans"])
    by_word = {
        row["text"][start:end]: box[:4].round(2).tolist()
        for (start, end), box in zip(row["minilm_spans"], extents, strict=True)
    }
    assert by_word["wings"] == [0.05, 0.12, 0.2, 0.22]
    assert by_word["flour"] == [0.8, 0.72, 0.95, 0.82]
    assert np.isnan(extents[:, 4:]).all()


@pytest.mark.heavy
def test_samer_uses_positions_on_pages(cluster, tmp_path, folder):
    far = {"compressor": {**SAMER["compressor"], "gamma": 9.0}, "id": "far"}
    index(folder, tmp_path / "index", SAMER, far)
    row = rows(tmp_path / "index")["a.pdf#page=1"]
    assert row["far_assignment"] != row["samer_3_assignment"]
    # With that weight, vectors represent words of one line, which share their upper edge.
    tops = {}
    for vector, box in zip(row["far_assignment"], row["minilm_extents"], strict=True):
        tops.setdefault(vector, set()).add(round(box[1], 3))
    assert sum(len(edges) == 1 for edges in tops.values()) >= 2


@pytest.mark.heavy
def test_separate_actors_and_recompression_use_the_same_boxes(cluster, tmp_path, folder):
    index(folder, tmp_path / "one", FULL, SAMER)
    with actor_pools():
        index(folder, tmp_path / "two", FULL, SAMER, compress={"num_threads": 1})
    index(folder, tmp_path / "later", FULL)
    given = {"index": str(tmp_path / "later"), "representations": [SAMER]}
    spec = config.parse(recompress.RecompressSpec, given)
    resources = recompress.RecompressResources()
    add.run(recompress.Recompression(spec, resources), job="2", report=lambda line: None)
    one, two, later = (rows(tmp_path / name) for name in ("one", "two", "later"))
    for item_id, row in one.items():
        for name in ("full", "samer_3", "minilm_extents"):
            np.testing.assert_array_equal(two[item_id][name], row[name])
        np.testing.assert_allclose(later[item_id]["samer_3"], row["samer_3"], atol=2e-3)
        assert later[item_id]["samer_3_assignment"] == row["samer_3_assignment"]


@pytest.mark.heavy
def test_pages_and_texts_in_one_index(cluster, tmp_path, folder, collection):
    given = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(collection(letter="Dear Ada"))},
        "representations": [FULL, SAMER],
    }
    spec = config.parse(IndexSpec, given)
    job.run(spec, IndexResources(), job="0", report=lambda line: None)
    index(folder, tmp_path / "index", FULL, SAMER)
    stored = rows(tmp_path / "index")
    assert stored["letter"]["minilm_extents"] is None
    assert len(stored["b.pdf#page=1"]["minilm_extents"]) == len(stored["b.pdf#page=1"]["full"])
