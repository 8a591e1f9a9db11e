"""BLIP as a reranker, compared with the forward pass of transformers."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import BlipForImageTextRetrieval, BlipProcessor

from examples.papers.synthetic.shapes_files import write_collection
from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.evaluation import run
from pipeline.eval.report.files import write
from pipeline.eval.spec import EvaluateSpec
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search.rerankers import load_rerankers
from pipeline.search.searcher import open_index
from tests.conftest import ROOT

MODEL = str(ROOT / "jobs/data/models/shapes_colpali")
QUERIES = ["a small red circle left of a large blue star", "heat transfer"]


def blip(model: str) -> Any:
    return load_rerankers({"name": "blip", "model": model})[0]


@pytest.fixture(scope="module")
def folder(cluster, tmp_path_factory):
    """Folder with an index of five scenes and a text."""
    folder = tmp_path_factory.mktemp("blip")
    write_collection(folder / "shapes", 5)
    fields = {
        "index": str(folder / "index"),
        "source": {"name": "images", "path": str(folder / "shapes/images")},
        "encoder": {"name": "colpali", "model": MODEL, "dtype": "float32"},
        "representations": [{"compressor": "none"}],
    }
    job.run(config.parse(IndexSpec, fields), IndexResources(), job="1", report=print)
    return folder


@pytest.fixture(scope="module")
def match_logit(checkpoint):
    """Function that returns transformers' logit of "match" of a text and an image."""
    path = checkpoint("blip")
    model = BlipForImageTextRetrieval.from_pretrained(path).eval()
    processor = BlipProcessor.from_pretrained(path)

    def logit(text: str, image: Image.Image) -> float:
        inputs = processor(images=image, text=text, return_tensors="pt")
        inputs = {k: v for k, v in inputs.items() if k != "token_type_ids"}
        with torch.inference_mode():
            return model(**inputs, use_itm_head=True).itm_score[0, 1].item()

    return logit


def test_scores_equal_transformers(folder, checkpoint, match_logit):
    searcher = open_index(str(folder / "index"))
    files = sorted((folder / "shapes/images").glob("*.png"))
    reranker = blip(checkpoint("blip"))
    names = [file.name for file in files]
    for _ in range(2):  # the second time with cached features
        found = reranker.score(searcher, QUERIES, [names, names[:2]])
        assert [list(scores) for scores in found] == [names, names[:2]]
        for query, scores in zip(QUERIES, found, strict=True):
            for name, score in scores.items():
                image = Image.open(folder / "shapes/images" / name).convert("RGB")
                assert score.score == pytest.approx(match_logit(query, image), abs=1e-5)
                assert score.num_truncated_tokens == 0


def test_rows_of_an_evaluation(folder, checkpoint, match_logit):
    spec = {
        "index": str(folder / "index"),
        "benchmark": {"name": "beir", "path": str(folder / "shapes")},
        "output": str(folder / "evaluation"),
        "bm25": False,
        "diagnostics": False,
        "k": 10,
        "measures": ["nDCG@10"],
        "rerank": [{"name": "blip", "model": checkpoint("blip"), "top": 3}],
    }
    evaluation = run(config.parse(EvaluateSpec, spec), print)
    write(evaluation, spec["output"])
    row = evaluation.row("blip_3")
    assert (row.method, row.score, row.first_stage) == ("blip", "blip", "full.maxsim")
    model = BlipForImageTextRetrieval.from_pretrained(checkpoint("blip"))
    others = torch.nn.ModuleList([model.vision_model, model.vision_proj, model.text_proj])
    num_others = sum(parameter.numel() for parameter in others.parameters())
    assert row.rerank["parameters"] == model.num_parameters() - num_others
    with (folder / "evaluation/runs/blip_3.trec").open(encoding="utf-8") as file:
        reranked = [line.split()[2] for line in file if line.startswith("q0 ")]
    with (folder / "evaluation/runs/full.maxsim.trec").open(encoding="utf-8") as file:
        first = [line.split()[2] for line in file if line.startswith("q0 ")]
    with (folder / "shapes/queries.jsonl").open(encoding="utf-8") as file:
        query = json.loads(file.readline())["text"]
    logits = {
        name: match_logit(query, Image.open(folder / "shapes/images" / name).convert("RGB"))
        for name in first[:3]
    }
    assert reranked[:3] == sorted(first[:3], key=lambda name: -logits[name])
    assert reranked[3:] == first[3:]


def test_image_queries_need_texts(folder, checkpoint):
    searcher = open_index(str(folder / "index"))
    data = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(data, "PNG")
    found = blip(checkpoint("blip")).score(searcher, [data.getvalue()], [["scene-00000.png"]])
    assert found == [{}]


def test_errors(folder, checkpoint):
    with pytest.raises(SpecError, match="a checkpoint of the type blip"):
        blip(MODEL)
    fields = {"name": "blip", "model": "x", "precision": "int8"}
    spec = {"index": "i", "benchmark": {"name": "beir", "path": "b"}, "output": "o"}
    with pytest.raises(SpecError, match=r"unknown field 'precision' in rerank\[0\].rerankers"):
        config.parse(EvaluateSpec, {**spec, "rerank": [fields]})
