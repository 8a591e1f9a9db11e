"""The plot of an evaluation: quality against bytes, a panel a score, a line a method."""

from __future__ import annotations

import io

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from pipeline.eval.results import BM25, FULL, SINGLE, Evaluation, pareto_front

#: Colours that stay apart for readers who see colours differently, and in print with the markers.
STYLES = tuple(
    zip(
        ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5D4A9C", "#7F5B3A"),
        ("o", "s", "^", "D", "v", "P", "X", "*"),
        strict=True,
    )
)
REFERENCE = "#555555"


def quality_bytes_png(evaluation: Evaluation) -> bytes:
    """All panels side by side, as a picture."""
    png = io.BytesIO()
    _figure(evaluation, panels(evaluation)).savefig(png, format="png", dpi=150)
    return png.getvalue()


def quality_bytes_svg(evaluation: Evaluation, score: str) -> str:
    """One panel as an `<svg>` element, its grey in the colour of the text that stands around it."""
    svg = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": score}):
        figure = _figure(evaluation, [score])
        figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
    text = svg.getvalue()
    return text[text.index("<svg") :].replace(REFERENCE, "currentColor")


def panels(evaluation: Evaluation) -> list[str]:
    """The scores that have a panel: those of multi-vector rows, else that of single vectors."""
    there = {result.score for result in evaluation.results}
    return [score for score in ("late", "hybrid") if score in there] or [SINGLE]


def _figure(evaluation: Evaluation, scores: list[str]) -> Figure:
    """Panels of quality against bytes of vectors per item.

    Full tokens, the single vector and BM25 have a line across: what a budget can win or lose lies
    between them. The Pareto front is that of all rows, whatever panel their points stand in.
    """
    figure = Figure(figsize=(0.8 + 4.4 * len(scores), 4.8), layout="constrained")
    axes = figure.subplots(1, len(scores), sharex=True, sharey=True, squeeze=False)[0]
    methods = sorted({result.method for result in evaluation.results if result.is_compressed})
    for panel, score in zip(axes, scores, strict=True):
        _draw(panel, evaluation, score, methods)
    axes[0].set_ylabel(evaluation.headline)
    axes[0].set_ylim(*_quality_range(evaluation))  # the same where panels are drawn alone
    handles = {
        label: handle
        for panel in axes
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    columns = min(len(handles), 2 * len(scores))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        labelcolor=REFERENCE,
    )
    return figure


def _quality_range(evaluation: Evaluation) -> tuple[float, float]:
    qualities = [evaluation.quality(result) for result in evaluation.results]
    margin = max(0.08 * (max(qualities) - min(qualities)), 0.002)
    return min(qualities) - margin, max(qualities) + 2 * margin  # room for the budgets


def _draw(panel: Axes, evaluation: Evaluation, score: str, methods: list[str]) -> None:
    measure = evaluation.headline
    results = [r for r in evaluation.results if r.score in (score, SINGLE, BM25)]
    sizes: dict[int | None, float] = {}  # of each budget, of the method that takes most
    for i, method in enumerate(methods):
        color, marker = STYLES[i % len(STYLES)]
        line = sorted(
            (r for r in results if r.method == method), key=lambda result: result.vector_bytes
        )
        panel.plot(
            [result.vector_bytes for result in line],
            [result.means[measure] for result in line],
            marker=marker,
            markersize=8,
            markeredgecolor="white",
            color=color,
            label=method,
            linewidth=1.8,
        )
        for result in line:
            largest = max(result.vector_bytes, sizes.get(result.num_vectors, 0.0))
            sizes[result.num_vectors] = largest
    for budget, size in sizes.items():
        panel.annotate(
            "adaptive" if budget is None else f"K={budget}",
            (size, 0.985),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="top",
            fontsize=8,
            color=REFERENCE,
        )
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
    panel.grid(color=REFERENCE, alpha=0.15, linewidth=0.8)
    panel.tick_params(which="both", color=REFERENCE, labelcolor=REFERENCE)
    panel.xaxis.label.set_color(REFERENCE)
    panel.yaxis.label.set_color(REFERENCE)
    panel.spines[:].set_color(REFERENCE)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _bytes(size: float) -> str:
    """A size for an axis.

    >>> _bytes(768), _bytes(24576)
    ('768 B', '24.6 kB')
    """
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.3g} B"
