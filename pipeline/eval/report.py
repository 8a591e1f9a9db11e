"""Tables and the plot of an evaluation: what each method reaches, and what its vectors take."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from pipeline.registry import COMPRESSORS

SINGLE, FULL = "single", "full"

#: Colours that stay apart for readers who see colours differently, and in print with the markers.
STYLES = tuple(
    zip(
        ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5D4A9C", "#7F5B3A"),
        ("o", "s", "^", "D", "v", "P", "X", "*"),
        strict=True,
    )
)
REFERENCE = "#555555"


@dataclass(frozen=True)
class Result:
    """One row of the table: a representation under one score.

    Attributes:
        representation: the searched column.
        method: the compressor with its settings other than the budget; "full" or "single".
        num_vectors: the budget K; None for the full tokens.
        score: late, single or hybrid.
        means: mean over the queries, by measure.
        vectors_per_item: stored vectors, mean over the items.
        vector_bytes: bytes of the vectors that the score reads, mean over the items.
        all_bytes: the same with support and token positions.
        queries_per_second: scoring and ranking of encoded queries with the vectors in memory.
    """

    representation: str
    method: str
    num_vectors: int | None
    score: str
    means: dict[str, float]
    vectors_per_item: float
    vector_bytes: float
    all_bytes: float
    queries_per_second: float

    @property
    def name(self) -> str:
        """What the run is called."""
        is_single = self.score == SINGLE
        return self.representation if is_single else f"{self.representation}.{self.score}"


def method_name(compressor: Mapping[str, Any]) -> str:
    """A compressor's name, with the settings that are not its defaults; the budget left out.

    >>> method_name({"name": "none"}), method_name({"name": "hpool", "num_vectors": 32})
    ('full', 'hpool')
    """
    if compressor["name"] == "none":
        return FULL
    defaults = COMPRESSORS.load(compressor["name"]).Spec.model_fields
    changed = [
        f"{key}={value}"
        for key, value in compressor.items()
        if key not in ("name", "num_vectors")
        and not (key in defaults and value == defaults[key].get_default(call_default_factory=True))
    ]
    return " ".join([compressor["name"], *changed])


def table(results: Sequence[Result]) -> list[list[str]]:
    """The results as cells, the header first."""
    measures = list(results[0].means)
    header = ["representation", "method", "K", "score", *measures]
    header += ["vectors/item", "B/item", "B/item all", "queries/s"]
    rows = [
        [
            result.representation,
            result.method,
            "all" if result.num_vectors is None else str(result.num_vectors),
            result.score,
            *(f"{result.means[name]:.4f}" for name in measures),
            f"{result.vectors_per_item:.1f}",
            f"{result.vector_bytes:,.0f}",
            f"{result.all_bytes:,.0f}",
            f"{result.queries_per_second:,.1f}",
        ]
        for result in results
    ]
    return [header, *rows]


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Cells as plain text: columns of numbers to the right, others to the left.

    >>> print(aligned([["method", "K"], ["hpool", "8"], ["samer", "16"]]))
    method   K
    hpool    8
    samer   16
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_number = [column[-1][:1].isdigit() for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """Cells as a Markdown table."""
    header, *rows = cells
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def metrics_csv(results: Sequence[Result]) -> str:
    """The results as CSV, numbers unrounded."""
    measures = list(results[0].means)
    plain = ("representation", "method", "num_vectors", "score")
    sizes = ("vectors_per_item", "vector_bytes", "all_bytes", "queries_per_second")
    rows = [
        [
            *(getattr(result, name) for name in plain),
            *(result.means[name] for name in measures),
            *(getattr(result, name) for name in sizes),
        ]
        for result in results
    ]
    return _csv([[*plain, *measures, *sizes], *rows])


def per_query_csv(values: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """`{run: {query id: {measure: value}}}` as CSV, a row for each run and query."""
    first = next(iter(next(iter(values.values())).values()))
    rows = [
        [run, query_id, *row.values()]
        for run, queries in values.items()
        for query_id, row in queries.items()
    ]
    return _csv([["run", "query_id", *first], *rows])


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def quality_bytes_png(results: Sequence[Result], measure: str) -> bytes:
    """A plot of quality against bytes of vectors per item: a panel a score, a line a method.

    The full tokens and the single vector are points with a line across: between the two lies what a
    budget can win or lose.
    """
    scores = [score for score in ("late", "hybrid") if any(r.score == score for r in results)]
    scores = scores or [SINGLE]
    figure = Figure(figsize=(1.2 + 5.4 * len(scores), 5.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(scores), sharex=True, sharey=True, squeeze=False)[0]
    methods = sorted({r.method for r in results if r.method not in (FULL, SINGLE)})
    for panel, score in zip(panels, scores, strict=True):
        _draw(panel, [r for r in results if r.score in (score, SINGLE)], methods, measure)
        panel.set_title(f"{score} score", fontsize=11)
        panel.set_xlabel("bytes of vectors per item")
    panels[0].set_ylabel(measure)
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    columns = min(len(handles), 3 * len(scores))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False
    )
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _draw(panel: Axes, results: list[Result], methods: list[str], measure: str) -> None:
    best_of_budget: dict[int | None, Result] = {}
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
            best = best_of_budget.setdefault(result.num_vectors, result)
            if result.means[measure] > best.means[measure]:
                best_of_budget[result.num_vectors] = result
    for budget, result in best_of_budget.items():
        panel.annotate(
            "adaptive" if budget is None else f"K={budget}",
            (result.vector_bytes, result.means[measure]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=REFERENCE,
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
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _bytes(size)))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(color="#e4e4e4", linewidth=0.8)
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
