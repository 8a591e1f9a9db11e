"""Tests of AGC against sections 5.1 to 5.3 of the paper, computed in float64 with scalar loops."""

import dataclasses
import math

import pytest
import torch

from pipeline.compression.agc import AGC
from pipeline.compression.attention_clustering import AttentionClustering
from pipeline.compression.random import random_draws
from pipeline.tokens import TokenBatch

TAP = "appended_rows/mean/last"
SOFTMAX = "appended_softmax/mean/last"
LENGTHS = [9, 1, 0, 23, 5, 40]
K = 6


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def unit(z):
    return [x / math.hypot(*z) for x in z]


def most_salient(alpha, m):
    """Returns the positions of the m largest values, the earlier of equal ones, in order."""
    return sorted(sorted(range(len(alpha)), key=lambda j: (-alpha[j], j))[:m])


def clusters(states, centroids):
    """Returns the first of the most similar centroids of each token."""
    groups = []
    for z in states:
        similarities = [cosine(z, states[c]) for c in centroids]
        # Equal centroids differ by rounding.
        groups.append(next(k for k, s in enumerate(similarities) if s > max(similarities) - 1e-9))
    return groups


def means(states, weights, groups, m):
    """Returns the normalised weighted mean of each non-empty cluster."""
    vectors = []
    for k in range(m):
        members = [j for j in range(len(states)) if groups[j] == k]
        if not members:
            continue
        total = sum(weights[j] for j in members)
        dims = range(len(states[0]))
        vectors.append(
            unit([sum(weights[j] * states[j][d] for j in members) / total for d in dims])
        )
    return vectors


def agc(states, alpha, m, weights="saliency", assignment="cluster", centroids=None):
    """Compresses one item; `centroids` overrides the most salient tokens."""
    m = min(m, len(states))
    if centroids is None:
        centroids = most_salient(alpha, m)
    if assignment == "none":
        return [unit(states[c]) for c in centroids]
    groups = clusters(states, centroids)
    return means(states, alpha if weights == "saliency" else [1.0] * len(alpha), groups, m)


def compressed(batch, **options):
    return AGC(AGC.Spec(num_vectors=K, **options)).compress(batch)


def check(result, i, vectors):
    found = result.vectors[i, result.mask[i]].double()
    expected = torch.tensor(vectors, dtype=torch.float64).reshape(found.shape)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def rows(batch, tap=TAP):
    """Yields the number, states and saliency of each item."""
    for i, mask in enumerate(batch.mask):
        states = batch.vectors[i, mask].double().tolist()
        yield i, states, batch.taps[tap][i, mask].double().tolist()


