"""Selection on a GPU of the scores among which the best are found."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pipeline.search.score import _Scores, _shortlists, top_rows

NUM_ITEMS, NUM_QUERIES = 60, 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 7, 1000])
@pytest.mark.parametrize(
    ("selects", "is_grouped"), list(itertools.product((False, True), (False, True)))
)
def test_best_of_a_shortlist_are_the_best_of_all(device, k, selects, is_grouped):
    generator = np.random.default_rng(k)
    order = generator.permutation(NUM_ITEMS)
    groups = generator.integers(0, 9, NUM_ITEMS) if is_grouped else None
    rows = np.flatnonzero(generator.random(NUM_ITEMS) < 0.5) if selects else None
    num_scored = NUM_ITEMS if rows is None else len(rows)
    total = generator.integers(0, 9, (NUM_QUERIES, num_scored)).astype(np.float32)  # many ties
    total[generator.random(total.shape) < 0.2] = -np.inf
    total[-1] = -np.inf
    scores = _Scores(torch.from_numpy(total).to(device), torch.from_numpy(total + 1).to(device))
    found = list(_shortlists(scores, rows, k, groups))
    assert len(found) == NUM_QUERIES
    for all_scores, (items, parts) in zip(total, found, strict=True):
        expected = top_rows(all_scores, rows, order, k, groups)
        best = top_rows(parts.total, items, order, k, groups)
        assert items[best].tolist() == (expected if rows is None else rows[expected]).tolist()
        assert parts.total[best].tolist() == all_scores[expected].tolist()
        assert parts.maxsim[best].tolist() == (all_scores[expected] + 1).tolist()
        assert parts.single_vector is None
        if k == 1 and not is_grouped:
            assert (parts.total == parts.total.max(initial=-np.inf)).all()


def test_no_items():
    scores = _Scores(torch.empty(2, 0))
    for groups in (None, np.empty(0, np.int64)):
        found = list(_shortlists(scores, None, 10, groups))
        assert [len(items) for items, _ in found] == [0, 0]
