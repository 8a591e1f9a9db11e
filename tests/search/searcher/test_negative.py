"""Negative queries: scores minus weighted scores of another query."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline import Composed
from pipeline.config import SpecError
from pipeline.search.searcher import open_index
from pipeline.search.sharded import ShardedSearcher

QUERY, NEGATIVE = "a wing in a slipstream", "how to bake bread"


@pytest.fixture(scope="module")
def searcher(index_uri):
    return open_index(index_uri)


def scores(searcher, query, **options):
    return {hit.item_id: hit.score for hit in searcher.search(query, k=100, **options)}


@pytest.mark.parametrize("score", ["maxsim", "single_vector", "hybrid"])
@pytest.mark.parametrize("name", ["full", "hpool_2"])
def test_weighted_score_is_subtracted(searcher, score, name):
    options = {"representation": name, "score": score}
    positive, negative = (scores(searcher, text, **options) for text in (QUERY, NEGATIVE))
    expected = {item: positive[item] - 0.3 * negative[item] for item in positive}
    for more in ({}, {"ids": list(positive)}, {"group_by": "parent"}):
        hits = searcher.search(
            QUERY, negative=NEGATIVE, negative_weight=0.3, k=100, **options, **more
        )
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        for hit in hits:
            assert hit.score == pytest.approx(expected[hit.item_id], abs=1e-4)
            assert hit.parts.negative == pytest.approx(negative[hit.item_id], abs=1e-4)
            part = hit.parts.maxsim if score == "maxsim" else hit.parts.single_vector
            assert part is not None
    assert searcher.search(QUERY, **options)[0].parts.negative is None


def test_default_weight_is_a_half(searcher):
    hits = searcher.search(QUERY, negative=NEGATIVE)
    assert hits == searcher.search(QUERY, negative=NEGATIVE, negative_weight=0.5)


def test_the_query_itself(searcher):
    """A weight below 1 scales all scores, and a weight of 1 makes them 0: ties by id."""
    plain, scaled = scores(searcher, QUERY), scores(searcher, QUERY, negative=QUERY)
    assert list(scaled) == list(plain)
    assert scaled == pytest.approx({item: 0.5 * score for item, score in plain.items()}, abs=1e-5)
    hits = searcher.search(QUERY, negative=QUERY, negative_weight=1, k=100)
    assert {hit.score for hit in hits} == {0.0}
    assert [hit.item_id for hit in hits] == sorted(hit.item_id for hit in hits)


def test_batches_shards_and_vectors(searcher, index_uri, cluster):
    options = {"negative": NEGATIVE, "representation": "full", "k": 5}
    together = searcher.search([QUERY, "heat"], **options)
    alone = searcher.search("heat", **options)
    assert [hit.item_id for hit in together[1]] == [hit.item_id for hit in alone]
    (vectors,) = searcher.queries([NEGATIVE]).tokens
    found = searcher.search(QUERY, **{**options, "negative": vectors.numpy()})
    assert [hit.item_id for hit in found] == [hit.item_id for hit in together[0]]
    with ShardedSearcher(index_uri, num_shards=2) as sharded:
        found = sharded.search(QUERY, **options)
    assert [hit.item_id for hit in found] == [hit.item_id for hit in together[0]]
    scores = [hit.score for hit in together[0]]
    np.testing.assert_allclose([hit.score for hit in found], scores, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negative": " "}, "negative must be a text with at least one word, got ' '"),
        ({"negative": b"GIF"}, "negative must be a text or audio or a video, got 'an image', whi"),
        ({"negative": Composed(audio=b"x")}, "negative.audio must be a readable audio file"),
        ({"negative": "x", "negative_weight": 0}, "negative_weight must be .*got 0"),
        ({"negative": "x", "negative_weight": 1.5}, "negative_weight must be .*got 1.5"),
        ({"negative": "x", "negative_weight": float("nan")}, "negative_weight must be .*got nan"),
    ],
)
def test_errors(searcher, options, message):
    with pytest.raises(SpecError, match=f"^{message}"):
        searcher.search(QUERY, **options)


def test_fused_scores_and_reranking_are_refused(lexical_uri):
    searcher = open_index(lexical_uri)
    with pytest.raises(SpecError, match="^score must be maxsim, single_vector or hybrid with a ne"):
        fusion = {"weights": {"bm25": 0.5}}
        searcher.search(QUERY, negative=NEGATIVE, score="fused", fusion=fusion)
