import math

import pytest
import torch

from pipeline.compression.adaptive import Adaptive, budgets, information
from pipeline.compression.hpool import HPool, merge_costs
from pipeline.compression.kcenter import KCenter
from pipeline.config import SpecError, dump, parse
from pipeline.registry import COMPRESSORS
from pipeline.tokens import TokenBatch, normalise

TAP = "pooled_row/mean/last"
CRITERIA = ["gain", "radius", "entropy", "length"]


def make_batch(num_items=24, dim=16, seed=0):
    """Returns items of 20 to 90 tokens around 1 to 24 directions, with different information."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(20, 90, (num_items,), generator=generator)
    directions = torch.randn(num_items, dim, dim, generator=generator)
    choice = torch.randint(0, 10**6, (num_items, 90), generator=generator)
    choice %= torch.arange(1, num_items + 1).clamp(max=dim).unsqueeze(1)
    vectors = directions.gather(1, choice.unsqueeze(2).expand(-1, -1, dim))
    vectors = normalise(vectors + 0.02 * torch.randn(vectors.shape, generator=generator))
    mask = torch.arange(90) < lengths.unsqueeze(1)
    taps = {TAP: (3 * torch.randn(num_items, 90, generator=generator)).softmax(dim=1)}
    return TokenBatch(vectors, mask, True, taps=taps)


def squared_error(batch, result):
    """Returns the squared error of the tokens to the mean of their group, per item."""
    errors = []
    for tokens, mask, outputs in zip(batch.vectors, batch.mask, result.assignment, strict=True):
        groups = outputs[mask]
        means = torch.stack(
            [tokens[mask][groups == k].mean(dim=0) for k in range(groups.max() + 1)]
        )
        errors.append(float((tokens[mask] - means[groups]).square().sum()))
    return errors


def fitted(batch, **fields):
    spec = parse(Adaptive.Spec, {"num_vectors": 8, **fields})
    return Adaptive(spec, Adaptive.fit(spec, [batch]))


def test_merge_costs_equal_increase_in_squared_error():
    batch = make_batch(4)
    costs = merge_costs(batch.vectors, batch.lengths)
    for k in (1, 2, 7):
        compressed = HPool(HPool.Spec(num_vectors=k, num_protected=0)).compress(batch)
        expected = [
            float(row[k - 1 : n - 1].sum()) for row, n in zip(costs, batch.lengths, strict=True)
        ]
        assert squared_error(batch, compressed) == pytest.approx(expected, abs=1e-5)
    assert (costs[0, int(batch.lengths[0]) - 1 :] == -1).all()


@pytest.mark.parametrize("criterion", CRITERIA)
def test_total_equals_uniform_budget(criterion):
    batch = make_batch()
    compressor = fitted(batch, criterion=criterion)
    lengths = compressor.compress(batch).lengths
    max_total = int(batch.lengths.clamp(max=8).sum())
    assert max_total - len(batch) <= lengths.sum() <= max_total  # ties and limits cost a few
    assert lengths.min() >= 2 and lengths.max() <= 32  # 8 / 4 and 8 * 4
    assert len(set(lengths.tolist())) > 4


def test_gain_minimises_squared_error():
    batch = make_batch()
    fixed = HPool(HPool.Spec(num_vectors=8, num_protected=0)).compress(batch)
    method = {"name": "hpool", "num_protected": 0}
    results = {
        c: fitted(batch, criterion=c, method=method, min_budget=0).compress(batch) for c in CRITERIA
    }
    errors = {c: sum(squared_error(batch, result)) for c, result in results.items()}
    assert errors["gain"] < 0.5 * sum(squared_error(batch, fixed))
    assert errors["gain"] < min(errors["length"], errors["entropy"])
    # Budgets grow with the number of directions.
    lengths = results["gain"].lengths[:6].tolist()
    assert lengths == sorted(lengths)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_equals_definition(criterion):
    batch = make_batch(6)
    spec = parse(Adaptive.Spec, {"num_vectors": 8, "criterion": criterion, "min_budget": 0.5})
    measure = information(batch, spec)
    theta = 0.07
    found = budgets(spec, measure, batch.lengths, theta).tolist()
    for i, n in enumerate(batch.lengths.tolist()):
        if criterion == "gain":
            expected = 1 + sum(cost > theta for cost in measure[i].tolist())
        elif criterion == "radius":
            tokens, k = batch.vectors[i, :n].double(), 0
            radius = 2.0
            while radius > theta:
                k += 1
                centres = KCenter(KCenter.Spec(num_vectors=k, output="centre")).compress(batch)
                similarity = tokens @ centres.vectors[i, centres.mask[i]].double().T
                radius = float((1 - similarity.amax(dim=1)).max())
            expected = k
        elif criterion == "length":
            expected = round(theta * n)
        else:
            total = float(batch.taps[TAP][i, :n].sum())
            weights = [float(a) / total for a in batch.taps[TAP][i, :n]]
            expected = round(theta * math.exp(-sum(p * math.log(p) for p in weights)))
        assert found[i] == min(max(expected, 4), 32, n)


@pytest.mark.parametrize(
    "method", ["hpool", "kcenter", "random", "sap", "attention_clustering", "samer", "spatial"]
)
def test_supports_all_methods_with_budget(method):
    batch = make_batch()
    spec = parse(Adaptive.Spec, {"num_vectors": 8, "method": method})
    for tap in Adaptive(spec).needs_taps:
        batch.taps[tap.name] = batch.taps[TAP]
    compressor = Adaptive(spec, Adaptive.fit(spec, [batch]))
    inner = COMPRESSORS.build(COMPRESSORS.resolve({"name": method, "num_vectors": 8}))
    assert compressor.assignment_form == inner.assignment_form
    result = compressor.compress(batch)
    assert len(set(result.lengths.tolist())) > 4
    assert result.lengths.sum() <= 8 * len(batch)


def test_budget_of_method():
    spec = parse(Adaptive.Spec, {"num_vectors": 8, "method": "sap"})
    assert spec.method.num_vectors == 8
    assert parse(Adaptive.Spec, dump(spec)) == spec
    for method, message in [
        (
            {"name": "sap", "num_vectors": 4},
            "method.num_vectors must be omitted (the budget is num_vectors=",
        ),
        ({"name": "sap", "ratio": 0.1}, "method.ratio must be omitted (the budget is num_vectors="),
        ({"name": "none"}, "method.name must be a method with a vector budget"),
        ("adaptive", "method.name must be a method with a vector budget"),
    ]:
        with pytest.raises(SpecError) as error:
            parse(Adaptive.Spec, {"num_vectors": 8, "method": method})
        assert str(error.value).startswith(message)
