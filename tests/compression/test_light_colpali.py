import numpy as np
import pytest
import torch

from pipeline.compression.hpool import HPool
from pipeline.compression.light_colpali import LightColPali
from pipeline.tokens import TokenBatch

LENGTHS = [23, 3, 0, 9, 1, 40]


def reference(x, num_groups, dtype):
    """Ward linkage of the rows of the rounded cosine distances, by pairwise merges."""
    rows = np.zeros((len(x), len(x)))
    for i in range(len(x)):
        for j in range(len(x)):
            rows[i, j] = 0.0 if i == j else dtype(max(0.0, 1 - x[i] @ x[j]))
    groups = [[i] for i in range(len(x))]
    while len(groups) > num_groups:
        best, pair = np.inf, None
        for a in range(len(groups)):
            for b in range(a + 1, len(groups)):
                difference = rows[groups[a]].mean(axis=0) - rows[groups[b]].mean(axis=0)
                sizes = len(groups[a]), len(groups[b])
                delta = sizes[0] * sizes[1] / sum(sizes) * (difference @ difference)
                if delta < best:
                    best, pair = delta, (a, b)
        groups[pair[0]] += groups.pop(pair[1])
    return sorted(sorted(group) for group in groups)


@pytest.mark.parametrize("distances", ["float16", "float64"])
def test_equals_reference(ragged, unit_items, distances):
    batch = ragged(LENGTHS)
    result = LightColPali(LightColPali.Spec(num_vectors=5, distance_dtype=distances)).compress(
        batch
    )
    for i, x in enumerate(unit_items(batch)):
        groups = reference(x, 5, getattr(np, distances))
        assignment = result.assignment[i, batch.mask[i]].tolist()
        assert [
            [n for n, k in enumerate(assignment) if k == j] for j in range(len(groups))
        ] == groups
        for k, group in enumerate(groups):
            mean = sum(x[n] for n in group) / len(group)
            mean /= np.sqrt((mean**2).sum())
            np.testing.assert_allclose(result.vectors[i, k], mean, atol=1e-6)


def test_without_rounding_equals_hpool_of_rows(ragged):
    batch = ragged([80, 50], dim=16)
    light = LightColPali(LightColPali.Spec(num_vectors=9, distance_dtype="float64")).compress(batch)
    spec = HPool.Spec(num_vectors=9, linkage="rows", num_protected=0)
    assert torch.equal(light.assignment, HPool(spec).compress(batch).assignment)


def test_rounding_changes_few_merges(ragged):
    batch = ragged([200] * 20, dim=16)
    assignments = [
        LightColPali(LightColPali.Spec(num_vectors=20, distance_dtype=name))
        .compress(batch)
        .assignment
        for name in ("float16", "float64")
    ]
    num_changed = (assignments[0] != assignments[1]).any(dim=1).sum()
    assert 0 < num_changed < 20


@pytest.mark.parametrize("distances", ["float16", "float64"])
def test_equal_tokens_yield_fewer_vectors_than_budget(distances):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 7, 24, generator=generator)[:, [0, 1, 2, 3, 4, 5, 6] * 5]
    batch = TokenBatch(vectors, torch.ones(1, 35, dtype=torch.bool), normalised=False)
    spec = LightColPali.Spec(num_vectors=20, distance_dtype=distances)
    assert LightColPali(spec).compress(batch).assignment.tolist() == [list(range(7)) * 5]
