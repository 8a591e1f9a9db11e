"""Evaluations made by hand, for what reads them."""

import pytest

from pipeline.eval.diagnostics import Diagnosis
from pipeline.eval.results import Evaluation, Result

#: Two pairs of one query and one of another; the OSR is (0.5 + 1 + 0.75) / 3.
DIAGNOSIS = Diagnosis(
    full="full",
    pairs={"q0": [[1.0, 2.0], [2.0, 2.0]], "q1": [[3.0, 4.0]]},
    num_missing=0,
    used=0.5,
    used_relevant=0.25,
    cv=120.0,
    gini=0.4,
    num_positions=3,
    strengths=[0.5, 0.1, 0.3],
    similarity=[[1.0, 0.2, 0.1], [0.2, 1.0, 0.4], [0.1, 0.4, 1.0]],
    similarity_mean=0.23,
    num_sampled=1000,
)


def result(representation="hpool_32", method="hpool", num_vectors=32, score="late", **fields):
    """A row; `quality` gives the headline measure of each query."""
    quality = fields.pop("quality", [0.4, 0.42])
    values = {f"q{i}": {"nDCG@10": value, "AP": value / 2} for i, value in enumerate(quality)}
    rest = {
        "encoder": "e1",
        "values": values,
        "vectors_per_item": 31.5,
        "vector_bytes": 24192.0,
        "all_bytes": 26000.0,
        "queries_per_second": 1234.5,
        "median_ms": 1.5,
        "p95_ms": 2.25,
    }
    return Result(representation, method, num_vectors, score, **{**rest, **fields})


def evaluation_of(results, **fields):
    spec = {
        "index": "out/index",
        "benchmark": {"name": "beir", "path": "data/some"},
        "judged": "parent",
    }
    rest = {
        "spec": spec,
        "headline": "nDCG@10",
        "judgments": "j1",
        "num_items": 1400,
        "notes": ["2 judged queries"],
        "made": "2026-01-02 03:04 UTC",
        "versions": {"maxray": "0.1.0"},
    }
    return Evaluation(**{**rest, **fields}, results=results)


@pytest.fixture
def results():
    """BM25, a single vector, full tokens, and one method at two budgets under two scores."""
    free = {"encoder": "", "vectors_per_item": 0.0, "vector_bytes": 0.0, "all_bytes": 0.0}
    single = {"vectors_per_item": 1.0, "vector_bytes": 768.0, "all_bytes": 768.0}
    return [
        result("bm25", "bm25", None, "bm25", quality=[0.3, 0.4], **free),
        result("minilm_pooled", "single", 1, "single", quality=[0.2, 0.2], **single),
        result("full", "full", None, quality=[0.5, 0.5], vector_bytes=150e3, all_bytes=151e3),
        result(quality=[0.4, 0.42]),
        result(quality=[0.5, 0.48], score="hybrid", vector_bytes=25e3, all_bytes=27e3),
        result("hpool_16", num_vectors=16, quality=[0.1, 0.12], vector_bytes=12e3, all_bytes=14e3),
    ]


@pytest.fixture
def evaluation(results):
    return evaluation_of(results)
