"""Metrics of the queries, and pseudo-queries."""

import numpy as np
import torch

from pipeline.eval.recommend.queries import NUM_TOKENS, QuerySet, pseudo_queries
from tests.eval.recommend.vectors import measured, random_sample, representation


def test_parents_have_the_score_of_their_best_item():
    queries = QuerySet([torch.eye(2)] * 2, [{"a": 1}, {"b": 1, "missing": 2}], True)
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.9, 0.1, 0.5]])
    values = queries.measure(scores, ["a", "a", "b"])
    ideal = 2 + 1 / np.log2(3)
    np.testing.assert_allclose(values, [1.0, 1 / np.log2(3) / ideal])


def test_documents_that_are_the_query_itself_are_removed():
    scores = torch.tensor([[0.9, 0.5, 0.1]] * 3)
    grades = [{"b": 1}, {"b": 1}, {"c": 1}]
    queries = QuerySet([torch.eye(2)] * 3, grades, True, ["a", None, "not sampled"])
    values = queries.measure(scores, ["a", "b", "c"])
    np.testing.assert_allclose(values, [1.0, 1 / np.log2(3), 0.5])


def test_pseudo_queries_find_their_items():
    sample = random_sample(num_tokens=NUM_TOKENS + 4)
    (full,) = measured(sample, representation("none"))
    options = {"num_queries": 7, "seed": 3}
    queries = pseudo_queries(sample, full.packed, noise=0.0, **options)
    assert len(queries.tokens) == len({next(iter(g)) for g in queries.grades}) == 7
    assert queries.measure(full.scores(queries.tokens), sample.ids).tolist() == [1.0] * 7
    again, noisy, more = (
        pseudo_queries(sample, full.packed, noise=noise, **options) for noise in (0.0, 1.0, 50.0)
    )
    torch.testing.assert_close(again.tokens, queries.tokens)
    torch.testing.assert_close(noisy.tokens[0].norm(dim=1), torch.ones(NUM_TOKENS))
    assert queries.measure(full.scores(more.tokens), sample.ids).mean() < 1
