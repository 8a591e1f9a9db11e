"""Randomisation test against all sign vectors, and Holm's correction."""

import itertools

import numpy as np
import pytest

from pipeline.eval.significance import holm, randomisation_p

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("num_queries", [3, 6, 10])
def test_equals_exact_test(num_queries):
    differences = RNG.normal(0.3, 1, num_queries).round(1)
    signs = np.array(list(itertools.product((-1, 1), repeat=num_queries)))
    exact = np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9)
    assert randomisation_p(differences[None])[0] == pytest.approx(exact, abs=0.02)


def test_is_symmetric():
    differences = RNG.normal(0.2, 1, (3, 40))
    assert randomisation_p(differences).tolist() == randomisation_p(-differences).tolist()


def test_no_difference():
    assert randomisation_p(np.zeros((2, 5))).tolist() == [1, 1]


def test_minimum_p_value():
    assert randomisation_p(np.ones((1, 100)), num_permutations=999).tolist() == [1 / 1000]


def test_independent_of_block_size(monkeypatch):
    differences = RNG.normal(0.2, 1, (2, 30))
    whole = randomisation_p(differences)
    monkeypatch.setattr("pipeline.eval.significance.BLOCK", 30 * 7)
    assert randomisation_p(differences) == pytest.approx(whole, abs=0.02)


def test_holm():
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([0.04]) == [0.04]
