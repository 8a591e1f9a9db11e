"""The plot of an evaluation: quality against bytes, a panel a score, a line a method."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from pipeline.eval.results import (
    BM25,
    FULL,
    SINGLE,
    Budget,
    Evaluation,
    Result,
    method_name,
    pareto_front,
)
from pipeline.eval.views import codecs_of, in_scans, layer_scans, line_name
from pipeline.index.columns import codec_name

#: Colours that stay apart for readers who see colours differently, and in print with the markers;
#: the second eight are dashed too.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5D4A9C", "#7F5B3A")
STYLES = tuple(
    {"color": color, "marker": marker, "linestyle": dashes}
    for dashes, markers in (("solid", "os^DvPX*"), ("dashed", "<>phd8H."))
    for color, marker in zip(COLORS, markers, strict=True)
)
REFERENCE = "#555555"


def to_png(figure: Figure) -> bytes:
    """A figure as a picture."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150, bbox_inches="tight")
    return png.getvalue()


def to_svg(figure: Figure, name: str) -> str:
    """A figure as an `<svg>` element, its grey in the colour of the text that stands around it.

    Args:
        name: tells its inner names from those of other figures on the page.
    """
    svg = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(svg, format="svg", transparent=True, metadata=nothing, bbox_inches="tight")
    text = svg.getvalue()
    return text[text.index("<svg") :].replace(REFERENCE, "currentColor")


def styles(evaluation: Evaluation) -> dict[str, dict[str, str]]:
    """How each line is drawn, the same in all figures: methods, then scans of no such method.

    Where there are several codecs, a colour is a codec and a marker is a method.
    """
    scanned = in_scans(evaluation)
    rows = [r for r in evaluation.results if r.is_compressed and r.name not in scanned]
    lines = {line_name(evaluation, row): row for row in rows}
    scans = [scan.name for scan in layer_scans(evaluation)]
    names = dict.fromkeys([*sorted(lines), *scans])
    drawn = {name: STYLES[i % len(STYLES)] for i, name in enumerate(names)}
    codecs = codecs_of(evaluation)
    if len(codecs) > 1:
        methods = sorted({method_name(row.compressor) for row in rows})
        for name, row in lines.items():
            style = STYLES[methods.index(method_name(row.compressor)) % len(STYLES)]
            color = COLORS[codecs.index(codec_name(row.codec)) % len(COLORS)]
            drawn[name] = {**style, "color": color}
    return drawn


def plain(panel: Axes) -> None:
    """Gives axes the looks that all figures share."""
    panel.grid(color=REFERENCE, alpha=0.15, linewidth=0.8)
    panel.tick_params(which="both", color=REFERENCE, labelcolor=REFERENCE)
    for label in (panel.xaxis.label, panel.yaxis.label, panel.title):
        label.set_color(REFERENCE)
    panel.spines[:].set_color(REFERENCE)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, panels: Sequence[Axes]) -> None:
    """A legend of all panels under them, each name once; the figure grows for it."""
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if not handles:
        return
    columns = min(len(handles), 2 * len(panels))
    rows = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + 0.21 * max(0, rows - 3))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        labelcolor=REFERENCE,
    )


def quality_bytes_png(evaluation: Evaluation) -> bytes:
    """All panels side by side, as a picture."""
    return to_png(_figure(evaluation, panels(evaluation)))


def quality_bytes_svg(evaluation: Evaluation, score: str) -> str:
    """One panel as an `<svg>` element."""
    return to_svg(_figure(evaluation, [score]), score)


def panels(evaluation: Evaluation) -> list[str]:
    """The scores that have a panel: those of multi-vector rows, else that of single vectors."""
    there = {result.score for result in evaluation.results}
    return [score for score in ("late", "hybrid") if score in there] or [SINGLE]


def _figure(evaluation: Evaluation, scores: list[str]) -> Figure:
    """Panels of quality against bytes of vectors per item.

    Full tokens, the single vector and BM25 have a line across: what a budget can win or lose lies
    between them. Rows of a scan over layers have a figure of their own. The Pareto front is that of
    all rows, whatever panel their points stand in.
    """
    figure = Figure(figsize=(0.8 + 4.4 * len(scores), 4.8), layout="constrained")
    axes = figure.subplots(1, len(scores), sharex=True, sharey=True, squeeze=False)[0]
    for panel, score in zip(axes, scores, strict=True):
        _draw(panel, evaluation, score)
    axes[0].set_ylabel(evaluation.headline)
    axes[0].set_ylim(*_quality_range(evaluation))  # the same where panels are drawn alone
    legend_below(figure, axes)
    return figure


