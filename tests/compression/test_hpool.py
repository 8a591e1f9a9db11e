import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from pipeline.compression import hpool
from pipeline.compression.hpool import HPool
from pipeline.tokens import TokenBatch

LENGTHS = [23, 3, 0, 9, 1, 40]


def merge_until(num_groups, groups, cost):
    """Merges the pair with the smallest cost until `num_groups` groups remain."""
    groups = [list(group) for group in groups]
    while len(groups) > num_groups:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a + 1, len(groups))]
        a, b = min(pairs, key=lambda pair: cost(groups[pair[0]], groups[pair[1]]))
        groups[a] += groups.pop(b)
    return groups


def ward_vectors(x, num_groups):
    """Algorithm of the paper: Delta_ab = |A||B| / (|A| + |B|) * |mu_a - mu_b|^2."""

    def delta(a, b):
        difference = x[a].mean(axis=0) - x[b].mean(axis=0)
        return len(a) * len(b) / (len(a) + len(b)) * (difference @ difference)

    return merge_until(num_groups, [[i] for i in range(len(x))], delta)


def cosine_distances(x):
    return np.array([[1 - a @ b for b in x] for a in x])


def ward_rows(x, num_groups):
    return ward_vectors(cosine_distances(x), num_groups)


def ward_condensed(x, num_groups):
    distances = cosine_distances(x)
    condensed = [distances[i, j] for i in range(len(x)) for j in range(i + 1, len(x))]
    labels = fcluster(linkage(np.array(condensed), "ward"), num_groups, "maxclust")
    return [np.flatnonzero(labels == label).tolist() for label in set(labels)]


REFERENCES = {
    "vectors": ward_vectors,
    "rows": ward_rows,
    "condensed": ward_condensed,
}


@pytest.mark.parametrize("num_protected", [0, 1, 3])
@pytest.mark.parametrize("name", REFERENCES)
def test_equals_reference(ragged, unit_items, name, num_protected):
    batch = ragged(LENGTHS, seed=num_protected)
    num = 5
    spec = HPool.Spec(num_vectors=num, linkage=name, num_protected=num_protected)
    result = HPool(spec).compress(batch)
    for i, x in enumerate(unit_items(batch)):
        groups = [[n] for n in range(len(x))]
        if len(x) > num:
            tail = REFERENCES[name](x[num_protected:], num - num_protected)
            groups = [[n] for n in range(num_protected)]
            groups += [[num_protected + n for n in group] for group in tail]
        groups.sort(key=min)
        means = np.array([x[group].mean(axis=0) for group in groups]).reshape(-1, 8)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        np.testing.assert_allclose(result.vectors[i, result.mask[i]], means, atol=1e-6)
        assignment = result.assignment[i, batch.mask[i]].tolist()
        assert [[n for n, k in enumerate(assignment) if k == j] for j in range(len(groups))] == [
            sorted(group) for group in groups
        ]


def scipy_distances(x, name):
    """Computes the input of the Ward linkage with SciPy."""
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
@pytest.mark.parametrize("name", REFERENCES)
def test_clusters_equal_scipy(unit_items, name, kind):
    """Includes equal and nearly equal tokens, where distances computed by products are inexact."""
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
        assignment = HPool(spec).compress(batch).assignment.numpy()
        for i, x in enumerate(unit_items(batch)):
            labels = fcluster(linkage(scipy_distances(x, name), "ward"), num, "maxclust")
            assert partition(assignment[i, : lengths[i]]) == partition(labels)
    if kind == "few distinct":
        distinct = [x[:length] for x, length in zip(vectors, lengths, strict=True)]
        spec = HPool.Spec(num_vectors=120, linkage=name, num_protected=0)
        result = HPool(spec).compress(batch)
        assert result.lengths.tolist() == [len(x.unique(dim=0)) for x in distinct]


