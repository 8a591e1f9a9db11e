"""Comparison of LEMUR with loops in float64, and the recall of its candidates."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from pipeline.config import SpecError
from pipeline.registry import CANDIDATES
from pipeline.search.generators import Sample, lemur
from pipeline.search.generators.lemur import Lemur
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors, Segment

DIM = 12
LENGTHS = [3, 1, 0, 7, 1, 0, 2]
SMALL = {
    "num_features": 16,
    "num_dims": 6,
    "num_samples": 60,
    "epochs": 2,
    "batch_size": 25,
    "num_targets": 9,
}


def vectors(num_tokens: int, dim: int = DIM, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(num_tokens, dim, generator=generator), dim=1)


def sample(num_tokens: int = 80, num_items: int = 11) -> Sample:
    lengths = torch.arange(num_items) % 4 + 1
    return Sample(vectors(num_tokens, seed=1), vectors(int(lengths.sum()), seed=2), lengths)


def spec(**settings) -> Lemur.Spec:
    return CANDIDATES.resolve({"name": "lemur", **SMALL, **settings})


@functools.cache
def build(features: str, **settings) -> Lemur:
    options = spec(features=features, **settings)
    return Lemur(options, Lemur.fit(options, sample()))


@pytest.fixture(params=["random", "mlp"])
def generator(request) -> Lemur:
    return build(request.param)


def reference_hidden(arrays: dict[str, np.ndarray], token: np.ndarray) -> np.ndarray:
    """Computes the features of a token before they are standardised."""
    hidden = token @ arrays["weight"]
    if "norm_weight" in arrays:
        hidden = hidden + arrays["bias"]
        hidden = (hidden - hidden.mean()) / math.sqrt(hidden.var() + 1e-5)
        hidden = hidden * arrays["norm_weight"] + arrays["norm_bias"]
    return np.array([x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in hidden])


def reference_maximum(item: np.ndarray, token: np.ndarray) -> float:
    return max(float(vector @ token) for vector in item)


def test_equals_reference(generator, monkeypatch):
    """Codes and queries are determined up to rotations, so that their products are compared."""
    monkeypatch.setattr(lemur, "MAX_SIMILARITIES", 100)  # blocks of one item
    monkeypatch.setattr(lemur, "MAX_MAXIMA", 130)  # blocks of two items
    arrays = {name: array.astype(np.float64) for name, array in generator.artefact.items()}
    tokens = arrays["tokens"]
    hidden = np.stack([reference_hidden(arrays, token) for token in tokens])
    mean, scale = hidden.mean(axis=0), hidden.std(axis=0)
    np.testing.assert_allclose(arrays["mean"], mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(arrays["scale"], scale, rtol=1e-4)
    features = np.column_stack([(hidden - mean) / scale, np.ones(len(tokens))])
    moments = features.T @ features / len(tokens) + generator.spec.ridge * np.diag([1] * 15 + [0])

    def coefficients(items: list[np.ndarray]) -> np.ndarray:
        maxima = [[reference_maximum(item, token) for token in tokens] for item in items]
        return np.linalg.solve(moments, features.T @ np.transpose(maxima) / len(tokens)).T

    fitted = sample()
    items = np.split(fitted.vectors_TD.double().numpy(), np.cumsum(fitted.lengths_B)[:-1])
    sample_coefficients = coefficients(items)
    mean_coefficients = sample_coefficients.mean(axis=0)
    root = np.linalg.cholesky(moments)
    _, _, directions = np.linalg.svd((sample_coefficients - mean_coefficients) @ root)
    directions = directions[: generator.dim].T

    items = np.split(vectors(sum(LENGTHS)).double().numpy(), np.cumsum(LENGTHS)[:-1])
    filled = [item for item in items if len(item)]
    expected_codes = (coefficients(filled) - mean_coefficients) @ root @ directions
    codes, counts = generator.encode(vectors(sum(LENGTHS)), torch.tensor(LENGTHS))
    assert codes.dtype == torch.float32 and codes.shape == (5, generator.dim) == (5, 6)
    assert counts.tolist() == [1, 1, 0, 1, 1, 0, 1] and counts.dtype == torch.int64

    queries = [vectors(4, seed=3), vectors(0), vectors(1, seed=4)]
    found = generator.queries(queries)
    assert [query.shape for query in found] == [(1, 6)] * 3
    assert not found[1].any()
    for query, code in zip(queries, found, strict=True):
        token_features = [
            [*(reference_hidden(arrays, token) - mean) / scale, 1.0]
            for token in query.double().numpy()
        ]
        total = np.sum(token_features, axis=0) if token_features else np.zeros(16)
        expected = np.linalg.solve(root, total) @ directions @ expected_codes.T
        np.testing.assert_allclose(
            code[0].double() @ codes.double().T, expected, rtol=1e-3, atol=1e-3
        )


def test_codes_of_the_same_items_are_bit_identical(generator):
    first, _ = generator.encode(vectors(sum(LENGTHS)), torch.tensor(LENGTHS))
    second, _ = generator.encode(vectors(sum(LENGTHS)), torch.tensor(LENGTHS))
    assert torch.equal(first, second)


def test_codes_are_independent_of_the_batch(generator):
    together, _ = generator.encode(vectors(sum(LENGTHS)), torch.tensor(LENGTHS))
    alone = [
        generator.encode(item, torch.tensor([len(item)]))[0]
        for item in vectors(sum(LENGTHS)).split(LENGTHS)
    ]
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_items_without_vectors_have_no_codes(generator, lengths):
    codes, counts = generator.encode(vectors(0), torch.tensor(lengths, dtype=torch.int64))
    assert codes.shape == (0, 6) and counts.tolist() == [0] * len(lengths)


@pytest.mark.parametrize("features", ["random", "mlp"])
def test_scores_of_sample_tokens_average_to_maxsim(features):
    """Without a reduction, the regression is unbiased at the sample tokens, except for a shift."""
    generator = build(features, num_dims=16)
    tokens = torch.from_numpy(generator.artefact["tokens"])
    codes, _ = generator.encode(vectors(9), torch.tensor([4, 5]))
    scores = generator.queries([tokens])[0] @ codes.T
    exact = maxsim([tokens], PackedVectors.from_values(vectors(9), torch.tensor([4, 5])))
    torch.testing.assert_close(scores.diff(), exact.diff(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("features", ["random", "mlp"])
def test_fit_is_deterministic_and_depends_on_the_seed(features):
    first, second, other = (
        Lemur.fit(spec(features=features, seed=seed), sample()) for seed in (5, 5, 6)
    )
    assert first.keys() == second.keys() == other.keys()
    for name, array in first.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, second[name])
    assert all((first[name] != other[name]).any() for name in ("weight", "tokens", "operator"))


def test_fit_leaves_the_global_generator_unchanged():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    Lemur.fit(spec(), sample())
    assert torch.equal(torch.rand(2), expected)


def test_fit_uses_all_tokens_of_a_small_sample():
    assert Lemur.fit(spec(), sample(20))["tokens"].shape == (20, DIM)
    assert Lemur.fit(spec(), sample(80))["tokens"].shape == (60, DIM)


def test_features_that_are_constant_on_the_sample_are_ignored():
    same = Sample(vectors(1).expand(30, -1), vectors(6), torch.tensor([3, 2, 1]))
    generator = Lemur(spec(), Lemur.fit(spec(), same))
    codes, _ = generator.encode(vectors(6), torch.tensor([3, 2, 1]))
    (query,) = generator.queries([vectors(2)])
    assert codes.isfinite().all() and query.isfinite().all()
    (query,) = generator.queries([vectors(1)])
    exact = maxsim([vectors(1)], PackedVectors.from_values(vectors(6), torch.tensor([3, 2, 1])))
    torch.testing.assert_close((query @ codes.T).diff(), exact.diff(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_features": 81, "num_samples": 90}, "num_features must be at most 80, the number"),
        ({"num_features": 61}, "num_samples must be at least num_features, which is 61, got 60"),
        ({"num_features": 1}, "num_features"),
        ({"num_dims": 17}, "num_dims must be at most num_features, which is 16, got 17"),
        ({"ridge": 0}, "ridge"),
        ({"num_targets": 8193}, "num_targets"),
        ({"features": "linear"}, "features"),
    ],
)
def test_invalid_specs(settings, message):
    with pytest.raises(SpecError, match=message):
        Lemur.fit(spec(**settings), sample())


def test_sample_without_items():
    with pytest.raises(SpecError, match="sample that has items"):
        Lemur.fit(spec(), sample(num_items=0))


@functools.cache
def clustered() -> tuple[Sample, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns a sample, queries, and 2,000 items of 8 vectors that are near several topics each."""
    generator = torch.Generator().manual_seed(0)
    topics = torch.randn(100, 32, generator=generator)

    def near(choice: torch.Tensor, noise: float) -> torch.Tensor:
        tokens = topics[choice] + noise * torch.randn(*choice.shape, 32, generator=generator)
        return torch.nn.functional.normalize(tokens, dim=-1)

    items = near(torch.randint(100, (2000, 8), generator=generator), 0.5)
    queries = list(near(torch.randint(100, (40, 6), generator=generator), 0.5))
    tokens = near(torch.randint(100, (2000,), generator=generator), 0.5)
    lengths = torch.full((2000,), 8)
    return Sample(tokens, items[:300].flatten(0, 1), lengths[:300]), queries, items, lengths


