import math

import pytest
import torch

from pipeline.compression.attention_clustering import AttentionClustering
from pipeline.config import SpecError
from pipeline.registry import COMPRESSORS
from pipeline.tokens import TokenBatch

TAP = "pooled_row/mean/last"
LENGTHS = [9, 1, 0, 23, 5, 40]


def reference(states, alpha, m, reading):
    """Computes sections 5.1 to 5.3 for one item with scalar loops: vectors and groups."""
    n = len(states)
    if n <= m:
        return [[x / math.hypot(*z) for x in z] for z in states], list(range(n))
    if reading == "code":
        total = sum(math.exp(a) for a in alpha)
        alpha = [math.exp(a) / total for a in alpha]
    centroids = sorted(sorted(range(n), key=lambda j: -alpha[j])[:m])

    def cosine(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

    groups = []
    for z in states:
        similarities = [cosine(z, states[c]) for c in centroids]
        groups.append(similarities.index(max(similarities)))
    vectors = []
    for k in range(m):
        members = [j for j in range(n) if groups[j] == k]
        weight = sum(alpha[j] for j in members)
        mean = [
            sum(alpha[j] * states[j][d] for j in members) / weight for d in range(len(states[0]))
        ]
        vectors.append([x / math.hypot(*mean) for x in mean])
    return vectors, groups


@pytest.mark.parametrize("reading", ["paper", "code"])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_equations(reading, unit, seed, ragged):
    batch = ragged(LENGTHS, seed=seed, unit=unit, taps=[TAP])
    spec = AttentionClustering.Spec(num_vectors=6, reading=reading)
    result = AttentionClustering(spec).compress(batch)
    for i, mask in enumerate(batch.mask):
        states = batch.vectors[i, mask].double().tolist()
        alpha = batch.taps[TAP][i, mask].double().tolist()
        vectors, groups = reference(states, alpha, 6, reading)
        found = result.vectors[i, result.mask[i]].double()
        torch.testing.assert_close(
            found, torch.tensor(vectors, dtype=torch.float64).reshape(-1, 8), atol=1e-5, rtol=0
        )
        assert result.assignment[i, mask].tolist() == groups


def test_readings_differ(ragged):
    """A softmax of probabilities is almost uniform, so means are almost unweighted."""
    batch = ragged([200], unit=True, taps=[TAP])
    generator = torch.Generator().manual_seed(0)
    batch.taps[TAP][batch.mask] = (8 * torch.randn(200, generator=generator)).softmax(dim=0)
    spec = AttentionClustering.Spec
    paper, code = (
        AttentionClustering(spec(num_vectors=8, reading=reading)).compress(batch)
        for reading in ("paper", "code")
    )
    assert torch.equal(paper.assignment, code.assignment)  # equal rankings yield equal groups
    assert (paper.vectors - code.vectors).abs().max() > 0.1


@pytest.mark.parametrize("dim", [3, 48])
def test_duplicate_centroid_yields_no_vector(dim):
    vectors = torch.eye(dim)[[0, 1, 0, 2, 1, 0]].unsqueeze(0)
    taps = {TAP: torch.tensor([[0.3, 0.1, 0.25, 0.1, 0.2, 0.05]])}  # centroids 0, 2, 4
    batch = TokenBatch(vectors, torch.ones(1, 6, dtype=torch.bool), True, taps=taps)
    result = AttentionClustering(AttentionClustering.Spec(num_vectors=3)).compress(batch)
    # Centroids 0 and 2 are equal, so the first gets both. e_2 is equally far from all centroids
    # and is assigned to the first.
    assert result.assignment.tolist() == [[0, 1, 0, 0, 1, 0]]
    assert result.mask.tolist() == [[True, True, False]]
    torch.testing.assert_close(result.vectors[0, 1], torch.eye(dim)[1])


def test_group_without_saliency_yields_unweighted_mean():
    taps = {TAP: torch.tensor([[1.0, 0.0, 0.0, 0.0]])}
    tokens = torch.tensor([[1.0, 0], [0, 1], [0, 1], [0.6, 0.8]]).unsqueeze(0)
    batch = TokenBatch(tokens, torch.ones(1, 4, dtype=torch.bool), True, taps=taps)
    result = AttentionClustering(AttentionClustering.Spec(num_vectors=2)).compress(batch)
    assert result.assignment.tolist() == [[0, 1, 1, 1]]
    mean = torch.tensor([0.6, 2.8])
    torch.testing.assert_close(result.vectors[0, 1], mean / mean.norm())


def test_saliency_accepts_any_tap():
    def resolve(saliency):
        fields = {"name": "attention_clustering", "num_vectors": 3, "saliency": saliency}
        return COMPRESSORS.resolve(fields)

    spec = resolve("column_sums")
    assert [tap.name for tap in AttentionClustering(spec).needs_taps] == ["column_sums/mean/last"]
    with pytest.raises(
        SpecError, match="saliency must be STATISTIC/HEADS/LAYERS .*, got 'attention'"
    ):
        resolve("attention")
