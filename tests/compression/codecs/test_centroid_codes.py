"""Comparison of centroid codes with loops in float64."""

import numpy as np
import pytest
import torch

from pipeline.compression.codecs import residual
from pipeline.compression.codecs.centroid_codes import CentroidCodes
from pipeline.tokens import TokenBatch, normalise


def vectors(num: int, dim: int, seed: int = 0) -> torch.Tensor:
    return normalise(torch.randn(num, dim, generator=torch.Generator().manual_seed(seed)))


def build(centroids_CD: torch.Tensor) -> CentroidCodes:
    return CentroidCodes(CentroidCodes.Spec(), {"centroids": centroids_CD.numpy()})


@pytest.mark.parametrize("num_centroids", [1, 7, 300])
def test_codes_are_the_nearest_centroids(num_centroids, monkeypatch):
    monkeypatch.setattr(residual, "MAX_BLOCK_ELEMENTS", 1000)  # many blocks, the last one smaller
    centroids_CD, given_TD = vectors(num_centroids, 24), vectors(100, 24, seed=1)
    codec = build(centroids_CD)
    parts = codec.quantise(given_TD)
    assert {name: (p.dtype, p.shape[1]) for name, p in parts.items()} == codec.parts(24)
    # The inner product selects the same centroids, because they have unit length.
    expected = (given_TD.double() @ centroids_CD.double().T).argmax(dim=1)
    assert parts["codes"].squeeze(1).long().equal(expected)
    assert codec.dequantise(parts, 24).equal(centroids_CD[expected])


def test_centroids_of_any_length_are_compared_by_distance():
    codec = build(torch.tensor([[1.0, 0.0], [9.0, 0.0]]))
    assert codec.quantise(torch.tensor([[2.0, 0.0], [6.0, 0.0]]))["codes"].tolist() == [[0], [1]]


def test_ties_resolve_to_the_lowest_number():
    codec = build(torch.eye(4)[[1, 0, 0, 1]])
    assert codec.quantise(torch.eye(4))["codes"].tolist() == [[1], [0], [0], [0]]


def test_columns_with_the_largest_code():
    centroids = np.zeros((65_536, 2), np.float32)
    centroids[[300, 65_535]] = [[1, 0], [0, 1]]
    codec = build(torch.from_numpy(centroids))
    batch = TokenBatch(torch.eye(2)[None], torch.tensor([[True, True]]), True)
    column = codec.encode(batch)
    assert column.type == codec.column_type(2) and codec.token_bytes(2) == 2
    parts, lengths = codec.unpack(column, 2)
    assert parts["codes"].tolist() == [[300], [65_535]] and lengths.tolist() == [2]
    assert codec.decode(column, 2)[0].tolist() == [[1, 0], [0, 1]]
