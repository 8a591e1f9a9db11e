"""Sheets of hits of an evaluation."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from examples.papers.synthetic.shapes_files import write_collection
from jobs import draw
from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.evaluation import run
from pipeline.eval.report.files import write
from pipeline.eval.report.match_sheets import IRRELEVANT, RELEVANT
from pipeline.eval.spec import EvaluateSpec
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search.map_sheets import SHEET_STEP
from tests.conftest import ROOT

MODEL = str(ROOT / "jobs/data/models/shapes_colpali")


@pytest.fixture(scope="module")
def evaluated(cluster, tmp_path_factory) -> str:
    """Output folder of an evaluation of six scenes, uncompressed and at two vectors."""
    folder = tmp_path_factory.mktemp("sheets")
    write_collection(folder / "shapes", 6)
    fields = {
        "index": str(folder / "index"),
        "source": {"name": "images", "path": str(folder / "shapes/images")},
        "encoder": {"name": "colpali", "model": MODEL, "dtype": "float32"},
        "representations": [
            {"compressor": "none"},
            {"compressor": {"name": "random", "num_vectors": 2}},
        ],
    }
    job.run(config.parse(IndexSpec, fields), IndexResources(), job="1", report=print)
    spec = {
        "index": fields["index"],
        "benchmark": {"name": "beir", "path": str(folder / "shapes")},
        "output": str(folder / "evaluation"),
        "bm25": False,
        "diagnostics": False,
        "k": 10,
        "measures": ["nDCG@10"],
    }
    write(run(config.parse(EvaluateSpec, spec), print), spec["output"])
    return spec["output"]


def has_colour(image: Image.Image, colour: tuple[int, int, int]) -> bool:
    return bool((np.asarray(image) == colour).all(axis=2).any())


def test_relevant_hits_are_outlined(evaluated, tmp_path, capsys):
    draw.main([
        "sheets",
        evaluated, "--row", "random_2.maxsim", "--row", "full.maxsim", "--queries", "q0",
        "--k", "6", "--output", str(tmp_path),
    ])  # fmt: skip
    (path,) = capsys.readouterr().out.split()
    image = Image.open(path).convert("RGB")
    assert image.size == (6 * SHEET_STEP, 2 * (SHEET_STEP + 44))
    with open(f"{evaluated}/runs/full.maxsim.trec", encoding="utf-8") as file:
        ranking = [line.split()[2] for line in file if line.startswith("q0 ")]
    with open(f"{evaluated}/../shapes/qrels/test.tsv", encoding="utf-8") as file:
        relevant = {line.split()[1] for line in file if line.startswith("q0\t")}
    for rank, item_id in enumerate(ranking):
        box = (rank * SHEET_STEP, SHEET_STEP + 96, (rank + 1) * SHEET_STEP, 2 * SHEET_STEP + 88)
        cell = image.crop(box)
        assert has_colour(cell, RELEVANT) == (item_id in relevant)
        assert has_colour(cell, IRRELEVANT) == (item_id not in relevant)


def test_default_queries_gain_most(evaluated, capsys):
    draw.main(["sheets", evaluated, "--count", "2", "--k", "1"])
    assert len(capsys.readouterr().out.split()) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--row", "ful.maxsim"], "did you mean 'full.maxsim'?"),
        (["--queries", "q99"], "--queries must be the id of a judged query, got 'q99'"),
    ],
)
def test_errors(evaluated, options, message):
    with pytest.raises(SpecError) as caught:
        draw.main(["sheets", evaluated, *options])
    assert message in str(caught.value)
