"""Placements of seeds, against loops in float64."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch

from pipeline.compression.random import Random
from pipeline.compression.samer import SaMer, places
from pipeline.compression.seeds import degenerate_placement, lattice_positions
from pipeline.compression.spatial import Spatial
from pipeline.config import digest, dump
from pipeline.index.columns import Representation
from pipeline.tokens import TokenBatch
from tests.compression.test_samer import merged_by_hand, places_by_hand

LENGTHS = [23, 4, 0, 9, 1, 40, 6]


def grid_extents(*shape):
    """(N, 6) float32 boxes of a grid of (t,) y, x tokens in raster order."""
    frames, rows, columns = (1, *shape)[-3:]
    t, y, x = (axis.reshape(-1) for axis in np.mgrid[:frames, :rows, :columns].astype(float))
    if len(shape) == 2:
        t = np.full_like(t, np.nan)
    boxes = [x / columns, y / rows, (x + 1) / columns, (y + 1) / rows, t, t + 1]
    return np.stack(boxes, axis=1).astype(np.float32)


def on_grid(*shape, seed=0):
    """A batch of one item on a grid, its features random."""
    extents = torch.from_numpy(grid_extents(*shape))[None]
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(1, extents.shape[1], 8, generator=generator)
    mask = torch.ones(1, extents.shape[1], dtype=torch.bool)
    return TokenBatch(vectors, mask, normalised=False, extents=extents)


def kept(batch, **options):
    """The positions that `spatial` keeps of the first item."""
    support = Spatial(Spatial.Spec(**options)).compress(batch).support[0]
    return (support >= 0).nonzero().flatten().tolist()


def lattice_by_hand(places_N3, num):
    """The cells by sorting and cutting lists; in each the token nearest to its centre."""

    def split(tokens, seeds, axis):
        if not seeds:
            return []
        known = {x for x in places_N3[tokens, axis] if not np.isnan(x)}
        parts = [min(round(seeds ** (1 / 3)), max(1, len(known))), round(seeds**0.5), seeds][axis]
        inf = float("inf")
        values = [inf if np.isnan(x) else x for x in places_N3[tokens, axis]]
        ranked = [token for _, token in sorted(zip(values, tokens, strict=True))]
        cells = []
        for part in range(parts):
            low, high = part * seeds // parts, (part + 1) * seeds // parts
            begin, end = (int(-(-Fraction(s * len(tokens), seeds) // 1)) for s in (low, high))
            cut = ranked[begin:end]
            cells += [cut] if axis == 2 else split(cut, high - low, axis + 1)
        return cells

    seeds = []
    for cell in split(list(range(len(places_N3))), num, 0):
        members = places_N3[cell]
        known = ~np.isnan(members)
        centre = [members[known[:, a], a].mean() if known[:, a].any() else np.nan for a in range(3)]
        apart = np.nansum((members - centre) ** 2, axis=1)
        seeds.append(min(cell, key=lambda n: (round(apart[cell.index(n)], 6), n)))
    return sorted(seeds)


def farthest_by_hand(distance, num_tokens, num):
    """Farthest-point sampling in loops; `distance(i, None)` is that from the centre."""
    seeds = [min(range(num_tokens), key=lambda i: round(distance(i, None), 6))]
    while len(seeds) < num:
        left = [i for i in range(num_tokens) if i not in seeds]
        seeds.append(max(left, key=lambda i: round(min(distance(i, j) for j in seeds), 6)))
    return sorted(seeds)


def distances(v, p, gamma):
    """Eq. 2 between tokens, or from the unit mean of the features at the mean position."""
    mean = v.sum(axis=0) if v.shape[1] else np.zeros(0)
    mean = mean / (np.linalg.norm(mean) or 1)
    known = ~np.isnan(p)
    middle = [p[known[:, a], a].mean() if known[:, a].any() else np.nan for a in range(p.shape[1])]

    def distance(i, j):
        feature, place = (mean, middle) if j is None else (v[j], p[j])
        return 1 - v[i] @ feature + gamma * np.nansum((p[i] - place) ** 2)

    return distance


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("num", [1, 5, 8, 17])
def test_lattice_equals_cells_cut_by_hand(ragged, num, gaps):
    batch = ragged(LENGTHS, boxes=True, seed=num)
    if gaps:  # tokens without a box, and an item without times
        batch.extents[:, ::3, :4] = torch.nan
        batch.extents[5, :, 4:] = torch.nan
    result = Spatial(Spatial.Spec(num_vectors=num, seeds="lattice")).compress(batch)
    found = places_by_hand(batch, ("t", "y", "x"))
    for support, mask, p in zip(result.support, batch.mask, found, strict=True):
        positions = (support[mask] >= 0).nonzero().flatten().tolist()
        assert positions == lattice_by_hand(p, min(num, len(p)))


@pytest.mark.parametrize("axes", [("x", "y"), ("x", "y", "t"), ()])
@pytest.mark.parametrize("seeds", ["lattice", "farthest"])
def test_samer_begins_with_the_seeds(ragged, unit_items, seeds, axes):
    batch = ragged(LENGTHS, boxes=True, seed=3)
    spec = SaMer.Spec(num_vectors=6, seeds=seeds, axes=axes)
    result = SaMer(spec).compress(batch)
    lattice = places_by_hand(batch, ("t", "y", "x"))
    found = places_by_hand(batch, axes)
    for i, (v, p, grid) in enumerate(zip(unit_items(batch), found, lattice, strict=True)):
        if len(v) <= 6:
            continue
        if seeds == "lattice":
            positions = lattice_by_hand(grid, 6)
        else:
            positions = farthest_by_hand(distances(v, p, spec.gamma), len(v), 6)
        expected, nearest = merged_by_hand(v, p, 6, seeds=positions)
        np.testing.assert_allclose(result.vectors[i, result.mask[i]], expected, atol=2e-6)
        assert result.support[i, batch.mask[i]].tolist() == nearest


@pytest.mark.parametrize("boxes", [False, True])
def test_spatial_samples_positions_or_the_token_order(ragged, boxes):
    batch = ragged(LENGTHS, boxes=boxes, seed=4)
    result = Spatial(Spatial.Spec(num_vectors=6, seeds="farthest")).compress(batch)
    found = places_by_hand(batch, ("t", "y", "x"))
    for support, mask, p in zip(result.support, batch.mask, found, strict=True):
        positions = (support[mask] >= 0).nonzero().flatten().tolist()
        if not boxes:
            p = np.arange(len(p))[:, None] / max(1, len(p))
        if len(p):
            distance = distances(np.zeros((len(p), 0)), p, gamma=1.0)
            assert positions == farthest_by_hand(distance, len(p), min(6, len(p)))


def test_a_lattice_is_regular_on_a_grid():
    assert kept(on_grid(4, 4), num_vectors=4, seeds="lattice") == [0, 2, 8, 10]
    rows, columns = np.divmod(kept(on_grid(14, 14), num_vectors=8, seeds="lattice"), 14)
    assert len(set(columns)) >= 5 and rows.max() - rows.min() >= 9
    # In space and time: two frames of four, in each a lattice of two by two.
    found = kept(on_grid(4, 4, 4), num_vectors=8, seeds="lattice")
    assert found == [0, 2, 8, 10, 32, 34, 40, 42]


def test_a_lattice_of_tokens_without_positions_is_the_papers(ragged):
    batch = ragged(LENGTHS)
    even = Spatial(Spatial.Spec(num_vectors=5)).compress(batch)
    for extents in (None, torch.full((*batch.mask.shape, 6), torch.nan)):
        text = dataclasses.replace(batch, extents=extents)
        lattice = Spatial(Spatial.Spec(num_vectors=5, seeds="lattice")).compress(text)
        assert torch.equal(lattice.support, even.support)


def test_equal_tokens_have_distinct_seeds():
    batch = dataclasses.replace(on_grid(5, 5), vectors=torch.ones(1, 25, 8))
    batch.extents[:] = batch.extents[:, :1].clone()
    for seeds in ("lattice", "farthest"):
        assert len(kept(batch, num_vectors=12, seeds=seeds)) == 12
    mask, places_BN3 = batch.mask, places(batch, ("t", "y", "x"))
    positions, _ = lattice_positions(places_BN3, mask, torch.tensor([25]))
    assert positions[0].tolist() == list(range(25))


def test_farthest_seeds_find_what_is_rare():
    """One token in a hundred differs: uniform seeds miss it."""
    vectors = torch.zeros(1, 100, 4)
    vectors[..., 0] = 1.0
    vectors[0, 37] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    batch = TokenBatch(vectors, torch.ones(1, 100, dtype=torch.bool), normalised=True)
    nearest = {}
    for seeds in ("paper", "farthest"):
        spec = SaMer.Spec(num_vectors=4, seeds=seeds, num_iterations=0)
        nearest[seeds] = (SaMer(spec).compress(batch).vectors[0] @ vectors[0, 37]).max()
    assert nearest["paper"] < 0.1 and nearest["farthest"] > 0.9


@pytest.mark.parametrize(
    ("shape", "budget", "where"),
    [
        ((14, 14), 8, "2 of the 14 columns of the 14 x 14 tokens"),
        ((16, 16), 17, "2 of the 16 columns of the 16 x 16 tokens"),
        ((32, 32), 9, "2 of the 32 columns of the 32 x 32 tokens"),
        ((9, 6, 6), 10, "2 of the 6 rows of the 9 x 6 x 6 tokens"),
        ((14, 14), 9, None),
        ((14, 14), 16, None),
        ((32, 32), 64, None),
        ((14, 14), 3, None),
        ((14, 14), 196, None),
    ],
)
def test_a_degenerate_placement_is_described(shape, budget, where):
    extents = grid_extents(*shape)
    expected = where and f"all {budget} seeds lie in {where}"
    assert degenerate_placement(extents, budget) == expected
    sentence = Spatial(Spatial.Spec(num_vectors=budget)).remark(extents)
    assert (sentence is None) == (where is None)
    for seeds in ("lattice", "farthest"):
        assert SaMer(SaMer.Spec(num_vectors=budget, seeds=seeds)).remark(extents) is None


def test_what_is_no_grid_is_not_judged():
    words = np.random.default_rng(0).random((50, 6)).astype(np.float32)
    assert degenerate_placement(words, 8) is None
    assert degenerate_placement(np.full((50, 6), np.nan), 8) is None
    assert degenerate_placement(np.zeros((0, 6)), 8) is None
    assert Random(Random.Spec(num_vectors=8)).remark(grid_extents(14, 14)) is None


def test_tokens_beside_a_grid_count_in_the_placement():
    """Text behind the patches shifts the seeds off the column."""
    text = np.full((30, 6), np.nan, dtype=np.float32)
    assert degenerate_placement(np.concatenate([grid_extents(14, 14), text]), 8) is None


def test_the_default_leaves_hashes_and_names_as_they_were():
    for name, fields in (
        ("spatial", {}),
        ("samer", {"gamma": 0.1, "tau_s": 0.07, "num_iterations": 3, "axes": ["x", "y"]}),
    ):
        paper, lattice = (
            Representation(compressor={"name": name, "num_vectors": 8, **own})
            for own in ({}, {"seeds": "lattice"})
        )
        assert "seeds" not in dump(paper.compressor)
        assert fields.items() <= dump(paper.compressor).items()
        assert paper.id == f"{name}_8" and lattice.id == f"{name}_lattice_8"
        assert digest(paper) != digest(lattice)
    assert digest(Spatial.Spec(num_vectors=8)) == digest(
        {"name": "spatial", "num_vectors": 8, "ratio": None, "rounding": "floor"}
    )
