"""Comparison of k-centre merging with loops in float64."""

import dataclasses

import numpy as np
import pytest
import torch

from pipeline.compression.kcenter import KCenter
from pipeline.config import SpecError, parse
from pipeline.index.columns import Representation
from pipeline.tokens import TokenBatch

LENGTHS = [23, 4, 0, 9, 1, 40, 6]
BUDGET = 6
TAP = "pooled_row/mean/last"


def compress(batch, **options):
    return KCenter(parse(KCenter.Spec, {"name": "kcenter", **options})).compress(batch)


def select_centres(x, num, start="mean", weights=None):
    """Returns the positions of the centres in the order of selection."""
    mean = x.mean(axis=0)
    if start == "first":
        centres = [0]
    else:
        sign = {"mean": 1, "outlier": -1}[start]
        centres = [max(range(len(x)), key=lambda i: sign * (x[i] @ mean))]
    weights = np.ones(len(x)) if weights is None else weights
    while len(centres) < num:

        def priority(i, centres=tuple(centres)):
            return weights[i] * min(1 - x[i] @ x[c] for c in centres)

        centres.append(max((i for i in range(len(x)) if i not in centres), key=priority))
    return centres


def assign(x, centres):
    """Returns the tokens of each centre."""
    nearest = [max(range(len(centres)), key=lambda k: token @ x[centres[k]]) for token in x]
    return [[i for i, n in enumerate(nearest) if n == k] for k in range(len(centres))]


def merge_to(x, groups, num):
    """Merges groups by Ward's criterion; the first group of a pair receives the other."""
    groups = [list(group) for group in groups]
    while len(groups) > num:

        def cost(pair, groups=groups):
            a, b = (groups[k] for k in pair)
            difference = x[a].mean(axis=0) - x[b].mean(axis=0)
            return len(a) * len(b) / (len(a) + len(b)) * (difference @ difference)

        pairs = [(a, b) for a in range(len(groups)) for b in range(a + 1, len(groups))]
        a, b = min(pairs, key=cost)
        groups[a] += groups.pop(b)
    return groups


def mean(x, group, weights=None):
    weights = np.ones(len(x)) if weights is None else weights
    total = (x[group] * weights[group, None]).sum(axis=0)
    return total / np.linalg.norm(total)


def reference(x, budget, output="mean", oversampling=1.5, start="mean", weights=None):
    """Returns the vectors of an item and the tokens of each."""
    if not len(x):
        return np.zeros((0, x.shape[1])), []
    budget = min(budget, len(x))
    if output == "mean":
        if len(x) <= budget:
            return x, [[i] for i in range(len(x))]
        num = min(len(x), int(np.ceil(budget * oversampling)))
        groups = merge_to(x, assign(x, select_centres(x, num, start, weights)), budget)
        return np.array([mean(x, group, weights) for group in groups]), groups
    centres = select_centres(x, budget, start, weights)
    groups = assign(x, centres)
    vectors = []
    for k in range(budget):
        level = 1
        while level < k + 1:
            level *= 4
        coarse = assign(x, centres[: min(level, budget)])[k]
        total = mean(x, groups[k], weights) + mean(x, coarse, weights)
        vectors.append(total / np.linalg.norm(total))
    return np.array(vectors), groups


@pytest.mark.parametrize(
    "output, oversampling",
    [("mean", 1.0), ("mean", 1.5), ("mean", 4.0), ("progressive", 1.5)],
)
@pytest.mark.parametrize("start", ["mean", "first", "outlier"])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_reference(ragged, unit_items, output, start, weighted, oversampling):
    batch = ragged(LENGTHS, taps=[TAP], seed=3)
    saliency = TAP if weighted else None
    options = {"output": output, "start": start, "oversampling": oversampling}
    result = compress(batch, num_vectors=BUDGET, saliency=saliency, **options)
    for i, x in enumerate(unit_items(batch)):
        weights = batch.taps[TAP][i, batch.mask[i]].double().numpy() if weighted else None
        vectors, groups = reference(x, BUDGET, **options, weights=weights)
        np.testing.assert_allclose(result.vectors[i, result.mask[i]], vectors, atol=1e-5)
        assignment = result.assignment[i, batch.mask[i]].tolist()
        found = [[n for n, k in enumerate(assignment) if k == j] for j in range(len(groups))]
        assert found == [sorted(group) for group in groups]


def test_prefix_of_nested_output_covers_the_item(ragged, unit_items):
    """Vectors are most similar to their own centre, also for items within their budget."""
    batch = ragged([40, 23, 8, 3], unit=True)
    large = KCenter(KCenter.Spec(num_vectors=16, output="progressive"))
    assert large.is_nested and not KCenter(KCenter.Spec(num_vectors=16)).is_nested
    vectors = large.compress(batch).vectors.double().numpy()
    for i, x in enumerate(unit_items(batch)):
        for k in (1, 4, 6):
            centres = select_centres(x, min(k, len(x)))
            nearest = (vectors[i, : len(centres)] @ x[centres].T).argmax(axis=1)
            assert nearest.tolist() == list(range(len(centres)))


