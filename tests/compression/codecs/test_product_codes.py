"""Comparison of product codes with loops in float64."""

import numpy as np
import pytest
import torch

from pipeline.compression.codecs import residual
from pipeline.compression.codecs.product_codes import ProductCodes
from pipeline.tokens import TokenBatch


def build(num_parts: int, num_centroids: int, size: int) -> ProductCodes:
    rng = np.random.default_rng(0)
    centroids = rng.normal(size=(num_parts, num_centroids, size)).astype(np.float32)
    return ProductCodes(ProductCodes.Spec(), {"centroids": centroids})


def vectors(num: int, dim: int) -> torch.Tensor:
    return torch.randn(num, dim, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("num_parts", "num_centroids", "size", "dim"), [(4, 256, 3, 12), (3, 7, 5, 13), (1, 1, 4, 4)]
)
def test_codes_are_the_nearest_centroids(num_parts, num_centroids, size, dim, monkeypatch):
    monkeypatch.setattr(residual, "MAX_BLOCK_ELEMENTS", 1000)  # many blocks, the last one smaller
    codec, given_TD = build(num_parts, num_centroids, size), vectors(50, dim)
    parts = codec.quantise(given_TD)
    assert {name: (p.dtype, p.shape[1]) for name, p in parts.items()} == codec.parts(dim)
    restored_TD = codec.dequantise(parts, dim)
    assert restored_TD.shape == (50, dim)
    centroids = codec.fitted["centroids"].astype(np.float64)
    for given_D, codes, restored_D in zip(given_TD, parts["codes"], restored_TD, strict=True):
        padded = np.zeros(num_parts * size)
        padded[:dim] = given_D
        for part, code in enumerate(codes.tolist()):
            span = slice(part * size, (part + 1) * size)
            distances = [((padded[span] - centroid) ** 2).sum() for centroid in centroids[part]]
            assert code == np.argmin(distances)
            chosen = centroids[part, code][: max(dim - part * size, 0)]
            np.testing.assert_array_equal(restored_D[span].double(), chosen)


def test_ties_resolve_to_one_of_the_centroids():
    codec = ProductCodes(ProductCodes.Spec(), {"centroids": np.ones((2, 5, 1), np.float32)})
    parts = codec.quantise(torch.zeros(3, 2))
    assert (parts["codes"] < 5).all() and (parts["codes"] == parts["codes"][0]).all()
    assert (codec.dequantise(parts, 2) == 1).all()


def test_columns_restore_codes():
    codec = build(4, 256, 2)
    given = vectors(6, 8)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    column = codec.encode(TokenBatch(given.view(2, 3, 8), mask, True))
    assert column.type == codec.column_type(8) and codec.token_bytes(8) == 4
    parts, lengths = codec.unpack(column, 8)
    assert lengths.tolist() == [2, 3]
    assert parts["codes"].tolist() == codec.quantise(given[mask.flatten()])["codes"].tolist()
