"""The codec bits against float64, and its estimates of inner products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipeline import Index
from pipeline.compression.codecs.bits import CLIPPING, Bits, mean_direction
from pipeline.config import SpecError
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors, Segment
from tests.index.test_isotropy import vectors_with

DIM = 64


def fitted(bits: int, sample_TD: np.ndarray, seed: int = 0) -> Bits:
    spec = Bits.Spec(bits=bits)
    return Bits(spec, Bits.fit(spec, sample_TD.astype(np.float32), seed))


def anisotropic(cosine: float, num_items: int = 200, seed: int = 0) -> np.ndarray:
    """Returns vectors that share a direction other than an axis."""
    rotation_DD, _ = np.linalg.qr(np.random.default_rng(9).standard_normal((DIM, DIM)))
    items = np.concatenate(vectors_with(cosine, num_items, seed))
    return (items @ rotation_DD).astype(np.float32)


@pytest.mark.parametrize("dim", [1, 2, 13, 64])
def test_rotation_is_orthogonal_and_begins_with_the_mean_direction(dim):
    sample_TD = np.random.default_rng(0).standard_normal((50, dim)) + 0.5
    rotation_DD = fitted(1, sample_TD).fitted["rotation"].astype(np.float64)
    np.testing.assert_allclose(rotation_DD @ rotation_DD.T, np.eye(dim), atol=1e-6)
    units_TD = sample_TD / np.linalg.norm(sample_TD, axis=1, keepdims=True)
    mean_D = units_TD.mean(axis=0)
    np.testing.assert_allclose(rotation_DD[0], mean_D / np.linalg.norm(mean_D), atol=1e-6)
    again = fitted(4, sample_TD).fitted["rotation"]
    np.testing.assert_array_equal(again, fitted(1, sample_TD).fitted["rotation"])
    assert dim < 3 or (again != fitted(1, sample_TD, seed=1).fitted["rotation"]).any()


@pytest.mark.parametrize("sample", [np.zeros((0, 5)), np.zeros((3, 5)), np.eye(5) * [[1], [-1]][0]])
def test_samples_without_a_mean_direction(sample):
    rotation_DD = fitted(1, sample).fitted["rotation"]
    np.testing.assert_allclose(rotation_DD @ rotation_DD.T, np.eye(5), atol=1e-6)
    assert mean_direction(np.zeros((0, 5))).tolist() == [0] * 5


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codes_equal_a_loop(bits):
    """For each vector, the integers of the largest cosine among the quantiser steps."""
    sample_TD = anisotropic(0.6, num_items=5)
    codec, top = fitted(bits, sample_TD), 2**bits - 1
    parts = codec.quantise(torch.from_numpy(sample_TD))
    rotation_DD = codec.fitted["rotation"].astype(np.float64)
    for row, vector_D in enumerate(sample_TD.astype(np.float64)):
        rotated_D = rotation_DD @ vector_D
        rest_D = rotated_D[1:]
        grids = []
        for clipping in CLIPPING:
            steps_D = np.clip(rest_D * top * clipping / np.abs(rest_D).max(), -top, top)
            grids.append(2 * np.floor(steps_D / 2) + 1)
        grid_D = max(grids, key=lambda grid: rest_D @ grid / np.linalg.norm(grid))
        scale = rest_D @ rest_D / (rest_D @ grid_D)
        assert parts["projections"][row].item() == pytest.approx(rotated_D[0], rel=5e-4)
        assert parts["scales"][row].item() == pytest.approx(scale, rel=1e-3)
        found_D = np.unpackbits(parts["bits"][row].numpy(), bitorder="little").reshape(DIM, bits)
        np.testing.assert_array_equal(2 * found_D[1:] @ (1 << np.arange(bits)) - top, grid_D)


def test_bytes_per_vector():
    assert [Bits(Bits.Spec(bits=bits)).token_bytes(128) for bits in (1, 2, 4)] == [20, 36, 68]


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("cosine", [0.0, 0.95])
def test_decoded_vectors_are_encoded_as_before(bits, cosine):
    codec = fitted(bits, anisotropic(cosine))
    parts = codec.quantise(torch.from_numpy(anisotropic(cosine)))
    again = codec.quantise(codec.dequantise(parts, DIM))
    assert all(torch.equal(again[name], part) for name, part in parts.items())


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("cosine", [0.0, 0.3, 0.6, 0.95])
def test_estimates_are_unbiased(bits, cosine):
    """Over random rotations, the mean error of each of 64 inner products is that of its samples."""
    vectors_TD, num_seeds = anisotropic(cosine), 200
    queries_QD, documents_TD = (torch.from_numpy(vectors_TD[i::50][:8]) for i in (0, 1))
    documents_TD[0] = queries_QD[0]  # estimates of signs without a factor are biased most here
    exact_QT = queries_QD.double() @ documents_TD.double().T
    errors_SQT = []
    for seed in range(num_seeds):
        codec = fitted(bits, vectors_TD, seed)
        decoded_TD = codec.dequantise(codec.quantise(documents_TD), DIM)
        found_QT = codec.transform_queries(queries_QD).double() @ decoded_TD.double().T
        errors_SQT.append(found_QT - exact_QT)
    errors = torch.stack(errors_SQT)
    rest = 1 - cosine
    spread = {1: 0.75, 2: 0.35, 4: 0.1}[bits] * rest / DIM**0.5
    assert errors.std() < 1.1 * spread + 2e-4
    standard = errors.std(dim=0) / num_seeds**0.5
    # The largest of 64 normal errors; float16 projections and scales add a constant error.
    assert (errors.mean(dim=0).abs() < 4 * standard + 3e-4).all()
    assert abs(errors.mean().item()) < 0.02 * spread + 1e-4


@pytest.mark.parametrize("bits", [1, 4])
def test_equal_and_zero_vectors(bits):
    given_TD = torch.ones(40, 5)
    codec = fitted(bits, given_TD.numpy())
    parts = codec.quantise(given_TD)
    torch.testing.assert_close(codec.dequantise(parts, 5), given_TD, rtol=1e-3, atol=1e-3)
    zero = codec.quantise(torch.zeros(2, 5))
    assert not codec.dequantise(zero, 5).any()
    assert not codec.transform_queries(torch.zeros(2, 5)).any()
    packed = PackedVectors([Segment(codec, 5, zero, torch.tensor([2]))])
    assert maxsim([torch.zeros(3, 5), torch.ones(1, 5)], packed).tolist() == [[0], [0]]


def share_found(
    vectors_TD: torch.Tensor,
    cosine: float,
    coded: PackedVectors,
    transform: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> float:
    """Returns the share of the exact best 10 items of 8 vectors among 50 candidates by codes.

    Queries are items with noise of half the size of the differences between vectors.
    """
    exact = PackedVectors.from_values(vectors_TD, coded.lengths)
    generator = torch.Generator().manual_seed(1)
    size = 0.5 * (1 - cosine) ** 0.5 / DIM**0.5
    queries = [
        item_ND + size * torch.randn(8, DIM, generator=generator)
        for item_ND in vectors_TD.split(8)[::40]
    ]
    best_Q10 = maxsim(queries, exact).topk(10).indices
    found_Q50 = maxsim(transform(queries), coded).topk(50).indices
    return (best_Q10[:, :, None] == found_Q50[:, None]).any(dim=2).float().mean().item()


@pytest.mark.parametrize("cosine", [0.3, 0.6, 0.95])
def test_best_items_of_anisotropic_vectors_are_found(cosine):
    given, lengths = torch.from_numpy(anisotropic(cosine, num_items=1000)), torch.tensor([8] * 1000)
    codec = fitted(1, given.numpy())

    def transform(queries: list[torch.Tensor]) -> list[torch.Tensor]:
        return [codec.transform_queries(query) for query in queries]

    packed = PackedVectors([Segment(codec, DIM, codec.quantise(given), lengths)])
    found = share_found(given, cosine, packed, transform)
    signs = PackedVectors.from_values(given.sign(), lengths)
    assert found > 0.65 > share_found(given, cosine, signs, list)


@pytest.mark.parametrize("lengths", [[1] * 40, [2000, 1]], ids=["one", "2000"])
def test_indexes_of_bits(tmp_path, lengths):
    rng = np.random.default_rng(0)
    vectors = [rng.standard_normal((length, 20)) + 1 for length in lengths]
    vectors = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in vectors]
    index = Index(str(tmp_path / "index"))
    ids = [f"i{number}" for number in range(len(vectors))]
    full = {"compressor": "none", "codec": {"name": "bits", "bits": 4}}
    index.add(ids, vectors, representations=[full])
    hit = index.search([vectors[1]], k=1)[0][0]
    assert hit.item_id == "i1"
    assert index.reader.representation("full_bits_4").codec_artefact


def test_rejects_invalid_values(tmp_path):
    with pytest.raises(SpecError, match="contains|finite"):
        codec = {"compressor": "none", "codec": "bits"}
        bad = np.full((2, 4), np.nan)
        Index(str(tmp_path / "index")).add(["a"], [bad], representations=[codec])
