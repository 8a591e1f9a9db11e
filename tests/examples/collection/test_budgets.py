"""Budgets by the number of tokens, and diagnostics without judgments."""

import numpy as np
import pytest
import torch

from examples.collection.budgets import (
    RULES,
    Case,
    Collection,
    Rules,
    diagnose,
    fitted_scale,
    matched,
    measured,
    packed,
    regrets,
    smallest,
    varied,
)
from pipeline.eval.recommend.queries import pseudo_queries
from pipeline.eval.recommend.sample import Sample
from pipeline.tokens import TokenBatch, normalise


def sample() -> Sample:
    """Returns 24 items of 2 to 40 random tokens in two batches."""
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.tensor([2, 3, 5, 8, 12, 16, 20, 24, 28, 32, 36, 40] * 2)
    batches = []
    for part_B in lengths_B.split(12):
        vectors = normalise(torch.randn(12, 40, 16, generator=generator))
        batches.append(TokenBatch(vectors, torch.arange(40) < part_B[:, None], normalised=True))
    return Sample([f"item{i}" for i in range(24)], batches, 24)


def collection() -> Collection:
    """Returns one query per item: four of its tokens, or all of a shorter one."""
    items = sample()
    full = packed(items, {"name": "none"})
    queries = [full.item(row)[:4] for row in range(24)]
    halves = np.array(["choose", "prove"] * 12)
    grades = [{name: 1} for name in items.ids]
    return Collection("any", items, items, queries, grades, halves, [()] * 24)


def test_rules_have_equal_totals():
    rules = Rules(sample(), 8)
    total = 2 * (2 + 3 + 5 + 9 * 8)
    budgets = {rule: torch.cat(rules.budgets(rule)) for rule in RULES}
    assert int(budgets["fixed"].sum()) == total
    for rule, budgets_B in budgets.items():
        assert total - 4 <= int(budgets_B.sum()) <= total, rule
        assert (budgets_B <= rules.lengths_B).all() and budgets_B.max() <= 32
    assert budgets["power 1"][:12].tolist() == [2, 2, 2, 3, 4, 6, 7, 8, 10, 11, 13, 14]
    assert budgets["power 0.5"][11] == 11 and budgets["fixed"][11] == 8


def test_matched_total():
    assert matched(lambda x: torch.tensor([x, 2 * x]).long(), 7).tolist() == [2, 5]


def test_diagnostics_of_all_and_of_one_vector():
    items = sample()
    full = packed(items, {"name": "none"})
    sets = {"any": pseudo_queries(items, full, num_queries=24, noise=1.0, seed=0)}
    found = diagnose(full, full, sets, items.ids)
    assert found.pop("exact, any") > 0.9
    assert all(value == pytest.approx(0, abs=1e-6) for value in found.values())
    one = packed(items, {"name": "hpool", "num_vectors": 1})
    found = diagnose(full, one, sets, items.ids)
    assert found["share of vectors"] == pytest.approx(1 - 24 / full.num_vectors)
    mean = [
        float((1 - full.item(row) @ normalise(full.item(row).mean(dim=0))).mean())
        for row in range(24)
    ]
    assert found["mean distance"] == pytest.approx(np.mean(mean), abs=1e-5)
    assert found["unexplained variance"] > 0.5 and found["overlap, any"] > 0.2


def test_measured_candidates():
    result = measured(collection(), "plain")
    assert result["reference"].mean() == 1 and result["vectors"] == pytest.approx(226 / 12)
    vectors, values_Q, found = result["candidates"]["hpool_32"]
    assert values_Q.mean() == 1 and found["overlap, queries"] < 0.1
    assert vectors == pytest.approx((226 - 4 - 8) / 12)
    assert result["candidates"]["hpool_1"][1].mean() < 0.9


def test_variants():
    changed = varied(collection(), "cosine")
    assert changed.queries[0].shape == (2, 16)
    vectors_TD = packed(changed.items, {"name": "none"}).segments[0].parts["values"]
    assert float(vectors_TD.mean(dim=0).square().sum()) == pytest.approx(0.6, abs=0.03)


def test_regrets():
    chosen, proved = np.array([1.0, 0.8, 0.96]), np.array([1.0, 0.7, 0.94])
    losses = {"distance": np.array([0.0, 0.2, 0.05])}
    case = Case("any", np.array([10.0, 1.0, 2.0]), 0.5, chosen, chosen - 0.1, proved, losses)
    assert smallest(case, chosen, 0.95) == 2 and smallest(case, case.low, 0.95) == 0
    found = regrets([case], [chosen])
    assert found[:, 0].tolist() == pytest.approx([0, 0.5, 0]) and found[:, 1].tolist() == [
        1,
        0.2,
        1,
    ]
    scale = fitted_scale([case], "distance")
    estimate = 1 - scale * losses["distance"]
    assert 0.02 / 0.05 < scale < 0.05 / 0.05 and smallest(case, estimate, 0.98) == 0