def recall(scores: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the fraction of the exact top 10 among 100 candidates."""
    candidates, best = scores.topk(100).indices, exact.topk(10).indices
    return float((best[:, :, None] == candidates[:, None]).any(dim=2).float().mean())


@pytest.mark.parametrize("features", ["random", "mlp"])
def test_recall_and_quantisation(features):
    fit_sample, queries, items, lengths = clustered()
    exact = maxsim(queries, PackedVectors.from_values(items.flatten(0, 1), lengths))
    options = spec(
        features=features,
        num_features=256,
        num_dims=192,
        num_samples=2000,
        num_targets=300,
        batch_size=100,
    )
    generator = Lemur(options, Lemur.fit(options, fit_sample))
    codes, counts = generator.encode(items.flatten(0, 1), lengths)
    sums = torch.cat(generator.queries(queries))
    scores = sums @ codes.T
    means = torch.stack([query.sum(dim=0) for query in queries]) @ items.mean(dim=1).T
    assert recall(scores, exact) > 0.85 > 0.7 > recall(means, exact)
    errors = scores - exact
    assert errors.std(dim=1).mean() < 0.6 * exact.std(dim=1).mean()

    codec = generator.codec
    packed = PackedVectors([Segment(codec, generator.dim, codec.quantise(codes), counts)])
    quantised = maxsim([codec.transform_queries(query) for query in sums.unsqueeze(1)], packed)
    assert (quantised - scores).std() < 0.05 * scores.std()
    assert abs(recall(quantised, exact) - recall(scores, exact)) < 0.02
