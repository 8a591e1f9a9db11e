"""Tests that searches over HTTP give the results of in-process searches."""

from __future__ import annotations

import itertools
from functools import partial

import httpx2
import numpy as np
import pytest

from pipeline.search.maps import similarity_map
from pipeline.search.options import Rerank
from pipeline.search.results import Hit
from pipeline.search.searcher import open_index
from pipeline.search.stored_items import stored_query
from pipeline.serve import wire
from pipeline.serve.client import ServerError
from pipeline.serve.wire import ErrorResponse
from tests.serve.conftest import at_once

QUERIES = ["the lift of a wing", "heat", "bread with a golden crust"]
INDEXES = ["texts", "whole"]  # with two shards and with one


@pytest.fixture(scope="module")
def searcher(index_uri):
    return open_index(index_uri)


def summaries(hits) -> list[tuple]:
    """Returns the fields that must be equal in hits of the server and of the searcher."""
    return [(hit.rank, hit.item_id, hit.parent_id, hit.title, hit.text) for hit in hits]


def assert_same(hits: list[Hit], expected) -> None:
    assert summaries(hits) == summaries(expected)
    # The searcher scores in different blocks, so sums are rounded differently.
    np.testing.assert_allclose([h.score for h in hits], [h.score for h in expected], rtol=1e-5)


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("score", ["maxsim", "single_vector", "hybrid"])
def test_equals_in_process_search(client, searcher, index, score):
    for query, representation in itertools.product(QUERIES, ["full", "hpool_2", "random_4"]):
        options = {"representation": representation, "score": score, "k": 5}
        response = client.search(query, index=index, **options)
        assert (response.index, response.representation) == (index, representation)
        assert response.version == searcher.index.version and not response.reranked
        assert_same(response.hits, searcher.search(query, **options))
        for hit, expected in zip(response.hits, searcher.search(query, **options), strict=True):
            for part in ("maxsim", "maxsim_mean", "single_vector"):
                ours, theirs = getattr(hit.parts, part), getattr(expected.parts, part)
                assert ours == (None if theirs is None else pytest.approx(theirs, rel=1e-5))


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"group_by": "parent"}, {"group_by": "parent"}),
        ({"filter": "item_id LIKE 'wing%'"}, {"filter": "item_id LIKE 'wing%'"}),
        ({"filter": "item_id = 'nobody'"}, {"filter": "item_id = 'nobody'"}),
        ({"ids": ["flow", "bread/1", "nobody"]}, {"ids": ["flow", "bread/1"]}),
        ({"ids": []}, {"ids": []}),
        ({"parents": ["heat"], "k": 1}, {"parents": ["heat"], "k": 1}),
        (
            {"score": "hybrid", "weights": (1, 0.25), "group_by": "parent"},
            {"score": "hybrid", "weights": (1, 0.25), "group_by": "parent"},
        ),
    ],
)
def test_equals_in_process_search_with_options(client, searcher, index, ours, theirs):
    for query in QUERIES:
        assert_same(
            client.search(query, index=index, **ours).hits, searcher.search(query, **theirs)
        )


def test_candidates_equal_in_process_search(client, searcher):
    options = {"representation": "hpool_2", "k": 2, "candidates": "single", "num_candidates": 4}
    for query in QUERIES:
        hits = client.search(query, index="whole", **options).hits
        assert_same(hits, searcher.search(query, **options))
        sharded = client.search(query, index="texts", **options).hits
        assert all(a.score >= b.score - 1e-5 for a, b in zip(sharded, hits, strict=True))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"candidates": "ivf"}, "candidates"), ({"num_candidates": 5}, "num_candidates")],
)
def test_rejects_invalid_candidates(url, options, field):
    headers, body = {"Authorization": "Bearer mr_all"}, {"query": "wing", "index": "texts"}
    response = httpx2.post(f"{url}/v1/search", json={**body, **options}, headers=headers)
    problem = ErrorResponse.model_validate_json(response.content).error
    assert (response.status_code, problem.code) == (422, "invalid_argument")
    assert problem.field == field and problem.message.startswith(field)


