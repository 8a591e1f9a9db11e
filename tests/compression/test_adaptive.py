import math

import pytest
import torch

from pipeline.compression.adaptive import Adaptive, budgets, information
from pipeline.compression.hpool import HPool, merge_costs
from pipeline.config import SpecError, dump, parse
from pipeline.registry import COMPRESSORS
from pipeline.tokens import TokenBatch, normalise

TAP = "pooled_row/mean/last"
CRITERIA = ["gain", "entropy", "length"]


def uneven(num_items=24, dim=16, seed=0):
    """Items of 20 to 90 tokens around 1 to 24 directions: some hold little, others much."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(20, 90, (num_items,), generator=generator)
    directions = torch.randn(num_items, dim, dim, generator=generator)
    which = torch.randint(0, 10**6, (num_items, 90), generator=generator)
    which %= torch.arange(1, num_items + 1).clamp(max=dim).unsqueeze(1)
    vectors = directions.gather(1, which.unsqueeze(2).expand(-1, -1, dim))
    vectors = normalise(vectors + 0.02 * torch.randn(vectors.shape, generator=generator))
    mask = torch.arange(90) < lengths.unsqueeze(1)
    taps = {TAP: (3 * torch.randn(num_items, 90, generator=generator)).softmax(dim=1)}
    return TokenBatch(vectors, mask, True, taps=taps)


def squared_error(batch, result):
    """Of each item: of its tokens to the mean of their group, by the support."""
    errors = []
    for tokens, mask, support in zip(batch.vectors, batch.mask, result.support, strict=True):
        groups = support[mask]
        means = torch.stack(
            [tokens[mask][groups == k].mean(dim=0) for k in range(groups.max() + 1)]
        )
        errors.append(float((tokens[mask] - means[groups]).square().sum()))
    return errors


def fitted(batch, **fields):
    spec = parse(Adaptive.Spec, {"num_vectors": 8, **fields})
    return Adaptive(spec, Adaptive.fit(spec, [batch]))


def test_costs_of_merges_are_what_each_adds_to_the_squared_error():
    batch = uneven(4)
    costs = merge_costs(batch.vectors, batch.lengths)
    for k in (1, 2, 7):
        cut = HPool(HPool.Spec(num_vectors=k, num_protected=0)).compress(batch)
        left = [
            float(row[k - 1 : n - 1].sum()) for row, n in zip(costs, batch.lengths, strict=True)
        ]
        assert squared_error(batch, cut) == pytest.approx(left, abs=1e-5)
    assert (costs[0, int(batch.lengths[0]) - 1 :] == -1).all()


@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_sample_takes_as_many_vectors_as_with_the_uniform_budget(criterion):
    batch = uneven()
    compressor = fitted(batch, criterion=criterion)
    lengths = compressor.compress(batch).lengths
    wanted = int(batch.lengths.clamp(max=8).sum())
    assert wanted - len(batch) <= lengths.sum() <= wanted  # ties and bounds leave a little
    assert lengths.min() >= 2 and lengths.max() <= 32  # a quarter and four times of 8
    assert len(set(lengths.tolist())) > 4


def test_gain_gives_the_least_squared_error_of_that_many_vectors():
    batch = uneven()
    fixed = HPool(HPool.Spec(num_vectors=8, num_protected=0)).compress(batch)
    method = {"name": "hpool", "num_protected": 0}
    spread = {
        c: fitted(batch, criterion=c, method=method, lowest=0).compress(batch) for c in CRITERIA
    }
    errors = {c: sum(squared_error(batch, result)) for c, result in spread.items()}
    assert errors["gain"] < 0.5 * sum(squared_error(batch, fixed))
    assert errors["gain"] < min(errors["length"], errors["entropy"])
    # Its budgets follow the number of directions, which nobody told it.
    held = spread["gain"].lengths[:6].tolist()
    assert held == sorted(held)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_equals_the_definition(criterion):
    batch = uneven(6)
    spec = parse(Adaptive.Spec, {"num_vectors": 8, "criterion": criterion, "lowest": 0.5})
    held = information(batch, spec)
    theta = 0.07
    there = budgets(spec, held, batch.lengths, theta).tolist()
    for i, n in enumerate(batch.lengths.tolist()):
        if criterion == "gain":
            wanted = 1 + sum(cost > theta for cost in held[i].tolist())
        elif criterion == "length":
            wanted = round(theta * n)
        else:
            total = float(batch.taps[TAP][i, :n].sum())
            shares = [float(a) / total for a in batch.taps[TAP][i, :n]]
            wanted = round(theta * math.exp(-sum(p * math.log(p) for p in shares)))
        assert there[i] == min(max(wanted, 4), 32, n)


@pytest.mark.parametrize("method", ["hpool", "random", "sap", "agc", "samer", "spatial"])
def test_any_method_with_a_budget(method):
    batch = uneven()
    spec = parse(Adaptive.Spec, {"num_vectors": 8, "method": method})
    for tap in Adaptive(spec).needs_taps:
        batch.taps[tap.name] = batch.taps[TAP]
    compressor = Adaptive(spec, Adaptive.fit(spec, [batch]))
    alone = COMPRESSORS.build(COMPRESSORS.resolve({"name": method, "num_vectors": 8}))
    assert compressor.support_form == alone.support_form
    result = compressor.compress(batch)
    assert len(set(result.lengths.tolist())) > 4
    assert result.lengths.sum() <= 8 * len(batch)


def test_specs():
    spec = parse(Adaptive.Spec, {"num_vectors": 8, "method": "sap"})
    assert spec.method.num_vectors == 8
    assert parse(Adaptive.Spec, dump(spec)) == spec
    for method, sentence in [
        (
            {"name": "sap", "num_vectors": 4},
            "method.num_vectors must be omitted (the budget is num_vectors=",
        ),
        ({"name": "sap", "ratio": 0.1}, "method.ratio must be omitted (the budget is num_vectors="),
        ({"name": "none"}, "unknown field 'num_vectors' in method"),
        ("adaptive", "method.name must be a method with a vector budget"),
    ]:
        with pytest.raises(SpecError) as error:
            parse(Adaptive.Spec, {"num_vectors": 8, "method": method})
        assert str(error.value).startswith(sentence)
