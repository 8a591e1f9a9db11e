import dataclasses

import numpy as np
import pytest
import torch

from pipeline.compression.samer import SaMer, soft_centroids
from pipeline.tokens import TokenBatch

LENGTHS = [23, 4, 0, 9, 1, 40, 6]


def unit(vector):
    return vector / np.sqrt((vector**2).sum())


def merged_by_hand(v, p, num, gamma=0.1, tau=0.07, num_iterations=3):
    """Eq. 2 and 3 in loops over tokens i and representatives k; `p` may hold NaN.

    Returns the representatives and the nearest centroid of each token.
    """

    def distance(i, k):
        apart = 0.0
        for a in range(p.shape[1]):
            if not np.isnan(p[i, a]) and not np.isnan(s[k][a]):
                apart += (p[i, a] - s[k][a]) ** 2
        return (1 - v[i] @ mu[k]) + gamma * apart

    def mean_place(members):
        place = []
        for a in range(p.shape[1]):
            known = [p[i, a] for i in members if not np.isnan(p[i, a])]
            place.append(sum(known) / len(known) if known else np.nan)
        return place

    def nearest_to(i):  # the first of those that are equal but for rounding
        return min(range(num), key=lambda k: round(distance(i, k), 9))

    n = len(v)
    seeds = [round(x) for x in np.linspace(0, n - 1, num)]
    mu, s = [v[i] for i in seeds], [p[i] for i in seeds]
    for _ in range(num_iterations):
        nearest = [nearest_to(i) for i in range(n)]
        for k in range(num):
            members = [i for i in range(n) if nearest[i] == k]
            if members:
                mu[k] = unit(sum(v[i] for i in members) / len(members))
                s[k] = mean_place(members)

    a = np.zeros((n, num))
    for i in range(n):
        exps = [np.exp(-distance(i, k) / tau) for k in range(num)]
        a[i] = [e / sum(exps) for e in exps]
    r = [unit(sum(a[i, k] * v[i] for i in range(n)) / a[:, k].sum()) for k in range(num)]
    return np.array(r), [nearest_to(i) for i in range(n)]


def places(batch):
    """The box centres of each item's tokens; no axes where there are no boxes."""
    for i, mask in enumerate(batch.mask):
        if batch.extents is None:
            yield np.zeros((int(mask.sum()), 0))
        else:
            x0, y0, x1, y1, *_ = batch.extents[i, mask].double().numpy().T
            yield np.stack([(x0 + x1) / 2, (y0 + y1) / 2], axis=1)


def check(batch, unit_items, num=6, **options):
    result = SaMer(SaMer.Spec(num_vectors=num, **options)).compress(batch)
    if "tau_s" in options:
        options["tau"] = options.pop("tau_s")
    for i, (v, p) in enumerate(zip(unit_items(batch), places(batch), strict=True)):
        expected, nearest = v, list(range(len(v)))
        if len(v) > num:
            expected, nearest = merged_by_hand(v, p, num, **options)
        np.testing.assert_allclose(result.vectors[i, result.mask[i]], expected, atol=2e-6)
        assert result.support[i, batch.mask[i]].tolist() == nearest


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("dim", [2, 8, 64])
def test_equals_the_equations_in_loops(ragged, unit_items, boxes, dim):
    check(ragged(LENGTHS, dim, boxes=boxes), unit_items)


@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 0},
        {"num_iterations": 1},
        {"gamma": 0.0},
        {"gamma": 3.0},
        {"tau_s": 0.01},
        {"tau_s": 1.0},
        {"num": 1},
    ],
    ids=str,
)
def test_options_are_the_paper_s(ragged, unit_items, options):
    check(ragged(LENGTHS, seed=1, boxes=True), unit_items, **options)


def test_coordinates_without_meaning_are_left_out(ragged, unit_items):
    batch = ragged(LENGTHS, seed=2, boxes=True)
    generator = torch.Generator().manual_seed(0)
    extents = batch.extents.clone()
    extents[..., [0, 2]] = extents[..., [0, 2]].masked_fill(
        torch.rand(*batch.mask.shape, 1, generator=generator) < 0.5, torch.nan
    )
    extents[0, :, [1, 3]] = torch.nan  # no token of this item has a y
    check(dataclasses.replace(batch, extents=extents), unit_items, gamma=2.0)


def test_a_centroid_without_tokens_stays(ragged, unit_items):
    """Of two seeds on equal tokens the second gets nothing."""
    batch = ragged([24], boxes=True, num_padding=0)
    pairs = torch.arange(24) // 2
    batch = dataclasses.replace(
        batch, vectors=batch.vectors[:, pairs], extents=batch.extents[:, pairs]
    )
    for gamma in (0.1, 3.0):
        check(batch, unit_items, num=16, gamma=gamma)


def test_times_play_no_part(ragged):
    batch = ragged(LENGTHS, boxes=True)
    without = batch.extents.clone()
    without[..., 4:] = torch.nan
    compressor = SaMer(SaMer.Spec(num_vectors=6))
    results = [
        compressor.compress(dataclasses.replace(batch, extents=extents)).vectors
        for extents in (batch.extents, without)
    ]
    assert torch.equal(*results)


