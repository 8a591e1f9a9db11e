import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from pipeline.compression.hpool import HPool
from pipeline.tokens import TokenBatch

LENGTHS = [23, 3, 0, 9, 1, 40]


def merge_until(num_groups, groups, cost):
    """Merges the pair of least cost until `num_groups` are left."""
    groups = [list(group) for group in groups]
    while len(groups) > num_groups:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a + 1, len(groups))]
        a, b = min(pairs, key=lambda pair: cost(groups[pair[0]], groups[pair[1]]))
        groups[a] += groups.pop(b)
    return groups


def ward_of_vectors(x, num_groups):
    """The paper's algorithm: Delta_ab = |A||B| / (|A| + |B|) * |mu_a - mu_b|^2."""

    def delta(a, b):
        gap = x[a].mean(axis=0) - x[b].mean(axis=0)
        return len(a) * len(b) / (len(a) + len(b)) * (gap @ gap)

    return merge_until(num_groups, [[i] for i in range(len(x))], delta)


def cosine_distances(x):
    return np.array([[1 - a @ b for b in x] for a in x])


def ward_of_rows(x, num_groups):
    return ward_of_vectors(cosine_distances(x), num_groups)


def ward_of_condensed(x, num_groups):
    distances = cosine_distances(x)
    condensed = [distances[i, j] for i in range(len(x)) for j in range(i + 1, len(x))]
    labels = fcluster(linkage(np.array(condensed), "ward"), num_groups, "maxclust")
    return [np.flatnonzero(labels == label).tolist() for label in set(labels)]


BY_HAND = {
    "vectors": ward_of_vectors,
    "rows": ward_of_rows,
    "condensed": ward_of_condensed,
}


@pytest.mark.parametrize("num_protected", [0, 1, 3])
@pytest.mark.parametrize("name", BY_HAND)
def test_equals_the_paper_step_by_step(ragged, unit_items, name, num_protected):
    batch = ragged(LENGTHS, seed=num_protected)
    num = 5
    spec = HPool.Spec(num_vectors=num, linkage=name, num_protected=num_protected)
    result = HPool(spec).compress(batch)
    for i, x in enumerate(unit_items(batch)):
        groups = [[n] for n in range(len(x))]
        if len(x) > num:
            tail = BY_HAND[name](x[num_protected:], num - num_protected)
            groups = [[n] for n in range(num_protected)]
            groups += [[num_protected + n for n in group] for group in tail]
        groups.sort(key=min)
        means = np.array([x[group].mean(axis=0) for group in groups]).reshape(-1, 8)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        np.testing.assert_allclose(result.vectors[i, result.mask[i]], means, atol=1e-6)
        support = result.support[i, batch.mask[i]].tolist()
        assert [[n for n, k in enumerate(support) if k == j] for j in range(len(groups))] == [
            sorted(group) for group in groups
        ]


def scipy_distances(x, name):
    """What the three readings give to Ward, as scipy alone makes it."""
    cosine = (1 - x @ x.T).clip(min=0)
    np.fill_diagonal(cosine, 0)
    return {
        "vectors": lambda: pdist(x),
        "rows": lambda: pdist(cosine),
        "condensed": lambda: squareform(cosine, checks=False),
    }[name]()


def partition(labels):
    return {tuple(np.flatnonzero(labels == label)) for label in set(labels)}


@pytest.mark.parametrize("kind", ["spread", "in clusters", "few distinct", "nearly equal", "wide"])
@pytest.mark.parametrize("name", BY_HAND)
def test_the_clusters_are_those_of_scipy(unit_items, name, kind):
    """Also where distances by products lose their digits: between equal and nearly equal tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths, dim = [300, 211, 300], 512 if kind == "wide" else 32
    vectors = torch.randn(3, 300, dim, generator=generator)
    if kind == "in clusters":
        centres = torch.randn(40, dim, generator=generator)
        vectors = centres[torch.randint(40, (3, 300), generator=generator)] + 0.3 * vectors
    if kind == "few distinct":
        vectors = vectors[:, torch.randint(90, (300,), generator=generator)]
    if kind == "nearly equal":
        vectors[:, 150:] = vectors[:, :150] + 1e-6 * vectors[:, 150:]
    mask = torch.arange(300) < torch.tensor(lengths).unsqueeze(1)
    batch = TokenBatch(vectors, mask, normalised=False)
    for num in (3, 25, 60):
        spec = HPool.Spec(num_vectors=num, linkage=name, num_protected=0)
        support = HPool(spec).compress(batch).support.numpy()
        for i, x in enumerate(unit_items(batch)):
            labels = fcluster(linkage(scipy_distances(x, name), "ward"), num, "maxclust")
            assert partition(support[i, : lengths[i]]) == partition(labels)
    if kind == "few distinct":
        distinct = [x[:length] for x, length in zip(vectors, lengths, strict=True)]
        spec = HPool.Spec(num_vectors=120, linkage=name, num_protected=0)
        result = HPool(spec).compress(batch)
        assert result.lengths.tolist() == [len(x.unique(dim=0)) for x in distinct]


def test_the_three_readings_differ(ragged):
    batch = ragged([60])
    results = [
        HPool(HPool.Spec(num_vectors=12, linkage=name)).compress(batch).support.tolist()
        for name in BY_HAND
    ]
    assert results[0] != results[1] != results[2] != results[0]


@pytest.mark.parametrize(("num_vectors", "num_alone"), [(1, 0), (2, 1), (3, 2), (8, 2)])
def test_protects_less_than_the_budget(ragged, num_vectors, num_alone):
    batch = ragged([30], num_padding=0)
    spec = HPool.Spec(num_vectors=num_vectors, num_protected=2)
    support = HPool(spec).compress(batch).support[0]
    assert support[:num_alone].tolist() == list(range(num_alone))
    assert (support[num_alone:] >= num_alone).all()
    assert support.max() + 1 == num_vectors


def test_equal_tokens_give_fewer_vectors_than_the_budget():
    vectors = torch.eye(3)[[0, 1, 0, 2, 1, 0]].unsqueeze(0)
    batch = TokenBatch(vectors, torch.ones(1, 6, dtype=torch.bool), normalised=True)
    for name in BY_HAND:
        spec = HPool.Spec(num_vectors=5, linkage=name, num_protected=0)
        result = HPool(spec).compress(batch)
        assert result.support.tolist() == [[0, 1, 0, 2, 1, 0]]
        assert result.mask.tolist() == [[True, True, True, False, False]]
        torch.testing.assert_close(result.vectors[0, :3], torch.eye(3))
