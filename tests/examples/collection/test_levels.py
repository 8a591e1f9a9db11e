"""Budgets by the number of tokens, from the rankings of fixed budgets."""

import doctest

import numpy as np

from examples.collection import levels


def test_levels():
    assert doctest.testmod(levels).attempted == 1
    lengths_B = np.array([4, 16, 64, 256])
    equal = levels.levels(lengths_B, 0.0, 8, 2)
    assert equal.tolist() == [8, 8, 8, 8]
    for power in levels.POWERS.values():
        found = levels.levels(lengths_B, power, 8, 4)
        assert np.minimum(found, lengths_B).sum() <= 28
    assert levels.levels(lengths_B, 1.0, 8, 2).tolist() == [4, 4, 4, 16]
    assert levels.levels(lengths_B, 1.0, 4, 4).tolist() == [1, 1, 4, 8]


def test_scores_of_the_budget_of_an_item():
    runs = {
        4: {"q": {f"item{i}": 10.0 - i for i in range(12)}},
        8: {"q": {f"item{i}": 11.5 - i for i in range(11, -1, -1)}},
    }
    budgets = {f"item{i}": 8 if i == 3 else 4 for i in range(12)}
    run, share = levels.mixed(runs, budgets)
    assert list(run["q"])[:4] == ["item0", "item1", "item3", "item2"]
    assert run["q"]["item3"] == 8.5 and len(run["q"]) == 10 and share == 1
    cut = {4: runs[4], 8: {"q": {"item3": 8.5}}}
    assert levels.mixed(cut, budgets)[1] == 0
