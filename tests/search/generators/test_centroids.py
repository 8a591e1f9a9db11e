"""Tests of the fitting of centroids, of codes and of approximate scores."""

import faiss
import numpy as np
import pytest
import torch

from pipeline.config import SpecError
from pipeline.registry import CANDIDATES
from pipeline.search.generators import Sample
from pipeline.search.generators.centroids import Centroids, distinct
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors, Segment
from pipeline.tokens import normalise

LENGTHS = [3, 0, 1, 40, 2, 0, 54]


def vectors(num: int, dim: int = 16, seed: int = 0) -> torch.Tensor:
    """Returns unit vectors around a few directions."""
    directions = torch.randn(12, dim, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    clusters = torch.randint(12, (num,), generator=generator)
    return normalise(directions[clusters] + torch.randn(num, dim, generator=generator))


def sample(vectors_TD: torch.Tensor) -> Sample:
    return Sample(vectors_TD[:1], vectors_TD, torch.tensor([len(vectors_TD)]))


def spec(**options) -> Centroids.Spec:
    return CANDIDATES.resolve({"name": "centroids", **options})


def build(vectors_TD: torch.Tensor, **options) -> Centroids:
    fitted = Centroids.fit(spec(**options), sample(vectors_TD))
    return CANDIDATES.build(spec(**options), fitted)


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [(640, {}, 20), (31, {}, 1), (100, {"num_centroids": 100}, 100)],
)
def test_number_of_centroids(size, options, expected):
    centroids = Centroids.fit(spec(**options), sample(vectors(size)))["centroids"]
    assert centroids.shape == (expected, 16) and centroids.dtype == np.float32


def test_rejects_more_centroids_than_vectors():
    rule = "num_centroids must be at most 7, the number of vectors in the sample to fit on, got 8"
    with pytest.raises(SpecError, match=rule):
        Centroids.fit(spec(num_centroids=8), sample(vectors(7)))
    with pytest.raises(SpecError, match="at most 0"):
        Centroids.fit(spec(), sample(vectors(0)))


def test_centroids_of_unit_vectors_have_unit_length():
    centroids = Centroids.fit(spec(), sample(vectors(640)))["centroids"]
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-6)
    scaled = Centroids.fit(spec(), sample(3 * vectors(640)))["centroids"]
    assert np.linalg.norm(scaled, axis=1).max() > 1.5


def test_centroids_depend_only_on_sample_and_options():
    given, num_threads = sample(vectors(4000, dim=48)), faiss.omp_get_max_threads()
    first = Centroids.fit(spec(num_centroids=64), given)["centroids"]
    try:
        for count in (1, 3):
            faiss.omp_set_num_threads(count)
            again = Centroids.fit(spec(num_centroids=64), given)["centroids"]
            np.testing.assert_array_equal(first, again)
    finally:
        faiss.omp_set_num_threads(num_threads)
    for option in ({"seed": 1}, {"iterations": 1}):
        other = Centroids.fit(spec(num_centroids=64, **option), given)["centroids"]
        assert (other != first).any()


def test_more_iterations_reduce_the_error():
    given = vectors(2000)

    def error(iterations: int) -> float:
        codec = build(given, num_centroids=50, iterations=iterations).codec
        decoded = codec.dequantise(codec.quantise(given), 16)
        return float((decoded - given).square().sum(dim=1).mean())

    assert error(10) < error(1)


def test_duplicate_vectors_have_equal_codes():
    generator = build(torch.eye(4).repeat(10, 1), num_centroids=8)  # more than distinct vectors
    codes_TD, lengths_B = generator.encode(torch.eye(4).repeat(2, 1), torch.tensor([4, 4]))
    codes = generator.codec.quantise(codes_TD)["codes"]
    assert codes[:4].equal(codes[4:]) and len(set(codes.flatten().tolist())) == 4
    assert distinct(codes, lengths_B) == 4


def test_scores_equal_a_loop_over_centroids():
    generator = build(vectors(640), num_centroids=20)
    given, lengths = vectors(sum(LENGTHS), seed=1), torch.tensor(LENGTHS)
    codes_TD, lengths_B = generator.encode(given, lengths)
    assert generator.dim == 16 and lengths_B.equal(lengths)
    parts = generator.codec.quantise(codes_TD)
    packed = PackedVectors([Segment(generator.codec, generator.dim, parts, lengths_B)])
    query_tokens = [vectors(5, seed=2), vectors(0, seed=3), vectors(33, seed=4)]
    scores_QB = maxsim(generator.queries(query_tokens), packed)

    centroids = generator.artefact["centroids"].astype(np.float64)
    ends = np.cumsum(LENGTHS)
    for query_MD, scores_B in zip(query_tokens, scores_QB, strict=True):
        for item, (length, end) in enumerate(zip(LENGTHS, ends, strict=True)):
            item_TD = given[end - length : end].double().numpy()
            nearest = centroids[(item_TD @ centroids.T).argmax(axis=1)]
            expected = -np.inf
            if length:
                expected = (query_MD.double().numpy() @ nearest.T).max(axis=1).sum()
            # The kernel rounds similarities to 2^-16 of the largest one.
            assert scores_B[item].item() == pytest.approx(expected, abs=1e-5 * 33)


def test_distinct_ignores_empty_items():
    codes = torch.tensor([[9], [9], [65_535], [9]]).to(torch.uint16)
    assert distinct(codes, torch.tensor([0, 3, 0, 1])) == 1.5
    assert distinct(codes[:0], torch.tensor([0, 0])) == 0
