import numpy as np
import pytest
import torch

from pipeline.compression.adaptive import Adaptive, budgets, radii
from pipeline.config import SpecError, dump, parse
from pipeline.registry import COMPRESSORS
from pipeline.tokens import TokenBatch, normalise
from tests.compression.test_kcenter import select_centres

TAP = "pooled_row/mean/last"


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


def fitted(batch, **fields):
    spec = parse(Adaptive.Spec, {"num_vectors": 8, **fields})
    return Adaptive(spec, Adaptive.fit(spec, [batch]))


def test_total_equals_uniform_budget():
    batch = make_batch()
    lengths = fitted(batch).compress(batch).lengths
    max_total = int(batch.lengths.clamp(max=8).sum())
    assert max_total - len(batch) <= lengths.sum() <= max_total  # ties and limits cost a few
    assert lengths.min() >= 2 and lengths.max() <= 32  # 8 / 4 and 8 * 4
    assert len(set(lengths.tolist())) > 4


def test_equals_definition():
    batch = make_batch(6)
    spec = parse(Adaptive.Spec, {"num_vectors": 8, "min_budget": 0.5})
    theta = 0.07
    found = budgets(spec, radii(batch, spec), batch.lengths, theta).tolist()
    for i, n in enumerate(batch.lengths.tolist()):
        x = batch.vectors[i, :n].double().numpy()
        distances = 1 - x @ x[select_centres(x, min(n, 32))].T
        radii_K = np.minimum.accumulate(distances, axis=1).max(axis=0)
        expected = 1 + sum(radius > theta for radius in radii_K)
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
