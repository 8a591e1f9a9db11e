import numpy as np
import pytest
import torch

from pipeline.compression import pack_left
from pipeline.compression.cluster import SemanticCluster, kmeans_plus_plus, lloyd
from pipeline.compression.random import mix, random_draws
from pipeline.compression.spatial import uniform_positions
from pipeline.tokens import TokenBatch, unit_vectors

LENGTHS = [23, 4, 0, 9, 1, 40, 6]


def reference_seeds(x, draws, num):
    """Selects k-means++ seeds, the smallest -log(u) / w with the squared distance w."""
    seeds = []
    for number in range(num):
        salt = int(mix(torch.tensor(number + 1)))
        times = []
        for n in range(len(x)):
            weight = min([((x[n] - x[s]) ** 2).sum() for s in seeds], default=1.0)
            uniform = (int(mix(draws[n] ^ salt)) + 0.5) / 2**32
            times.append(-np.log(uniform) / weight if weight > 1e-5 else np.inf)
        if min(times) < np.inf:
            seeds.append(int(np.argmin(times)))
    return seeds


def reference_lloyd(x, seeds, num_iterations):
    """Returns the clusters after `num_iterations` assignments, and eq. 12 after each of them."""
    centres, sums = [x[s] for s in seeds], []
    for _ in range(num_iterations):
        clusters = [[] for _ in seeds]
        for n in range(len(x)):
            clusters[int(np.argmin([((x[n] - mu) ** 2).sum() for mu in centres]))].append(n)
        centres = [
            sum(x[n] for n in cluster) / len(cluster) if cluster else mu
            for cluster, mu in zip(clusters, centres, strict=True)
        ]
        pairs = zip(clusters, centres, strict=True)
        sums.append(sum(((x[n] - mu) ** 2).sum() for cluster, mu in pairs for n in cluster))
    return sorted(cluster for cluster in clusters if cluster), sums


def reference_average(x, num):
    """Repeatedly merges the groups with the smallest mean of `1 - cos` over pairs of tokens."""
    groups = [[n] for n in range(len(x))]
    while len(groups) > num:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a + 1, len(groups))]
        a, b = min(
            pairs,
            key=lambda p: np.mean([1 - x[i] @ x[j] for i in groups[p[0]] for j in groups[p[1]]]),
        )
        groups[a] += groups.pop(b)
    return sorted(sorted(group) for group in groups)


def assert_groups(batch, result, items, item_groups, normalise=False):
    for i, x in enumerate(items):
        groups = item_groups(i, x)
        assignment = result.assignment[i, batch.mask[i]].tolist()
        assert [
            [n for n, k in enumerate(assignment) if k == j] for j in range(len(groups))
        ] == groups
        means = [sum(x[n] for n in group) / len(group) for group in groups]
        if normalise:
            means = [mean / np.sqrt((mean**2).sum()) for mean in means]
        means = np.array(means).reshape(-1, x.shape[1])
        np.testing.assert_allclose(result.vectors[i, result.mask[i]], means, atol=1e-6)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("num_iterations", [1, 2, 10])
@pytest.mark.parametrize("num", [1, 5])
def test_equals_reference(ragged, unit_items, num, num_iterations, normalise):
    batch = ragged(LENGTHS)
    spec = SemanticCluster.Spec(num_vectors=num, num_iterations=num_iterations, normalise=normalise)
    compressor = SemanticCluster(spec)
    result = compressor.compress(batch)
    assert result.normalised == compressor.normalised == normalise
    draws = random_draws(pack_left(batch)[0], 0)

    def item_groups(i, x):
        if len(x) <= num:
            return [[n] for n in range(len(x))]
        return reference_lloyd(x, reference_seeds(x, draws[i], num), num_iterations)[0]

    assert_groups(batch, result, unit_items(batch), item_groups, normalise)


def test_ratio_determines_budget_per_item(ragged, unit_items):
    batch = ragged(LENGTHS)
    result = SemanticCluster(SemanticCluster.Spec(ratio=0.3)).compress(batch)
    draws = random_draws(pack_left(batch)[0], 0)

    def item_groups(i, x):
        num = max(1, int(0.3 * len(x)))
        return reference_lloyd(x, reference_seeds(x, draws[i], num), 10)[0] if len(x) else []

    assert_groups(batch, result, unit_items(batch), item_groups)


def test_average_linkage_equals_reference(ragged, unit_items):
    batch = ragged(LENGTHS, seed=1)
    spec = SemanticCluster.Spec(num_vectors=5, algorithm="average")
    result = SemanticCluster(spec).compress(batch)
    assert_groups(batch, result, unit_items(batch), lambda _, x: reference_average(x, 5))


def sums_of_squares(batch, result):
    """Computes eq. 12 for each item."""
    tokens = unit_vectors(batch).double()
    centres = result.vectors.double().gather(
        1, result.assignment.clamp_min(0).unsqueeze(2).expand_as(tokens)
    )
    return ((tokens - centres).square().sum(dim=2) * batch.mask).sum(dim=1)


