"""Indexing and evaluation of miniatures of published data sets, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import config
from pipeline.eval.evaluation import run
from pipeline.eval.results import Evaluation
from pipeline.eval.spec import EvaluateSpec
from pipeline.index import job
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from tests import datasets
from tests.conftest import ROOT
from tests.tiny import checkpoints

MODEL = str(ROOT / "jobs/data/models/shapes_colpali")


def index(folder: Path, source: dict[str, Any], encoder: Any, **fields: Any) -> str:
    uri = str(folder / "index")
    spec_fields = {
        "index": uri,
        "source": source,
        "encoder": encoder,
        "representations": [{"compressor": "none"}],
        **fields,
    }
    job.run(config.parse(IndexSpec, spec_fields), IndexResources(), job="1", report=print)
    return uri


def evaluate(folder: Path, uri: str, benchmark: dict[str, Any], **fields: Any) -> Evaluation:
    spec_fields = {
        "index": uri,
        "benchmark": benchmark,
        "output": str(folder / "out"),
        "scores": ["maxsim"],
        "diagnostics": False,
        **fields,
    }
    return run(config.parse(EvaluateSpec, spec_fields), print)


def test_multivent_by_its_transcripts(cluster, tmp_path):
    source = {"name": "multivent", **datasets.multivent(tmp_path / "data")}
    uri = index(tmp_path, source, "minilm")
    table = IndexReader(uri).items(["200", "201"], ["item_id", "text", "modality"]).to_pylist()
    assert [row["modality"] for row in table] == ["video", "video"]
    rejects = {row["item_id"]: row["reason"] for row in IndexReader(uri).rejects().to_pylist()}
    assert rejects == {
        "000003.tar/203.mp4": "corrupted archive",
        "asr/202.m4a.csv": "corrupted asr",
        "202": "empty text",
    }
    benchmark = {
        "name": "multivent",
        "path": str(tmp_path / "data/queries.csv"),
        "judgments": str(tmp_path / "data/judgments.jsonl"),
    }
    evaluation = evaluate(tmp_path, uri, benchmark, measures=["R@1"], k=10)
    assert evaluation.headline == "nDCG@10"
    full = evaluation.row("full.maxsim")
    assert full.means == {"nDCG@10": pytest.approx(1.0), "R@1": pytest.approx(0.75)}
    assert evaluation.row("bm25").values["q2"]["nDCG@10"] == 1.0
    submission = json.loads((tmp_path / "out/multivent/full.maxsim.json").read_text())
    assert set(submission["q1"]) == {"200", "201"}
    assert (tmp_path / "out/multivent/full.maxsim_splits.json").exists()


@pytest.mark.heavy
def test_imagecode_ranks_ten_candidates(cluster, tmp_path):
    folder = datasets.imagecode(tmp_path / "data")
    captions = str(folder / "valid_data.json")
    source = {"name": "imagecode", "path": captions, "images": str(folder / "image-sets.zip")}
    uri = index(tmp_path, source, {"name": "colpali", "model": MODEL, "dtype": "float32"})
    evaluation = evaluate(tmp_path, uri, {"name": "imagecode", "path": captions}, measures=["R@5"])
    assert "each query ranks a candidate pool of 10 documents" in evaluation.notes
    run_file = (tmp_path / "out/runs/full.maxsim.trec").read_text().splitlines()
    ranked = [line.split() for line in run_file]
    assert len(ranked) == 30
    assert all(row[0].rpartition("/")[0] == row[2].rpartition("/")[0] for row in ranked)
    predictions = json.loads((tmp_path / "out/imagecode/full.maxsim.json").read_text())
    assert predictions.keys() == set(datasets.SETS)


def tiny_qwen(folder: Path) -> dict[str, Any]:
    """Returns the spec of an encoder that reads texts and images as documents and queries."""
    model = str(checkpoints.qwen2_5_vl(folder))
    options = {"dtype": "float32", "min_pixels": 64, "max_pixels": 1024}
    return {"name": "qwen_vl", "model": model, **options}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "direction, content, measure",
    [("text_to_image", "images", "R@1"), ("image_to_text", "captions", "Success@1")],
)
def test_coco_in_folds(cluster, tmp_path, direction, content, measure):
    folder = datasets.karpathy(tmp_path / "data")
    path = str(folder / "dataset_coco.json")
    source = {"name": "karpathy", "path": path, "content": content}
    uri = index(tmp_path, source, tiny_qwen(tmp_path / "model"))
    benchmark = {"name": "karpathy", "path": path, "direction": direction, "folds": 2}
    evaluation = evaluate(tmp_path, uri, benchmark, measures=["MdR", "R@2"])
    assert evaluation.headline == measure
    row = evaluation.row("full.maxsim")
    num_queries, fold_size = (8, 2) if content == "images" else (4, 4)
    assert len(row.values) == num_queries and 1 <= row.means["MdR"] <= fold_size
    lines = (tmp_path / "out/runs/full.maxsim.trec").read_text().splitlines()
    assert len(lines) == num_queries * fold_size
    for query_id, _, document, *_ in map(str.split, lines):
        query_image, image = (int(name.partition("#")[0]) for name in (query_id, document))
        assert (query_image - 100) // 2 == (image - 100) // 2  # the same fold
    # Each query token is compared with all vectors of the documents of its fold.
    assert row.maxsim_ops > 0 and row.maxsim_ops % 1 == 0


@pytest.mark.heavy
def test_mmeb_ranks_the_candidates_of_each_row(cluster, tmp_path):
    folder = datasets.mmeb(tmp_path / "data")
    fields = {"path": str(folder / "CIRR"), "images": str(folder / "image-tasks")}
    uri = index(tmp_path, {"name": "mmeb", **fields}, tiny_qwen(tmp_path / "model"))
    evaluation = evaluate(tmp_path, uri, {"name": "mmeb", **fields}, measures=["RR"], bm25=False)
    assert evaluation.headline == "Success@1" and evaluation.num_items == 4
    lines = (tmp_path / "out/runs/full.maxsim.trec").read_text().splitlines()
    ranked: dict[str, set[str]] = {}
    for line in lines:
        query_id, _, document, *_ = line.split()
        ranked.setdefault(query_id, set()).add(document.replace("%20", " "))
    assert ranked == {
        "0": {"CIRR/1.jpg", "CIRR/2.jpg", "CIRR/3.jpg"},
        "1": {"CIRR/3.jpg", "CIRR/2.jpg:a caption"},
    }


@pytest.mark.heavy
def test_entities_measure_grounding(cluster, tmp_path):
    folder = datasets.flickr30k(tmp_path / "data")
    path = str(folder / "dataset_flickr30k.json")
    source = {"name": "karpathy", "path": path, "images": str(folder / "images")}
    uri = index(
        tmp_path,
        source,
        {"name": "colpali", "model": MODEL, "dtype": "float32"},
        representations=[
            {"compressor": "none"},
            {"compressor": {"name": "hpool", "num_vectors": 4}},
        ],
    )
    benchmark = {"name": "karpathy", "path": path, "entities": str(folder)}
    evaluation = evaluate(tmp_path, uri, benchmark, grounding="benchmark")
    for name in ("full.maxsim", "hpool_4.maxsim"):
        grounding = evaluation.row(name).grounding
        assert grounding["phrases"] == 1 and 0 < grounding["box_mass"] < 1


@pytest.mark.heavy
def test_boxes_of_vidore_measure_grounding(cluster, tmp_path):
    folder = datasets.vidore(tmp_path / "data")
    source = {"name": "images", "path": str(folder / "corpus"), "id_field": "corpus_id"}
    uri = index(tmp_path, source, {"name": "colpali", "model": MODEL, "dtype": "float32"})
    benchmark = {"name": "vidore", "path": str(folder), "language": "english"}
    evaluation = evaluate(tmp_path, uri, benchmark, grounding="benchmark")
    row = evaluation.row("full.maxsim")
    assert row.grounding["phrases"] == 1 and 0 <= row.grounding["region_hit"] <= 1
    assert row.means["nDCG@10"] > 0.5
