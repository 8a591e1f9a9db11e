"""Plots of figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from examples.papers.tables.figures import lines, plot, points
from tests.examples.papers.tables.tables import table

COLUMNS = [{"dataset": ["both", "one"], "measure": ["R@1", "CV"]}]
LABELS = ["A, full", "B, full", "B, hpool"]
OURS = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, None, 8.0], [9.0, 10.0, 11.0, math.nan]]
PAPER = [[math.nan] * 4, [None] * 4, [0.5] * 4]


def figure(x: str):
    """Returns the spec of a figure with three rows."""
    at = {"method": "full"}
    rows = [{"label": label, "at": at, "paper": [1.0] * 4} for label in LABELS]
    return table(columns=COLUMNS, rows=rows, x=x)


def test_lines_have_a_panel_per_combination_of_the_other_fields():
    first, second = lines(figure("dataset"), LABELS, (OURS, PAPER))
    assert (first.title, second.title) == ("R@1", "CV") and first.ticks == ["average", "one"]
    assert list(second.series) == LABELS
    ours_2N, paper_2N = second.series["B, hpool"]
    np.testing.assert_array_equal(ours_2N, [[0, 1], [10, np.nan]])
    np.testing.assert_array_equal(paper_2N, [[0, 1], [0.5, 0.5]])


def test_points_have_a_style_per_end_of_a_label():
    labels, ours = [*LABELS, "C, none"], [*OURS, [None, 1.0] * 2]
    (panel,) = points(figure("R@1"), labels, (ours, [*PAPER, [None] * 4]))
    assert panel.title == "CV" and list(panel.series) == ["full", "hpool"]
    ours_2N, _ = panel.series["full"]
    np.testing.assert_array_equal(ours_2N, [[1, 3, 5, np.nan], [2, 4, 6, 8]])


@pytest.mark.parametrize("x", ["dataset", "R@1"])
def test_plot_is_a_png(x):
    assert plot(figure(x), LABELS, OURS, PAPER, True).startswith(b"\x89PNG")