@pytest.mark.parametrize("weights", ["saliency", "uniform"])
@pytest.mark.parametrize("assignment", ["cluster", "none"])
@pytest.mark.parametrize("is_unit", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_equations(weights, assignment, is_unit, seed, ragged):
    batch = ragged(LENGTHS, seed=seed, unit=is_unit, taps=[TAP])
    options = {"weights": weights, "assignment": assignment}
    result = compressed(batch, **options)
    for i, states, alpha in rows(batch):
        check(result, i, agc(states, alpha, K, **options))


def test_support_is_the_cluster_of_each_token(ragged):
    batch = ragged(LENGTHS, taps=[TAP])
    result = compressed(batch)
    for i, states, alpha in rows(batch):
        groups = clusters(states, most_salient(alpha, min(K, len(states))))
        assert result.assignment[i, batch.mask[i]].tolist() == groups


def test_code_reading_uses_the_statistic_with_a_softmax(ragged):
    batch = ragged(LENGTHS, taps=[TAP, SOFTMAX])
    assert [tap.name for tap in AGC(AGC.Spec(num_vectors=K, reading="code")).needs_taps] == [
        SOFTMAX
    ]
    result = compressed(batch, reading="code")
    for i, states, alpha in rows(batch, SOFTMAX):
        check(result, i, agc(states, alpha, K))


def test_random_centroids(ragged):
    batch = ragged(LENGTHS, taps=[TAP])
    for seed in (0, 1):
        result = compressed(batch, centroids="random", seed=seed)
        for i, states, alpha in rows(batch):
            item = TokenBatch(
                batch.vectors[i : i + 1, batch.mask[i]],
                torch.ones(1, len(states), dtype=torch.bool),
                False,
            )
            draws = random_draws(item, seed)[0].tolist()
            centroids = most_salient([-draw for draw in draws], min(K, len(states)))
            check(result, i, agc(states, alpha, K, centroids=centroids))
    assert not torch.equal(result.vectors, compressed(batch, centroids="random").vectors)


def test_ablations_differ_from_the_method(ragged):
    batch = ragged([40], taps=[TAP])
    method = compressed(batch).vectors
    for option in ({"weights": "uniform"}, {"centroids": "random"}, {"assignment": "none"}):
        assert (compressed(batch, **option).vectors - method).abs().max() > 0.01


def test_ties_go_to_the_earlier_token():
    vectors = torch.eye(5).unsqueeze(0)
    batch = TokenBatch(
        vectors,
        torch.ones(1, 5, dtype=torch.bool),
        True,
        taps={TAP: torch.tensor([[0.1, 0.3, 0.2, 0.2, 0.2]])},
    )
    result = AGC(AGC.Spec(num_vectors=2, assignment="none")).compress(batch)
    assert torch.equal(result.vectors, torch.eye(5)[[1, 2]].unsqueeze(0))
    # Tokens 0, 3 and 4 are orthogonal to both centroids and are assigned to the first.
    clustered = AGC(AGC.Spec(num_vectors=2)).compress(batch)
    assert clustered.assignment.tolist() == [[0, 0, 1, 0, 0]]


def test_duplicate_centroid_yields_no_vector():
    vectors = torch.eye(3)[[0, 0, 1]].unsqueeze(0)
    batch = TokenBatch(
        vectors,
        torch.ones(1, 3, dtype=torch.bool),
        True,
        taps={TAP: torch.tensor([[0.4, 0.3, 0.3]])},
    )
    result = AGC(AGC.Spec(num_vectors=3)).compress(batch)
    assert result.assignment.tolist() == [[0, 0, 1]]
    assert result.mask.tolist() == [[True, True, False]]


@pytest.mark.parametrize("assignment", ["cluster", "none"])
def test_gradients_equal_central_differences(assignment, ragged):
    """Gradients of a random projection, with respect to the vectors and to alpha."""
    batch = ragged([7, 2, 0, 4], dim=3, taps=[TAP], garbage=0.5)
    direction = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(3))
    vectors = batch.vectors.clone().requires_grad_()
    alpha = batch.taps[TAP].clone().requires_grad_()
    spec = AGC.Spec(num_vectors=3, assignment=assignment)
    result = AGC(spec).compress(dataclasses.replace(batch, vectors=vectors, taps={TAP: alpha}))
    result.vectors.mul(direction).sum().backward()

    def loss(states, saliency):
        total = 0.0
        for i in range(len(batch)):
            positions = batch.mask[i].nonzero().squeeze(1).tolist()
            item = [states[i][p] for p in positions]
            alphas = [saliency[i][p] for p in positions]
            for k, c in enumerate(agc(item, alphas, 3, assignment=assignment)):
                total += sum(x * y for x, y in zip(c, direction[i, k].tolist(), strict=True))
        return total

    states, saliency = batch.vectors.double(), batch.taps[TAP].double()
    for tensor, gradient in ((states, vectors.grad), (saliency, alpha.grad)):
        if gradient is None:  # without means, alpha only selects
            assert assignment == "none" and tensor is saliency
            continue
        assert gradient[~batch.mask].abs().max() == 0
        flat = tensor.reshape(-1)
        for j in range(len(flat)):
            value, differences = flat[j].item(), []
            for step in (1e-6, -1e-6):
                flat[j] = value + step
                differences.append(loss(states.tolist(), saliency.tolist()))
            flat[j] = value
            expected = (differences[0] - differences[1]) / 2e-6
            assert gradient.reshape(-1)[j].item() == pytest.approx(expected, abs=2e-5)


def test_shares_its_core_with_attention_clustering(ragged):
    batch = ragged(LENGTHS, taps=[TAP])
    spec = AttentionClustering.Spec(num_vectors=K, saliency=TAP)
    other = AttentionClustering(spec).compress(batch)
    assert torch.equal(compressed(batch).vectors, other.vectors)
