"""Measured numbers of candidates against a literal search, and searches of degenerate indexes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pipeline import Index
from pipeline.index.reader import IndexReader
from pipeline.search import candidates, lists, score
from pipeline.search.candidates import DEPTHS, Numbers
from pipeline.search.num_candidates import NUM_QUERIES, PROBES, measure, split_queries
from pipeline.search.options import SearchOptions

DIM, NUM_ITEMS = 32, 1200
COLUMN = "full_lemur_1_candidates"


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
    """Index with both generators."""
    index = Index(str(tmp_path_factory.mktemp("tiers") / "index"))
    index.add([f"i{number:04}" for number in range(NUM_ITEMS)], items(NUM_ITEMS))
    index.add_candidates({"name": "lemur", "num_features": 128, "num_samples": 512})
    index.add_candidates({"name": "ivf", "num_centroids": 256})
    return Index(index.uri)


def code_scores(index: Index, query: np.ndarray) -> np.ndarray:
    """Returns the scores of the codes of lemur of all items, read from the column."""
    generator = index.reader.generator(COLUMN)
    (tokens,) = generator.queries(index.searcher.queries([query]).tokens)
    table = index.reader.dataset.to_table(columns=[COLUMN])
    codes, _ = generator.codec.decode(table[COLUMN], generator.dim)
    return codes.astype(float) @ generator.codec.transform_queries(tokens).numpy()[0]


def test_numbers_have_the_wanted_recall(index, monkeypatch):
    """The numbers are those of a literal search, and unseen queries have about that recall."""
    monkeypatch.setattr(score, "EXACT_ITEMS", 0)
    given = queries(12)
    numbers = measure(index.reader, COLUMN, given, recall=0.9)
    exact = index.searcher.rank(given, k=100, candidates="exact")
    for depth, found in zip(DEPTHS, numbers.counts, strict=True):
        ranks = []
        for query, ranking in zip(given, exact, strict=True):
            scores = code_scores(index, query)
            ranks += [(scores >= scores[row] - 1e-4).sum() for row in ranking.rows[:depth]]
        assert abs(found - np.sort(ranks)[int(0.9 * len(ranks)) - 1]) <= 2
    info = index.reader.candidates_columns[COLUMN]
    stored = Numbers(**info.numbers)
    assert stored.items == NUM_ITEMS and stored.recall == 0.98 and stored.counts[0] < NUM_ITEMS
    best = index.searcher.rank(queries(30), k=10, candidates="exact")
    for name in ("lemur", "ivf"):
        hits = index.searcher.rank(queries(30), k=10, candidates=name)
        pairs = zip(hits, best, strict=True)
        assert np.mean([len({*a.item_ids} & {*b.item_ids}) / 10 for a, b in pairs]) > 0.9


def test_numbers_of_lists_have_the_wanted_recall(index, monkeypatch):
    """The numbers are those of a literal search of the chosen number of lists."""
    monkeypatch.setattr(score, "EXACT_ITEMS", 0)
    given, column = queries(12), "full_ivf_1_candidates"
    numbers = measure(index.reader, column, given, recall=0.9)
    exact = index.searcher.rank(given, k=100, candidates="exact")
    opened = index.searcher.scorer.lists(column)
    assert numbers.probes is not None and set(numbers.probes) <= set(PROBES)
    for depth, count, probes in zip(DEPTHS, numbers.counts, numbers.probes, strict=True):
        ranks = []
        tokens = index.searcher.queries(given).tokens
        for ranking, all_scores in zip(exact, opened.scores(tokens, probes), strict=True):
            ranks += [(all_scores >= all_scores[row]).sum() for row in ranking.rows[:depth]]
        assert count == np.sort(ranks)[int(0.9 * len(ranks)) - 1] < NUM_ITEMS
    stored = index.reader.candidates_columns[column].numbers
    assert stored["probes"] and stored["recall"] == 0.98


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


@pytest.mark.parametrize(("num_lemur", "expected"), [(400, "lemur"), (8000, "ivf")])
def test_the_default_generator_has_the_lower_estimated_time(
    index, num_lemur, expected, monkeypatch
):
    """ivf: 1.7 * 32 * 16 + 0.21 * 2,000 = 1,290 us, lemur: 18 + 0.21 times its candidates."""
    monkeypatch.setattr(candidates, "EXACT_VECTORS", 0)
    monkeypatch.setattr(candidates, "VECTORS_PER_ITEM", 6)
    reader = IndexReader(index.uri)
    numbers = {"lemur": {"counts": [num_lemur] * 2}, "ivf": {"counts": [2000] * 2}}
    for name, given in numbers.items():
        column = f"full_{name}_1_candidates"
        given |= {"recall": 0.98, "items": NUM_ITEMS}
        given["probes"] = [32, 32] if name == "ivf" else None
        stored = reader.candidates_columns
        stored[column] = dataclasses.replace(stored[column], numbers=given)
    info = reader.representation("full")
    assert candidates.default_candidates(reader, info) == expected
    assert candidates.default_candidates(reader, info, "cuda") == "exact"


def test_past_queries_measure_only_if_there_are_enough():
    few = list("ab")
    assert split_queries(few) == (few, few)
    for count, num_measured in ((300, 75), (1024, 256), (1500, 250), (7000, 250)):
        fitted, measured = split_queries(range(count))
        assert len(measured) == num_measured <= NUM_QUERIES
        assert sorted([*fitted, *measured]) == list(range(count))
        assert np.ptp(np.diff(measured)) == 0  # also those of the end of a sorted log


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
    names = ["ivf"]
    if name != "equal vectors":  # `lemur` rejects a single distinct token vector
        index.add_candidates({"name": "lemur", "num_features": 4, "num_samples": 16})
        names += ["lemur"]
    searcher = Index(index.uri).searcher
    query = np.eye(3, 8, dtype=np.float32)
    for candidates_name in names:
        for k in (2, 50):
            (hits,) = searcher.rank([query], k=k, candidates=candidates_name, num_candidates=k)
            assert len(hits.item_ids) == min(k, len(given))
    assert IndexReader(index.uri).candidates_columns["full_ivf_1_candidates"].numbers
