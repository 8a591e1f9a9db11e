"""Search against reference scores: ties, filters, ids, groups, weights, score components."""

import itertools

import numpy as np
import pytest

from pipeline.config import SpecError
from pipeline.search.results import ScoreParts
from pipeline.search.score import QUERY_BATCH
from tests.search.conftest import random_queries, random_rows, reference_ranking

NAME = "hpool_2"
NOT_FINITE = "finite in float32, got 'NaN or infinity'"


def hit_tuples(hits):
    return [(hit.item_id, hit.parent_id, hit.score, hit.parts) for hit in hits]


def expected_tuples(ranking, k):
    names = ("maxsim", "maxsim_mean", "single_vector")
    return [
        (row.item_id, row.parent_id, s.total, ScoreParts(**dict(zip(names, s[1:], strict=True))))
        for row, s in ranking[:k]
    ]


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.mark.parametrize("group_by", [None, "parent"])
@pytest.mark.parametrize(
    ("score", "weights"),
    [
        ("maxsim", (1, 1)),
        ("single_vector", (1, 1)),
        ("hybrid", (1, 1)),
        ("hybrid", (1.0, 0.25)),
        ("hybrid", (0, 2)),
        ("hybrid", (0.5, 0)),
    ],
)
def test_equals_reference_scores(make_index, rng, score, weights, group_by):
    """Covers all combinations of filter, ids and parents; most scores are ties."""
    rows, queries = random_rows(rng, 120), random_queries(rng, 8)
    searcher = make_index(rows)
    ids = [f"i{i:03}" for i in rng.choice(200, 90, replace=False)]
    parents = [f"p{i}" for i in range(0, 40, 2)]
    for filter, item_list, parent_list in itertools.product(
        (None, "item_id >= 'i030'"), (None, ids), (None, parents)
    ):
        selected = [
            row
            for row in rows
            if (filter is None or row.item_id >= "i030")
            and (item_list is None or row.item_id in ids)
            and (parent_list is None or row.parent_id in parents)
        ]
        for k in (1, 3, 10, 500):
            options = {"score": score, "group_by": group_by, "weights": weights, "k": k}
            options |= {"filter": filter, "ids": item_list, "parents": parent_list}
            hits_of_queries = searcher.search(queries, NAME, explain=False, **options)
            rankings = searcher.rank(queries, NAME, **options)
            for query, (hits, ranking) in enumerate(zip(hits_of_queries, rankings, strict=True)):
                reference = reference_ranking(
                    selected, queries, query, score, weights, by_parent=group_by == "parent"
                )
                assert hit_tuples(hits) == expected_tuples(reference, k)
                assert ranking.item_ids == [hit.item_id for hit in hits]
                assert ranking.scores == [hit.score for hit in hits]


def test_more_queries_than_a_batch(make_index, rng):
    rows, queries = random_rows(rng, 30), random_queries(rng, 2 * QUERY_BATCH + 1)
    hits = make_index(rows).search(queries, NAME, score="hybrid", k=5, explain=False)
    assert [hit_tuples(query_hits) for query_hits in hits] == [
        expected_tuples(reference_ranking(rows, queries, query, "hybrid"), 5)
        for query in range(len(queries))
    ]


def test_empty_selection_returns_no_hits(make_index, rng):
    rows, queries = random_rows(rng, 20), random_queries(rng, 2)
    searcher = make_index(rows)
    for restriction in (
        {"filter": "item_id = 'none'"},
        {"ids": []},
        {"ids": ["none", "nobody"]},
        {"parents": []},
        {"ids": ["i001"], "filter": "item_id = 'i002'"},
    ):
        for group_by in (None, "parent"):
            hits = searcher.search(queries, NAME, score="hybrid", group_by=group_by, **restriction)
            assert hits == [[], []]


def test_ids_can_be_any_collection_and_unknown_ids_are_ignored(make_index, rng):
    rows, queries = random_rows(rng, 20), random_queries(rng, 1)
    searcher = make_index(rows)
    names = ["i001", "i007", "i007", "none"]
    expected = searcher.search(queries, NAME, ids=names, score="single_vector")
    for ids in (tuple(names), set(names), dict.fromkeys(names), np.array(names)):
        assert searcher.search(queries, NAME, ids=ids, score="single_vector") == expected
    assert searcher.num_known(names) == 2
    assert searcher.num_known(["none"]) == searcher.num_known([]) == 0
    parents = {row.parent_id for row in rows}
    assert searcher.num_known([*parents, "none"], "parents") == len(parents)


@pytest.mark.parametrize("field", ["ids", "parents"])
@pytest.mark.parametrize(("ids", "value"), [("i001", "i001"), (["i001", 3], 3), (["\ud800"],) * 2])
def test_rejects_invalid_ids(make_index, rng, field, ids, value):
    searcher, queries = make_index(random_rows(rng, 8)), random_queries(rng, 1)
    with pytest.raises(SpecError) as caught:
        searcher.search(queries, NAME, **{field: ids})
    value = value[0] if isinstance(value, list) else value
    assert str(caught.value) == (f"{field} must be a list of ids in valid UTF-8, got {value!r}")


