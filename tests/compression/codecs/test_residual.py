"""Comparison of the residual codec with loops in float64, and tests of `fit`."""

import numpy as np
import pytest
import torch

from pipeline.compression.codecs import residual
from pipeline.compression.codecs.residual import Residual
from pipeline.config import SpecError
from pipeline.registry import CODECS


def sample(num_tokens: int, dim: int, seed: int = 0, *, unit: bool = True) -> np.ndarray:
    """Returns vectors around a few directions."""
    centres = np.random.default_rng(99).normal(size=(8, dim))
    rng = np.random.default_rng(seed)
    tokens = centres[rng.integers(8, size=num_tokens)] + 0.5 * rng.normal(size=(num_tokens, dim))
    return (tokens / np.linalg.norm(tokens, axis=1, keepdims=True) ** unit).astype(np.float32)


def spec(**settings) -> Residual.Spec:
    return CODECS.resolve({"name": "residual", "num_centroids": 16, **settings})


def build(tokens: np.ndarray, **settings) -> Residual:
    return Residual(spec(**settings), Residual.fit(spec(**settings), tokens))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dim", [13, 48])
@pytest.mark.parametrize("unit", [True, False])
def test_equals_reference(bits, dim, unit, monkeypatch):
    monkeypatch.setattr(residual, "MAX_BLOCK_ELEMENTS", 100)  # many blocks, the last one smaller
    codec = build(sample(200, dim, unit=unit), bits=bits)
    centroids, cutoffs, weights = (
        codec.artefact[name].astype(np.float64) for name in ("centroids", "cutoffs", "weights")
    )
    assert len(centroids) == 16 and len(cutoffs) + 1 == len(weights) == 2**bits
    given = sample(30, dim, seed=1, unit=unit)
    parts = codec.quantise(torch.from_numpy(given))
    found = codec.dequantise(parts, dim).numpy()
    for t, vector in enumerate(given.astype(np.float64)):
        nearest = int(((centroids - vector) ** 2).sum(axis=1).argmin())
        assert parts["centroids"][t].tolist() == [nearest]
        code = 0
        expected = np.zeros(dim)
        for d in range(dim):
            bucket = sum(bool(vector[d] - centroids[nearest, d] > cutoff) for cutoff in cutoffs)
            code |= bucket << (bits * d)
            expected[d] = centroids[nearest, d] + weights[bucket]
        width = -(-dim * bits // 8)
        assert bytes(parts["residuals"][t].numpy()) == code.to_bytes(width, "little")
        expected /= np.linalg.norm(expected) ** unit
        np.testing.assert_allclose(found[t], expected, atol=1e-6)


def test_buckets_are_quantiles_of_residuals():
    tokens = sample(500, 24)
    artefact = Residual.fit(spec(bits=2), tokens)
    distances = ((tokens[:, None] - artefact["centroids"][None]) ** 2).sum(axis=2)
    residuals = tokens - artefact["centroids"][distances.argmin(axis=1)]
    expected = np.quantile(residuals, [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8])
    np.testing.assert_allclose(artefact["weights"], expected[::2], atol=1e-6)
    np.testing.assert_allclose(artefact["cutoffs"], expected[1::2], atol=1e-6)


def test_more_bits_and_centroids_reduce_error():
    tokens, given = sample(2000, 64), torch.from_numpy(sample(300, 64, seed=1))

    def error(**settings) -> float:
        codec = build(tokens, **settings)
        found = codec.dequantise(codec.quantise(given), 64)
        return float((found - given).square().sum(dim=1).mean())

    assert error(bits=4) < 0.02 < error(bits=2) < 0.2
    assert error(bits=2, num_centroids=8) < error(bits=2, num_centroids=1)


@pytest.mark.parametrize("scale", [1.0, 0.995, 1.5])
def test_normalises_if_sample_is_normalised(scale):
    codec = build(sample(200, 24) * np.float32(scale))
    given = torch.from_numpy(sample(20, 24, seed=1)) * scale
    lengths = codec.dequantise(codec.quantise(given), 24).norm(dim=1)
    is_unit = scale < 1.01
    assert bool(codec.artefact["normalised"]) == is_unit
    assert torch.allclose(lengths, torch.ones(20)) == is_unit


def test_zero_vectors_do_not_affect_normalisation():
    tokens = np.concatenate([sample(200, 24), np.zeros((1, 24), np.float32)])
    assert bool(Residual.fit(spec(), tokens)["normalised"])
    assert not bool(Residual.fit(spec(num_centroids=1), tokens[-1:])["normalised"])


def test_fit_is_deterministic_given_seed():
    tokens = sample(400, 24)
    first, again, other = (Residual.fit(spec(), tokens, seed) for seed in (3, 3, 2**32 - 1))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["centroids"], other["centroids"])


def test_sample_as_small_as_codebook():
    tokens = sample(16, 24)
    codec = build(tokens)
    found = codec.dequantise(codec.quantise(torch.from_numpy(tokens)), 24)
    np.testing.assert_allclose(found.numpy(), tokens, atol=1e-6)  # each token is a centroid
    with pytest.raises(SpecError) as error:
        Residual.fit(spec(), tokens[:15])
    assert str(error.value) == (
        "codec.num_centroids must be at most 15, the number of vectors in the sample to fit on,"
        " got 16"
    )


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"bits": 3}, "bits must be 2 or 4, got 3"),
        ({"num_centroids": 0}, "num_centroids must be greater than or equal to 1, got 0"),
        ({"num_centroids": 65537}, "num_centroids must be less than or equal to 65536, got 65537"),
    ],
)
def test_rejects_invalid_settings(settings, message):
    with pytest.raises(SpecError) as error:
        spec(**settings)
    assert str(error.value).startswith(message)
