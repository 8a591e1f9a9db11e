import dataclasses

import numpy as np
import pytest
import torch

from pipeline import compression
from pipeline.compression import group_sums, memberships, samer
from pipeline.compression.geometry import object_labels, token_coordinates
from pipeline.compression.samer import SaMer, soft_centroids
from pipeline.config import SpecError, parse
from pipeline.tokens import TokenBatch

LENGTHS = [23, 4, 0, 9, 1, 40, 6]


def unit(vector):
    return vector / np.sqrt((vector**2).sum())


def reference(
    v,
    p,
    num,
    gamma=0.1,
    tau=0.07,
    num_iterations=3,
    centroid="soft",
    object_weight=2.0,
    objects=None,
    object_prior=False,
    penalty_assignment="final",
    seeds=None,
):
    """Computes eq. 2 to 6 and appendix A with loops over tokens i and representatives k.

    Args:
        v: Unit vectors.
        p: Positions, NaN if undefined.

    Returns:
        The representatives, None for groups without tokens, and the nearest centroid of each token.
    """

    def distance(i, k):
        squared = 0.0
        for a in range(p.shape[1]):
            if not np.isnan(p[i, a]) and not np.isnan(s[k][a]):
                squared += (p[i, a] - s[k][a]) ** 2
        return (1 - v[i] @ mu[k]) + gamma * squared

    def mean_position(members):
        position = []
        for a in range(p.shape[1]):
            known = [p[i, a] for i in members if not np.isnan(p[i, a])]
            position.append(sum(known) / len(known) if known else np.nan)
        return position

    def nearest_to(i):  # first of ties up to rounding errors
        return min(range(num), key=lambda k: round(distance(i, k), 9))

    n = len(v)
    seeds = [round(x) for x in np.linspace(0, n - 1, num)] if seeds is None else seeds
    mu, s = [v[i] for i in seeds], [p[i] for i in seeds]
    nearest = [nearest_to(i) for i in range(n)]
    for iteration in range(num_iterations):
        if iteration:
            nearest = [nearest_to(i) for i in range(n)]
        for k in range(num):
            members = [i for i in range(n) if nearest[i] == k]
            if members:
                mu[k] = unit(sum(v[i] for i in members) / len(members))
                s[k] = mean_position(members)
    previous, nearest = nearest, [nearest_to(i) for i in range(n)]
    if centroid != "soft":
        r = []
        for k in range(num):
            members = [i for i in range(n) if nearest[i] == k]
            weights = [object_weight if objects is not None and objects[i] else 1 for i in members]
            if not members:
                r.append(None)
            elif centroid == "mean":
                r.append(sum(v[i] for i in members) / len(members))
            elif centroid == "medoid":
                r.append(v[min(members, key=lambda i: round(distance(i, k), 9))])
            else:
                weights = weights if centroid == "object_weighted" else [1] * len(members)
                total = sum(w * v[i] for w, i in zip(weights, members, strict=True))
                r.append(unit(total / sum(weights)))
        return r, nearest

    penalty = np.zeros((n, num))
    if object_prior:
        c = nearest if penalty_assignment == "final" else previous
        for i in range(n):
            for k in range(num):
                inside = [j for j in range(n) if c[j] == k]
                same = [j for j in inside if objects[j] == objects[i]]
                penalty[i, k] = 1 - len(same) / (len(inside) + 1e-6)

    a = np.zeros((n, num))
    for i in range(n):
        penalised = [distance(i, k) + penalty[i, k] for k in range(num)]
        # The minimum is subtracted for numerical stability and cancels.
        exps = [np.exp(-(d - min(penalised)) / tau) for d in penalised]
        a[i] = [e / sum(exps) for e in exps]
    r = [unit(sum(a[i, k] * v[i] for i in range(n)) / a[:, k].sum()) for k in range(num)]
    return np.array(r), nearest


