"""Our numbers on ArguAna, Quora and CQADupStack equal those of mteb on the same miniatures."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.datasets.mteb_results import measure_name
from pipeline.eval.metrics import means, per_query
from pipeline.registry import BENCHMARKS, ENCODERS, SOURCES
from pipeline.schema import Item
from tests.conftest import ROOT
from tests.datasets import mteb_data, mteb_scores

STORED = json.loads(mteb_scores.SCORES.read_text("utf-8"))["scores"]
MEASURES = {measure_name(metric): metric for metric in mteb_scores.METRICS}


@functools.cache
def encoder():
    return ENCODERS.build(ENCODERS.resolve({"name": "minilm"}))


def scores(source: dict, benchmark: dict) -> dict[str, float]:
    """Returns our metrics of the single vectors of a collection."""
    reader = SOURCES.build(SOURCES.resolve(source), ("text",))
    items = [item for shard in reader.shards() for item in reader.scan(shard)]
    assert all(isinstance(item, Item) for item in items)
    table = pa.table({"text": [item.text for item in items]})
    documents = np.zeros((len(items), encoder().pooled_dim), np.float32)
    for rows, batch in encoder().encode(table):
        documents[rows] = batch.pooled.numpy()
    judged = BENCHMARKS.build(BENCHMARKS.resolve(benchmark)).load()
    queries = encoder().encode_queries(list(judged.queries.values())).tokens.pooled.numpy()
    ids = [item.item_id for item in items]
    run = {
        query_id: judged.remove_queries(query_id, ranked(ids, values), k=100)
        for query_id, values in zip(judged.queries, queries @ documents.T, strict=True)
    }
    return means(per_query(run, judged.qrels, list(MEASURES)))


def ranked(ids: list[str], values: np.ndarray) -> dict[str, float]:
    order = np.argsort(-values, kind="stable")
    return {ids[row]: float(values[row]) for row in order}


@functools.cache
def our_scores(folder: Path, task: str) -> dict[str, float]:
    path = str(mteb_scores.write_beir(folder, task))
    return scores({"name": "text", "path": path}, {"name": "beir", "path": path})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("beir")


@pytest.mark.parametrize("task", mteb_scores.FOLDERS)
def test_scores_equal_those_of_mteb(task, folder):
    found = our_scores(folder, task)
    assert {MEASURES[name]: value for name, value in found.items()} == pytest.approx(
        {name: value for name, value in STORED[task].items() if name != "main_score"}, abs=1e-5
    )


@pytest.mark.parametrize("task", ["ArguAna", "QuoraRetrieval"])
def test_queries_are_documents_that_are_removed(task, folder):
    path = str(mteb_scores.write_beir(folder, task))
    source = {"name": "text", "path": path}
    benchmark = {"name": "beir", "path": path, "ignore_identical_ids": False}
    with_queries = scores(source, benchmark)
    assert with_queries["nDCG@10"] < our_scores(folder, task)["nDCG@10"] - 0.05


def test_cqadupstack_is_the_mean_over_its_forums(folder):
    forums = [name for name in mteb_scores.FOLDERS if name.startswith("CQADupstack")]
    found = [our_scores(folder, forum)["nDCG@10"] for forum in forums]
    expected = STORED[mteb_scores.CQADUPSTACK]["main_score"]
    assert math.fsum(found) / len(found) == pytest.approx(expected, abs=1e-5)


@mteb_data.NEEDS_MTEB
@pytest.mark.parametrize("task", ["ArguAna", "QuoraRetrieval", "CQADupstackTexRetrieval"])
def test_snapshots_of_mteb_have_the_same_scores(task, folder, tmp_path):
    data = {"name": "mteb", "task": task, "data": str(mteb_scores.write_snapshot(tmp_path, task))}
    assert scores(data, data) == pytest.approx(our_scores(folder, task), abs=1e-5)


@pytest.mark.heavy
def test_mteb_gives_the_stored_scores(tmp_path):
    python = os.environ.get("MTEB_PYTHON")
    if not python:
        pytest.skip("MTEB_PYTHON does not name a Python with the extra mteb")
    file = tmp_path / "scores.json"
    command = [python, "-m", "tests.datasets.mteb_scores", str(file)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    made = json.loads(file.read_text("utf-8"))["scores"]
    assert made.keys() == STORED.keys()
    for task, expected in STORED.items():
        assert made[task] == pytest.approx(expected, abs=1e-5), task
