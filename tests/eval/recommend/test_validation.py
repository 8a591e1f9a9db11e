"""Regret of recommendations."""

import math
from dataclasses import replace

import pytest

from pipeline.eval.recommend.choose import Target
from pipeline.eval.recommend.comparison import Comparison
from pipeline.eval.recommend.queries import pseudo_queries
from pipeline.eval.recommend.validation import regrets
from tests.eval.recommend.vectors import measured, random_sample, representation


def comparison(seed, *representations):
    sample = random_sample(num_items=30)
    full, *candidates = measured(sample, representation("none"), *representations)
    queries = pseudo_queries(sample, full.packed, num_queries=20, noise=0.5, seed=seed)
    compared = Comparison(sample, full, queries, seed=0)
    for candidate in candidates:
        assert compared.add(candidate) is compared.rows[-1]
    return compared


def test_perfect_and_useless_estimates():
    candidates = [representation("spatial", 1), representation("spatial", 9)]
    judged = comparison(0, *candidates, representation("none", codec="int8"))
    rows = judged.rows
    assert rows[0].retained < rows[1].retained
    assert rows[0].max_distance > rows[1].max_distance > rows[2].max_distance
    perfect, *halves = regrets(judged, judged, Target(0.95))
    assert perfect.coverage == 1 and perfect.correlation == pytest.approx(1)
    assert perfect.size_ratio >= 1 and len(halves) == 2
    optimistic = comparison(0, *candidates, representation("none", codec="int8"))
    optimistic.rows[:] = [replace(row, low=1.0, retained=1.0) for row in optimistic.rows]
    useless, *_ = regrets(judged, optimistic, Target(0.95))
    assert useless.recommended == "spatial_1" and useless.size_ratio < 1
    assert useless.shortfall == pytest.approx(0.95 - rows[0].retained)
    assert math.isnan(useless.correlation)
