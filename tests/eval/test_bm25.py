"""BM25 against its formula worked out by hand on texts of a few words."""

import math
from types import SimpleNamespace

import pyarrow as pa
import pytest

from pipeline.eval.bm25 import Bm25

ROWS = [
    ("a/1", "a", "wing lift"),  # length 2
    ("a/2", "a", "The wings of the wing"),  # wing twice: length 2
    ("b/1", "b", "bread oven salt flour"),  # length 4
    ("c/1", "c", "of the and"),  # stop words alone: length 0, or 1 for bm25s
]


def index_of(rows):
    columns = dict(zip(("item_id", "parent_id", "text"), zip(*rows, strict=True), strict=True))
    batch = pa.record_batch({name: list(values) for name, values in columns.items()})
    return SimpleNamespace(batches=lambda columns, filter: [batch.slice(0, 2), batch.slice(2)])


def score(frequency: int, length: int, matching: int, lengths=(2, 2, 4, 1)) -> float:
    idf = math.log(1 + (len(lengths) - matching + 0.5) / (matching + 0.5))
    average = sum(lengths) / len(lengths)
    return idf * frequency / (frequency + 1.2 * (1 - 0.75 + 0.75 * length / average))


def test_order_and_scores_by_hand():
    items = Bm25(index_of(ROWS), "item")
    wing, lift, bread = items.rank(["wing", "lifting a wing", "Breads!"], k=10)
    assert wing == pytest.approx({"a/2": score(2, 2, 2), "a/1": score(1, 2, 2)})
    assert list(wing) == ["a/2", "a/1"]
    assert lift == pytest.approx({"a/1": score(1, 2, 2) + score(1, 2, 1), "a/2": score(2, 2, 2)})
    assert bread == pytest.approx({"b/1": score(1, 4, 1)})


def test_a_parent_has_the_score_of_its_best_item():
    (hits,) = Bm25(index_of(ROWS), "parent").rank(["wing bread"], k=10)
    assert hits == pytest.approx({"b": score(1, 4, 1), "a": score(2, 2, 2)})


def test_no_shared_word_is_no_hit():
    items = Bm25(index_of(ROWS), "item")
    assert items.rank(["of the", "zebra", "", "zebra salt"], k=10)[:3] == [{}, {}, {}]
    assert len(items.rank(["wing"], k=1)[0]) == 1
    assert Bm25(index_of([("a", "a", "the"), ("b", "b", "of")]), "item").rank(["the"], 3) == [{}]


def test_equal_scores_stand_in_the_order_of_the_ids():
    rows = [("z", "z", "wing"), ("y", "y", "wing"), ("x", "x", "bread")]
    assert list(Bm25(index_of(rows), "item").rank(["wing"], k=2)[0]) == ["y", "z"]
