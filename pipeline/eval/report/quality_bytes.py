"""Plot of quality against bytes per item, with one panel per score and size."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from pipeline.eval.report.plot import (
    REFERENCE,
    Style,
    apply_style,
    legend_below,
    styles,
    to_file,
    to_svg,
)
from pipeline.eval.results import (
    BM25,
    FULL,
    SINGLE_VECTOR,
    Budget,
    Evaluation,
    Result,
    pareto_front,
)
from pipeline.eval.views import codec_names, line_name, scanned_rows


class Panel(NamedTuple):
    """Plot of quality against size.

    Attributes:
        size: Attribute of rows with the bytes per item, `vector_bytes` or `all_bytes`.
    """

    score: str
    size: str

    @property
    def title(self) -> str:
        """Title of the plot.

        >>> Panel("maxsim", "all_bytes").title
        'MaxSim score, all stored bytes'
        """
        score = "MaxSim" if self.score == "maxsim" else self.score
        return f"{score} score, {'vectors' if self.size == SIZES[0] else 'all stored bytes'}"


#: The quality axis is extended to include BM25 if this stretches it by at most this factor.
MAX_STRETCH = 1.25
#: Sizes that are plotted: bytes of the vectors, and all stored bytes.
SIZES = ("vector_bytes", "all_bytes")


def quality_bytes_file(evaluation: Evaluation, format: str) -> bytes:
    """Returns all panels as a file, with one column per score and one row per size."""
    return to_file(_figure(evaluation, panels(evaluation)), format)


def quality_bytes_svg(evaluation: Evaluation, panel: Panel) -> str:
    """Returns one panel as an `<svg>` element."""
    return to_svg(_figure(evaluation, [panel]), "-".join(panel))


def panels(evaluation: Evaluation) -> list[Panel]:
    """Returns the panels, one for each combination of a multi-vector score and a size.

    If no multi-vector score was evaluated, the single-vector score is used. If neither assignments
    nor positions are stored, both sizes are equal and only one is plotted.
    """
    measured = {result.score for result in evaluation.results}
    scores: list[str] = [score for score in ("maxsim", "hybrid") if score in measured] or [
        SINGLE_VECTOR
    ]
    differ = any(result.vector_bytes != result.all_bytes for result in evaluation.results)
    return [Panel(score, size) for size in SIZES[: 1 + differ] for score in scores]


def _figure(evaluation: Evaluation, shown: Sequence[Panel]) -> Figure:
    """Draws panels that show quality against bytes per item.

    Uncompressed rows, single vectors and BM25 are drawn as horizontal lines, because they are
    bounds for the compressed rows. Rows of layer scans are shown in a separate figure. The Pareto
    front is computed over all rows, including those of other panels.
    """
    rows = len({panel.size for panel in shown})
    columns = len(shown) // rows
    figure = Figure(figsize=(0.8 + 4.4 * columns, 0.8 + 4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex="row", sharey=True, squeeze=False).ravel()
    low, high = _quality_range(evaluation)
    for axis, panel in zip(axes, shown, strict=True):
        axis.set_ylim(low, high)  # the same if panels are drawn separately
        _draw(axis, evaluation, panel)
    for axis in axes[::columns]:
        axis.set_ylabel(evaluation.headline)
    legend_below(figure, list(axes))
    return figure


def _quality_range(evaluation: Evaluation) -> tuple[float, float]:
    """Returns the limits of the quality axis. They include BM25 if it is close to the vector rows.

    If BM25 is far away, including it would compress all other rows into a corner, see `_draw_bm25`.
    """
    vectors = [result for result in evaluation.results if result.method != BM25]
    low, high = _ends(evaluation, vectors or evaluation.results)
    all_low, all_high = _ends(evaluation, evaluation.results)
    if all_high - all_low <= MAX_STRETCH * (high - low):
        low, high = all_low, all_high
    margin = max(0.08 * (high - low), 0.002)
    return low - margin, high + 2 * margin  # leaves space for the budgets


def _ends(evaluation: Evaluation, results: Sequence[Result]) -> tuple[float, float]:
    ends = [
        evaluation.quality(result) + sign * (result.spread(evaluation.headline) or 0.0)
        for result in results
        for sign in (-1, 1)
    ]
    return min(ends), max(ends)


def _draw(axis: Axes, evaluation: Evaluation, panel: Panel) -> None:
    measure, scanned = evaluation.headline, scanned_rows(evaluation)
    size_of = operator.attrgetter(panel.size)
    num_codecs = len(codec_names(evaluation))
    results = [r for r in evaluation.results if r.score in (panel.score, SINGLE_VECTOR, BM25)]
    sizes: dict[Budget, float] = {}  # of the largest method
    for method, style in styles(evaluation).items():
        rows = sorted(
            (
                r
                for r in results
                if r.is_compressed and line_name(evaluation, r) == method and r.name not in scanned
            ),
            key=size_of,
        )
        # Fixed numbers and ratios of vectors are separate lines.
        for is_share in (False, True):
            line = [row for row in rows if (row.budget.ratio is not None) == is_share]
            if line:
                _draw_line(axis, line, size_of, measure, method, style)
        for row in rows:
            sizes[row.budget] = max(size_of(row), sizes.get(row.budget, 0.0))
            if num_codecs > 1:  # a budget has one size per codec, so each point is labelled
                _label_point(axis, row, size_of(row), row.means[measure], style["color"])
    if num_codecs <= 1:
        _label_budgets(axis, sizes)
    front = pareto_front(evaluation.results, measure, panel.size)
    axis.plot(
        [size_of(result) for result in front],
        [result.means[measure] for result in front],
        color=REFERENCE,
        alpha=0.35,
        linewidth=5,
        solid_capstyle="round",
        zorder=1,
        label="Pareto front of all rows",
    )
    for result in (r for r in results if r.method == BM25):
        _draw_bm25(axis, result.means[measure])
    for name, marker, dashes in ((FULL, "*", (6, 3)), (SINGLE_VECTOR, "o", (1, 2))):
        for result in (r for r in results if r.method == name):
            quality = result.means[measure]
            axis.axhline(quality, color=REFERENCE, linewidth=1, dashes=dashes, zorder=0)
            axis.plot(
                [size_of(result)],
                [quality],
                marker=marker,
                markersize=12 if marker == "*" else 7,
                color=REFERENCE,
                linestyle="none",
                label=f"{name} ({result.representation})"
                if name == SINGLE_VECTOR
                else "uncompressed",
            )
    axis.set_title(panel.title, fontsize=11, color=REFERENCE)
    axis.set_xlabel("vector bytes per item" if panel.size == SIZES[0] else "stored bytes per item")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _bytes(size)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    apply_style(axis)


def _draw_bm25(axis: Axes, quality: float) -> None:
    """Draws BM25 as a horizontal line. If it is outside the axis, draws an arrow with its value."""
    low, high = axis.get_ylim()
    if low <= quality <= high:
        axis.axhline(
            quality, color=REFERENCE, linewidth=1, linestyle="dashdot", zorder=0, label="BM25"
        )
        return
    is_below = quality < low
    axis.annotate(
        f"BM25: {quality:.3f}",
        xy=(0.12, 0.0 if is_below else 1.0),
        xytext=(0.12, 0.09 if is_below else 0.88),
        xycoords="axes fraction",
        ha="center",
        fontsize=8,
        color=REFERENCE,
        arrowprops={"arrowstyle": "->", "color": REFERENCE},
    )


def _draw_line(
    panel: Axes,
    line: Sequence[Result],
    size_of: Callable[[Result], float],
    measure: str,
    method: str,
    style: Style,
) -> None:
    spreads = [row.spread(measure) or 0.0 for row in line]
    panel.errorbar(
        [size_of(row) for row in line],
        [row.means[measure] for row in line],
        spreads if any(spreads) else None,
        **style,
        markersize=8,
        markeredgecolor="white",
        label=method,
        linewidth=1.8,
        capsize=3,
    )


def _label_point(panel: Axes, row: Result, size: float, quality: float, color: str) -> None:
    panel.annotate(
        str(row.budget),
        (size, quality),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=6,
        color=color,
    )


def _label_budgets(panel: Axes, sizes: dict[Budget, float]) -> None:
    """Labels the points with their budgets. Budgets of similar size are on different lines."""
    sizes = {budget: size for budget, size in sizes.items() if size > 0}
    span = max(1.0, math.log10(max(sizes.values()) / min(sizes.values()))) if sizes else 1.0
    ends: list[float] = []  # position of the last label of each line
    for budget, size in sorted(sizes.items(), key=lambda entry: entry[1]):
        position = math.log10(size)
        line = next((i for i, end in enumerate(ends) if position - end > 0.14 * span), len(ends))
        ends[line : line + 1] = [position]
        panel.annotate(
            str(budget),
            (size, 0.985 - 0.04 * line),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="top",
            fontsize=8,
            color=REFERENCE,
        )


def _bytes(size: float) -> str:
    """Formats a size for an axis.

    >>> _bytes(768), _bytes(24576)
    ('768 B', '24.6 kB')
    """
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.3g} B"