def test_radius_bounds_the_loss_of_maxsim(ragged, unit_items):
    batch = ragged([60, 31, 5], unit=True)
    queries = torch.nn.functional.normalize(torch.randn(200, 8, dtype=torch.float64), dim=1)
    queries = queries.numpy()
    for radius in (0.3, 0.6, 0.9):
        lengths = compress(batch, max_radius=radius).lengths.tolist()
        for i, x in enumerate(unit_items(batch)):
            centres = x[select_centres(x, lengths[i])]
            distances = np.linalg.norm(x[:, None] - centres[None], axis=2).min(axis=1)
            assert distances.max() <= radius + 1e-3
            loss = (queries @ x.T).max(axis=1) - (queries @ centres.T).max(axis=1)
            assert loss.max() <= radius + 1e-3
            if len(centres) > 1:  # one centre less does not suffice
                distances = np.linalg.norm(x[:, None] - centres[None, :-1], axis=2).min(axis=1)
                assert distances.max() > radius - 1e-3


def test_max_radius_with_a_budget(ragged):
    batch = ragged([60, 31, 5], unit=True)
    unlimited = compress(batch, max_radius=0.6).lengths
    limited = compress(batch, max_radius=0.6, num_vectors=4).lengths
    assert limited.tolist() == unlimited.clamp(max=4).tolist()
    assert compress(batch, max_radius=2).lengths.tolist() == [1, 1, 1]


@pytest.mark.parametrize("output", ["mean", "progressive"])
def test_gradients_equal_finite_differences(ragged, output):
    batch = ragged([9, 4], num_padding=0, garbage=0.0, taps=[TAP])
    direction = torch.randn(batch.vectors.shape, generator=torch.Generator().manual_seed(1))
    compressor = KCenter(KCenter.Spec(num_vectors=3, output=output, saliency=TAP))

    def loss(vectors):
        result = compressor.compress(dataclasses.replace(batch, vectors=vectors))
        weights = torch.arange(result.vectors.numel()).reshape(result.vectors.shape).sin()
        return (result.vectors * weights)[result.mask].sum()

    vectors = batch.vectors.clone().requires_grad_()
    loss(vectors).backward()
    step = 1e-2 * direction
    expected = (loss(batch.vectors + step) - loss(batch.vectors - step)) / 2
    torch.testing.assert_close((vectors.grad * step).sum(), expected, atol=2e-4, rtol=2e-2)


def test_equal_tokens_yield_fewer_vectors_than_budget():
    vectors = torch.eye(3)[[0, 1, 0, 2, 1, 0]].unsqueeze(0)
    batch = TokenBatch(vectors, torch.ones(1, 6, dtype=torch.bool), normalised=True)
    for output in ("mean", "progressive"):
        result = compress(batch, num_vectors=5, output=output)
        assert result.lengths.tolist() == [3]
        assert result.assignment.tolist() == [[0, 1, 0, 2, 1, 0]]


def test_rare_token_has_a_vector_of_its_own():
    """One token of an object among a hundred of the background survives at K = 2."""
    noise = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    background = torch.tensor([1.0, 0.0, 0.0]) + 0.05 * noise
    vectors = torch.cat([background, torch.tensor([[0.0, 1.0, 0.0]])]).unsqueeze(0)
    batch = TokenBatch(vectors, torch.ones(1, 101, dtype=torch.bool), normalised=False)
    result = compress(batch, num_vectors=2)
    assert float(result.vectors[0, :, 1].max()) > 0.99


def test_budget_is_required():
    with pytest.raises(SpecError, match="field 'num_vectors' is required"):
        parse(KCenter.Spec, {"name": "kcenter"})
    with pytest.raises(SpecError, match="max_radius must be less than or equal to 2, got 3"):
        parse(KCenter.Spec, {"name": "kcenter", "max_radius": 3})
    with pytest.raises(SpecError, match="oversampling must be greater than or equal to 1, got 0.5"):
        parse(KCenter.Spec, {"name": "kcenter", "num_vectors": 3, "oversampling": 0.5})
    rule = "oversampling must be omitted with output: progressive, got 2"
    with pytest.raises(SpecError, match=rule):
        parse(
            KCenter.Spec,
            {"name": "kcenter", "num_vectors": 3, "oversampling": 2, "output": "progressive"},
        )
    with pytest.raises(SpecError, match="oversampling must be omitted with max_radius, got 2"):
        parse(KCenter.Spec, {"name": "kcenter", "max_radius": 1, "oversampling": 2})


def test_default_names():
    names = {
        "kcenter_64": {"num_vectors": 64},
        "kcenter_progressive_64": {"num_vectors": 64, "output": "progressive"},
        "kcenter_max_radius0_5": {"max_radius": 0.5},
    }
    for name, options in names.items():
        spec = parse(Representation, {"compressor": {"name": "kcenter", **options}})
        assert spec.id == name
