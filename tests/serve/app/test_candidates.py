"""Default candidate generators and weights of query tokens over HTTP."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from pipeline import open_index
from pipeline.config import parse
from pipeline.search.maps import similarity_map
from pipeline.search.query import Queries
from pipeline.search.token_weights_job import TokenFrequenciesSpec, run
from pipeline.serve.client import Client, ServerError

pytestmark = pytest.mark.heavy

QUERY = "The lift of the wing"


def test_defaults_and_weights(index_uri, tmp_path, serving_once):
    uri = str(tmp_path / "index")
    shutil.copytree(index_uri, uri)
    run(parse(TokenFrequenciesSpec, {"index": uri}), job="1", report=lambda line: None)
    candidates = {"hpool_2": {"generator": "single", "num_candidates": 4}}
    whole = {"uri": uri, "preload": ["hpool_2"], "candidates": candidates}
    settings = {"indexes": {"whole": whole, "sharded": {**whole, "num_shards": 2}}}
    searcher = open_index(uri)
    with Client(serving_once(settings, "candidates")) as client:
        infos = {info.name: info for info in client.indexes()[0].representations}
        assert infos["hpool_2"].default_candidates == "single"
        assert infos["hpool_2"].has_token_frequencies

        options = {"representation": "hpool_2", "k": 2}
        response = client.search(QUERY, index="whole", **options)
        expected = searcher.search(QUERY, candidates="single", num_candidates=4, **options)
        assert response.candidates == "single"
        assert [hit.item_id for hit in response.hits] == [hit.item_id for hit in expected]
        response = client.search(QUERY, index="whole", candidates="exact", **options)
        assert response.candidates == "exact"

        options = {"representation": "full", "k": 5}
        expected = searcher.search(QUERY, idf_power=1.0, **options)
        for index in ("whole", "sharded"):
            hits = client.search(QUERY, index=index, idf_power=1, explain="map", **options).hits
            assert [hit.item_id for hit in hits] == [hit.item_id for hit in expected]
            for hit, other in zip(hits, expected, strict=True):
                assert hit.score == pytest.approx(other.score, rel=1e-5)
                weights = [match.weight for match in hit.matches]
                assert weights == pytest.approx([match.weight for match in other.matches])
                assert hit.parts.maxsim_mean == pytest.approx(other.parts.maxsim_mean, rel=1e-5)
                map = similarity_map(searcher, QUERY, hit.item_id, "full", 1.0)
                credits = [word.credit for word in map.words]
                assert [word.credit for word in hit.map.words] == pytest.approx(credits, abs=1e-4)
            reranked = client.search(
                QUERY, index=index, idf_power=1, rerank={"rerank_depth": 5}, k=5,
                representation="hpool_2", candidates="exact",
            ).hits  # fmt: skip
            scores = {hit.item_id: hit.score for hit in searcher.search(QUERY, idf_power=1.0)}
            for hit in reranked:
                assert hit.score == pytest.approx(scores[hit.item_id], rel=1e-4)

        vectors = searcher.encoder("full").encode_queries([QUERY]).tokens.vectors[0].numpy()
        weights = np.linspace(0, 1, len(vectors)).tolist()
        body = {"vectors": vectors.tolist(), "weights": weights}
        answer = client._http.post("/v1/search", json={"query": body, "index": "whole", **options})
        found = [hit["score"] for hit in answer.raise_for_status().json()["hits"]]
        given = searcher.encoders.transform(Queries.from_vectors([vectors], [weights]), "full")
        (ranking,) = searcher.rank(given, "full", k=5)
        assert found == pytest.approx(ranking.scores, rel=1e-5)
        with pytest.raises(ServerError) as caught:
            client.search(np.ones((1, 384), np.float32), index="whole", idf_power=1)
        assert caught.value.problem.field == "idf_power"
