"""Default candidate generators over HTTP."""

from __future__ import annotations

import pytest

from pipeline.search.searcher import open_index
from pipeline.serve.client import Client

pytestmark = pytest.mark.heavy

QUERY = "The lift of the wing"


def test_defaults(index_uri, serving_once):
    candidates = {"hpool_2": {"generator": "single", "num_candidates": 4}}
    served = {"uri": index_uri, "preload": ["hpool_2"], "candidates": candidates}
    settings = {"indexes": {"texts": served}, "single_process": True}
    searcher = open_index(index_uri)
    with Client(serving_once(settings, "candidates")) as client:
        infos = {info.name: info for info in client.indexes()[0].representations}
        assert infos["hpool_2"].default_candidates == "single"

        options = {"representation": "hpool_2", "k": 2}
        response = client.search(QUERY, **options)
        expected = searcher.search(QUERY, candidates="single", num_candidates=4, **options)
        assert response.candidates == "single"
        assert [hit.item_id for hit in response.hits] == [hit.item_id for hit in expected]
        response = client.search(QUERY, candidates="exact", **options)
        assert response.candidates == "exact"
