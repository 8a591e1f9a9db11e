"""Fixtures: ragged token batches with padding anywhere in a row and garbage at padding."""

import pytest
import torch

from pipeline.tokens import TokenBatch


def _ragged(
    lengths, dim=8, seed=0, *, unit=False, boxes=False, garbage=float("nan"), num_padding=3, taps=()
):
    generator = torch.Generator().manual_seed(seed)
    num_items, width = len(lengths), max(lengths, default=0) + num_padding
    mask = torch.zeros(num_items, width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, torch.randperm(width, generator=generator)[:length]] = True
    vectors = torch.randn(num_items, width, dim, generator=generator)
    if unit:
        vectors = vectors / vectors.norm(dim=2, keepdim=True)
    extents = None
    if boxes:
        corners = torch.rand(num_items, width, 2, generator=generator) * 0.9
        times = torch.rand(num_items, width, 2, generator=generator) * 100
        extents = torch.cat([corners, corners + 0.1, times], dim=2)
        extents[~mask] = garbage
    vectors[~mask] = garbage
    tap_values = {name: torch.rand(num_items, width, generator=generator) for name in taps}
    return TokenBatch(vectors, mask, normalised=unit, extents=extents, taps=tap_values)


@pytest.fixture
def ragged():
    """Factory of batches with items of the given lengths."""
    return _ragged


@pytest.fixture
def unit_items():
    """Function that converts a batch to one float64 array of unit vectors per item."""

    def arrays(batch):
        items = []
        for vectors, mask in zip(batch.vectors, batch.mask, strict=True):
            item = vectors[mask].double().numpy()
            items.append(item / (item**2).sum(axis=1, keepdims=True) ** 0.5)
        return items

    return arrays
