"""Rows that are better than uncompressed vectors."""

import numpy as np

from pipeline.eval.recommend.comparison import Comparison
from pipeline.eval.recommend.queries import QuerySet
from pipeline.tokens import normalise
from tests.eval.recommend.vectors import measured, random_sample, representation


def compared(is_judged: bool) -> Comparison:
    """Compares one vector per item with all vectors by queries whose best token is misleading.

    A query is the mean of an item and two tokens of the next one, which have higher scores.
    """
    sample = random_sample(num_items=12)
    full, *candidates = measured(
        sample, representation("none"), representation("hpool", 1), representation("spatial", 9)
    )
    queries, grades = [], []
    for row in range(len(sample)):
        mean_1D = normalise(full.packed.item(row)).mean(dim=0, keepdim=True)
        other_MD = normalise(full.packed.item((row + 1) % len(sample)))[:1]
        queries.append(normalise(normalise(mean_1D) + 0.9 * other_MD))
        grades.append({sample.ids[row]: 1})
    comparison = Comparison(sample, full, QuerySet(queries, grades, is_judged), seed=0)
    for candidate in candidates:
        comparison.add(candidate)
    return comparison


def test_rows_better_than_the_uncompressed_vectors():
    comparison = compared(is_judged=True)
    one, _ = comparison.rows
    assert comparison.reference_Q.mean() < 0.7 < one.quality
    assert comparison.better() == [one]
    assert np.abs(comparison.values[1] - comparison.reference_Q).mean() < 0.2
    comparison.values = [values_Q * 0 for values_Q in comparison.values]
    assert comparison.better() == []


def test_pseudo_queries_name_no_row():
    assert compared(is_judged=False).better() == []