@pytest.mark.parametrize(
    "weights",
    [(0, 0), (-1, 1), (1, float("nan")), (float("inf"), 1), (1,), (1, 1, 1), 1, "11", (True, 1),
     (1e-300, 1e-300), (1e300, 1), ("1", 1), None],
)  # fmt: skip
def test_rejects_invalid_weights(make_index, rng, weights):
    searcher, queries = make_index(random_rows(rng, 8)), random_queries(rng, 1)
    with pytest.raises(SpecError) as caught:
        searcher.search(queries, NAME, score="hybrid", weights=weights)
    assert str(caught.value) == (
        "weights must be two numbers (single_vector, maxsim), each 0 or from 1e-6 to 1e6, and not "
        f"both 0, got {weights!r}"
    )


def test_weights_require_the_hybrid_score(make_index, rng):
    searcher, queries = make_index(random_rows(rng, 8)), random_queries(rng, 1)
    with pytest.raises(SpecError) as caught:
        searcher.rank(queries, NAME, weights=(1, 2))
    assert str(caught.value) == ("weights must be [1.0, 1.0] for the score maxsim, got [1.0, 2.0]")
    searcher.rank(queries, NAME, weights=[1, 1])


def test_empty_index(make_index, rng):
    searcher, queries = make_index([]), random_queries(rng, 2)
    for score, group_by in itertools.product(
        ("maxsim", "single_vector", "hybrid"), (None, "parent")
    ):
        assert searcher.search(queries, NAME, score=score, group_by=group_by) == [[], []]
        selection = {"filter": "item_id <> ''", "ids": ["a"]}
        options = {"score": score, "group_by": group_by}
        assert searcher.search(queries, NAME, **options, **selection) == [[], []]
    assert searcher.num_known(["a"]) == 0


def test_rows_without_any_vectors(make_index, rng):
    rows, queries = random_rows(rng, 12), random_queries(rng, 2)
    searcher = make_index([row._replace(tokens=None) for row in rows])
    for group_by in (None, "parent"):
        assert searcher.search(queries, NAME, group_by=group_by) == [[], []]
        assert searcher.search(queries, NAME, score="hybrid", group_by=group_by) == [[], []]
    assert searcher.search(queries, NAME, score="single_vector")[0]
    searcher = make_index([row._replace(pooled=None) for row in rows])
    assert searcher.search(queries, NAME, score="single_vector") == [[], []]
    assert searcher.search(queries, NAME, score="hybrid", weights=(0, 1)) == [[], []]


def test_no_queries(make_index, rng):
    searcher = make_index(random_rows(rng, 8))
    assert searcher.search([], NAME) == searcher.rank([], NAME) == []


def test_rejects_zero_query(make_index, rng):
    """A zero token does not contribute; very short and very long vectors are normalised."""
    searcher = make_index(random_rows(rng, 12))
    query = np.eye(3, 384, dtype=np.float32)
    with pytest.raises(SpecError) as caught:
        searcher.search([query, 0 * query], NAME)
    assert str(caught.value) == (
        "query must be an array with at least one non-zero vector, got 'only zeros' (query 2 of 2)"
    )
    hits = searcher.search(query, NAME, explain=False)
    with_zeros = np.concatenate([query, 0 * query])
    for same in (with_zeros, np.float32(1e-30) * query, np.float32(1e30) * query):
        again = searcher.search(same, NAME, explain=False)
        assert [(h.item_id, h.score) for h in again] == [(h.item_id, h.score) for h in hits]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (np.ones((2, 5)), "vectors of dimension 384, got 'vectors of dimension 5'"),
        (np.ones((0, 384)), "a numeric array of shape (query tokens, dim), "
         "got 'an array of shape (0, 384)'"),
        (np.full((1, 384), np.nan), NOT_FINITE),
        (np.full((1, 384), -np.inf), NOT_FINITE),
        (np.full((1, 384), 1e300), NOT_FINITE),
        ([np.ones((1, 384)), np.ones((1, 3))],
         "vectors of dimension 384, got 'vectors of dimension 3' (query 2 of 2)"),
        (["a", " "], "a text with at least one word, got ' ' (query 2 of 2)"),
        ("\ud800", "valid UTF-8 text, got '\\ud800'"),
    ],
)  # fmt: skip
def test_rejects_invalid_queries(make_index, rng, query, message):
    with pytest.raises(SpecError) as caught:
        make_index(random_rows(rng, 8)).search(query, NAME)
    assert str(caught.value) == f"query must be {message}"


@pytest.mark.parametrize(
    ("k", "rule"),
    [
        (0, "greater than or equal to 1"),
        (-1, "greater than or equal to 1"),
        (True, "a number"),
        (2.5, "a valid integer"),
        ("ten", "a valid integer, unable to parse string as an integer"),
        (None, "a valid integer"),
    ],
)
def test_rejects_invalid_k(make_index, rng, k, rule):
    with pytest.raises(SpecError) as caught:
        make_index(random_rows(rng, 8)).search(np.ones((1, 384)), NAME, k=k)
    assert str(caught.value) == f"k must be {rule}, got {k!r}"


def test_k_larger_than_the_corpus(make_index, rng):
    rows, queries = random_rows(rng, 12), random_queries(rng, 1)
    (hits,) = make_index(rows).search(queries, NAME, k=10**30)
    assert len(hits) == sum(row.tokens is not None for row in rows)
