"""Inverted lists against loops over all vectors, and the recall of their candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.config import SpecError
from pipeline.registry import CANDIDATES
from pipeline.search import native
from pipeline.search.generators.ivf import Ivf
from pipeline.search.lists import Lists
from pipeline.search.packed import PackedVectors, Segment

DIM = 16


def vectors(num: int, seed: int = 0, norm: float = 1.0) -> torch.Tensor:
    """Returns vectors around 30 topics."""
    rng = np.random.default_rng(seed)
    topics = np.random.default_rng(99).normal(size=(30, DIM))
    values = topics[rng.integers(30, size=num)] + 0.7 * rng.normal(size=(num, DIM))
    values *= norm / np.linalg.norm(values, axis=1, keepdims=True)
    return torch.from_numpy(values.astype(np.float32))


def fit(num_centroids: int | None = 64, norm: float = 1.0, **settings: int) -> Ivf:
    spec = CANDIDATES.resolve({"name": "ivf", "num_centroids": num_centroids, **settings})
    return Ivf(spec, Ivf.fit(spec, vectors(2000, norm=norm).numpy()))


def packed(generator: Ivf, lengths: list[int], live: list[int] | None = None) -> PackedVectors:
    """Returns the codes of items in two segments."""
    values = vectors(sum(lengths), seed=1)
    cut = len(lengths) // 2
    segments = []
    for part, is_first in ((lengths[:cut], True), (lengths[cut:], False)):
        rows = slice(0, sum(part)) if is_first else slice(sum(lengths[:cut]), None)
        parts = generator.codec.quantise(values[rows])
        rows_L = None if live is None else torch.tensor(live)
        segments.append(Segment(generator.codec, DIM, parts, torch.tensor(part), rows_L))
    return PackedVectors(segments)


def test_fit_is_deterministic_and_centroids_are_means():
    one, same, other = fit(), fit(), fit(seed=1)
    assert all(np.array_equal(one.artefact[name], same.artefact[name]) for name in one.artefact)
    assert not np.array_equal(one.artefact["graph"], other.artefact["graph"])
    centroids = one.codec.centroids.numpy()
    firsts = one.artefact["firsts"]
    assert len(one.artefact["coarse"]) == 8 and 32 <= len(centroids) <= 64
    assert firsts[0] == 0 and firsts[-1] == len(centroids) and (np.diff(firsts) > 0).all()
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=5e-4)  # float16
    scaled = fit(norm=3.0).codec.centroids.numpy()
    assert 1.5 < np.linalg.norm(scaled, axis=1).mean() < 3.0


def test_vectors_are_in_the_list_of_the_nearest_centroid_of_the_nearest_coarse_one():
    generator = fit()
    values = vectors(200, seed=2).numpy().astype(np.float64)
    lists = generator.codec.quantise(torch.from_numpy(values).float())["lists"][:, 0].tolist()
    coarse, firsts = generator.artefact["coarse"].astype(float), generator.artefact["firsts"]
    centroids = generator.codec.centroids.numpy().astype(float)
    for value, found in zip(values, lists, strict=True):
        first, end = firsts[(group := ((coarse - value) ** 2).sum(axis=1).argmin()) :][:2]
        assert found == first + ((centroids[first:end] - value) ** 2).sum(axis=1).argmin(), group
    nearest = ((centroids[:, None] - values) ** 2).sum(axis=2).argmin(axis=0)
    assert (nearest == lists).mean() > 0.8


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("num_probes", [2, 9])
def test_scores_equal_a_loop(has_library, num_probes, monkeypatch):
    if not has_library:
        monkeypatch.setattr(native, "available", tuple)
    generator = fit()
    lengths = [3, 0, 1, 40, 5, 2, 0, 7]
    live = [0, 1, 3]
    codes = packed(generator, lengths, live)
    queries = [vectors(n, seed=n) for n in (5, 1, 12)]
    lists = Lists(generator, codes)
    assert len(lists) == 3 + 40 + 5 + 2 + 7
    items = [generator.codec.quantise(codes.item(row))["lists"][:, 0] for row in range(len(codes))]
    centroids = generator.codec.centroids.double()
    for _ in range(2):  # memory is zero again
        results = list(lists.search(queries, num_probes))
        assert len(results) == len(queries)
        for query, (found, scores) in zip(queries, results, strict=True):
            expected = np.zeros(len(items))
            for token in query.double():
                best = (centroids @ token).topk(num_probes)
                last, mean = float(best.values[-1]), float((centroids @ token).mean())
                missing = last - 0.2 * max(last - mean, 0)
                probed = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
                for number, item in enumerate(items):
                    sims = [probed[c] for c in item.tolist() if c in probed]
                    expected[number] += max(sims, default=missing) - missing
            assert sorted(found) == np.flatnonzero(expected > 1e-9).tolist()
            np.testing.assert_allclose(scores, expected[found], rtol=1e-4, atol=1e-6)


def test_both_implementations_are_bit_identical(monkeypatch):
    if not native.available():
        pytest.skip("the library is not built")
    generator = fit()
    lists = Lists(generator, packed(generator, [6] * 300))
    queries = [vectors(20, seed=5), vectors(3, seed=6)]
    fast = list(lists.search(queries, 12))
    monkeypatch.setattr(native, "available", tuple)
    for one, other in zip(fast, lists.search(queries, 12), strict=True):
        assert len(one[0]) > 100
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def test_number_of_centroids():
    def number(num_items: int) -> int:
        spec = CANDIDATES.resolve({"name": "ivf"})
        return Ivf(spec, Ivf.fit(spec, vectors(2000).numpy(), 250 / num_items)).codec.graph.ntotal

    assert 20 < number(250) <= 32 and 80 < number(800) <= 128
    assert 80 < number(100_000) <= 125  # a 16th of the vectors of the sample
    with pytest.raises(SpecError, match="num_centroids must be at most 2000"):
        fit(4000)


def test_more_lists_are_probed_for_items_that_are_rare_in_them(monkeypatch):
    generator = fit()
    codes = packed(generator, [6] * 300)
    items = Lists(generator, codes)
    query = vectors(4, seed=5)
    ((found, _),) = items.search([query], 4)
    is_found = np.isin(np.arange(300), found)
    like, unlike = np.flatnonzero(is_found), np.flatnonzero(~is_found)
    both = np.sort(np.concatenate([like[: len(like) // 8], unlike]))  # some are in the lists
    for rows, grows in ((np.arange(300), False), (like, False), (both, True)):
        ((probed, _),) = items.find([query], 4, rows)
        expected = np.intersect1d(found, rows)
        assert set(probed) >= set(expected) and (len(probed) > len(expected)) == grows
    ((probed, scores),) = items.find([query], 4, both, most_probes=15)  # all are as fast
    assert np.array_equal(probed, both) and not scores.any()
    monkeypatch.setattr("pipeline.search.lists.RARE", 0)
    ((probed, _),) = items.find([query], 4, both)
    assert set(probed) == set(np.intersect1d(found, both))