@pytest.mark.parametrize("index", INDEXES)
def test_batch_search(client, searcher, index):
    response = client.search_batch(QUERIES, index=index, k=3)
    for hits, query in zip(response.results, QUERIES, strict=True):
        assert_same(hits, searcher.search(query, k=3))


@pytest.mark.parametrize("rerank", [None, Rerank(top=4)])
def test_batch_of_maximum_size(client, searcher, rerank):
    queries = QUERIES * 50
    vectors = np.ones((1, 384), np.float32)
    response = client.search_batch([*queries[1:], vectors], index="texts", k=2, rerank=rerank)
    expected = {query: searcher.search(query, k=2) for query in QUERIES}
    for hits, query in zip(response.results[:-1], queries[1:], strict=True):
        assert_same(hits, expected[query])
    assert_same(response.results[-1], searcher.search(vectors, k=2))


def test_query_vectors(client, searcher):
    vectors = np.random.default_rng(0).normal(size=(3, 384)).astype(np.float32)
    assert_same(client.search(vectors, index="texts").hits, searcher.search(vectors))


@pytest.mark.parametrize("index", INDEXES)
def test_explanations(client, searcher, index):
    query = "the lift of a wing"
    options = {"representation": "hpool_4", "k": 3}
    hits = client.search(query, index=index, explain="matches", **options).hits
    for hit, expected in zip(hits, searcher.search(query, **options), strict=True):
        assert hit.map is None
        for match, other in zip(hit.matches, expected.matches, strict=True):
            assert (match.query_token, match.document_token) == (
                other.query_token,
                other.document_token,
            )
            assert match.spans == other.spans
            assert match.similarity == pytest.approx(other.similarity, abs=1e-5)
            assert match.contribution == pytest.approx(other.contribution, abs=1e-5)
        for passage, other in zip(hit.passages, expected.passages, strict=True):
            assert (passage.span, passage.box, passage.times) == (other.span, None, None)
            assert passage.contribution == pytest.approx(other.contribution, abs=1e-4)
            spans = [word.span for word in passage.highlights]
            assert spans == [word.span for word in other.highlights]
    hit = client.search(query, index=index, explain="map", **options).hits[0]
    expected_map = similarity_map(searcher, query, hit.item_id, "hpool_4")
    assert hit.map.query_tokens == expected_map.query_tokens
    for word, expected in zip(hit.map.words, expected_map.words, strict=True):
        assert (word.text, word.box, word.times) == (expected.text, None, None)
        assert word.similarities == pytest.approx(expected.similarities, abs=2e-4)
    hit = client.search(query, index=index).hits[0]
    assert hit.matches is None and hit.passages is None


@pytest.mark.parametrize("index", INDEXES)
def test_reranking(client, searcher, index):
    """The best hits of the first stage are rescored with all token vectors."""
    for query in QUERIES:
        first = searcher.rank([query], "random_4", k=4)[0]
        reranked = searcher.rank([query], "full", k=2, ids=first.item_ids)[0]
        response = client.search(
            query, index=index, representation="random_4", k=2, rerank=Rerank(top=4)
        )
        assert response.reranked and [hit.item_id for hit in response.hits] == reranked.item_ids
        scores = [hit.score for hit in response.hits]
        np.testing.assert_allclose(scores, reranked.scores, rtol=1e-5)
        for hit in response.hits:
            assert hit.first_stage.rank == first.item_ids.index(hit.item_id) + 1


def test_rerank(client, searcher):
    ids = ["flow", "bread/1", "wing/1", "nobody", "flow"]
    response = client.rerank("the lift of a wing", ids, index="texts")
    expected = searcher.rank(["the lift of a wing"], "full", ids=ids)[0]
    assert [scored.item_id for scored in response.results] == expected.item_ids
    assert response.missing == ["nobody"]
    assert len(client.rerank("lift", ids, index="texts", k=1).results) == 1


