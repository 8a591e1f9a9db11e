"""Table and plot of reproduced numbers beside those of the paper."""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from pipeline.atomic import write_atomic
from pipeline.eval.evaluation import versions
from pipeline.report.plot import COLORS, REFERENCE, apply_style, legend_below, to_png
from pipeline.report.text import aligned, as_csv
from pipeline.reproduce.plan import Plan
from pipeline.reproduce.spec import TableSpec
from pipeline.reproduce.values import cell_value

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
        label: Name of the row.
        values: Our numbers, one per column; None where the table has none.
        paper: Numbers of the paper.
    """

    label: str
    values: list[float | None]
    paper: list[float | None]


def table_rows(table: TableSpec, plan: Plan) -> tuple[list[str], list[TableRow]]:
    """Returns the titles of the columns and the rows of a table.

    Raises:
        SpecError: An evaluation does not have a row or a metric.
    """
    rows = [
        TableRow(row.label, [cell_value(cell, table.percent) for cell in cells], row.paper)
        for row, cells in zip(table.rows, plan.cells, strict=True)
    ]
    return table.column_titles(), rows


def text_table(titles: Sequence[str], rows: Sequence[TableRow]) -> str:
    """Returns the table as text: our number, that of the paper, and the difference.

    >>> print(text_table(["R@1"], [TableRow("AGC", [56.0], [56.9]), TableRow("full", [None], [5])]))
          R@1 ours  paper  difference
    AGC       56.0   56.9        -0.9
    full         -      5           -
    """
    blocks = []
    for first in range(0, len(titles), BLOCK):
        header = [""]
        for title in titles[first : first + BLOCK]:
            header += [f"{title} ours", "paper", "difference"]
        lines = [header]
        for row in rows:
            cells = [row.label]
            for ours, paper in list(zip(row.values, row.paper, strict=True))[first : first + BLOCK]:
                places = _places(paper)
                cells += [
                    _number(ours, places),
                    "-" if paper is None else f"{paper:g}",
                    _number(_difference(ours, paper), places, "+"),
                ]
            lines.append(cells)
        blocks.append(aligned(lines))
    return "\n\n".join(blocks)


def _places(paper: float | None) -> int:
    """Returns the number of decimals of a number of the paper, at least one."""
    return max(1, len(f"{paper:g}".partition(".")[2])) if paper is not None else 1


def _number(value: float | None, places: int, sign: str = "") -> str:
    if value is None or math.isnan(value):
        return "-"
    return format(value, f"{sign}.{places}f")


def _difference(ours: float | None, paper: float | None) -> float | None:
    return None if ours is None or paper is None else ours - paper


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
    lines += [text_table(titles, rows), "", *(f"Note: {note}" for note in table.notes)]
    text = "\n".join(lines).rstrip() + "\n"
    cells: list[list[Any]] = [["row", "column", "ours", "paper", "difference"]]
    for row in rows:
        for title, ours, paper in zip(titles, row.values, row.paper, strict=True):
            cells.append([row.label, title, ours, paper, _difference(ours, paper)])
    data = {
        "title": table.title,
        "source": table.source,
        "miniature": is_miniature,
        "notes": table.notes,
        "columns": list(titles),
        "rows": [row._asdict() for row in rows],
        "versions": versions(),
    }
    files: dict[str, str | bytes] = {
        "table.txt": text,
        "table.csv": as_csv(cells),
        "table.json": json.dumps(data, ensure_ascii=False, indent=1),
        "table.png": plot(table, titles, rows, is_miniature),
    }
    paths = [posixpath.join(folder, name) for name in files]
    for path, content in zip(paths, files.values(), strict=True):
        write_atomic(path, content)
    return text, paths


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
    legend_below(figure, panels[: len(titles)])
    figure.suptitle(f"{table.title}{' (miniature)' if is_miniature else ''}", color=REFERENCE)
    return to_png(figure)
