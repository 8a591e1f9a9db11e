"""Tests of the index job with tiny checkpoints of all model families and all compressors.

The indexes of the shipped files are searched by texts and images.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import config
from pipeline.eval.planning.trial import dry_run
from pipeline.index import job
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search.map_images import highlight
from pipeline.search.maps import similarity_map
from pipeline.search.previews import Previews
from pipeline.search.searcher import open_index
from tests.conftest import ROOT, actor_pools
from tests.images import noise, png

pytestmark = pytest.mark.heavy

DATA = ROOT / "jobs/data"
METHODS: list[dict[str, Any]] = [
    {"name": name, "num_vectors": 8}
    for name in ("samer", "hpool", "sap", "random", "spatial", "cluster")
]
METHODS += [
    {"name": "eos", "num_vectors": 8},
    {"name": "adaptive_eos", "ratio": 0.25},
    {"name": "attention_clustering", "num_vectors": 8, "saliency": "column_sums"},
    {"name": "hpc", "num_vectors": 8, "saliency": "column_sums", "num_centroids": 32},
    {"name": "adaptive", "num_vectors": 8, "method": {"name": "hpool"}},
]
#: Encoder, tiny checkpoint, and compressors whose attention statistics it does not provide.
FAMILIES = {
    "colpali": ("colpali", "colpali", ()),
    "colqwen2": ("colpali", "colqwen2", ()),
    "colmodernvbert": ("colpali", "colmodernvbert", ()),
    "siglip2": ("dual", "siglip2", ("eos", "adaptive_eos")),
    "qwen3_vl": ("qwen_vl", "qwen3_vl", ()),
    "jina_v4": ("jina_v4", "jina_v4", ()),
    "qwen2_5_omni": ("qwen_omni", "qwen2_5_omni", ()),
}
#: Encoders that encode videos as a whole, with at most `max_frames` frames.
FRAME_LIMITED = ("qwen_vl", "qwen_omni")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with shipped pages, images and a video, and an image too thin for any patch."""
    folder = tmp_path_factory.mktemp("shipped")
    for name in ("pages", "photos", "clips"):
        (folder / name).mkdir()
    for page in sorted((DATA / "pages/pdf").glob("*.pdf"))[:2]:
        shutil.copy(page, folder / "pages")
    for photo in sorted((DATA / "photos/images").glob("*.jpg"))[:4]:
        shutil.copy(photo, folder / "photos")
    (folder / "photos/thin.png").write_bytes(png(noise(1, 3_000)))
    shutil.copy(DATA / "clips/talk.mp4", folder / "clips")
    return folder


