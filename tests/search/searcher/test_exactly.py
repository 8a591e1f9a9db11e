"""Search against scores worked out item by item: ties, filters, ids, groups, weights, parts."""

import itertools

import numpy as np
import pytest

from pipeline.config import SpecError
from pipeline.schema import Parts
from pipeline.search.score import QUERY_BATCH
from tests.search.conftest import best_by_hand, random_queries, random_rows

NAME = "hpool_2"
NOT_FINITE = "finite float32 vectors, got 'NaN or infinity'"


def found(hits):
    return [(hit.item_id, hit.parent_id, hit.score, hit.parts) for hit in hits]


def expected(best, k):
    return [(row.item_id, row.parent_id, s.total, Parts(*s[1:])) for row, s in best[:k]]


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.mark.parametrize("group_by", [None, "parent"])
@pytest.mark.parametrize(
    ("score", "weights"),
    [
        ("late", (1, 1)),
        ("single", (1, 1)),
        ("hybrid", (1, 1)),
        ("hybrid", (1.0, 0.25)),
        ("hybrid", (0, 2)),
        ("hybrid", (0.5, 0)),
    ],
)
def test_equals_the_scores_by_hand(index_of, rng, score, weights, group_by):
    """With filters, ids and parents, and all of them; most places are shared by several items."""
    rows, queries = random_rows(rng, 120), random_queries(rng, 8)
    searcher = index_of(rows)
    ids = [f"i{i:03}" for i in rng.choice(200, 90, replace=False)]
    parents = [f"p{i}" for i in range(0, 40, 2)]
    for filter, some_ids, some_parents in itertools.product(
        (None, "item_id >= 'i030'"), (None, ids), (None, parents)
    ):
        through = [
            row
            for row in rows
            if (filter is None or row.item_id >= "i030")
            and (some_ids is None or row.item_id in ids)
            and (some_parents is None or row.parent_id in parents)
        ]
        for k in (1, 3, 10, 500):
            how = {"score": score, "group_by": group_by, "weights": weights, "k": k}
            how |= {"filter": filter, "ids": some_ids, "parents": some_parents}
            every = searcher.search(queries, NAME, explain=False, **how)
            ranked = searcher.rank(queries, NAME, **how)
            for query, (hits, ranking) in enumerate(zip(every, ranked, strict=True)):
                by_hand = best_by_hand(
                    through, queries, query, score, weights, by_parent=group_by == "parent"
                )
                assert found(hits) == expected(by_hand, k)
                assert ranking.item_ids == [hit.item_id for hit in hits]
                assert ranking.scores == [hit.score for hit in hits]


def test_more_queries_than_a_batch(index_of, rng):
    rows, queries = random_rows(rng, 30), random_queries(rng, 2 * QUERY_BATCH + 1)
    hits = index_of(rows).search(queries, NAME, score="hybrid", k=5, explain=False)
    assert [found(of_query) for of_query in hits] == [
        expected(best_by_hand(rows, queries, query, "hybrid"), 5) for query in range(len(queries))
    ]


def test_nothing_let_through_gives_no_hits(index_of, rng):
    rows, queries = random_rows(rng, 20), random_queries(rng, 2)
    searcher = index_of(rows)
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


def test_ids_are_any_collection_and_unknown_ones_are_left_out(index_of, rng):
    rows, queries = random_rows(rng, 20), random_queries(rng, 1)
    searcher = index_of(rows)
    named = ["i001", "i007", "i007", "none"]
    alone = searcher.search(queries, NAME, ids=named, score="single")
    for ids in (tuple(named), set(named), dict.fromkeys(named), np.array(named)):
        assert searcher.search(queries, NAME, ids=ids, score="single") == alone
    assert searcher.num_known(named) == 2
    assert searcher.num_known(["none"]) == searcher.num_known([]) == 0
    there = {row.parent_id for row in rows}
    assert searcher.num_known([*there, "none"], "parents") == len(there)


@pytest.mark.parametrize("field", ["ids", "parents"])
@pytest.mark.parametrize(("ids", "value"), [("i001", "i001"), (["i001", 3], 3), (["\ud800"],) * 2])
def test_illegal_ids(index_of, rng, field, ids, value):
    searcher, queries = index_of(random_rows(rng, 8)), random_queries(rng, 1)
    with pytest.raises(SpecError) as caught:
        searcher.search(queries, NAME, **{field: ids})
    value = value[0] if isinstance(value, list) else value
    assert str(caught.value) == (f"{field} must be a list of ids in valid UTF-8, got {value!r}")


