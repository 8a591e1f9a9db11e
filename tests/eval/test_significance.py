"""The randomisation test against every choice of signs, and Holm's correction."""

import itertools

import numpy as np
import pytest

from pipeline.eval.significance import holm, randomisation_p

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("num_queries", [3, 6, 10])
def test_against_every_choice_of_signs(num_queries):
    differences = RNG.normal(0.3, 1, num_queries).round(1)
    signs = np.array(list(itertools.product((-1, 1), repeat=num_queries)))
    exact = np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9)
    assert randomisation_p(differences[None])[0] == pytest.approx(exact, abs=0.02)


def test_neither_side_is_favoured():
    differences = RNG.normal(0.2, 1, (3, 40))
    assert randomisation_p(differences).tolist() == randomisation_p(-differences).tolist()


def test_no_difference_at_all():
    assert randomisation_p(np.zeros((2, 5))).tolist() == [1, 1]


def test_a_difference_on_every_query_is_as_small_as_a_p_can_be():
    assert randomisation_p(np.ones((1, 100)), num_permutations=999).tolist() == [1 / 1000]


def test_blocks_change_nothing_in_the_count(monkeypatch):
    differences = RNG.normal(0.2, 1, (2, 30))
    whole = randomisation_p(differences)
    monkeypatch.setattr("pipeline.eval.significance.BLOCK", 30 * 7)
    assert randomisation_p(differences) == pytest.approx(whole, abs=0.02)


def test_holm_keeps_the_order_and_stays_below_1():
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([0.04]) == [0.04]
