"""Search among the candidates of the single vectors, against brute force."""

import numpy as np
import pytest

from pipeline.config import SpecError
from pipeline.search.fusion import best_rows
from pipeline.search.options import Rerank, SearchOptions
from tests.search.conftest import random_queries, random_rows, reference_ranking


def test_best_rows_equals_sorting():
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores = rng.integers(0, 6, 30).astype(np.float32)
        scores[rng.random(30) < 0.2] = -np.inf
        num = int(rng.integers(1, 30))
        found = best_rows(scores, None, num)
        limit = np.sort(scores)[::-1][num - 1]
        assert found.tolist() == np.flatnonzero((scores >= limit) & (scores > -np.inf)).tolist()


def test_best_rows_of_a_selection():
    rows = np.array([3, 5, 9])
    assert best_rows(np.array([1.0, 3.0, 2.0]), rows, 2).tolist() == [5, 9]
    assert best_rows(np.full(3, -np.inf), rows, 2).tolist() == []
    assert best_rows(np.empty(0), rows[:0], 2, np.empty(0, int)).tolist() == []


def test_best_rows_contain_the_best_item_of_each_group():
    scores = np.array([5.0, 4.0, 3.0, 2.0, -np.inf], np.float32)
    groups = np.array([0, 0, 0, 1, 2])
    assert best_rows(scores, None, 3, groups).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("group_by", [None, "parent"])
@pytest.mark.parametrize("score", ["maxsim", "hybrid"])
def test_scores_of_candidates_are_exact(make_index, score, group_by):
    rng = np.random.default_rng(1)
    rows = random_rows(rng, 60)
    searcher, queries = make_index(rows), random_queries(rng, 4)
    options = {"score": score, "group_by": group_by, "candidates": "single"}
    rankings = searcher.rank(queries, k=5, num_candidates=20, **options)
    for number, ranking in enumerate(rankings):
        expected = reference_ranking(rows, queries, number, score)
        scores = {row.item_id: parts.total for row, parts in expected}
        assert len(ranking.item_ids) == 5
        assert ranking.scores == [scores[item_id] for item_id in ranking.item_ids]
        assert ranking.scores == sorted(ranking.scores, reverse=True)
        if group_by:
            assert len(set(ranking.parent_ids)) == 5


@pytest.mark.parametrize("group_by", [None, "parent"])
def test_candidates_are_the_best_by_the_generator(make_index, group_by):
    """Items without a single vector are always scored."""
    rng = np.random.default_rng(2)
    rows = random_rows(rng, 60)
    searcher, queries = make_index(rows), random_queries(rng, 6)
    found = searcher.rank(queries, k=3, candidates="single", num_candidates=12, group_by=group_by)
    for number, ranking in enumerate(found):
        pooled = queries.pooled[number].numpy()
        singles = [
            -np.inf if row.pooled is None or row.tokens is None else float(pooled @ row.pooled)
            for row in rows
        ]
        limit = sorted(singles, reverse=True)[11]
        chosen = {row.item_id for row, s in zip(rows, singles, strict=True) if s >= limit}
        if group_by:
            best = {}
            for row, single in zip(rows, singles, strict=True):
                best[row.parent_id] = max(best.get(row.parent_id, -np.inf), single)
            parent_limit = sorted(best.values(), reverse=True)[11]
            chosen |= {
                row.item_id
                for row, single in zip(rows, singles, strict=True)
                if single == best[row.parent_id] >= parent_limit
            }
        chosen |= {row.item_id for row in rows if row.pooled is None}
        candidates = [row for row in rows if row.item_id in chosen]
        by_parent = group_by == "parent"
        expected = reference_ranking(candidates, queries, number, "maxsim", by_parent=by_parent)
        assert ranking.item_ids == [row.item_id for row, _ in expected[:3]]


def test_selection_restricts_candidates(make_index, monkeypatch):
    """The generator selects among the items of the filter, so that k items are always found."""
    rng = np.random.default_rng(3)
    rows = random_rows(rng, 60)
    searcher, queries = make_index(rows), random_queries(rng, 3)
    monkeypatch.setattr("pipeline.search.score.EXACT_ITEMS", 0)
    ids = [row.item_id for row in rows if row.tokens is not None][:15]
    options = {"candidates": "single", "num_candidates": 5, "ids": ids}
    for ranking in searcher.rank(queries, k=5, **options):
        assert len(ranking.item_ids) == 5
        assert set(ranking.item_ids) <= set(ids)


