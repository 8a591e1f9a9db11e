from fractions import Fraction

import numpy as np
import torch

from pipeline.compression.seeds import uniform_positions
from pipeline.compression.spatial import Spatial


def linspace_rounded(length, num):
    """Computes `linspace(0, length - 1, num).round()` with exact fractions."""
    if num == 1:
        return [0]
    return [round(Fraction(k * (length - 1), num - 1)) for k in range(num)]


def test_positions_equal_rounded_linspace_and_are_distinct():
    for length in range(1, 70):
        for num in range(1, 70):
            positions, mask = uniform_positions(
                torch.tensor([length]), torch.tensor([min(num, length)])
            )
            found = positions[mask].tolist()
            assert found == linspace_rounded(length, min(num, length))
            assert len(set(found)) == min(num, length)


def test_halves_are_rounded_to_even():
    positions, _ = uniform_positions(
        torch.tensor([4, 6]), torch.tensor([3, 3])
    )  # the middle positions are 1.5 and 2.5
    assert positions.tolist() == [[0, 2, 3], [0, 2, 5]]


def test_keeps_tokens_at_uniform_positions(ragged, unit_items):
    batch = ragged([9, 2, 0, 5, 17])
    result = Spatial(Spatial.Spec(num_vectors=5)).compress(batch)
    for i, item in enumerate(unit_items(batch)):
        positions = linspace_rounded(len(item), min(5, len(item))) if len(item) else []
        np.testing.assert_allclose(result.vectors[i, result.mask[i]], item[positions], atol=1e-6)
        assignment = result.assignment[i, batch.mask[i]].tolist()
        assert [assignment.index(k) for k in range(len(positions))] == positions


def test_grid_in_raster_order(ragged):
    """On a 4 x 4 grid with K = 4, every fifth token is on the diagonal."""
    result = Spatial(Spatial.Spec(num_vectors=4)).compress(ragged([16], num_padding=0))
    assert (result.assignment[0] >= 0).nonzero().flatten().tolist() == [0, 5, 10, 15]