def _quality_range(evaluation: Evaluation) -> tuple[float, float]:
    ends = [
        evaluation.quality(result) + sign * (result.spread(evaluation.headline) or 0.0)
        for result in evaluation.results
        for sign in (-1, 1)
    ]
    margin = max(0.08 * (max(ends) - min(ends)), 0.002)
    return min(ends) - margin, max(ends) + 2 * margin  # room for the budgets


def _draw(panel: Axes, evaluation: Evaluation, score: str) -> None:
    measure, scanned = evaluation.headline, in_scans(evaluation)
    num_codecs = len(codecs_of(evaluation))
    results = [r for r in evaluation.results if r.score in (score, SINGLE, BM25)]
    sizes: dict[Budget, float] = {}  # of each budget, of the method that takes most
    for method, style in styles(evaluation).items():
        rows = sorted(
            (
                r
                for r in results
                if r.is_compressed and line_name(evaluation, r) == method and r.name not in scanned
            ),
            key=lambda result: result.vector_bytes,
        )
        # A number for every item and a share of its tokens are two ways to spend bytes.
        for is_share in (False, True):
            line = [row for row in rows if (row.budget.ratio is not None) == is_share]
            if line:
                _draw_line(panel, line, measure, method, style)
        for row in rows:
            sizes[row.budget] = max(row.vector_bytes, sizes.get(row.budget, 0.0))
            if num_codecs > 1:  # a budget has as many sizes: each point says which it is
                _label_point(panel, row, row.means[measure], style["color"])
    if num_codecs <= 1:
        _label_budgets(panel, sizes)
    front = pareto_front(evaluation.results, measure)
    panel.plot(
        [result.vector_bytes for result in front],
        [result.means[measure] for result in front],
        color=REFERENCE,
        alpha=0.35,
        linewidth=5,
        solid_capstyle="round",
        zorder=1,
        label="Pareto front of all rows",
    )
    for result in (r for r in results if r.method == BM25):
        quality = result.means[measure]
        panel.axhline(
            quality, color=REFERENCE, linewidth=1, linestyle="dashdot", zorder=0, label="BM25"
        )
    for name, marker, dashes in ((FULL, "*", (6, 3)), (SINGLE, "o", (1, 2))):
        for result in (r for r in results if r.method == name):
            quality = result.means[measure]
            panel.axhline(quality, color=REFERENCE, linewidth=1, dashes=dashes, zorder=0)
            panel.plot(
                [result.vector_bytes],
                [quality],
                marker=marker,
                markersize=12 if marker == "*" else 7,
                color=REFERENCE,
                linestyle="none",
                label=f"{name} ({result.representation})" if name == SINGLE else "full tokens",
            )
    panel.set_title(f"{score} score", fontsize=11, color=REFERENCE)
    panel.set_xlabel("bytes of vectors per item")
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _bytes(size)))
    panel.xaxis.set_minor_formatter(NullFormatter())
    plain(panel)


def _draw_line(
    panel: Axes, line: Sequence[Result], measure: str, method: str, style: dict[str, str]
) -> None:
    """A method's rows from the smallest on, with the spread of those that stand for seeds."""
    spreads = [row.spread(measure) or 0.0 for row in line]
    panel.errorbar(
        [row.vector_bytes for row in line],
        [row.means[measure] for row in line],
        spreads if any(spreads) else None,
        **style,
        markersize=8,
        markeredgecolor="white",
        label=method,
        linewidth=1.8,
        capsize=3,
    )


def _label_point(panel: Axes, row: Result, quality: float, color: str) -> None:
    """Writes a row's budget above its point."""
    panel.annotate(
        str(row.budget),
        (row.vector_bytes, quality),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=6,
        color=color,
    )


def _label_budgets(panel: Axes, sizes: dict[Budget, float]) -> None:
    """Writes each budget above its points; budgets of nearly the same size on lines of their own.

    Args:
        sizes: where each is written, in bytes.
    """
    sizes = {budget: size for budget, size in sizes.items() if size > 0}
    span = max(1.0, math.log10(max(sizes.values()) / min(sizes.values()))) if sizes else 1.0
    ends: list[float] = []  # of each line of labels, where the last one stands
    for budget, size in sorted(sizes.items(), key=lambda entry: entry[1]):
        place = math.log10(size)
        line = next((i for i, end in enumerate(ends) if place - end > 0.14 * span), len(ends))
        ends[line : line + 1] = [place]
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
    """A size for an axis.

    >>> _bytes(768), _bytes(24576)
    ('768 B', '24.6 kB')
    """
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.3g} B"