@pytest.mark.parametrize(
    "weights",
    [(0, 0), (-1, 1), (1, float("nan")), (float("inf"), 1), (1,), (1, 1, 1), 1, "11", (True, 1),
     (1e-300, 1e-300), (1e300, 1), ("1", 1), None],
)  # fmt: skip
def test_illegal_weights(index_of, rng, weights):
    searcher, queries = index_of(random_rows(rng, 8)), random_queries(rng, 1)
    with pytest.raises(SpecError) as caught:
        searcher.search(queries, NAME, score="hybrid", weights=weights)
    assert str(caught.value) == (
        "weights must be two numbers (single, late), each 0 or from 1e-6 to 1e6, and not both 0, "
        f"got {weights!r}"
    )


def test_weights_are_of_the_hybrid_score(index_of, rng):
    searcher, queries = index_of(random_rows(rng, 8)), random_queries(rng, 1)
    with pytest.raises(SpecError) as caught:
        searcher.rank(queries, NAME, weights=(1, 2))
    assert str(caught.value) == ("weights must be (1.0, 1.0) for the score late, got (1, 2)")
    searcher.rank(queries, NAME, weights=[1, 1])


def test_an_index_without_rows(index_of, rng):
    searcher, queries = index_of([]), random_queries(rng, 2)
    for score, group_by in itertools.product(("late", "single", "hybrid"), (None, "parent")):
        assert searcher.search(queries, NAME, score=score, group_by=group_by) == [[], []]
        how = {"filter": "item_id <> ''", "ids": ["a"]}
        assert searcher.search(queries, NAME, score=score, group_by=group_by, **how) == [[], []]
    assert searcher.num_known(["a"]) == 0


def test_rows_without_any_vectors(index_of, rng):
    rows, queries = random_rows(rng, 12), random_queries(rng, 2)
    searcher = index_of([row._replace(tokens=None) for row in rows])
    for group_by in (None, "parent"):
        assert searcher.search(queries, NAME, group_by=group_by) == [[], []]
        assert searcher.search(queries, NAME, score="hybrid", group_by=group_by) == [[], []]
    assert searcher.search(queries, NAME, score="single")[0]
    searcher = index_of([row._replace(pooled=None) for row in rows])
    assert searcher.search(queries, NAME, score="single") == [[], []]
    assert searcher.search(queries, NAME, score="hybrid", weights=(0, 1)) == [[], []]


def test_no_queries_have_no_hits(index_of, rng):
    searcher = index_of(random_rows(rng, 8))
    assert searcher.search([], NAME) == searcher.rank([], NAME) == []


def test_a_query_of_zeros_has_no_direction(index_of, rng):
    """One token of zeros counts for nothing; the shortest and longest vectors have a direction."""
    searcher = index_of(random_rows(rng, 12))
    query = np.eye(3, 384, dtype=np.float32)
    with pytest.raises(SpecError) as caught:
        searcher.search([query, 0 * query], NAME)
    assert str(caught.value) == (
        "query must be vectors with a direction, got 'zeros' (query 2 of 2)"
    )
    hits = searcher.search(query, NAME, explain=False)
    with_zeros = np.concatenate([query, 0 * query])
    for same in (with_zeros, np.float32(1e-30) * query, np.float32(1e30) * query):
        again = searcher.search(same, NAME, explain=False)
        assert [(h.item_id, h.score) for h in again] == [(h.item_id, h.score) for h in hits]


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        (np.ones((2, 5)), "vectors of 384 numbers, got 'vectors of 5 numbers'"),
        (np.ones((0, 384)), "a matrix of numbers of shape (query tokens, dim), "
         "got 'an array of shape (0, 384)'"),
        (np.full((1, 384), np.nan), NOT_FINITE),
        (np.full((1, 384), -np.inf), NOT_FINITE),
        (np.full((1, 384), 1e300), NOT_FINITE),
        ([np.ones((1, 384)), np.ones((1, 3))],
         "vectors of 384 numbers, got 'vectors of 3 numbers' (query 2 of 2)"),
        (["a", " "], "a text with at least one word, got ' ' (query 2 of 2)"),
        ("\ud800", "a text in UTF-8, got '\\ud800'"),
    ],
)  # fmt: skip
def test_illegal_queries(index_of, rng, query, sentence):
    with pytest.raises(SpecError) as caught:
        index_of(random_rows(rng, 8)).search(query, NAME)
    assert str(caught.value) == f"query must be {sentence}"


@pytest.mark.parametrize("k", [0, -1, True, 2.0, "3", None])
def test_illegal_k(index_of, rng, k):
    with pytest.raises(SpecError) as caught:
        index_of(random_rows(rng, 8)).search(np.ones((1, 384)), NAME, k=k)
    assert str(caught.value) == f"k must be an integer >= 1, got {k!r}"


def test_k_beyond_the_corpus_gives_all(index_of, rng):
    rows, queries = random_rows(rng, 12), random_queries(rng, 1)
    (hits,) = index_of(rows).search(queries, NAME, k=10**30)
    assert len(hits) == sum(row.tokens is not None for row in rows)