def test_raw_vectors_are_averaged():
    """AGC paper, section 4.3: groups by cosine similarity, means of the vectors as they are."""
    x = torch.tensor([[9.0, 0.0], [0.0, 2.0], [1.0, 0.1], [0.1, 1.0]])
    batch = TokenBatch(x[None], torch.ones(1, 4, dtype=torch.bool), normalised=False)
    options = {"num_vectors": 2, "num_protected": 0}
    unit, raw = (HPool(HPool.Spec(average=name, **options)) for name in ("unit", "raw"))
    found = raw.compress(batch)
    assert found.assignment.tolist() == [[0, 1, 0, 1]] and found.normalised
    sums = torch.stack([x[0] + x[2], x[1] + x[3]])
    torch.testing.assert_close(found.vectors[0], torch.nn.functional.normalize(sums))
    x = torch.nn.functional.normalize(x)
    sums = torch.stack([x[0] + x[2], x[1] + x[3]])
    expected = torch.nn.functional.normalize(sums)
    torch.testing.assert_close(unit.compress(batch).vectors[0], expected)
    same = TokenBatch(x[None], batch.mask, normalised=True)
    torch.testing.assert_close(raw.compress(same).vectors[0], expected)


def test_linkages_differ(ragged):
    batch = ragged([60])
    results = [
        HPool(HPool.Spec(num_vectors=12, linkage=name)).compress(batch).assignment.tolist()
        for name in REFERENCES
    ]
    assert results[0] != results[1] != results[2] != results[0]


@pytest.mark.parametrize(("num_vectors", "num_separate"), [(1, 0), (2, 1), (3, 2), (8, 2)])
def test_protects_fewer_tokens_than_budget(ragged, num_vectors, num_separate):
    batch = ragged([30], num_padding=0)
    spec = HPool.Spec(num_vectors=num_vectors, num_protected=2)
    assignment = HPool(spec).compress(batch).assignment[0]
    assert assignment[:num_separate].tolist() == list(range(num_separate))
    assert (assignment[num_separate:] >= num_separate).all()
    assert assignment.max() + 1 == num_vectors


def test_equal_tokens_yield_fewer_vectors_than_budget():
    vectors = torch.eye(3)[[0, 1, 0, 2, 1, 0]].unsqueeze(0)
    batch = TokenBatch(vectors, torch.ones(1, 6, dtype=torch.bool), normalised=True)
    for name in REFERENCES:
        spec = HPool.Spec(num_vectors=5, linkage=name, num_protected=0)
        result = HPool(spec).compress(batch)
        assert result.assignment.tolist() == [[0, 1, 0, 2, 1, 0]]
        assert result.mask.tolist() == [[True, True, True, False, False]]
        torch.testing.assert_close(result.vectors[0, :3], torch.eye(3))


@pytest.fixture
def short_blocks(monkeypatch):
    """Merges items of more than 256 tokens in blocks of up to 128 tokens."""
    monkeypatch.setattr(hpool, "MAX_LINKED", 256)
    monkeypatch.setattr(hpool, "BLOCK_TOKENS", 128)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("num_vectors", [1, 8, 64, 300])
def test_long_items_are_merged_in_blocks(unit_items, monkeypatch, name, num_vectors):
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(20, 16, generator=generator)
    vectors = centres[torch.randint(20, (2, 700), generator=generator)]
    vectors += 0.3 * torch.randn(2, 700, 16, generator=generator)
    mask = torch.arange(700) < torch.tensor([[700], [256]])
    batch = TokenBatch(vectors, mask, normalised=False)
    compressor = HPool(HPool.Spec(num_vectors=num_vectors, linkage=name))
    exact = compressor.compress(batch)
    monkeypatch.setattr(hpool, "MAX_LINKED", 256)
    monkeypatch.setattr(hpool, "BLOCK_TOKENS", 128)
    result = compressor.compress(batch)
    assert result.lengths.tolist() == [num_vectors, min(256, num_vectors)]
    assert torch.equal(result.vectors[1], exact.vectors[1])  # within the limit
    groups = result.assignment[0].numpy()
    first = np.unique(groups, return_index=True)[1]
    assert (np.diff(first) > 0).all()
    x = unit_items(batch)[0]
    errors = [
        sum(((x[labels == k] - x[labels == k].mean(axis=0)) ** 2).sum() for k in set(labels))
        for labels in (groups, exact.assignment[0].numpy())
    ]
    if num_vectors <= 128:  # more groups are those of the blocks
        assert errors[0] <= 1.15 * errors[1]


def test_equal_tokens_of_different_blocks_share_a_group(short_blocks):
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randn(12, 16, generator=generator)
    batch = TokenBatch(
        distinct[torch.randint(12, (1, 700), generator=generator)],
        torch.ones(1, 700, dtype=torch.bool),
        normalised=False,
    )
    assert HPool(HPool.Spec(num_vectors=60, num_protected=0)).compress(batch).lengths == 12
