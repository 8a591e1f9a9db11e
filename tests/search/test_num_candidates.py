"""Measured numbers of candidates against a literal search, and searches of degenerate indexes."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline import Index
from pipeline.index.reader import IndexReader
from pipeline.search import candidates, lists, score
from pipeline.search.candidates import DEPTHS, Numbers
from pipeline.search.num_candidates import NUM_QUERIES, PROBES, measure
from pipeline.search.options import SearchOptions
from pipeline.search.query import Queries
from pipeline.search.searcher import Searcher

DIM, NUM_ITEMS = 32, 1200
COLUMN = "full_ivf_1_candidates"


def items(num: int, seed: int = 0, length: int = 6) -> list[np.ndarray]:
    """Returns unit vectors of items, which are near topics."""
    rng = np.random.default_rng(seed)
    topics = np.random.default_rng(99).standard_normal((40, DIM))
    given = []
    for _ in range(num):
        vectors = topics[rng.integers(40, size=length)] + rng.standard_normal((length, DIM))
        given.append((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32))
    return given


def queries(num: int = 20) -> list[np.ndarray]:
    return items(num, seed=5, length=4)


@pytest.fixture(scope="module")
def index(cluster, tmp_path_factory) -> Index:
    """Index with `ivf`."""
    index = Index(str(tmp_path_factory.mktemp("tiers") / "index"))
    index.add([f"i{number:04}" for number in range(NUM_ITEMS)], items(NUM_ITEMS))
    index.add_candidates({"name": "ivf", "num_centroids": 256})
    return Index(index.uri)


def test_numbers_have_the_wanted_recall(index, monkeypatch):
    """They are those of a literal search of the lists, and unseen queries have about the recall."""
    monkeypatch.setattr(score, "EXACT_ITEMS", 0)
    given = queries(12)
    numbers = measure(index.reader, COLUMN, given, recall=0.9)
    exact = index.searcher.rank(given, k=100, candidates="exact")
    opened = index.searcher.scorer.lists(COLUMN)
    assert set(numbers.probes) <= set(PROBES)
    for depth, count, probes in zip(DEPTHS, numbers.counts, numbers.probes, strict=True):
        ranks = []
        tokens = index.searcher.queries(given).tokens
        for ranking, all_scores in zip(exact, opened.scores(tokens, probes), strict=True):
            ranks += [(all_scores >= all_scores[row]).sum() for row in ranking.rows[:depth]]
        assert count == np.sort(ranks)[int(0.9 * len(ranks)) - 1] < NUM_ITEMS
    stored = Numbers(**index.reader.candidates_columns[COLUMN].numbers)
    assert stored.items == NUM_ITEMS and stored.recall == 0.98
    best = index.searcher.rank(queries(30), k=10, candidates="exact")
    options = {"candidates": "ivf", "num_candidates": numbers.counts[0]}
    hits = index.searcher.rank(queries(30), k=10, **options)
    pairs = zip(hits, best, strict=True)
    assert np.mean([len({*a.item_ids} & {*b.item_ids}) / 10 for a, b in pairs]) > 0.85


def test_the_queries_of_a_sorted_log_are_measured_evenly(index, monkeypatch):
    measured = []
    encode = Searcher.queries

    def record(searcher: Searcher, given: list[np.ndarray], *arguments: str) -> Queries:
        measured.append(len(given))
        return encode(searcher, given, *arguments)

    monkeypatch.setattr(Searcher, "queries", record)
    near, far = queries(1) * NUM_QUERIES, [np.eye(1, DIM, dtype=np.float32)] * NUM_QUERIES
    both, few = (measure(index.reader, COLUMN, given, recall=0.8) for given in (near + far, near))
    assert measured == [NUM_QUERIES] * 2 and both.counts[0] > few.counts[0]


def test_more_lists_are_probed_for_items_unlike_the_query(index, monkeypatch):
    """Items of the worse half are in few of the probed lists."""
    monkeypatch.setattr(score, "EXACT_ITEMS", 0)
    monkeypatch.setattr(score, "numbers_for", lambda *given: (400, 4))
    monkeypatch.setattr(score, "is_exact_faster", lambda *given: False)

    def recall() -> float:
        shares = []
        for query in queries(10):
            (ranking,) = index.searcher.rank([query], k=NUM_ITEMS, candidates="exact")
            worse = ranking.item_ids[NUM_ITEMS // 2 :]
            options = {"ids": worse, "k": 10, "candidates": "ivf"}
            (hits,) = index.searcher.rank([query], **options)
            assert len(hits.item_ids) == 10
            shares.append(len({*hits.item_ids} & {*worse[:10]}) / 10)
        return float(np.mean(shares))

    found = recall()
    monkeypatch.setattr(lists, "MAX_PROBES", 0)
    assert recall() + 0.2 < found > 0.5


@pytest.mark.parametrize(("num_probes", "is_exact"), [(4, False), (4000, True)])
def test_filtered_searches_are_exact_if_that_is_faster(index, num_probes, is_exact, monkeypatch):
    """600 items take 2,640 us, and 10 candidates of 4 or 4,000 lists 223 or 140,882 us."""
    monkeypatch.setattr(score, "EXACT_ITEMS", 0)
    monkeypatch.setattr(candidates, "numbers_for", lambda *given: (10, num_probes))
    options = SearchOptions(representation="full", candidates="ivf", num_candidates=10)
    assert index.searcher.scorer.scores_all(options, np.arange(600)) == is_exact


SMALL = {
    "three items": items(3),
    "equal vectors": [np.ones((2, 8), np.float32)] * 40,
    "zero vectors": [item * [[0], [1]] for item in items(40, length=2)],
    "one vector": items(60, length=1),
    "many vectors": items(3, length=2000),
}


@pytest.mark.parametrize("name", SMALL)
def test_degenerate_indexes_are_searched(cluster, name, tmp_path, monkeypatch):
    """Searches find as many hits as exist."""
    monkeypatch.setattr(score, "EXACT_ITEMS", 0)
    given = [item[:, :8] for item in SMALL[name]]
    index = Index(str(tmp_path / "index"))
    index.add([f"i{number}" for number in range(len(given))], given)
    index.add_candidates({"name": "ivf", "num_centroids": min(8, sum(map(len, given)))})
    searcher = Index(index.uri).searcher
    query = np.eye(3, 8, dtype=np.float32)
    for k in (2, 50):
        (hits,) = searcher.rank([query], k=k, candidates="ivf", num_candidates=k)
        assert len(hits.item_ids) == min(k, len(given))
    assert IndexReader(index.uri).candidates_columns["full_ivf_1_candidates"].numbers
