import numpy as np
import pytest
import torch

from pipeline.compression import pack_left
from pipeline.compression.cluster import SemanticCluster, lloyd, plus_plus
from pipeline.compression.random import mix, random_draws
from pipeline.compression.spatial import uniform_positions
from pipeline.tokens import TokenBatch, unit_vectors

LENGTHS = [23, 4, 0, 9, 1, 40, 6]


def seeds_by_hand(x, draws, num):
    """k-means++: the token with the least -log(u) / w wins, w its distance to the seeds so far."""
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


def lloyd_by_hand(x, seeds, num_iterations):
    """The cluster of each token after so many assignments, and eq. 12 after each."""
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


def average_by_hand(x, num):
    """Merges the two groups of the least mean of `1 - cos` over their pairs of tokens."""
    groups = [[n] for n in range(len(x))]
    while len(groups) > num:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a + 1, len(groups))]
        a, b = min(
            pairs,
            key=lambda p: np.mean([1 - x[i] @ x[j] for i in groups[p[0]] for j in groups[p[1]]]),
        )
        groups[a] += groups.pop(b)
    return sorted(sorted(group) for group in groups)


def check(batch, result, items, groups_of, normalise=False):
    for i, x in enumerate(items):
        groups = groups_of(i, x)
        support = result.support[i, batch.mask[i]].tolist()
        assert [[n for n, k in enumerate(support) if k == j] for j in range(len(groups))] == groups
        means = [sum(x[n] for n in group) / len(group) for group in groups]
        if normalise:
            means = [mean / np.sqrt((mean**2).sum()) for mean in means]
        means = np.array(means).reshape(-1, x.shape[1])
        np.testing.assert_allclose(result.vectors[i, result.mask[i]], means, atol=1e-6)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("num_iterations", [1, 2, 10])
@pytest.mark.parametrize("num", [1, 5])
def test_equals_the_loops(ragged, unit_items, num, num_iterations, normalise):
    batch = ragged(LENGTHS)
    spec = SemanticCluster.Spec(num_vectors=num, num_iterations=num_iterations, normalise=normalise)
    compressor = SemanticCluster(spec)
    result = compressor.compress(batch)
    assert result.normalised == compressor.normalised == normalise
    draws = random_draws(pack_left(batch)[0], 0)

    def groups_of(i, x):
        if len(x) <= num:
            return [[n] for n in range(len(x))]
        return lloyd_by_hand(x, seeds_by_hand(x, draws[i], num), num_iterations)[0]

    check(batch, result, unit_items(batch), groups_of, normalise)


def test_a_ratio_gives_each_item_its_own_number(ragged, unit_items):
    batch = ragged(LENGTHS)
    result = SemanticCluster(SemanticCluster.Spec(ratio=0.3)).compress(batch)
    draws = random_draws(pack_left(batch)[0], 0)

    def groups_of(i, x):
        num = max(1, int(0.3 * len(x)))
        return lloyd_by_hand(x, seeds_by_hand(x, draws[i], num), 10)[0] if len(x) else []

    check(batch, result, unit_items(batch), groups_of)


def test_average_linkage_equals_the_merges_step_by_step(ragged, unit_items):
    batch = ragged(LENGTHS, seed=1)
    spec = SemanticCluster.Spec(num_vectors=5, algorithm="average")
    result = SemanticCluster(spec).compress(batch)
    check(batch, result, unit_items(batch), lambda _, x: average_by_hand(x, 5))


def sums_of_squares(batch, result):
    """Eq. 12 of each item."""
    tokens = unit_vectors(batch).double()
    centres = result.vectors.double().gather(
        1, result.support.clamp_min(0).unsqueeze(2).expand_as(tokens)
    )
    return ((tokens - centres).square().sum(dim=2) * batch.mask).sum(dim=1)


def clustered(num_items=8, num_tokens=300, dim=32):
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(num_items, 30, dim, generator=generator)
    picks = torch.randint(30, (num_items, num_tokens, 1), generator=generator)
    noise = torch.randn(num_items, num_tokens, dim, generator=generator)
    vectors = centres.gather(1, picks.expand(-1, -1, dim)) + 0.7 * noise
    mask = torch.ones(num_items, num_tokens, dtype=torch.bool)
    return TokenBatch(vectors, mask, normalised=False)