def clustered_batch(num_items=8, num_tokens=300, dim=32):
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(num_items, 30, dim, generator=generator)
    picks = torch.randint(30, (num_items, num_tokens, 1), generator=generator)
    noise = torch.randn(num_items, num_tokens, dim, generator=generator)
    vectors = centres.gather(1, picks.expand(-1, -1, dim)) + 0.7 * noise
    mask = torch.ones(num_items, num_tokens, dtype=torch.bool)
    return TokenBatch(vectors, mask, normalised=False)


def test_sum_of_squares_never_increases():
    batch = clustered_batch()
    previous = torch.full((8,), torch.inf, dtype=torch.float64)
    for num_iterations in range(1, 15):
        spec = SemanticCluster.Spec(num_vectors=20, num_iterations=num_iterations)
        current = sums_of_squares(batch, SemanticCluster(spec).compress(batch))
        assert (current <= previous + 1e-5).all()
        previous = current


def test_kmeans_plus_plus_beats_uniform_seeds():
    batch = clustered_batch()
    tokens, budgets = unit_vectors(batch), torch.full((8,), 30)
    totals = []
    for seeds, mask in (
        kmeans_plus_plus(tokens, random_draws(batch, 0), batch, budgets),
        uniform_positions(batch.lengths, budgets),
    ):
        assignment = lloyd(tokens, batch.mask, seeds, mask, 10)
        sums = torch.zeros(8, 30, 32).scatter_add_(
            1, assignment[..., None].expand_as(tokens), tokens
        )
        counts = torch.zeros(8, 30).scatter_add_(1, assignment, torch.ones(8, 300))
        means = TokenBatch(
            sums / counts.clamp_min(1)[..., None],
            counts > 0,
            normalised=False,
            assignment=assignment,
        )
        totals.append(float(sums_of_squares(batch, means).sum()))
    assert totals[0] < totals[1]


def test_seed_probability_is_proportional_to_squared_distance():
    """Squared distances 2 and 0.4 from three equal tokens yield odds of 5 to 1."""
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.8, 0.6]])
    tokens = x.expand(6000, -1, -1)
    batch = TokenBatch(tokens, torch.ones(6000, 5, dtype=torch.bool), normalised=True)
    draws = torch.randint(2**32, (6000, 5), generator=torch.Generator().manual_seed(0))
    seeds, _ = kmeans_plus_plus(tokens, draws, batch, torch.full((6000,), 2))
    counts = torch.bincount(seeds[:, 0], minlength=5)
    assert ((counts - 1200).abs() < 150).all()  # 5 standard deviations
    second = seeds[seeds[:, 0] < 3, 1]
    assert ((second == 3) | (second == 4)).all()
    assert float((second == 3).float().mean()) == pytest.approx(5 / 6, abs=0.03)


@pytest.mark.parametrize("algorithm", ["kmeans", "average"])
def test_equal_tokens_yield_fewer_vectors_than_budget(algorithm):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 7, 24, generator=generator)[:, [0, 1, 2, 3, 4, 5, 6] * 5]
    batch = TokenBatch(vectors, torch.ones(1, 35, dtype=torch.bool), normalised=False)
    spec = SemanticCluster.Spec(num_vectors=20, algorithm=algorithm)
    result = SemanticCluster(spec).compress(batch)
    assert result.assignment.tolist() == [list(range(7)) * 5]
    assert result.mask.tolist() == [[True] * 7 + [False] * 13]


def test_assignment_of_equal_tokens_is_independent_of_batch():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([90, 200, 131, 299])
    distinct = torch.nn.functional.normalize(torch.randn(50, 384, generator=generator), dim=1)
    vectors = distinct[torch.randint(50, (4, 299), generator=generator)]
    mask = torch.arange(299) < lengths.unsqueeze(1)
    compressor = SemanticCluster(SemanticCluster.Spec(num_vectors=64))
    together = compressor.compress(TokenBatch(vectors, mask, normalised=True))
    for i, length in enumerate(lengths.tolist()):
        real = TokenBatch(vectors[i : i + 1, :length], mask[i : i + 1, :length], normalised=True)
        assert torch.equal(compressor.compress(real).assignment[0], together.assignment[i, :length])


def test_gradients_equal_gradients_of_means(ragged):
    batch = ragged(LENGTHS, garbage=0.0)
    vectors = batch.vectors.clone().requires_grad_()
    differentiable = TokenBatch(vectors, batch.mask, normalised=True)
    result = SemanticCluster(SemanticCluster.Spec(num_vectors=5)).compress(differentiable)
    result.vectors.sum().backward()
    counts = torch.nn.functional.one_hot(result.assignment.clamp_min(0), 5) * batch.mask[..., None]
    expected = (1 / counts.sum(dim=1)).gather(1, result.assignment.clamp_min(0)) * batch.mask
    expected = expected.nan_to_num(posinf=0)
    torch.testing.assert_close(vectors.grad, expected.unsqueeze(2).expand_as(vectors))