def test_the_spatial_term_keeps_equal_tokens_of_distant_places_apart():
    """Two equal objects left and right, background between them: features alone merge them."""
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    x = torch.tensor([0.0, 0.1, 0.4, 0.6, 0.9, 1.0])
    extents = torch.full((1, 6, 6), torch.nan)
    extents[0, :, 0] = extents[0, :, 2] = x
    batch = TokenBatch(
        vectors[None], torch.ones(1, 6, dtype=torch.bool), normalised=True, extents=extents
    )
    spec = SaMer.Spec(num_vectors=3)
    assert SaMer(spec).compress(batch).support.tolist() == [[0, 0, 1, 1, 2, 2]]
    text = dataclasses.replace(batch, extents=None)
    assert SaMer(spec).compress(text).support.tolist() == [[0, 0, 1, 1, 0, 0]]


def test_a_representative_far_from_all_tokens_does_not_underflow():
    """exp(-100 / 0.1) is zero in float32, but the ratio of its weights is e^-1 all the same."""
    tokens = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    mask = torch.tensor([[True, True, False]])
    distance = torch.tensor([[[0.0, 100.0], [0.0, 100.1], [0.0, 0.0]]])
    found = soft_centroids(tokens, mask, distance, tau=0.1)
    expected = [unit(np.array([1.0, 1.0])), unit(np.array([1.0, np.exp(-1)]))]
    np.testing.assert_allclose(found[0], expected, atol=1e-4)  # 100.1 has 1e-5 of float32 rounding


def test_zero_and_equal_tokens_are_safe():
    vectors = torch.zeros(2, 9, 4)
    vectors[1] = 0.5
    batch = TokenBatch(vectors, torch.ones(2, 9, dtype=torch.bool), normalised=False)
    result = SaMer(SaMer.Spec(num_vectors=4)).compress(batch)
    torch.testing.assert_close(result.vectors, vectors[:, :4])


def test_equal_tokens_go_to_the_same_representatives_in_every_batch():
    """Distances to equal representatives differ by rounding, which differs with the padding."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([90, 200, 131, 299])
    distinct = torch.nn.functional.normalize(torch.randn(20, 384, generator=generator), dim=1)
    vectors = distinct[torch.randint(20, (4, 299), generator=generator)]
    mask = torch.arange(299) < lengths.unsqueeze(1)
    compressor = SaMer(SaMer.Spec(num_vectors=64))
    together = compressor.compress(TokenBatch(vectors, mask, normalised=True))
    for i, length in enumerate(lengths.tolist()):
        real = TokenBatch(vectors[i : i + 1, :length], mask[i : i + 1, :length], normalised=True)
        alone = compressor.compress(real)
        assert torch.equal(alone.support[0], together.support[i, :length])
        torch.testing.assert_close(alone.vectors[0], together.vectors[i], atol=1e-6, rtol=0)


def test_gradients_are_those_of_the_soft_assignment(ragged):
    """The slope of a score along a direction, against finite differences of the loops above.

    k-means moves the centroids with the tokens, but off the gradient path: without iterations and
    with the seed tokens held, the loops see the same function.
    """
    batch = ragged([12], dim=6, unit=True, boxes=True, num_padding=0)
    vectors = batch.vectors.clone().requires_grad_()
    query, step = torch.randn(2, 6, generator=torch.Generator().manual_seed(5)).unbind()
    spec = SaMer.Spec(num_vectors=3, num_iterations=0)
    result = SaMer(spec).compress(dataclasses.replace(batch, vectors=vectors))
    (result.vectors[0] @ query).sum().backward()
    not_seeds = [i for i in range(12) if i not in (0, 6, 11)]
    slope = sum(vectors.grad[0, i] @ step for i in not_seeds)

    def score(epsilon):
        v = batch.vectors[0].double().numpy()
        v[not_seeds] += epsilon * step.double().numpy()
        r, _ = merged_by_hand(v, next(places(batch)), 3, num_iterations=0)
        return (r @ query.double().numpy()).sum()

    assert abs(slope) > 0.1
    assert float(slope) == pytest.approx((score(1e-5) - score(-1e-5)) / 2e-5, rel=1e-3)


def test_gradients_stay_finite_next_to_padding_and_short_items(ragged):
    batch = ragged(LENGTHS, boxes=True, garbage=0.0)
    vectors = batch.vectors.clone().requires_grad_()
    result = SaMer(SaMer.Spec(num_vectors=6)).compress(dataclasses.replace(batch, vectors=vectors))
    result.vectors[result.mask].sum().backward()
    assert vectors.grad.isfinite().all()
    assert (vectors.grad[~batch.mask] == 0).all()
    assert (vectors.grad[batch.mask] != 0).all()


def test_runs_in_float32_inside_a_half_precision_region(ragged):
    batch = ragged(LENGTHS)
    compressor = SaMer(SaMer.Spec(num_vectors=6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = compressor.compress(batch)
    assert torch.equal(inside.vectors, compressor.compress(batch).vectors)