def reference_coordinates(batch, axes=("x", "y"), seconds_per_unit=None):
    """Yields the positions of the tokens of each item; without axes if there are no extents."""
    for i, mask in enumerate(batch.mask):
        if batch.extents is None:
            yield np.zeros((int(mask.sum()), 0))
            continue
        x0, y0, x1, y1, t0, t1 = batch.extents[i, mask].double().numpy().T
        columns = {"x": (x0 + x1) / 2, "y": (y0 + y1) / 2, "t": (t0 + t1) / 2}
        if "t" in axes and np.isfinite(t0).any():
            columns["t"] -= np.nanmin(t0)
            columns["t"] /= seconds_per_unit or (np.nanmax(t1) - np.nanmin(t0)) or np.inf
        yield np.stack([columns[axis] for axis in (*axes, "x")], axis=1)[:, : len(axes)]


def assert_equals_reference(batch, unit_items, num=6, **options):
    compressor = SaMer(parse(SaMer.Spec, {"num_vectors": num, **options}))
    result = compressor.compress(batch)
    if "tau_s" in options:
        options["tau"] = options.pop("tau_s")
    position = {n: options.pop(n) for n in ("axes", "seconds_per_unit") if n in options}
    found = reference_coordinates(batch, **position)
    for i, (v, p) in enumerate(zip(unit_items(batch), found, strict=True)):
        expected, nearest = v, list(range(len(v)))
        if len(v) > num:
            objects = None if batch.objects is None else batch.objects[i, batch.mask[i]].tolist()
            expected, nearest = reference(v, p, num, objects=objects, **options)
            order = [k for k in range(num) if expected[k] is not None]
            expected = [expected[k] for k in order]
            nearest = [order.index(k) for k in nearest]
        np.testing.assert_allclose(
            result.vectors[i, result.mask[i]], np.reshape(expected, (-1, v.shape[1])), atol=2e-6
        )
        assert result.assignment[i, batch.mask[i]].tolist() == nearest


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("dim", [2, 8, 64])
def test_equals_reference(ragged, unit_items, boxes, dim):
    assert_equals_reference(ragged(LENGTHS, dim, boxes=boxes), unit_items)


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
def test_options(ragged, unit_items, options):
    assert_equals_reference(ragged(LENGTHS, seed=1, boxes=True), unit_items, **options)


@pytest.mark.parametrize("centroid", ["mean", "normalised", "medoid", "object_weighted"])
@pytest.mark.parametrize("has_objects", [False, True])
def test_hard_centroids(ragged, unit_items, centroid, has_objects):
    batch = ragged(LENGTHS, seed=3, boxes=True)
    if has_objects:
        batch = with_objects(batch)
    assert_equals_reference(batch, unit_items, centroid=centroid)
    assert_equals_reference(
        batch, unit_items, num=12, centroid=centroid, gamma=2.0, object_weight=5.0
    )


def with_objects(batch, seed=0):
    """Adds random objects 0 to 3, and object 99 at padding."""
    generator = torch.Generator().manual_seed(seed)
    objects = torch.randint(0, 4, batch.mask.shape, generator=generator)
    return dataclasses.replace(batch, objects=objects.masked_fill(~batch.mask, 99))


def test_only_mean_centroids_are_not_normalised(ragged):
    batch = with_objects(ragged(LENGTHS, seed=3))
    for centroid in ("soft", "mean", "normalised", "medoid", "object_weighted"):
        compressor = SaMer(SaMer.Spec(num_vectors=6, centroid=centroid))
        result = compressor.compress(batch)
        lengths = result.vectors[result.mask].norm(dim=1)
        assert compressor.normalised == result.normalised == (centroid != "mean")
        assert bool((lengths < 0.99).any()) == (centroid == "mean")
        if centroid == "medoid":  # each medoid is an input token
            tokens = batch.vectors[5, batch.mask[5]]
            tokens = tokens / tokens.norm(dim=1, keepdim=True)
            closest = (result.vectors[5, result.mask[5]] @ tokens.T).amax(dim=1)
            torch.testing.assert_close(closest, torch.ones_like(closest))


