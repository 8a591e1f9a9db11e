"""Table and plot of reproduced numbers beside those of the paper."""

from __future__ import annotations

import functools
import json
import math
import posixpath
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from examples.papers.tables.plan import Plan
from examples.papers.tables.spec import MEASURE, TableSpec
from examples.papers.tables.values import cell_value, read_evaluation
from pipeline.eval.evaluation import versions
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


def table_rows(table: TableSpec, plan: Plan) -> tuple[list[str], list[TableRow]]:
    """Returns the titles of the columns and the rows of a table."""
    read = functools.cache(read_evaluation)  # many cells are from the same evaluation
    rows = [
        TableRow(row.label, [cell_value(cell, table.percent, read) for cell in cells], row.paper)
        for row, cells in zip(table.rows, plan.cells, strict=True)
    ]
    return table.column_titles(), rows


def correlations(table: TableSpec, rows: Sequence[TableRow]) -> tuple[list[str], list[TableRow]]:
    """Returns the titles and rows of the correlations of a table, which are empty without any."""
    if table.correlation is None:
        return [], []
    measures = [column[MEASURE] for column in table.selections()]

    def column(name: str) -> np.ndarray:
        values = [row.values[measures.index(name)] for row in rows]
        return np.array([np.nan if value is None else value for value in values], np.float64)

    with np.errstate(divide="ignore"):
        inverses = [1 / column(name) for name in table.correlation.inverse]
    found = [
        TableRow(name, [pearson(column(name), inverse_N) for inverse_N in inverses], [*paper])
        for name, paper in table.correlation.paper.items()
    ]
    return [f"r with 1 / {name}" for name in table.correlation.inverse], found


def pearson(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Returns the Pearson correlation of two samples, or NaN if one of them is constant.

    >>> round(pearson(np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 8.0])), 6)
    1.0
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.corrcoef(first_N, second_N)[0, 1])


def text_table(titles: Sequence[str], rows: Sequence[TableRow]) -> str:
    """Returns the table as text: our number, that of the paper, and the difference.

    >>> print(text_table(["R@1"], [TableRow("AGC", [56.0], [56.9]), TableRow("full", [None], [5])]))
          R@1 ours  paper  difference
    AGC       56.0   56.9  -0.9
    full         -    5.0  -
    """
    blocks = []
    places = [max(_places(row.paper[i]) for row in rows) for i in range(len(titles))]
    for first in range(0, len(titles), BLOCK):
        header = [""]
        for title in titles[first : first + BLOCK]:
            header += [f"{title} ours", "paper", "difference"]
        lines = Table([header])
        for row in rows:
            cells = [row.label]
            for i in range(first, min(first + BLOCK, len(titles))):
                ours, paper = row.values[i], row.paper[i]
                cells += [
                    _number(ours, places[i]),
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


def write(
    table: TableSpec,
    titles: Sequence[str],
    rows: Sequence[TableRow],
    folder: str,
    is_miniature: bool,
) -> tuple[str, list[str]]:
    """Writes the table as text, CSV and JSON, and the plot as PNG.

    Returns:
        The text, and the paths of the files.
    """
    lines = [table.title, table.source, *([MINIATURE_NOTE] if is_miniature else []), ""]
    lines += [text_table(titles, rows), ""]
    correlated_titles, correlated = correlations(table, rows)
    if correlated:
        lines += [text_table(correlated_titles, correlated), ""]
    lines += [*(f"Note: {note}" for note in table.notes)]
    text = "\n".join(lines).rstrip() + "\n"
    cells = Table([["row", "column", "ours", "paper", "difference"]])
    for names, found in ((titles, rows), (correlated_titles, correlated)):
        for row in found:
            for title, ours, paper in zip(names, *map(_or_none, row[1:]), strict=True):
                cells.append([row.label, title, ours, paper, _difference(ours, paper)])
    data = {
        "title": table.title,
        "source": table.source,
        "miniature": is_miniature,
        "notes": table.notes,
        "columns": list(titles),
        "rows": _json_rows(rows),
        "correlations": _json_rows(correlated),
        "versions": versions(),
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
    """Draws one panel per column with our numbers and those of the paper, as a PNG."""
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
