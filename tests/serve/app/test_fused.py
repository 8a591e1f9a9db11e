"""Fused search, BM25 candidates and their settings over HTTP, with two shards and with one."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.search.fusion import Fusion, FusionWeights
from pipeline.search.options import Rerank
from pipeline.search.searcher import open_index
from pipeline.serve.client import Client, ServerError

pytestmark = pytest.mark.heavy

QUERIES = ["the lift of a wing", "heat", "bread with a golden crust"]
FITTED = Fusion(weights=FusionWeights(bm25=0.25), agreement=0)


@pytest.fixture(scope="module")
def url(serving_here, lexical_uri, tmp_path_factory) -> str:
    """URL of a server of an index with fitted settings, and of the same index without."""
    path = tmp_path_factory.mktemp("fusion") / "fusion.yaml"
    path.write_text("weights: {bm25: 0.25}\nagreement: 0\n")
    settings = {
        "indexes": {
            "sharded": {"uri": lexical_uri, "num_shards": 2, "fusion": str(path)},
            "whole": {"uri": lexical_uri},
        },
        "single_process": True,
    }
    return serving_here(settings, "fused")


@pytest.fixture
def client(url):
    with Client(url) as client:
        yield client


@pytest.mark.parametrize("index", ["sharded", "whole"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"k": 2, "group_by": "parent"},
        {"filter": "item_id LIKE 'wing%'"},
        {"candidates": "single+bm25", "num_candidates": 10},
    ],
)
def test_equals_in_process_search(client, lexical_uri, index, options):
    searcher = open_index(lexical_uri)
    fusion = FITTED if index == "sharded" else Fusion(weights=FusionWeights(bm25=0.5))
    sent = {} if index == "sharded" else {"fusion": fusion}
    for query in QUERIES:
        expected = searcher.search(query, score="fused", fusion=fusion, explain=False, **options)
        hits = client.search(query, index=index, score="fused", **sent, **options).hits
        assert [hit.item_id for hit in hits] == [hit.item_id for hit in expected]
        np.testing.assert_allclose([h.score for h in hits], [h.score for h in expected], rtol=1e-4)
        for hit, other in zip(hits, expected, strict=True):
            assert hit.parts.bm25 == pytest.approx(other.parts.bm25, rel=1e-5)
            assert hit.parts.maxsim == pytest.approx(other.parts.maxsim, rel=1e-5)


def test_settings_of_a_request_replace_those_of_the_index(client, lexical_uri):
    weights = FusionWeights(bm25=2, single_vector=1)
    fusion = Fusion(weights=weights)
    expected = open_index(lexical_uri).search(QUERIES[0], score="fused", fusion=fusion, k=4)
    response = client.search(QUERIES[0], index="sharded", score="fused", fusion=fusion, k=4)
    scores = [hit.score for hit in expected]
    assert [hit.score for hit in response.hits] == pytest.approx(scores, rel=1e-5)
    assert response.hits[0].parts.single_vector is not None


def test_reranks_fused_hits(client):
    options = {"index": "sharded", "score": "fused", "k": 3}
    rerank = Rerank(top=6, representation="hpool_2")
    fused = client.search(QUERIES[0], **{**options, "k": 6}).hits
    hits = client.search(QUERIES[0], rerank=rerank, **options).hits
    first = {hit.item_id: (hit.rank, hit.score) for hit in fused}
    for hit in hits:
        assert first[hit.item_id] == (hit.first_stage.rank, pytest.approx(hit.first_stage.score))


def test_explains_fused_hits(client):
    hits = client.search("a wing", index="sharded", score="fused", k=2, explain="matches").hits
    assert all(hit.matches and hit.passages for hit in hits)


def test_indexes_list_scores_and_candidates(client):
    for index in client.indexes():
        by_name = {r.name: r for r in index.representations}
        fused = ["fused"] * (index.name == "sharded")  # the other has no weights
        assert by_name["full"].scores == ["maxsim", "single_vector", "hybrid", *fused]
        assert by_name["full"].candidates == ["exact", "single", "bm25"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"score": "fused"}, "fusion.weights"),
        ({"score": "fused", "fusion": Fusion(agreement=0)}, "fusion.weights"),
        ({"candidates": "single+ivf"}, "candidates"),
    ],
)
def test_rejects_invalid_options(client, options, field):
    with pytest.raises(ServerError) as caught:
        client.search("wing", index="whole", **options)
    assert (caught.value.problem.code, caught.value.problem.field) == ("invalid_argument", field)


def test_rejects_contradicting_options_before_a_request(client):
    with pytest.raises(ValidationError, match="score must be fused if fusion is set"):
        client.search("wing", index="whole", fusion=Fusion(agreement=0))


def test_rejects_vectors(client):
    with pytest.raises(ServerError) as caught:
        client.search(np.ones((1, 384), np.float32), index="sharded", score="fused")
    assert (caught.value.problem.code, caught.value.problem.field) == ("invalid_argument", "score")