def test_object_weight_without_objects(ragged):
    batch = ragged(LENGTHS, boxes=True)
    results = [
        SaMer(SaMer.Spec(num_vectors=6, centroid=centroid)).compress(batch)
        for centroid in ("object_weighted", "normalised")
    ]
    assert torch.equal(results[0].vectors, results[1].vectors)


def test_empty_groups_yield_no_vector(ragged, unit_items):
    batch = ragged([24], boxes=True, num_padding=0)
    pairs = torch.arange(24) // 2
    batch = dataclasses.replace(
        batch, vectors=batch.vectors[:, pairs], extents=batch.extents[:, pairs]
    )
    for centroid in ("mean", "normalised", "medoid", "object_weighted"):
        assert_equals_reference(batch, unit_items, num=16, centroid=centroid)
        result = SaMer(SaMer.Spec(num_vectors=16, centroid=centroid)).compress(batch)
        assert 0 < result.lengths.item() < 16


@pytest.mark.parametrize("penalty_assignment", ["final", "previous"])
@pytest.mark.parametrize("num_iterations", [0, 1, 3])
def test_object_prior(ragged, unit_items, penalty_assignment, num_iterations):
    batch = with_objects(ragged(LENGTHS, seed=4, boxes=True))
    options = {"penalty_assignment": penalty_assignment, "num_iterations": num_iterations}
    assert_equals_reference(batch, unit_items, object_prior=True, **options)
    assert_equals_reference(
        batch, unit_items, object_prior=True, num=15, gamma=1.0, tau_s=0.3, **options
    )


def test_penalty_assignments_differ(ragged):
    batch = with_objects(ragged([40], seed=4, boxes=True))
    final, previous, none = (
        SaMer(SaMer.Spec(num_vectors=6, num_iterations=1, **options)).compress(batch).vectors
        for options in (
            {"object_prior": True},
            {"object_prior": True, "penalty_assignment": "previous"},
            {},
        )
    )
    assert not torch.allclose(final, previous, atol=1e-3)
    assert not torch.allclose(final, none, atol=1e-3)


