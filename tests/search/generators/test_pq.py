"""Tests of the fitting of product quantisation, of codes and of approximate scores."""

import faiss
import numpy as np
import pytest
import torch

from pipeline.config import SpecError
from pipeline.registry import CANDIDATES
from pipeline.search.generators import Sample
from pipeline.search.generators.pq import Pq
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors, Segment
from pipeline.tokens import normalise
from tests.compression.codecs.test_bits import anisotropic, share_found

LENGTHS = [3, 0, 1, 40, 2, 0, 54]


def vectors(num: int, dim: int = 20, seed: int = 0) -> torch.Tensor:
    return normalise(torch.randn(num, dim, generator=torch.Generator().manual_seed(seed)))


def sample(vectors_TD: torch.Tensor) -> Sample:
    return Sample(vectors_TD[:1], vectors_TD, torch.tensor([len(vectors_TD)]))


def spec(**options) -> Pq.Spec:
    return CANDIDATES.resolve({"name": "pq", **options})


def build(vectors_TD: torch.Tensor, **options) -> Pq:
    return CANDIDATES.build(spec(**options), Pq.fit(spec(**options), sample(vectors_TD)))


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        (600, {}, (3, 256, 7)),
        (10, {"num_parts": 4}, (4, 10, 5)),
        (1, {"num_parts": 20}, (20, 1, 1)),
    ],
)
def test_number_and_size_of_parts(size, options, expected):
    generator = build(vectors(size), **options)
    assert generator.artefact["centroids"].shape == expected and generator.dim == 20
    assert generator.codec.token_bytes(20) == expected[0]


def test_invalid_options():
    with pytest.raises(SpecError, match="num_parts must be at most 20, the dimension of the vec"):
        Pq.fit(spec(num_parts=21), sample(vectors(9)))
    with pytest.raises(SpecError, match="a sample that has vectors"):
        Pq.fit(spec(), sample(vectors(0)))


def test_centroids_depend_only_on_sample_and_options():
    given, num_threads = sample(vectors(3000)), faiss.omp_get_max_threads()
    first = Pq.fit(spec(), given)["centroids"]
    try:
        for count in (1, 3):
            faiss.omp_set_num_threads(count)
            np.testing.assert_array_equal(first, Pq.fit(spec(), given)["centroids"])
    finally:
        faiss.omp_set_num_threads(num_threads)
    for option in ({"seed": 1}, {"iterations": 1}):
        assert (Pq.fit(spec(**option), given)["centroids"] != first).any()


def test_scores_equal_a_loop_over_centroids():
    generator = build(vectors(640), num_parts=6)
    given, lengths = vectors(sum(LENGTHS), seed=1), torch.tensor(LENGTHS)
    codes_TD, lengths_B = generator.encode(given, lengths)
    parts = generator.codec.quantise(codes_TD)
    packed = PackedVectors([Segment(generator.codec, generator.dim, parts, lengths_B)])
    query_tokens = [vectors(5, seed=2), vectors(0, seed=3), vectors(33, seed=4)]
    scores_QB = maxsim(generator.queries(query_tokens), packed)

    centroids = generator.artefact["centroids"].astype(np.float64)
    normal_D = generator.artefact["reflection"].astype(np.float64)
    mirror_DD = np.eye(20) - 2 * np.outer(normal_D, normal_D)
    padded = np.pad(given.double().numpy() @ mirror_DD, ((0, 0), (0, 4))).reshape(-1, 6, 4)
    distances = ((padded[:, :, None] - centroids) ** 2).sum(axis=3)
    restored = centroids[np.arange(6), distances.argmin(axis=2)].reshape(-1, 24)[:, :20] @ mirror_DD
    ends = np.cumsum(LENGTHS)
    for number, query_MD in enumerate(query_tokens):
        for item, (length, end) in enumerate(zip(LENGTHS, ends, strict=True)):
            expected = -np.inf
            if length:
                sims = query_MD.double().numpy() @ restored[end - length : end].T
                expected = sims.max(axis=1).sum()
            # The kernel rounds each of 6 similarities to 2^-16 of the largest sum.
            assert scores_QB[number, item].item() == pytest.approx(expected, abs=5e-5 * 33)


def test_mean_direction_becomes_the_first_axis():
    given = normalise(vectors(600) + 2 * vectors(1, seed=7))
    generator = build(given)
    mean_D = normalise(given.mean(dim=0, keepdim=True))
    (reflected,) = generator.queries([mean_D])
    torch.testing.assert_close(reflected, torch.eye(20)[:1], atol=1e-6, rtol=0)
    (back,) = generator.queries([generator.queries([given])[0]])
    torch.testing.assert_close(back, given, atol=1e-6, rtol=0)
    former = {k: v for k, v in generator.artefact.items() if k != "reflection"}
    assert Pq(spec(), former).queries([given])[0].equal(given)
    assert not Pq.fit(spec(), sample(torch.zeros(9, 20)))["reflection"].any()


@pytest.mark.parametrize("cosine", [0.3, 0.6, 0.95])
def test_best_items_of_anisotropic_vectors_are_found(cosine):
    given, lengths = torch.from_numpy(anisotropic(cosine, 1000)), [8] * 1000
    generator = build(given)
    parts = generator.codec.quantise(generator.encode(given, torch.tensor(lengths))[0])
    segment = Segment(generator.codec, generator.dim, parts, torch.tensor(lengths))
    # 0.2 at a mean cosine of 0.95 without the reflection
    assert share_found(given, cosine, PackedVectors([segment]), generator.queries) > 0.8


def test_more_parts_are_closer_to_exact_scores():
    given, lengths = vectors(800, seed=1), torch.full((100,), 8)
    query = vectors(6, seed=2)
    exact = maxsim([query], PackedVectors.from_values(given, lengths))

    def error(num_parts: int) -> float:
        generator = build(vectors(4000), num_parts=num_parts)
        parts = generator.codec.quantise(given)
        packed = PackedVectors([Segment(generator.codec, generator.dim, parts, lengths)])
        return float((maxsim([query], packed) - exact).std())

    assert error(10) < 0.6 * error(2)
