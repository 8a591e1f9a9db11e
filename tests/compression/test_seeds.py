"""Comparison of seed placements with loops in float64."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch

from pipeline.compression.geometry import token_coordinates
from pipeline.compression.random import Random
from pipeline.compression.samer import SaMer
from pipeline.compression.seeds import degenerate_placement, lattice_positions
from pipeline.compression.spatial import Spatial
from pipeline.config import digest, dump
from pipeline.index.columns import Representation
from pipeline.tokens import TokenBatch
from tests.compression.test_samer import reference, reference_coordinates

LENGTHS = [23, 4, 0, 9, 1, 40, 6]


def grid_extents(*shape):
    """Returns the extents (N, 6) float32 of a grid of (t,) y, x tokens in raster order."""
    frames, rows, columns = (1, *shape)[-3:]
    t, y, x = (axis.reshape(-1) for axis in np.mgrid[:frames, :rows, :columns].astype(float))
    if len(shape) == 2:
        t = np.full_like(t, np.nan)
    boxes = [x / columns, y / rows, (x + 1) / columns, (y + 1) / rows, t, t + 1]
    return np.stack(boxes, axis=1).astype(np.float32)


def grid_batch(*shape, seed=0):
    """Returns a batch of one item on a grid with random features."""
    extents = torch.from_numpy(grid_extents(*shape))[None]
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(1, extents.shape[1], 8, generator=generator)
    mask = torch.ones(1, extents.shape[1], dtype=torch.bool)
    return TokenBatch(vectors, mask, normalised=False, extents=extents)


def selected_positions(batch, **options):
    """Returns the positions of the first item that `spatial` keeps."""
    outputs = Spatial(Spatial.Spec(**options)).compress(batch).assignment[0]
    return (outputs >= 0).nonzero().flatten().tolist()


def reference_lattice(coords_N3, num):
    """Splits sorted lists into cells and selects the token nearest to the centre of each cell."""

    def split(tokens, seeds, axis):
        if not seeds:
            return []
        known = {x for x in coords_N3[tokens, axis] if not np.isnan(x)}
        parts = [min(round(seeds ** (1 / 3)), max(1, len(known))), round(seeds**0.5), seeds][axis]
        inf = float("inf")
        values = [inf if np.isnan(x) else x for x in coords_N3[tokens, axis]]
        ranked = [token for _, token in sorted(zip(values, tokens, strict=True))]
        cells = []
        for part in range(parts):
            low, high = part * seeds // parts, (part + 1) * seeds // parts
            begin, end = (int(-(-Fraction(s * len(tokens), seeds) // 1)) for s in (low, high))
            group = ranked[begin:end]
            cells += [group] if axis == 2 else split(group, high - low, axis + 1)
        return cells

    seeds = []
    for cell in split(list(range(len(coords_N3))), num, 0):
        members = coords_N3[cell]
        known = ~np.isnan(members)
        centre = [members[known[:, a], a].mean() if known[:, a].any() else np.nan for a in range(3)]
        squared = np.nansum((members - centre) ** 2, axis=1)
        seeds.append(min(cell, key=lambda n: (round(squared[cell.index(n)], 6), n)))
    return sorted(seeds)


def reference_farthest(distance, num_tokens, num):
    """Farthest-point sampling in loops; `distance(i, None)` is the distance from the centre."""
    seeds = [min(range(num_tokens), key=lambda i: round(distance(i, None), 6))]
    while len(seeds) < num:
        others = [i for i in range(num_tokens) if i not in seeds]
        seeds.append(max(others, key=lambda i: round(min(distance(i, j) for j in seeds), 6)))
    return sorted(seeds)


def distances(v, p, gamma):
    """Returns the distance of eq. 2 between tokens, or from the mean of the item."""
    mean = v.sum(axis=0) if v.shape[1] else np.zeros(0)
    mean = mean / (np.linalg.norm(mean) or 1)
    known = ~np.isnan(p)
    centre = [p[known[:, a], a].mean() if known[:, a].any() else np.nan for a in range(p.shape[1])]

    def distance(i, j):
        feature, position = (mean, centre) if j is None else (v[j], p[j])
        return 1 - v[i] @ feature + gamma * np.nansum((p[i] - position) ** 2)

    return distance


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("num", [1, 5, 8, 17])
def test_lattice_equals_reference(ragged, num, gaps):
    batch = ragged(LENGTHS, boxes=True, seed=num)
    if gaps:  # tokens without a box, and an item without times
        batch.extents[:, ::3, :4] = torch.nan
        batch.extents[5, :, 4:] = torch.nan
    result = Spatial(Spatial.Spec(num_vectors=num, seeds="lattice")).compress(batch)
    found = reference_coordinates(batch, ("t", "y", "x"))
    for outputs, mask, p in zip(result.assignment, batch.mask, found, strict=True):
        positions = (outputs[mask] >= 0).nonzero().flatten().tolist()
        assert positions == reference_lattice(p, min(num, len(p)))


@pytest.mark.parametrize("axes", [("x", "y"), ("x", "y", "t"), ()])
@pytest.mark.parametrize("seeds", ["lattice", "farthest"])
def test_samer_starts_from_seeds(ragged, unit_items, seeds, axes):
    batch = ragged(LENGTHS, boxes=True, seed=3)
    spec = SaMer.Spec(num_vectors=6, seeds=seeds, axes=axes)
    result = SaMer(spec).compress(batch)
    lattice = reference_coordinates(batch, ("t", "y", "x"))
    found = reference_coordinates(batch, axes)
    for i, (v, p, grid) in enumerate(zip(unit_items(batch), found, lattice, strict=True)):
        if len(v) <= 6:
            continue
        if seeds == "lattice":
            positions = reference_lattice(grid, 6)
        else:
            positions = reference_farthest(distances(v, p, spec.gamma), len(v), 6)
        expected, nearest = reference(v, p, 6, seeds=positions)
        np.testing.assert_allclose(result.vectors[i, result.mask[i]], expected, atol=2e-6)
        assert result.assignment[i, batch.mask[i]].tolist() == nearest


@pytest.mark.parametrize("boxes", [False, True])
def test_farthest_uses_positions_or_token_order(ragged, boxes):
    batch = ragged(LENGTHS, boxes=boxes, seed=4)
    result = Spatial(Spatial.Spec(num_vectors=6, seeds="farthest")).compress(batch)
    found = reference_coordinates(batch, ("t", "y", "x"))
    for outputs, mask, p in zip(result.assignment, batch.mask, found, strict=True):
        positions = (outputs[mask] >= 0).nonzero().flatten().tolist()
        if not boxes:
            p = np.arange(len(p))[:, None] / max(1, len(p))
        if len(p):
            distance = distances(np.zeros((len(p), 0)), p, gamma=1.0)
            assert positions == reference_farthest(distance, len(p), min(6, len(p)))


def test_lattice_is_regular_on_grid():
    assert selected_positions(grid_batch(4, 4), num_vectors=4, seeds="lattice") == [0, 2, 8, 10]
    rows, columns = np.divmod(
        selected_positions(grid_batch(14, 14), num_vectors=8, seeds="lattice"), 14
    )
    assert len(set(columns)) >= 5 and rows.max() - rows.min() >= 9
    # In space and time: 2 of 4 frames with a lattice of 2 x 2 each.
    found = selected_positions(grid_batch(4, 4, 4), num_vectors=8, seeds="lattice")
    assert found == [0, 2, 8, 10, 32, 34, 40, 42]


def test_lattice_without_positions_equals_uniform(ragged):
    batch = ragged(LENGTHS)
    uniform = Spatial(Spatial.Spec(num_vectors=5)).compress(batch)
    for extents in (None, torch.full((*batch.mask.shape, 6), torch.nan)):
        text = dataclasses.replace(batch, extents=extents)
        lattice = Spatial(Spatial.Spec(num_vectors=5, seeds="lattice")).compress(text)
        assert torch.equal(lattice.assignment, uniform.assignment)


def test_equal_tokens_yield_distinct_seeds():
    batch = dataclasses.replace(grid_batch(5, 5), vectors=torch.ones(1, 25, 8))
    batch.extents[:] = batch.extents[:, :1].clone()
    for seeds in ("lattice", "farthest"):
        assert len(selected_positions(batch, num_vectors=12, seeds=seeds)) == 12
    mask, coords_BN3 = batch.mask, token_coordinates(batch, ("t", "y", "x"))
    positions, _ = lattice_positions(coords_BN3, mask, torch.tensor([25]))
    assert positions[0].tolist() == list(range(25))


def test_farthest_seeds_cover_outlier():
    """Uniform seeds miss the only token in a hundred that differs."""
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
    ("shape", "budget", "region"),
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
def test_describes_degenerate_placement(shape, budget, region):
    extents = grid_extents(*shape)
    expected = region and f"all {budget} seeds are in {region}"
    assert degenerate_placement(extents, budget) == expected
    remark = Spatial(Spatial.Spec(num_vectors=budget)).remark(extents)
    assert (remark is None) == (region is None)
    for seeds in ("lattice", "farthest"):
        assert SaMer(SaMer.Spec(num_vectors=budget, seeds=seeds)).remark(extents) is None


def test_ignores_tokens_without_grid():
    words = np.random.default_rng(0).random((50, 6)).astype(np.float32)
    assert degenerate_placement(words, 8) is None
    assert degenerate_placement(np.full((50, 6), np.nan), 8) is None
    assert degenerate_placement(np.zeros((0, 6)), 8) is None
    assert Random(Random.Spec(num_vectors=8)).remark(grid_extents(14, 14)) is None


def test_placement_includes_tokens_outside_grid():
    """Text after the patches shifts the seeds to other columns."""
    text = np.full((30, 6), np.nan, dtype=np.float32)
    assert degenerate_placement(np.concatenate([grid_extents(14, 14), text]), 8) is None


def test_default_seeds_do_not_change_names():
    for name, fields in (
        ("spatial", {}),
        ("samer", {"gamma": 0.1, "tau_s": 0.07, "num_iterations": 3, "axes": ["x", "y"]}),
    ):
        paper, lattice = (
            Representation(compressor={"name": name, "num_vectors": 8, **options})
            for options in ({}, {"seeds": "lattice"})
        )
        assert {**fields, "seeds": "paper"}.items() <= dump(paper.compressor).items()
        assert paper.id == f"{name}_8" and lattice.id == f"{name}_lattice_8"
        assert digest(paper) != digest(lattice)
