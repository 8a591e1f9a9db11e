"""Table and plot of reproduced numbers beside those of the paper."""

from __future__ import annotations

import functools
import json
import math
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from examples.papers.tables import figures, provenance
from examples.papers.tables.figures import measured
from examples.papers.tables.plan import Cell, Plan
from examples.papers.tables.schedule import Scheduled
from examples.papers.tables.spec import MEASURE, MEASURING, TableSpec
from examples.papers.tables.values import (
    EXPONENTIAL,
    cell_interval,
    cell_value,
    other_gain_value,
    read_evaluation,
)
from pipeline.eval.report.plot import COLORS, REFERENCE, apply_style, legend_below, to_png
from pipeline.runtime.atomic import write_atomic
from pipeline.runtime.text import Table

#: Sentence above the table of a miniature.
MINIATURE_NOTE = (
    "MINIATURE: shipped or generated data and tiny or untrained models. The numbers only show that "
    "all steps run; they say nothing about the paper."
)
#: Columns per block of the table, and panels per row of the plot.
BLOCK, PANELS = 4, 4


class TableRow(NamedTuple):
    """A row of the table.

    Attributes:
        values: Our numbers, one per column; None where the table has none.
    """

    label: str
    values: list[float | None]
    paper: list[float | None]


class Number(NamedTuple):
    """Our number in a cell.

    Attributes:
        interval: 95 % confidence interval over the queries, or None for other numbers than
            means over queries.
        other_gain: nDCG with the other gain of graded judgments, or None.
    """

    value: float | None = None
    interval: tuple[float, float] | None = None
    other_gain: float | None = None


class Report:
    """Files of a table, which are written again when a row is complete.

    Args:
        folder: Folder of the files.
        data_sets: Names of the data sets of the table.
        data: Data folder.
    """

    def __init__(
        self,
        table: TableSpec,
        plan: Plan,
        folder: str,
        is_miniature: bool,
        data_sets: Sequence[str],
        data: str,
    ):
        self._table, self._plan, self._folder = table, plan, folder
        self._is_miniature, self._data_sets, self._data = is_miniature, data_sets, data
        self._known: dict[tuple[int, int], Number] = {}
        self._num_complete = 0
        self._read = functools.cache(read_evaluation)  # many cells are from the same evaluation

    def update(self, steps: Sequence[Scheduled]) -> None:
        """Writes the files if another row is complete."""
        done = [s.step for s in steps if s.state == "done"]
        finished = {step.output for step in done if step.job in MEASURING}
        is_complete = [
            finished.issuperset(origin.output for cell in cells for origin in cell)
            for cells in self._plan.cells
        ]
        if sum(is_complete) > self._num_complete:
            self._num_complete = sum(is_complete)
            self.write(steps)

    def write(self, steps: Sequence[Scheduled]) -> tuple[str, list[str]]:
        """Writes the files with the numbers of the finished evaluations. See `write`."""
        finished = {s.step.output for s in steps if s.state == "done"}
        for i, cells in enumerate(self._plan.cells):
            for j, cell in enumerate(cells):
                if cell and finished.issuperset(origin.output for origin in cell):
                    self._known[i, j] = self._known.get((i, j)) or self._number(cell)
        numbers = [
            [self._known.get((i, j), Number()) for j in range(len(cells))]
            for i, cells in enumerate(self._plan.cells)
        ]
        rows = [
            TableRow(row.label, [number.value for number in of_row], row.paper)
            for row, of_row in zip(self._table.rows, numbers, strict=True)
        ]
        left = sum(s.state in ("left", "running") for s in steps)
        problems = [f"Unfinished: {left} of {len(steps)} steps are left."] if left else []
        problems += [f"Failed: {s.title}: {s.error}" for s in steps if s.state == "failed"]
        problems += [f"Skipped: {s.title}: {s.error}" for s in steps if s.state == "skipped"]
        origin = provenance.provenance(steps, self._data_sets, self._data)
        return write(self._table, rows, numbers, self._folder, self._is_miniature, origin, problems)

    def _number(self, cell: Sequence[Cell]) -> Number:
        arguments = (cell, self._table.percent, self._read)
        return Number(
            cell_value(*arguments), cell_interval(*arguments), other_gain_value(*arguments)
        )


