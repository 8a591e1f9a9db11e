"""Reports of the benchmark of local bindings."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np
import pytest

from pipeline.synthetic.binding import (
    GRID,
    MARKER_COLOURS,
    PANELS,
    RADIUS,
    SIDE,
    SMALLEST_SIDE,
    Report,
    derangement,
    pair_of,
)
from pipeline.synthetic.shapes import COLOURS
from pipeline.synthetic.shapes_data import VALIDATION_SERIES

SENTENCE = re.compile(r"Code (\w+) labels the (\w+ \w+) marker\.")
QUERY = re.compile(r"Find the report where code ([A-Z]\d[A-Z]) labels the (\w+ \w+) marker\.")
SEEDS = np.random.default_rng(17).integers(0, 1 << 31, (30, 2)).tolist()


@pytest.mark.parametrize(("series", "number"), [*SEEDS, (0, 0), (VALIDATION_SERIES, 0)])
def test_a_pair_has_one_inventory_and_no_binding_in_common(series, number):
    pair = pair_of(series, number)
    here, there = (SENTENCE.findall(report.text) for report in (pair.positive, pair.negative))
    assert len(here) == len(set(here)) == PANELS
    codes, markers = zip(*here, strict=True)
    assert len(set(codes)) == len(set(markers)) == PANELS
    assert [marker for _, marker in there] == list(markers)  # the same place in the layout
    assert sorted(code for code, _ in there) == sorted(codes)
    assert not set(here) & set(there)
    # A query names the binding of one panel; the hard negative has its parts, apart.
    asked = [QUERY.fullmatch(text).groups() for text in pair.positive.queries]
    assert asked == here


def test_reports_depend_on_series_and_number_alone():
    one, again = pair_of(3, 8), pair_of(3, 8)
    assert one.positive.text == again.positive.text
    assert one.negative.text == again.negative.text
    assert one.negative.picture().tobytes() == again.negative.picture().tobytes()
    # A series beyond 32 bits is not the next number of a short one.
    places = [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (VALIDATION_SERIES, 0),
        (VALIDATION_SERIES, 1),
        (VALIDATION_SERIES + 1, 0),
    ]
    assert len({pair_of(*place).positive.text for place in places}) == len(places)


def test_derangements_are_uniform():
    random, count = np.random.default_rng(0), 18_000
    drawn = Counter(tuple(derangement(random, 4).tolist()) for _ in range(count))
    legal = {p for p in itertools.permutations(range(4)) if all(a != b for a, b in enumerate(p))}
    assert set(drawn) == legal and len(legal) == 9
    squares = sum((drawn[each] - count / 9) ** 2 for each in legal) / (count / 9)
    assert squares < 26.1  # chi-square of 8 degrees of freedom, p = 0.001


@pytest.mark.parametrize("size", [0, 2, 3, 25])
def test_derangements_have_no_fixed_point(size):
    for seed in range(200):
        drawn = derangement(np.random.default_rng(seed), size)
        assert sorted(drawn) == list(range(size)) and (drawn != np.arange(size)).all()


@pytest.mark.parametrize("side", [SMALLEST_SIDE, 333, SIDE])
@pytest.mark.parametrize(("series", "number"), SEEDS[:6])
def test_pictures_differ_in_every_code_and_nowhere_else(series, number, side):
    pair = pair_of(series, number)
    here, there = (
        np.asarray(report.picture(side)).astype(int) for report in (pair.positive, pair.negative)
    )
    assert here.shape == there.shape == (side, side, 3)
    differs = (here != there).any(axis=2)
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


def test_every_code_is_drawn_whole():
    """The widest codes have their ink inside their boxes."""
    pair = pair_of(0, 0)
    for code in ("W8W", "M0Q", "J4J"):
        written = Report((code,) * PANELS, pair.positive.markers, (0, 0))
        blank = Report((" ",) * PANELS, pair.positive.markers, (0, 0))
        for side in (SMALLEST_SIDE, SIDE):
            a, b = (np.asarray(report.picture(side)) for report in (written, blank))
            ink = (a != b).any(axis=2)
            for x0, y0, x1, y1 in written.code_boxes(side):
                assert ink[y0:y1, x0:x1].any()
                ink[y0:y1, x0:x1] = False
            assert not ink.any()


def test_markers_are_seen_in_their_colours():
    report = pair_of(0, 0).positive
    pixels = np.asarray(report.picture())
    radius = round(RADIUS * (SIDE // GRID))
    for (colour, _), (x0, y0, _, y1) in zip(report.markers, report.code_boxes(), strict=True):
        around = pixels[(y0 + y1) // 2 - radius : (y0 + y1) // 2 + radius, x0 - 2 * radius - 3 : x0]
        seen = (around == COLOURS[MARKER_COLOURS[colour]]).all(axis=2)
        assert seen.sum() > radius**2 / 2