def test_object_prior_requires_objects_and_option(ragged):
    batch = ragged(LENGTHS, seed=4, boxes=True)
    plain = SaMer(SaMer.Spec(num_vectors=6))
    prior = SaMer(SaMer.Spec(num_vectors=6, object_prior=True))
    expected = plain.compress(batch).vectors
    assert torch.equal(prior.compress(batch).vectors, expected)
    assert torch.equal(plain.compress(with_objects(batch)).vectors, expected)
    # With a single object, the penalty of non-empty groups is almost 0.
    single = dataclasses.replace(batch, objects=torch.zeros_like(batch.mask, dtype=torch.int64))
    torch.testing.assert_close(prior.compress(single).vectors, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("prior", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_gradients_equal_float64_equations(ragged, unit_items, prior, unit):
    """Eq. 2 to 6 with centroids and assignments as constants of the forward pass."""
    batch = with_objects(ragged([30], dim=8, unit=unit, boxes=True, num_padding=0))
    spec = SaMer.Spec(num_vectors=5, object_prior=prior)
    vectors = batch.vectors.clone().requires_grad_()
    query_QD = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = SaMer(spec).compress(dataclasses.replace(batch, vectors=vectors))
    (query_QD.float() @ result.vectors[0].T).amax(dim=1).mean().backward()

    (tokens,) = unit_items(batch)
    (p,) = reference_coordinates(batch)
    hard = {"centroid": "normalised"}  # the hard means are the centroids of the next iteration
    mu, _ = reference(tokens, p, 5, num_iterations=2, **hard)
    _, c = reference(tokens, p, 5)
    _, previous = reference(tokens, p, 5, num_iterations=2)
    s = np.array([p[np.array(previous) == k].mean(axis=0) for k in range(5)])
    v = batch.vectors[0].double().requires_grad_()
    v_ND = v if unit else v / v.norm(dim=1, keepdim=True)
    squared = torch.from_numpy(((p[:, None] - s[None]) ** 2).sum(axis=2))
    d = 1 - v_ND @ torch.from_numpy(np.array(mu)).T + 0.1 * squared
    if prior:
        c, b = torch.tensor(c), batch.objects[0]
        for k in range(5):
            for i in range(30):
                same = ((c == k) & (b == b[i])).sum().double()
                d[i, k] += 1 - same / ((c == k).sum() + 1e-6)
    a = (-d / 0.07).softmax(dim=1)
    r = torch.stack([(a[:, k : k + 1] * v_ND).sum(dim=0) / a[:, k].sum() for k in range(5)])
    r = r / r.norm(dim=1, keepdim=True)
    torch.testing.assert_close(result.vectors[0].detach().double(), r.detach(), atol=2e-6, rtol=0)
    (query_QD @ r.T).amax(dim=1).mean().backward()
    assert v.grad.abs().max() > 0.01
    torch.testing.assert_close(vectors.grad[0].double(), v.grad, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("centroid", ["soft", "mean", "normalised", "medoid", "object_weighted"])
def test_gradients_reach_tokens_through_all_centroids(ragged, centroid):
    batch = with_objects(ragged(LENGTHS, boxes=True, garbage=0.0))
    vectors = batch.vectors.clone().requires_grad_()
    compressor = SaMer(SaMer.Spec(num_vectors=6, centroid=centroid))
    result = compressor.compress(dataclasses.replace(batch, vectors=vectors))
    result.vectors[result.mask].sum().backward()
    assert vectors.grad.isfinite().all()
    assert (vectors.grad[~batch.mask] == 0).all()
    assert (vectors.grad[batch.mask] != 0).any()


BOXES = torch.tensor([[[0.1, 0.1, 0.9, 0.9], [0.4, 0.4, 0.6, 0.6], [0.5, 0.5, 0.7, 0.7]]])


def find_labels(points, boxes=BOXES, mask=None):
    mask = torch.ones(boxes.shape[:2], dtype=torch.bool) if mask is None else mask
    return object_labels(torch.tensor([points]), boxes, mask)[0].tolist()


def test_object_labels_use_smallest_box():
    points = [[0.0, 0.5], [0.2, 0.2], [0.45, 0.45], [0.55, 0.55], [0.65, 0.65], [0.95, 0.95]]
    assert find_labels(points) == [0, 1, 2, 2, 3, 0]  # the first of two boxes of equal size
    assert find_labels(points, BOXES[:, [0, 2, 1]]) == [0, 1, 3, 2, 2, 0]
    assert find_labels(points, mask=torch.tensor([[True, False, True]])) == [0, 1, 1, 3, 3, 0]


def test_object_labels_at_edges_and_without_positions():
    edges = [[0.1, 0.1], [0.9, 0.1], [0.9, 0.9], [0.5, 0.1], [0.1, 0.95]]
    assert find_labels(edges, BOXES[:, :1]) == [1, 1, 1, 1, 0]
    nan = float("nan")
    assert find_labels([[nan, 0.5], [nan, nan], [0.5, 0.5]]) == [0, 0, 2]


def test_object_labels_without_boxes():
    assert find_labels([[0.5, 0.5]], torch.zeros(1, 0, 4)) == [0]
    assert find_labels([[0.5, 0.5]], mask=torch.zeros(1, 3, dtype=torch.bool)) == [0]


def test_boxes_are_clipped_to_the_image():
    boxes = torch.tensor([[[0.5, 0.5, 1.0, 1.0], [-0.8, -0.8, 0.6, 0.6]]])
    assert find_labels([[0.0, 0.0], [0.55, 0.55], [1.0, 1.0]], boxes) == [2, 1, 1]
    boxes = torch.tensor([[[0.2, 0.2, 0.9, 0.9], [-0.8, -0.8, 0.6, 0.6]]])
    assert find_labels([[0.3, 0.3]], boxes) == [2]


@pytest.mark.parametrize(
    ("box", "problem"),
    [
        ([0.5, 0.1, 0.4, 0.3], "is reversed"),
        ([0.5, 0.1, 0.5, 0.3], "has no area"),
        ([1.2, 0.1, 1.4, 0.3], "is outside the image"),
        ([-0.5, 0.1, 0.0, 0.3], "is outside the image"),
        ([0.0, 0.0, 640.0, 480.0], "extends far beyond the image"),
        ([0.1, float("nan"), 0.4, 0.3], "is not finite"),
        ([0.1, 0.1, float("inf"), 0.3], "is not finite"),
    ],
)
def test_rejects_invalid_boxes(box, problem):
    boxes = torch.cat([BOXES, torch.tensor([[box]])], dim=1)
    with pytest.raises(
        SpecError,
        match=rf"^boxes must be .* x0 < x1 .* {problem} \(box 3 of"
        rf" item 0\)",
    ):
        find_labels([[0.5, 0.5]], boxes)
    # Masked boxes are ignored.
    mask = torch.tensor([[True, True, True, False]])
    assert find_labels([[0.5, 0.5]], boxes, mask) == [2]


def test_object_labels_of_batch(ragged):
    batch = ragged([9, 4], boxes=True)
    labels = object_labels(
        token_coordinates(batch), BOXES.expand(2, -1, -1), torch.ones(2, 3).bool()
    )
    assert (labels[~batch.mask] == 0).all() and (labels > 0).any()


@pytest.mark.parametrize(
    "options",
    [
        {"axes": ["t"]},
        {"axes": ["y"], "gamma": 2.0},
        {"axes": ["t", "x"]},
        {"axes": ["y", "t", "x"], "gamma": 1.0},
        {"axes": []},
        {"axes": ["t"], "seconds_per_unit": 10.0},
        {"axes": ["x", "y", "t"], "seconds_per_unit": 100.0},
        {"axes": ["x", "t"], "seconds_per_unit": 1.0, "gamma": 1e-4},
    ],
    ids=str,
)
def test_axes(ragged, unit_items, options):
    batch = ragged(LENGTHS, seed=6, boxes=True)
    extents = batch.extents.clone()
    extents[..., 4:] = extents[..., 4:].sort(dim=2).values
    batch = dataclasses.replace(batch, extents=extents)
    assert_equals_reference(batch, unit_items, **options)
    gaps = extents.clone()
    gaps[::2, ::3, 4] = torch.nan  # tokens without a time
    gaps[5, :, 4:] = torch.nan  # an item without times
    assert_equals_reference(dataclasses.replace(batch, extents=gaps), unit_items, **options)


def test_seconds_per_unit(ragged):
    batch = ragged([20], boxes=True, num_padding=0)
    batch.extents[0, :, 4] = 1000.0 + torch.arange(20)
    batch.extents[0, :, 5] = 1001.0 + torch.arange(20)
    centre = torch.arange(20) + 0.5
    for seconds, unit in ((None, 20.0), (4.0, 4.0)):
        found = token_coordinates(batch, ("t",), seconds)[0, :, 0]
        torch.testing.assert_close(found, centre / unit)
    batch.extents[..., 4:] = 7.0  # without a duration, all distances are 0
    assert (token_coordinates(batch, ("t",)) == 0).all()
    assert token_coordinates(dataclasses.replace(batch, extents=None), ("t",)).shape == (1, 20, 0)


def test_precision_late_in_long_recordings(ragged, unit_items):
    """After an hour, p^2 - 2ps + s^2 in seconds would lose all digits of (p - s)^2."""
    batch = ragged([40], dim=4, seed=7, boxes=True, num_padding=0)
    batch.extents[0, :, 4] = batch.extents[0, :, 5] = 3500.0 + torch.arange(40)
    batch.extents[0, 0, 4:] = 0.0
    assert_equals_reference(batch, unit_items, axes=["t"], seconds_per_unit=1.0, gamma=0.1)


def test_rejects_invalid_combinations():
    for fields, message in (
        ({"axes": ["x", "x"]}, r"axes must be a list of different axes, got \['x', 'x'\]"),
        ({"axes": ["z"]}, r"axes\[0\] must be 'x', 'y' or 't', got 'z'"),
        (
            {"seconds_per_unit": 2.0},
            "seconds_per_unit must be null unless t is among the axes, got 2.0",
        ),
        ({"axes": ["t"], "seconds_per_unit": 0}, "seconds_per_unit must be .*, got 0"),
        (
            {"object_prior": True, "centroid": "mean"},
            "object_prior must be false unless centroid is soft, got True",
        ),
        ({"object_weight": 0.5}, "object_weight must be .*, got 0.5"),
    ):
        with pytest.raises(SpecError, match=message):
            parse(SaMer.Spec, {"num_vectors": 4, **fields})


@pytest.mark.parametrize("centroid", ["soft", "medoid", "object_weighted"])
def test_blocks_do_not_change_results(ragged, monkeypatch, centroid):
    """Includes blocks whose largest budget is smaller than that of the batch."""
    batch = with_objects(ragged(LENGTHS, boxes=True))
    compressor = SaMer(SaMer.Spec(ratio=0.4, centroid=centroid))
    whole = compressor.compress(batch)
    monkeypatch.setitem(samer.blocks.__globals__["MAX_BLOCK_ELEMENTS"], "cpu", 1)
    parts = compressor.compress(batch)
    assert torch.equal(parts.mask, whole.mask) and torch.equal(parts.assignment, whole.assignment)
    torch.testing.assert_close(parts.vectors[parts.mask], whole.vectors[whole.mask])


def test_group_sums_equal_products_with_memberships(monkeypatch):
    """Other devices use the product, because atomic additions are not deterministic."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 20, 4, generator=generator)
    groups = torch.randint(-1, 5, (3, 20), generator=generator)
    weights = torch.rand(3, 20, generator=generator).masked_fill(groups < 0, 0.0)
    expected = memberships(groups, 6).mT @ values
    weighted = memberships(groups, 6).mT @ (values * weights.unsqueeze(2))
    for is_cpu in (True, False):
        monkeypatch.setattr(compression, "is_cpu", lambda tensor, is_cpu=is_cpu: is_cpu)
        torch.testing.assert_close(group_sums(values, groups, 6), expected)
        torch.testing.assert_close(group_sums(values, groups, 6, weights), weighted)


@pytest.mark.gpu
@pytest.mark.parametrize("centroid", ["soft", "mean", "medoid", "object_weighted"])
def test_gpu_equals_cpu(ragged, centroid):
    batch = with_objects(ragged(LENGTHS, dim=64, boxes=True))
    for compressor in (
        SaMer(SaMer.Spec(num_vectors=6, centroid=centroid)),
        SaMer(SaMer.Spec(ratio=0.3, axes=("x", "y", "t"), object_prior=centroid == "soft")),
    ):
        expected = compressor.compress(batch)
        found, again = (compressor.compress(batch.to("cuda")) for _ in range(2))
        assert torch.equal(found.vectors, again.vectors)
        assert torch.equal(found.assignment.cpu(), expected.assignment)
        torch.testing.assert_close(
            found.vectors.cpu()[expected.mask], expected.vectors[expected.mask], atol=1e-5, rtol=0
        )


def test_ignores_undefined_coordinates(ragged, unit_items):
    batch = ragged(LENGTHS, seed=2, boxes=True)
    generator = torch.Generator().manual_seed(0)
    extents = batch.extents.clone()
    extents[..., [0, 2]] = extents[..., [0, 2]].masked_fill(
        torch.rand(*batch.mask.shape, 1, generator=generator) < 0.5, torch.nan
    )
    extents[0, :, [1, 3]] = torch.nan  # an item without y coordinates
    assert_equals_reference(dataclasses.replace(batch, extents=extents), unit_items, gamma=2.0)


def test_centroids_without_tokens_are_not_moved(ragged, unit_items):
    """The second of two seeds on equal tokens gets no tokens."""
    batch = ragged([24], boxes=True, num_padding=0)
    pairs = torch.arange(24) // 2
    batch = dataclasses.replace(
        batch, vectors=batch.vectors[:, pairs], extents=batch.extents[:, pairs]
    )
    for gamma in (0.1, 3.0):
        assert_equals_reference(batch, unit_items, num=16, gamma=gamma)


def test_times_are_ignored_by_default(ragged):
    batch = ragged(LENGTHS, boxes=True)
    without = batch.extents.clone()
    without[..., 4:] = torch.nan
    compressor = SaMer(SaMer.Spec(num_vectors=6))
    results = [
        compressor.compress(dataclasses.replace(batch, extents=extents)).vectors
        for extents in (batch.extents, without)
    ]
    assert torch.equal(*results)


def test_spatial_term_separates_equal_tokens_at_distant_positions():
    """Features alone would merge two equal objects on both sides of the background."""
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    x = torch.tensor([0.0, 0.1, 0.4, 0.6, 0.9, 1.0])
    extents = torch.full((1, 6, 6), torch.nan)
    extents[0, :, 0] = extents[0, :, 2] = x
    batch = TokenBatch(
        vectors[None], torch.ones(1, 6, dtype=torch.bool), normalised=True, extents=extents
    )
    spec = SaMer.Spec(num_vectors=3)
    assert SaMer(spec).compress(batch).assignment.tolist() == [[0, 0, 1, 1, 2, 2]]
    text = dataclasses.replace(batch, extents=None)
    assert SaMer(spec).compress(text).assignment.tolist() == [[0, 0, 1, 1, 0, 0]]


def test_distant_representative_does_not_underflow():
    """exp(-100 / 0.1) is zero in float32, but the ratio of the weights is e^-1."""
    tokens = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    mask = torch.tensor([[True, True, False]])
    distance = torch.tensor([[[0.0, 100.0], [0.0, 100.1], [0.0, 0.0]]])
    found = soft_centroids(tokens, mask, distance.mT, tau=0.1)
    expected = [unit(np.array([1.0, 1.0])), unit(np.array([1.0, np.exp(-1)]))]
    np.testing.assert_allclose(found[0], expected, atol=1e-4)  # float32 rounds 100.1 by 1e-5


def test_zero_and_equal_tokens():
    vectors = torch.zeros(2, 9, 4)
    vectors[1] = 0.5
    batch = TokenBatch(vectors, torch.ones(2, 9, dtype=torch.bool), normalised=False)
    result = SaMer(SaMer.Spec(num_vectors=4)).compress(batch)
    torch.testing.assert_close(result.vectors, vectors[:, :4])


def test_assignment_of_equal_tokens_is_independent_of_batch():
    """Rounding errors of distances to equal representatives depend on the padding."""
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
        assert torch.equal(alone.assignment[0], together.assignment[i, :length])
        torch.testing.assert_close(alone.vectors[0], together.vectors[i], atol=1e-6, rtol=0)


def test_gradients_equal_finite_differences(ragged):
    """Compares the directional derivative of a score with finite differences of the reference.

    K-means moves the centroids without a gradient. Therefore the test uses no iterations and does
    not move the seed tokens.
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
        r, _ = reference(v, next(reference_coordinates(batch)), 3, num_iterations=0)
        return (r @ query.double().numpy()).sum()

    assert abs(slope) > 0.1
    assert float(slope) == pytest.approx((score(1e-5) - score(-1e-5)) / 2e-5, rel=1e-3)


def test_gradients_are_finite_with_padding_and_short_items(ragged):
    batch = ragged(LENGTHS, boxes=True, garbage=0.0)
    vectors = batch.vectors.clone().requires_grad_()
    result = SaMer(SaMer.Spec(num_vectors=6)).compress(dataclasses.replace(batch, vectors=vectors))
    result.vectors[result.mask].sum().backward()
    assert vectors.grad.isfinite().all()
    assert (vectors.grad[~batch.mask] == 0).all()
    assert (vectors.grad[batch.mask] != 0).all()


def test_runs_in_float32_inside_autocast(ragged):
    batch = ragged(LENGTHS)
    compressor = SaMer(SaMer.Spec(num_vectors=6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = compressor.compress(batch)
    assert torch.equal(inside.vectors, compressor.compress(batch).vectors)