def test_encode(client, searcher):
    response = client.encode(QUERIES, index="texts")
    expected = searcher.queries(QUERIES)
    assert response.fingerprint == searcher.index.representation("full").encoder.fingerprint
    for query, tokens, texts in zip(
        response.queries, expected.tokens, expected.token_texts, strict=True
    ):
        np.testing.assert_allclose(query.vectors, tokens.numpy(), atol=1e-5)
        assert query.token_texts == texts and len(query.single_vector) == 384


def test_items_and_indexes(client, searcher):
    item = client.item("wing/1", "texts")
    assert item.parent_id == "wing" and item.title == "On wing/1" and item.modality == "text"
    names = [info.name for info in client.indexes()]
    assert names == ["texts", "whole"]
    info = client.indexes()[0]
    assert info.num_items == 8 and info.default_representation == "full"
    roles = {r.name: r.role for r in info.representations}
    assert roles["hpool_2"] == "search" and "rerank" in roles.values()


def test_concurrent_requests(client, searcher):
    """Concurrent requests are batched."""
    expected = {query: searcher.search(query, k=3) for query in QUERIES}
    queries = QUERIES * 8
    options = {"index": "texts", "k": 3}
    responses = at_once([partial(client.search, query, **options) for query in queries])
    for query, response in zip(queries, responses, strict=True):
        assert_same(response.hits, expected[query])


def test_invalid_request_does_not_fail_concurrent_ones(client, searcher):
    invalid = partial(client.search, "x", index="texts", filter="nonsense = ")
    valid = partial(client.search, "heat", index="texts", k=3)
    error, *responses = at_once([invalid] + [valid] * 6)
    assert isinstance(error, ServerError) and error.problem.field == "filter"
    for response in responses:
        assert_same(response.hits, searcher.search("heat", k=3))


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("score", ["maxsim", "hybrid"])
def test_item_as_query(client, searcher, index, score):
    """Searches by the stored vectors of an item of any shard."""
    for item_id, representation in itertools.product(["wing/1", "bread/2"], ["full", "hpool_4"]):
        options = {"score": score, "k": 4}
        query = stored_query(searcher.index, item_id, representation)
        (expected,) = searcher.search(
            searcher.encoders.transform(query, representation), representation, **options
        )
        hits = client.search(
            wire.StoredItem(item=item_id), index=index, representation=representation, **options
        ).hits
        assert_same(hits, expected)
        assert hits[0].item_id == item_id
        assert (hits[0].modality, hits[0].source) == ("text", "test")


@pytest.mark.parametrize(
    ("query", "options", "field"),
    [
        ({"item": "nobody"}, {}, "query.item"),
        ({"item": "wing/1", "box": [0, 0, 1, 1]}, {}, "query.box"),
        ({"item": "wing/1", "times": [0, 1]}, {}, "query.times"),
        ({"item": "wing/1", "box": [1, 0, 0, 1]}, {}, "query.box"),
        ({"item": "wing/1", "box": [0, 0, 1, 2]}, {}, "query.box[3]"),
        ({"item": "wing/1", "times": [1, 1]}, {}, "query.times"),
        ({"item": ""}, {}, "query.item"),
        ({"item": "wing/1", "page": 1}, {}, "query.page"),
        ({"item": "wing/1"}, {"rerank": {"name": "edje"}}, "rerank.name"),
    ],
)
def test_rejects_invalid_item_queries(http, query, options, field):
    response = http.post("/v1/search", json={"query": query, "index": "texts", **options})
    error = wire.ErrorResponse.model_validate_json(response.content).error
    assert (response.status_code, error.field) == (422, field), error


def test_item_as_query_with_rerank(client):
    hits = client.search(
        wire.StoredItem(item="wing/1"),
        index="texts",
        representation="hpool_2",
        rerank=Rerank(representation="full", top=6),
        k=2,
    ).hits
    assert hits[0].item_id == "wing/1" and hits[0].first_stage is not None