def test_items_without_vectors_do_not_replace_others(make_index):
    """Items that the generator ranks first but that have no score are no candidates."""
    rng = np.random.default_rng(6)
    rows, queries = random_rows(rng, 60), random_queries(rng, 3)
    pooled = queries.pooled.sum(dim=0).numpy()
    rows = [
        row._replace(tokens=None, pooled=pooled) if i < 20 else row for i, row in enumerate(rows)
    ]
    searcher = make_index(rows)
    options = {"k": 5, "candidates": "single", "num_candidates": 5}
    for group_by in (None, "parent"):
        for ranking in searcher.rank(queries, group_by=group_by, **options):
            assert len(ranking.item_ids) == 5


@pytest.mark.parametrize("is_small", [True, False])
def test_selections_below_the_threshold_are_searched_exactly(make_index, is_small, monkeypatch):
    rng = np.random.default_rng(7)
    rows = random_rows(rng, 60)
    searcher, queries = make_index(rows), random_queries(rng, 6)
    ids = [row.item_id for row in rows][:40]
    monkeypatch.setattr("pipeline.search.score.EXACT_ITEMS", len(ids) - (not is_small))
    exact = searcher.rank(queries, k=3, ids=ids)
    found = searcher.rank(queries, k=3, ids=ids, candidates="single", num_candidates=4)
    assert ([r.item_ids for r in found] == [r.item_ids for r in exact]) == is_small


def test_few_items_are_searched_exactly(make_index):
    rng = np.random.default_rng(4)
    rows = random_rows(rng, 40)
    searcher, queries = make_index(rows), random_queries(rng, 3)
    exact = searcher.rank(queries, k=10)
    found = searcher.rank(queries, k=10, candidates="single")
    assert [r.item_ids for r in found] == [r.item_ids for r in exact]


@pytest.mark.parametrize(("num_candidates", "share"), [(15, 0.25), (60, 1), (10**400, 1)])
def test_number_of_scored_vectors(make_index, num_candidates, share):
    searcher = make_index(random_rows(np.random.default_rng(7), 60))
    options = SearchOptions(candidates="single", num_candidates=num_candidates)
    options = options.resolve(searcher.index)
    num_vectors = searcher.scorer.vectors(options.column).num_vectors
    num_codes = searcher.scorer.num_scored_vectors(options) - int(share * num_vectors)
    assert 0 < num_codes <= 60


def test_invalid_options(make_index):
    searcher = make_index(random_rows(np.random.default_rng(5), 10))
    with pytest.raises(SpecError, match=r"^candidates must be one of exact, single, got 'ivf'"):
        searcher.rank(["a wing"], candidates="ivf")
    with pytest.raises(SpecError, match=r"^num_candidates must be at least k = 10, got 5"):
        searcher.rank(["a wing"], num_candidates=5)
    with pytest.raises(
        SpecError, match=r"^num_candidates must be greater than or equal to 1, got 0"
    ):
        searcher.rank(["a wing"], num_candidates=0)
    with pytest.raises(SpecError, match=r"^candidates must be exact for the score single_vector"):
        searcher.rank(["a wing"], candidates="single", score="single_vector")
    vectors = np.ones((2, 384), np.float32)
    with pytest.raises(SpecError, match="needs a pooled query vector"):
        searcher.rank([vectors], k=2, candidates="single", num_candidates=2)


def test_first_stage_keeps_enough_candidates():
    options = SearchOptions(k=5, candidates="single", num_candidates=20)
    assert options.first_stage(50).num_candidates == 50
    reranked = options.model_copy(update={"rerank": (Rerank(top=60),)})
    assert reranked.first_stage().num_candidates == 60


def test_default_number_of_candidates():
    options = SearchOptions(k=100, candidates="ivf")
    assert [options.candidates_per_query(items) for items in (50_000, 1_000_000)] == [1600, 25_000]
