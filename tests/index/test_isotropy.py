"""Mean cosine of the vectors of an index, and what is said about it."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import evaluate, plan, status
from pipeline import Index
from pipeline.config import parse
from pipeline.index import job
from pipeline.index.isotropy import isotropy_remark, mean_cosine, sample_vectors
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search import num_candidates
from tests.tiny.anisotropic import ANISOTROPIC

DIM = 64


def vectors_with(cosine: float, num_items: int = 200, seed: int = 0) -> list[np.ndarray]:
    """Returns items (8, DIM) of unit vectors that share a direction, by their mean cosine."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((num_items, 8, DIM)) + 0.5 * rng.standard_normal(
        (num_items, 1, DIM)
    )
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    shared = np.zeros(DIM)
    shared[0] = 1
    vectors -= (vectors @ shared)[:, :, None] * shared  # orthogonal to the direction
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    return list((np.sqrt(cosine) * shared + np.sqrt(1 - cosine) * vectors).astype(np.float32))


def write(folder, cosine: float) -> str:
    uri = str(folder / f"index{cosine}")
    vectors = vectors_with(cosine)
    Index(uri).add([f"i{number}" for number in range(len(vectors))], vectors)
    return uri


@pytest.fixture(scope="module", params=[0.0, 0.3, 0.6, 0.95])
def made(request, tmp_path_factory) -> tuple[str, float]:
    return write(tmp_path_factory.mktemp("isotropy"), request.param), request.param


def test_mean_cosine_is_that_of_all_pairs(made):
    uri, cosine = made
    vectors = np.concatenate(vectors_with(cosine)).astype(np.float64)
    pairs = vectors @ vectors.T
    expected = (pairs.sum() - np.trace(pairs)) / (len(pairs) * (len(pairs) - 1))
    assert expected == pytest.approx(cosine, abs=0.01)
    assert mean_cosine(IndexReader(uri), "full") == pytest.approx(expected, abs=0.01)


def test_status_shows_it(made, capsys):
    uri, cosine = made
    status.main([uri])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("full"))
    assert float(row.split()[5]) == pytest.approx(cosine, abs=0.011)
    status.main([uri, "--json"])
    shown = json.loads(capsys.readouterr().out)["representations"]["full"]["cosine"]
    assert shown == pytest.approx(cosine, abs=0.01)
    remark = isotropy_remark(IndexReader(uri), "full")
    assert (remark is None) == (cosine < 0.5)
    assert remark is None or f"(mean cosine {cosine:.2f})" in remark


@pytest.mark.parametrize("vectors", [[], [np.ones((1, 4))]])
def test_fewer_than_two_vectors_have_none(tmp_path, vectors):
    index = Index(str(tmp_path / "index"))
    index.add(["a"], vectors or [np.ones((1, 4))])
    if not vectors:
        index.delete(["a"])
    reader = IndexReader(index.uri)
    assert mean_cosine(reader, "full") is None and isotropy_remark(reader, "full") is None
    assert len(sample_vectors(reader, "full", 8)[1]) == len(reader)


def test_equal_vectors_have_one(tmp_path):
    index = Index(str(tmp_path / "index"))
    index.add(["a", "b"], [np.ones((3, 4)), np.ones((2, 4))])
    assert mean_cosine(index.reader, "full") == pytest.approx(1)


@pytest.mark.usefixtures("blank_figures")
def test_recommendations_and_evaluations_report_it(tmp_path, capsys):
    vectors = vectors_with(0.95)
    index = Index(str(tmp_path / "index"))
    ids = [f"i{number}" for number in range(len(vectors))]
    full = {"id": "full", "compressor": "none", "codec": "float16"}
    index.add(ids, vectors, representations=[full])
    remark = "the vectors of full share a direction (mean cosine 0.95)"
    sweep = ("--methods", "none", "hpool", "--budgets", "4", "--codecs", "int8")
    plan.main(("recommend", index.uri, *sweep, "--out", str(tmp_path / "out")))
    assert remark in capsys.readouterr().out
    folder = tmp_path / "benchmark"
    (folder / "qrels").mkdir(parents=True)
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "any"}\n')
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ti3\t1\n")
    queries = pa.table({"id": ["q"], "vectors": [vectors[3][:4].tolist()]})
    pq.write_table(queries, tmp_path / "queries.parquet")
    spec = {
        "index": index.uri,
        "benchmark": {"name": "beir", "path": str(folder)},
        "query_vectors": str(tmp_path / "queries.parquet"),
        "output": str(tmp_path / "evaluation"),
        "bm25": False,
    }
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    evaluate.main([str(tmp_path / "spec.yaml")])
    assert remark in capsys.readouterr().out
    assert remark in (tmp_path / "evaluation/report.html").read_text()


def test_encoder_with_a_shared_direction(cluster, tmp_path, monkeypatch):
    """An item is found by some of its words, through the index job, candidates and the search."""
    monkeypatch.setattr(num_candidates, "QUERY_TOKENS", num_candidates.QUERY_WORDS)
    rng = np.random.default_rng(0)
    items = ["_".join(f"w{word}" for word in rng.permutation(4000)[:8]) for _ in range(600)]
    lines = [json.dumps({"_id": item, "text": item.replace("_", " ")}) for item in items]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    given = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(tmp_path)},
        "encoder": {"class": ANISOTROPIC, "seconds": 0.0, "num_tokens": 8, "dim": 64},
        "representations": [
            {"compressor": "none", "codec": codec} for codec in ("float32", "int8", "bits")
        ],
    }
    job.run(parse(IndexSpec, given), IndexResources(), job="1", report=lambda line: None)
    index = Index(given["index"])
    assert mean_cosine(index.reader, "full_float32") == pytest.approx(0.95, abs=0.01)
    for name in ("full_float32", "full_bits_1"):
        index.add_candidates({"name": "ivf", "num_centroids": 1024}, representation=name)
    queries = [" ".join(item.split("_")[:4]) for item in items[::20]]
    for name in ("full_bits_1", "full_int8"):
        assert first(index, queries, name) == items[::20]
    for name in ("full_float32", "full_bits_1"):
        found = first(index, queries, name, candidates="ivf", num_candidates=10)
        share = np.mean([a == b for a, b in zip(found, items[::20], strict=True)])
        assert share > 0.9
    column = index.reader.candidates_columns["full_float32_ivf_1_candidates"]
    passages = num_candidates._text_queries(index.reader, "full_float32")
    assert all(any(passage in item.replace("_", " ") for item in items) for passage in passages)
    numbers = num_candidates.measure(index.reader, column.name, passages, recall=0.98)
    assert column.numbers == numbers._asdict() and len(passages) == num_candidates.NUM_QUERIES


def first(index: Index, queries: list[str], representation: str, **options: object) -> list[str]:
    hits = index.searcher.search(queries, representation, k=1, **options)
    return [best[0].item_id for best in hits]
