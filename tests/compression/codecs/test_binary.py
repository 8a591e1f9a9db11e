"""Comparison of the binary codec with NumPy and with explicit Hamming distances."""

import numpy as np
import pytest
import torch

from pipeline.config import SpecError
from pipeline.registry import CODECS
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors, Segment


def build(**settings):
    return CODECS.build(CODECS.resolve({"name": "binary", **settings}))


def random(num_tokens: int, dim: int, seed: int) -> torch.Tensor:
    vectors = torch.randn(num_tokens, dim, generator=torch.Generator().manual_seed(seed))
    vectors[:, ::5] = 0.0  # zeros are stored as bit 0
    return vectors


@pytest.mark.parametrize("dim", [1, 8, 13, 48, 2048])
def test_bits_equal_numpy(dim):
    given = random(30, dim, seed=dim)
    parts = build().quantise(given)
    expected = np.packbits(given.numpy() > 0, axis=1, bitorder="little")
    assert np.array_equal(parts["bits"].numpy(), expected)
    signs = np.where(given.numpy() > 0, 1.0, -1.0) / np.sqrt(dim)
    found = build().dequantise(parts, dim)
    np.testing.assert_allclose(found.double().numpy(), signs, rtol=1e-6)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(30))
    assert build().token_bytes(dim) == -(-dim // 8)


@pytest.mark.parametrize("dim", [8, 13, 384])
def test_binary_queries_score_by_hamming_distance(dim):
    codec = build(query="binary")
    query, docs, lengths = random(5, dim, seed=1), random(12, dim, seed=2), torch.tensor([7, 5])
    packed = PackedVectors([Segment(codec, dim, codec.quantise(docs), lengths)])
    scores = maxsim([codec.transform_queries(query)], packed)[0]
    for score, document in zip(scores.tolist(), docs.split([7, 5]), strict=True):
        total = 0.0
        for token in query.numpy():
            distances = [int(((token > 0) != (other > 0)).sum()) for other in document.numpy()]
            total += 1 - 2 * min(distances) / dim
        assert score == pytest.approx(total, abs=1e-5)


def test_float_queries_are_unchanged():
    query = random(5, 13, seed=1)
    assert build().transform_queries(query) is query
    doc = torch.tensor([[3.0, -1.0, 0.0, 2.0]])
    codec = build()
    packed = PackedVectors([Segment(codec, 4, codec.quantise(doc), torch.tensor([1]))])
    scores = maxsim([torch.tensor([[1.0, 2.0, 4.0, 8.0]])], packed)
    assert scores.tolist() == [[(1.0 - 2.0 - 4.0 + 8.0) / 2]]


def test_ignores_padding_bits():
    codec, given = build(), random(4, 13, seed=3)
    parts = codec.quantise(given)
    modified = {"bits": parts["bits"] | torch.tensor([0, 0b1110_0000], dtype=torch.uint8)}
    assert torch.equal(codec.dequantise(modified, 13), codec.dequantise(parts, 13))


def test_rejects_invalid_query():
    with pytest.raises(SpecError, match=r"query must be 'float' or 'binary', got 'hamming'"):
        build(query="hamming")