def sources(folder: Path, with_sound: bool) -> list[dict[str, Any]]:
    clips = {"name": "video", "path": str(folder / "clips"), "window_seconds": 10, "fps": 0.25}
    speech = {"name": "audio", "path": str(DATA / "speech"), "window_seconds": 5}
    return [
        *([speech] if with_sound else []),
        {"name": "pages", "path": str(folder / "pages"), "dpi": 40},
        {"name": "images", "path": str(folder / "photos"), "max_pixels": 60_000},
        {**clips, "max_pixels": 20_000},
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def index(request, cluster, checkpoint, folder) -> tuple[str, Path]:
    name, family, unsupported = FAMILIES[request.param]
    encoder: dict[str, Any] = {"name": name, "model": checkpoint(family), "dtype": "float32"}
    if name in ("qwen_vl", "jina_v4", "qwen_omni"):  # their context windows are short
        encoder["max_pixels"] = 2_000
    if name in FRAME_LIMITED:
        encoder["max_frames"] = 2
    if name != "dual":  # prompt tokens have no position
        encoder["output_tokens"] = "media" if name == "qwen_omni" else "visual"
    uri = folder / f"index-{request.param}"
    methods = [{"name": "none"}, *(m for m in METHODS if m["name"] not in unsupported)]
    given = {
        "index": str(uri),
        "source": sources(folder, with_sound=name == "qwen_omni"),
        "encoder": encoder,
        "representations": [{"compressor": method} for method in methods],
        "unit_items": 4,
        "fit": {"num_items": 8},
    }
    pools = {"prepare": {"num_cpus": 0.5}, "encode": {"num_cpus": 0.5, "max_actors": 2}}
    with actor_pools():
        progress = job.run(
            config.parse(IndexSpec, given),
            config.parse(IndexResources, pools),
            job="1",
            report=lambda line: None,
        )
    assert progress.listed == progress.indexed + progress.rejected
    assert progress.seconds["prepare"] > 0
    return request.param, uri


def test_indexed_and_rejected_items(index, folder):
    family, uri = index
    table = IndexReader(str(uri)).dataset.to_table(["item_id", "source", "full", "hpool_8"])
    sound = {"speech"} if family == "qwen2_5_omni" else set()
    assert set(table["source"].to_pylist()) == {"pages", "photos", "clips", *sound}
    item_ids = table["item_id"].to_pylist()
    rejected = IndexReader(str(uri)).rejects()
    rejects = dict(
        zip(rejected["item_id"].to_pylist(), rejected["reason"].to_pylist(), strict=True)
    )
    if "thin.png" not in item_ids:
        assert "not supported" in rejects["thin.png"] or "too many" in rejects["thin.png"]
    assert len(item_ids) + len(rejects) == table.num_rows + len(rejects) >= 8
    assert all(1 <= len(vectors) <= 8 for vectors in table["hpool_8"].to_pylist())


def test_image_query_finds_the_same_image(index, folder):
    family, uri = index
    searcher = open_index(str(uri))
    score = "single_vector" if family == "siglip2" else "maxsim"
    for photo in sorted((folder / "photos").glob("*.jpg"))[:2]:
        hits = searcher.search(photo.read_bytes(), "full", k=3, score=score)
        assert hits[0].item_id == photo.name, [hit.item_id for hit in hits]
    for representation in searcher.index.representations():
        hits = searcher.search(photo.read_bytes(), representation, k=3)
        assert len(hits) == 3 and np.isfinite([hit.score for hit in hits]).all()


def test_text_queries_and_similarity_maps(index, folder):
    family, uri = index
    searcher = open_index(str(uri))
    if family == "siglip2":
        assert searcher.search("a bird", "full", k=2, score="single_vector")
        return
    photo = sorted((folder / "photos").glob("*.jpg"))[0].read_bytes()
    for representation in ("full", "hpool_8", "sap_8"):
        hit = searcher.search(photo, representation, k=1)[0]
        locations = [location for match in hit.matches for location in match.locations]
        assert locations and all(location.box for location in locations)  # prompt tokens have none
        assert all(passage.box for passage in hit.passages)
        map = similarity_map(searcher, photo, hit.item_id, representation)
        assert map.score == pytest.approx(hit.score, abs=1e-3)
        assert highlight(Previews(searcher.index), map).startswith(b"\x89PNG")


def test_matches_of_frames_have_times(index):
    _, uri = index
    searcher = open_index(str(uri))
    query = png(noise(40, 40))
    hit = searcher.search(query, "full", k=1, filter="source = 'clips'")[0]
    locations = [location for match in hit.matches for location in match.locations]
    start, end = hit.span["start"], hit.span["end"]
    assert any(location.box for location in locations)
    assert all(location.times for location in locations)
    assert all(start <= location.times[0] < location.times[1] <= end + 4 for location in locations)


def test_metadata_records_the_number_of_encoded_frames(index):
    family, uri = index
    rows = (
        IndexReader(str(uri)).dataset.to_table(["metadata"], filter="source = 'clips'").to_pylist()
    )
    metadata_rows = [json.loads(row["metadata"]) for row in rows]
    assert any(len(metadata["frames"]) > 2 for metadata in metadata_rows)
    for metadata in metadata_rows:
        is_limited = FAMILIES[family][0] in FRAME_LIMITED and len(metadata["frames"]) > 2
        assert metadata.get("frames_read") == (2 if is_limited else None)
    num_limited = open_index(str(uri)).num_items(filter="metadata LIKE '%frames_read%'")
    assert num_limited == sum("frames_read" in metadata for metadata in metadata_rows)


def test_rejects_corrupted_weights(cluster, checkpoint, folder, tmp_path):
    shutil.copytree(checkpoint("colpali"), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"corrupted")
    given = {
        "index": str(tmp_path / "index"),
        "source": {"name": "images", "path": str(folder / "photos")},
        "encoder": {"name": "colpali", "model": str(tmp_path / "model")},
        "representations": [{"compressor": "none"}],
    }
    spec, resources = config.parse(IndexSpec, given), IndexResources()
    with pytest.raises(config.SpecError, match="encoder.model must be .*cannot be loaded"):
        job.run(spec, resources, job="1", report=lambda line: None)
    with pytest.raises(config.SpecError, match="encoder.model must be .*cannot be loaded"):
        dry_run(spec, resources, None, lambda line: None)
