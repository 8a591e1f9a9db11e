"""Conversion of requests to search options."""

from __future__ import annotations

import pytest

from pipeline.index.reader import IndexReader
from pipeline.search.options import Rerank
from pipeline.serve import wire
from pipeline.serve.errors import ApiError
from pipeline.serve.inputs import search_options
from pipeline.serve.responses import index_info
from pipeline.serve.served import Served
from pipeline.serve.settings import Limits, ServedCandidates, ServedIndex


@pytest.fixture(scope="module")
def served(nested_uri) -> Served:
    index = IndexReader(nested_uri)
    return Served("texts", ServedIndex(uri=nested_uri), index, index.edition)


def test_prefixes_of_representations(served):
    rerank = Rerank(representation="nested_8@5")
    request = wire.SearchRequest(query="a wing", representation="nested_8@3", rerank=rerank)
    options = search_options(request, served, 1, Limits())
    assert (options.column, options.rerank[0].representation) == ("nested_8@3", "nested_8@5")


@pytest.mark.parametrize("field", ["representation", "rerank.representation"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nested_8@9", "must be nested_8@K with an integer K from 1 to 8, its stored budget, got"),
        ("nested_8@x", "must be nested_8@K with an integer K from 1 to 8, its stored budget, got"),
        ("hpool_4@2", "which stores no nested vectors"),
        ("nobody@2", "which is not in the index"),
    ],
)
def test_invalid_prefixes(served, field, name, message):
    fields = {"representation": name}
    if field != "representation":
        fields = {"rerank": Rerank(representation=name)}
    request = wire.SearchRequest(query="a wing", **fields)
    with pytest.raises(ApiError, match=message) as caught:
        search_options(request, served, 1, Limits())
    assert (caught.value.field, caught.value.status) == (field, 422)


@pytest.fixture(scope="module")
def with_defaults(index_uri) -> Served:
    index = IndexReader(index_uri)
    candidates = {
        "hpool_2": ServedCandidates(generator="single", num_candidates=50),
        "hpool_4": ServedCandidates(generator="ivf"),
    }
    spec = ServedIndex(uri=index_uri, candidates=candidates)
    return Served("texts", spec, index, index.edition)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"representation": "hpool_2"}, ("single", 50)),
        ({"representation": "hpool_2", "k": 80}, ("single", 80)),
        ({"representation": "hpool_2", "num_candidates": 20}, ("single", 20)),
        ({"representation": "hpool_2", "candidates": "exact"}, ("exact", None)),
        ({"representation": "hpool_2", "candidates": "single"}, ("single", 50)),
        ({"representation": "hpool_2", "score": "single_vector"}, ("exact", None)),
        ({"representation": "hpool_4"}, ("exact", None)),  # the generator was not built
        ({"representation": "full", "candidates": "single"}, ("single", None)),
        ({}, ("exact", None)),
    ],
)
def test_default_candidates(with_defaults, fields, expected):
    request = wire.SearchRequest(query="a wing", **fields)
    options = search_options(request, with_defaults, 1, Limits())
    assert (options.candidates, options.num_candidates) == expected


def test_info_lists_candidates(with_defaults):
    infos = {info.name: info for info in index_info(with_defaults).representations}
    assert infos["hpool_2"].candidates == ["exact", "single"]
    assert infos["hpool_2"].default_candidates == "single"
    assert infos["hpool_4"].default_candidates == "exact"
