"""Plots of figures: lines over a field of the columns, or points over a measure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from examples.papers.tables.spec import MEASURE, TableSpec
from pipeline.eval.report.plot import REFERENCE, STYLES, apply_style, legend_below, to_png

#: Maximum number of panels per row of the plot and of labels per axis.
PANELS, TICKS = 3, 10

#: Numbers by row and column, None where the table has none.
Numbers = Sequence[Sequence[float | None]]


class Panel(NamedTuple):
    """Panel of a plot.

    Attributes:
        series: Positions of our numbers and of those of the paper, (2, N) each, by label.
        ticks: Labels of the positions 0, 1, ... of the horizontal axis, or empty for numbers.
    """

    title: str
    series: dict[str, list[np.ndarray]]
    ticks: list[str]


def measured(table: TableSpec, numbers: Numbers, measure: str | None) -> np.ndarray:
    """Returns the numbers of a measure in all rows and columns, (N,), NaN where there is none."""
    columns = [i for i, column in enumerate(table.selections()) if column[MEASURE] == measure]
    return np.array([row[i] for row in numbers for i in columns], np.float64)


def lines(table: TableSpec, labels: Sequence[str], both: Sequence[Numbers]) -> Iterator[Panel]:
    """Yields a panel per combination of the fields other than `x`, with a line per row."""
    names: dict[str, dict[int, str]] = {}
    for i, column in enumerate(table.selections()):
        shown = {field: table.labels.get(value, value) for field, value in column.items()}
        x = shown.pop(str(table.x))
        names.setdefault(" ".join(filter(None, shown.values())), {})[i] = x
    for title, ticks in names.items():
        series = {
            label: [
                np.array([range(len(ticks)), [numbers[row][i] for i in ticks]], np.float64)
                for numbers in both
            ]
            for row, label in enumerate(labels)
        }
        yield Panel(title, series, list(ticks.values()))


def points(table: TableSpec, labels: Sequence[str], both: Sequence[Numbers]) -> Iterator[Panel]:
    """Yields a panel per measure other than `x`, with points in a style per end of a label."""
    measures = [column[MEASURE] for column in table.selections()]
    ends, columns = [label.rpartition(", ")[2] for label in labels], measures.count(str(table.x))
    methods_N = np.repeat(ends, columns)
    x_2N = np.stack([measured(table, numbers, table.x) for numbers in both])
    found = dict.fromkeys(methods_N[~np.isnan(x_2N).all(axis=0)].tolist())
    for measure in dict.fromkeys(measures):
        if measure != table.x:
            y_2N = [measured(table, numbers, measure) for numbers in both]
            positions = [np.stack(pair) for pair in zip(x_2N, y_2N, strict=True)]
            series = {name: [xy[:, methods_N == name] for xy in positions] for name in found}
            yield Panel(table.labels.get(measure, measure), series, [])


def plot(
    table: TableSpec, labels: Sequence[str], ours: Numbers, paper: Numbers, is_miniature: bool
) -> bytes:
    """Draws our numbers with filled markers and those of the paper with open ones, as a PNG."""
    is_measure = any(column[MEASURE] == table.x for column in table.selections())
    panels = list((points if is_measure else lines)(table, labels, (ours, paper)))
    across = min(PANELS, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(1.0 + 3.6 * across, 1.2 + 3.0 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        apply_style(axis)
        for number, (label, (ours_2N, paper_2N)) in enumerate(panel.series.items()):
            style = STYLES[number % len(STYLES)] | {"markersize": 4}
            if is_measure:
                style["linestyle"] = "none"
            is_last = number == len(panel.series) - 1
            axis.plot(*ours_2N, **style, label=label)
            style |= {"markerfacecolor": "none", "alpha": 0.5}
            axis.plot(*paper_2N, **style, label="paper" if is_last else None)
        axis.set_xlabel(table.labels.get(str(table.x), str(table.x)))
        axis.set_ylabel(panel.title)
        if panel.ticks:
            step = math.ceil(len(panel.ticks) / TICKS)
            axis.set_xticks(range(0, len(panel.ticks), step), panel.ticks[::step])
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    legend_below(figure, list(axes[: len(panels)]))
    figure.suptitle(f"{table.title}{' (miniature)' if is_miniature else ''}", color=REFERENCE)
    return to_png(figure)
