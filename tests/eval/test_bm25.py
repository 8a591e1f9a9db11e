"""BM25 against its formula on texts of a few words."""

import math
from types import SimpleNamespace

import pyarrow as pa
import pytest

from pipeline.eval.bm25 import Bm25

ROWS = [
    ("a/1", "a", "wing lift"),  # length 2
    ("a/2", "a", "The wings of the wing"),  # wing twice: length 2
    ("b/1", "b", "bread oven salt flour"),  # length 4
    ("c/1", "c", "of the and"),  # only stop words: length 0, or 1 in bm25s
]


def fake_index(rows):
    columns = dict(zip(("item_id", "parent_id", "text"), zip(*rows, strict=True), strict=True))
    batch = pa.record_batch({name: list(values) for name, values in columns.items()})
    return SimpleNamespace(batches=lambda columns, filter: [batch.slice(0, 2), batch.slice(2)])


def score(frequency: int, length: int, matching: int, lengths=(2, 2, 4, 1)) -> float:
    idf = math.log(1 + (len(lengths) - matching + 0.5) / (matching + 0.5))
    average = sum(lengths) / len(lengths)
    return idf * frequency / (frequency + 1.2 * (1 - 0.75 + 0.75 * length / average))


def test_scores_equal_formula():
    items = Bm25(fake_index(ROWS), "item")
    wing, lift, bread = items.rank(["wing", "lifting a wing", "Breads!"], k=10)
    assert wing == pytest.approx({"a/2": score(2, 2, 2), "a/1": score(1, 2, 2)})
    assert list(wing) == ["a/2", "a/1"]
    assert lift == pytest.approx({"a/1": score(1, 2, 2) + score(1, 2, 1), "a/2": score(2, 2, 2)})
    assert bread == pytest.approx({"b/1": score(1, 4, 1)})


def test_parents_have_score_of_best_item():
    (hits,) = Bm25(fake_index(ROWS), "parent").rank(["wing bread"], k=10)
    assert hits == pytest.approx({"b": score(1, 4, 1), "a": score(2, 2, 2)})


def test_texts_without_query_words_are_not_hits():
    items = Bm25(fake_index(ROWS), "item")
    assert items.rank(["of the", "zebra", "", "zebra salt"], k=10)[:3] == [{}, {}, {}]
    assert len(items.rank(["wing"], k=1)[0]) == 1
    assert Bm25(fake_index([("a", "a", "the"), ("b", "b", "of")]), "item").rank(["the"], 3) == [{}]


def test_ties_are_ordered_by_id():
    rows = [("z", "z", "wing"), ("y", "y", "wing"), ("x", "x", "bread")]
    assert list(Bm25(fake_index(rows), "item").rank(["wing"], k=2)[0]) == ["y", "z"]
