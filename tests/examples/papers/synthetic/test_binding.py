"""Tests of the reports of the local-evidence benchmark."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np
import pytest

from examples.papers.synthetic.binding import (
    GRID,
    MARKER_COLOURS,
    MIN_SIDE,
    PANELS,
    RADIUS,
    SIDE,
    Report,
    derangement,
    generate_pair,
)
from examples.papers.synthetic.shapes import COLOURS
from examples.papers.synthetic.shapes_data import VALIDATION_SERIES

SENTENCE = re.compile(r"Code (\w+) labels the (\w+ \w+) marker\.")
QUERY = re.compile(r"Find the report where code ([A-Z]\d[A-Z]) labels the (\w+ \w+) marker\.")
SEEDS = np.random.default_rng(17).integers(0, 1 << 31, (30, 2)).tolist()


@pytest.mark.parametrize(("series", "number"), [*SEEDS, (0, 0), (VALIDATION_SERIES, 0)])
def test_pair_shares_codes_and_markers_but_no_bindings(series, number):
    pair = generate_pair(series, number)
    positive, negative = (
        SENTENCE.findall(report.text) for report in (pair.positive, pair.negative)
    )
    assert len(positive) == len(set(positive)) == PANELS
    codes, markers = zip(*positive, strict=True)
    assert len(set(codes)) == len(set(markers)) == PANELS
    assert [marker for _, marker in negative] == list(markers)  # same layout
    assert sorted(code for code, _ in negative) == sorted(codes)
    assert not set(positive) & set(negative)
    # A query states the binding of one panel.
    queries = [QUERY.fullmatch(text).groups() for text in pair.positive.queries]
    assert queries == positive


def test_reports_depend_only_on_series_and_number():
    first, second = generate_pair(3, 8), generate_pair(3, 8)
    assert first.positive.text == second.positive.text
    assert first.negative.text == second.negative.text
    assert first.negative.render().tobytes() == second.negative.render().tobytes()
    # Series of more than 32 bits do not coincide with numbers of another series.
    keys = [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (VALIDATION_SERIES, 0),
        (VALIDATION_SERIES, 1),
        (VALIDATION_SERIES + 1, 0),
    ]
    assert len({generate_pair(*key).positive.text for key in keys}) == len(keys)


def test_derangements_are_uniform():
    random, count = np.random.default_rng(0), 18_000
    counts = Counter(tuple(derangement(random, 4).tolist()) for _ in range(count))
    valid = {p for p in itertools.permutations(range(4)) if all(a != b for a, b in enumerate(p))}
    assert set(counts) == valid and len(valid) == 9
    squares = sum((counts[p] - count / 9) ** 2 for p in valid) / (count / 9)
    assert squares < 26.1  # chi-square of 8 degrees of freedom, p = 0.001


@pytest.mark.parametrize("size", [0, 2, 3, 25])
def test_derangements_have_no_fixed_point(size):
    for seed in range(200):
        permutation = derangement(np.random.default_rng(seed), size)
        assert sorted(permutation) == list(range(size))
        assert (permutation != np.arange(size)).all()


@pytest.mark.parametrize("side", [MIN_SIDE, 333, SIDE])
@pytest.mark.parametrize(("series", "number"), SEEDS[:6])
def test_images_differ_only_in_codes(series, number, side):
    pair = generate_pair(series, number)
    positive, negative = (
        np.asarray(report.render(side)).astype(int) for report in (pair.positive, pair.negative)
    )
    assert positive.shape == negative.shape == (side, side, 3)
    differs = (positive != negative).any(axis=2)
    boxes = pair.positive.code_boxes(side)
    assert (boxes == pair.negative.code_boxes(side)).all()
    for panel, (x0, y0, x1, y1) in enumerate(boxes):
        row, column = divmod(panel, GRID)
        width = side // GRID
        assert column * width < x0 < x1 < (column + 1) * width
        assert row * width < y0 < y1 < (row + 1) * width
        assert differs[y0:y1, x0:x1].any()
        differs[y0:y1, x0:x1] = False
    assert not differs.any()


def test_codes_are_inside_their_boxes():
    """The widest codes fit into their boxes."""
    pair = generate_pair(0, 0)
    for code in ("W8W", "M0Q", "J4J"):
        labelled = Report((code,) * PANELS, pair.positive.markers, (0, 0))
        blank = Report((" ",) * PANELS, pair.positive.markers, (0, 0))
        for side in (MIN_SIDE, SIDE):
            a, b = (np.asarray(report.render(side)) for report in (labelled, blank))
            ink = (a != b).any(axis=2)
            for x0, y0, x1, y1 in labelled.code_boxes(side):
                assert ink[y0:y1, x0:x1].any()
                ink[y0:y1, x0:x1] = False
            assert not ink.any()


def test_markers_have_their_colours():
    report = generate_pair(0, 0).positive
    pixels = np.asarray(report.render())
    radius = round(RADIUS * (SIDE // GRID))
    for (colour, _), (x0, y0, _, y1) in zip(report.markers, report.code_boxes(), strict=True):
        region = pixels[(y0 + y1) // 2 - radius : (y0 + y1) // 2 + radius, x0 - 2 * radius - 3 : x0]
        matches = (region == COLOURS[MARKER_COLOURS[colour]]).all(axis=2)
        assert matches.sum() > radius**2 / 2