def correlations(table: TableSpec, rows: Sequence[TableRow]) -> tuple[list[str], list[TableRow]]:
    """Returns the titles and rows of the correlations of a table, which are empty without any."""
    if table.correlation is None:
        return [], []
    values = [row.values for row in rows]
    others = {name: measured(table, values, name) for name in table.correlation.measures}
    if table.correlation.inverse:
        with np.errstate(divide="ignore"):
            others = {f"1 / {name}": 1 / values_N for name, values_N in others.items()}
    found = [
        TableRow(
            name,
            [pearson(measured(table, values, name), values_N) for values_N in others.values()],
            [*paper],
        )
        for name, paper in table.correlation.paper.items()
    ]
    return [f"r with {name}" for name in others], found


def pearson(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Returns the Pearson correlation of two samples, or NaN if one of them is constant.

    Pairs with a NaN are left out.

    >>> round(pearson(np.array([1.0, 2.0, 4.0, 9.0]), np.array([2.0, 4.0, 8.0, np.nan])), 6)
    1.0
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        pairs_2N = np.stack([first_N, second_N])
        return float(np.corrcoef(pairs_2N[:, ~np.isnan(pairs_2N).any(axis=0)])[0, 1])


def text_table(
    titles: Sequence[str],
    rows: Sequence[TableRow],
    numbers: Sequence[Sequence[Number]] | None = None,
) -> str:
    """Returns the table as text: our number, that of the paper, and the difference.

    Our number is followed by its 95 % confidence interval if any number of the column has one.

    >>> print(text_table(["R@1"], [TableRow("AGC", [56.0], [56.9]), TableRow("full", [None], [5])]))
          R@1 ours  paper  difference
    AGC       56.0   56.9  -0.9
    full         -    5.0  -
    """
    blocks = []
    places = [max(_places(row.paper[i]) for row in rows) for i in range(len(titles))]
    numbers = numbers or [[Number()] * len(titles)] * len(rows)
    has_intervals = [any(of_row[i].interval for of_row in numbers) for i in range(len(titles))]
    for first in range(0, len(titles), BLOCK):
        columns = range(first, min(first + BLOCK, len(titles)))
        header = [""]
        for i in columns:
            header += [f"{titles[i]} ours", *["95 %"] * has_intervals[i], "paper", "difference"]
        lines = Table([header])
        for row, of_row in zip(rows, numbers, strict=True):
            cells = [row.label]
            for i in columns:
                ours, paper, interval = row.values[i], row.paper[i], of_row[i].interval
                bounds = " to ".join(_number(bound, places[i]) for bound in interval or [])
                cells += [
                    _number(ours, places[i]),
                    *[bounds or "-"] * has_intervals[i],
                    _number(paper, places[i]),
                    _number(_difference(ours, paper), places[i], "+"),
                ]
            lines.append(cells)
        blocks.append(lines.text())
    return "\n\n".join(blocks)


def _places(paper: float | None) -> int:
    """Returns the number of decimals of a number of the paper, at least one."""
    has_none = paper is None or math.isnan(paper)
    return 1 if has_none else max(1, len(f"{paper:g}".partition(".")[2]))


def _number(value: float | None, places: int, sign: str = "") -> str:
    if value is None or math.isnan(value):
        return "-"
    return format(value, f"{sign}.{places}f")


def _difference(ours: float | None, paper: float | None) -> float | None:
    if ours is None or paper is None or math.isnan(ours) or math.isnan(paper):
        return None
    return ours - paper


def _or_none(values: Sequence[float | None]) -> list[float | None]:
    """Replaces NaN, which JSON does not have, by None."""
    return [None if value is None or math.isnan(value) else value for value in values]


def other_gains(
    table: TableSpec, rows: Sequence[TableRow], numbers: Sequence[Sequence[Number]]
) -> tuple[list[str], list[TableRow]]:
    """Returns the columns with nDCG whose other gain has other numbers: graded judgments."""
    columns = [
        i
        for i in range(len(rows[0].values))
        if any(of_row[i].other_gain not in (None, of_row[i].value) for of_row in numbers)
    ]
    titles, measures = table.column_titles(), [cell[MEASURE] for cell in table.selections()]
    gains = ["linear" if EXPONENTIAL in measure else "exponential" for measure in measures]
    return [f"{titles[i]}, {gains[i]} gain," for i in columns], [
        TableRow(
            row.label, [of_row[i].other_gain for i in columns], [row.paper[i] for i in columns]
        )
        for row, of_row in zip(rows, numbers, strict=True)
    ]


def write(
    table: TableSpec,
    rows: Sequence[TableRow],
    numbers: Sequence[Sequence[Number]],
    folder: str,
    is_miniature: bool,
    origin: Mapping[str, Any],
    problems: Sequence[str] = (),
) -> tuple[str, list[str]]:
    """Writes the table as text, CSV and JSON, and the plot as PNG.

    Args:
        numbers: Our numbers by row and column.
        origin: Provenance of the numbers.
        problems: Failed steps and incomplete rows.

    Returns:
        The text, and the paths of the files.
    """
    titles = table.column_titles()
    lines = [table.title, table.source, *([MINIATURE_NOTE] if is_miniature else []), ""]
    lines += [text_table(titles, rows, numbers), ""]
    correlated_titles, correlated = correlations(table, rows)
    other_titles, others = other_gains(table, rows, numbers)
    for more_titles, more in ((correlated_titles, correlated), (other_titles, others)):
        if more_titles:
            lines += [text_table(more_titles, more), ""]
    notes = [*(f"Note: {note}" for note in table.notes), *problems]
    text = "\n".join([*lines, *notes, *provenance.lines(origin)]) + "\n"
    cells = Table([["row", "column", "ours", "paper", "difference", "low", "high", "other gain"]])
    for row, of_row in zip(rows, numbers, strict=True):
        for title, number, ours, paper in zip(titles, of_row, *map(_or_none, row[1:]), strict=True):
            further = [*(number.interval or (None, None)), number.other_gain]
            cells.append([row.label, title, ours, paper, _difference(ours, paper), *further])
    for row in correlated:
        for title, ours, paper in zip(correlated_titles, *map(_or_none, row[1:]), strict=True):
            difference = _difference(ours, paper)
            cells.append([row.label, title, ours, paper, difference, None, None, None])
    json_rows = _json_rows(rows)
    for fields, of_row in zip(json_rows, numbers, strict=True):
        fields["intervals"] = [number.interval for number in of_row]
        fields["other_gains"] = _or_none([number.other_gain for number in of_row])
    data = {
        "title": table.title,
        "source": table.source,
        "miniature": is_miniature,
        "notes": table.notes,
        "problems": list(problems),
        "columns": list(titles),
        "rows": json_rows,
        "correlations": _json_rows(correlated),
        "provenance": origin,
    }
    files: dict[str, str | bytes] = {
        "table.txt": text,
        "table.csv": cells.csv(),
        "table.json": json.dumps(data, ensure_ascii=False, indent=1),
        "table.png": plot(table, titles, rows, is_miniature),
    }
    paths = [posixpath.join(folder, name) for name in files]
    for path, content in zip(paths, files.values(), strict=True):
        write_atomic(path, content)
    return text, paths


def _json_rows(rows: Sequence[TableRow]) -> list[dict[str, Any]]:
    return [
        {"label": row.label, "values": _or_none(row.values), "paper": _or_none(row.paper)}
        for row in rows
    ]


def plot(
    table: TableSpec, titles: Sequence[str], rows: Sequence[TableRow], is_miniature: bool
) -> bytes:
    """Draws one panel per column with our numbers and those of the paper, as a PNG.

    A figure with a horizontal axis has lines or points instead.
    """
    if table.x is not None:
        labels, values, papers = zip(*rows, strict=True)
        return figures.plot(table, labels, values, papers, is_miniature)
    across = min(PANELS, len(titles))
    down = math.ceil(len(titles) / across)
    height = 0.9 + 0.26 * len(rows)
    figure = Figure(figsize=(2.0 + 2.8 * across, 0.9 + height * down), layout="constrained")
    panels = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
    heights = np.arange(len(rows))[::-1]
    for number, (panel, title) in enumerate(zip(panels, titles, strict=False)):
        apply_style(panel)
        ours, paper = (
            np.array([np.nan if values[number] is None else values[number] for values in found])
            for found in ([row.values for row in rows], [row.paper for row in rows])
        )
        panel.hlines(heights, ours, paper, color=REFERENCE, alpha=0.4)
        panel.plot(paper, heights, "o", mfc="none", color=COLORS[0], label="paper")
        panel.plot(ours, heights, "o", color=COLORS[1], label="ours")
        panel.set_xlabel(title)
        panel.set_yticks(heights, [row.label for row in rows])
    for panel in panels[len(titles) :]:
        panel.set_visible(False)
    legend_below(figure, list(panels[: len(titles)]))
    figure.suptitle(f"{table.title}{' (miniature)' if is_miniature else ''}", color=REFERENCE)
    return to_png(figure)