def test_the_sum_of_squares_never_rises():
    batch = clustered()
    before = torch.full((8,), torch.inf, dtype=torch.float64)
    for num_iterations in range(1, 15):
        spec = SemanticCluster.Spec(num_vectors=20, num_iterations=num_iterations)
        after = sums_of_squares(batch, SemanticCluster(spec).compress(batch))
        assert (after <= before + 1e-5).all()
        before = after


def test_its_seeds_end_lower_than_uniform_ones():
    batch = clustered()
    tokens, budgets = unit_vectors(batch), torch.full((8,), 30)
    totals = []
    for seeds, mask in (
        plus_plus(tokens, random_draws(batch, 0), batch, budgets),
        uniform_positions(batch.lengths, budgets),
    ):
        support = lloyd(tokens, batch.mask, seeds, mask, 10)
        sums = torch.zeros(8, 30, 32).scatter_add_(1, support[..., None].expand_as(tokens), tokens)
        counts = torch.zeros(8, 30).scatter_add_(1, support, torch.ones(8, 300))
        means = TokenBatch(
            sums / counts.clamp_min(1)[..., None], counts > 0, normalised=False, support=support
        )
        totals.append(float(sums_of_squares(batch, means).sum()))
    assert totals[0] < totals[1]


def test_large_distances_are_drawn_more_often():
    """Next to three equal tokens, one at a squared distance of 2 and one at 0.4: 5 to 1."""
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.8, 0.6]])
    tokens = x.expand(6000, -1, -1)
    batch = TokenBatch(tokens, torch.ones(6000, 5, dtype=torch.bool), normalised=True)
    draws = torch.randint(2**32, (6000, 5), generator=torch.Generator().manual_seed(0))
    seeds, _ = plus_plus(tokens, draws, batch, torch.full((6000,), 2))
    counts = torch.bincount(seeds[:, 0], minlength=5)
    assert ((counts - 1200).abs() < 150).all()  # 5 standard deviations
    second = seeds[seeds[:, 0] < 3, 1]
    assert ((second == 3) | (second == 4)).all()
    assert float((second == 3).float().mean()) == pytest.approx(5 / 6, abs=0.03)


@pytest.mark.parametrize("algorithm", ["kmeans", "average"])
def test_equal_tokens_give_fewer_vectors_than_the_budget(algorithm):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 7, 24, generator=generator)[:, [0, 1, 2, 3, 4, 5, 6] * 5]
    batch = TokenBatch(vectors, torch.ones(1, 35, dtype=torch.bool), normalised=False)
    spec = SemanticCluster.Spec(num_vectors=20, algorithm=algorithm)
    result = SemanticCluster(spec).compress(batch)
    assert result.support.tolist() == [list(range(7)) * 5]
    assert result.mask.tolist() == [[True] * 7 + [False] * 13]


def test_equal_tokens_stay_together_in_every_batch():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([90, 200, 131, 299])
    distinct = torch.nn.functional.normalize(torch.randn(50, 384, generator=generator), dim=1)
    vectors = distinct[torch.randint(50, (4, 299), generator=generator)]
    mask = torch.arange(299) < lengths.unsqueeze(1)
    compressor = SemanticCluster(SemanticCluster.Spec(num_vectors=64))
    together = compressor.compress(TokenBatch(vectors, mask, normalised=True))
    for i, length in enumerate(lengths.tolist()):
        real = TokenBatch(vectors[i : i + 1, :length], mask[i : i + 1, :length], normalised=True)
        assert torch.equal(compressor.compress(real).support[0], together.support[i, :length])


def test_gradients_are_those_of_the_means(ragged):
    batch = ragged(LENGTHS, garbage=0.0)
    vectors = batch.vectors.clone().requires_grad_()
    mine = TokenBatch(vectors, batch.mask, normalised=True)
    result = SemanticCluster(SemanticCluster.Spec(num_vectors=5)).compress(mine)
    result.vectors.sum().backward()
    counts = torch.nn.functional.one_hot(result.support.clamp_min(0), 5) * batch.mask[..., None]
    expected = (1 / counts.sum(dim=1)).gather(1, result.support.clamp_min(0)) * batch.mask
    expected = expected.nan_to_num(posinf=0)
    torch.testing.assert_close(vectors.grad, expected.unsqueeze(2).expand_as(vectors))
