import dataclasses

import numpy as np
import torch

from pipeline.compression.random import Random
from pipeline.tokens import TokenBatch


def mix(bits):
    for _ in range(2):
        bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) % 2**32
    return bits ^ (bits >> 16)


def reference(item, num, seed):
    """Computes the positions of the `num` smallest draws with Python integers."""
    total = 0
    for n, token in enumerate(item):
        signs = sum(mix(d + 1) for d, x in enumerate(token) if np.signbit(x))
        total += mix(mix(signs % 2**32) ^ mix(n + 1))
    key = mix(mix(total % 2**32) ^ mix(seed ^ 0x9E3779B9))
    draws = [mix(key ^ mix(n + 1)) for n in range(len(item))]
    return sorted(sorted(range(len(item)), key=draws.__getitem__)[:num])


def selections(batch, num, seed=0):
    """Returns the selected positions of each item among its real tokens."""
    result = Random(Random.Spec(num_vectors=num, seed=seed)).compress(batch)
    rows = zip(result.assignment, batch.mask, strict=True)
    return [(outputs[mask] >= 0).nonzero().flatten().tolist() for outputs, mask in rows]


def test_equals_reference(ragged, unit_items):
    batch = ragged([9, 2, 0, 5, 40], seed=3)
    items = unit_items(batch)
    for seed in (0, 1, 2**32 - 1):
        assert selections(batch, 4, seed) == [reference(item, 4, seed) for item in items]
    result = Random(Random.Spec(num_vectors=4)).compress(batch)
    for i, (item, positions) in enumerate(zip(items, selections(batch, 4), strict=True)):
        np.testing.assert_allclose(result.vectors[i, result.mask[i]], item[positions], atol=1e-6)


def test_selection_is_stable_across_versions():
    """Stored indexes depend on these numbers."""
    vectors = torch.tensor([[[1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [0.0, 2.0]] * 4])
    batch = TokenBatch(vectors, torch.ones(1, 16, dtype=torch.bool), normalised=False)
    assert selections(batch, 4) == [[5, 11, 12, 15]]


def test_scale_and_precision_do_not_change_selection(ragged):
    batch = ragged([30] * 20, dim=64)
    expected = selections(batch, 7)
    unit = batch.vectors / batch.vectors.norm(dim=2, keepdim=True)
    for stored in (unit, unit.half(), unit.bfloat16(), batch.vectors * 37.0):
        assert selections(dataclasses.replace(batch, vectors=stored), 7) == expected


def test_selections_are_uniform_and_differ_between_items_and_seeds(ragged):
    batch = ragged([20] * 2000)
    first, second = selections(batch, 5, seed=0), selections(batch, 5, seed=1)
    assert len({tuple(c) for c in first}) > 1500  # of 15504 subsets
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10
    counts = np.bincount(np.concatenate(first), minlength=20)
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert chi_square < 43.8  # 99.9 % quantile at 19 degrees of freedom
