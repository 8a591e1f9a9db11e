"""Figures of the diagnostics, as in the papers; a figure without data is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.eval.results import OSR, Evaluation, Result
from pipeline.eval.views import (
    Correlation,
    DepthScan,
    Scan,
    common_budget,
    correlations,
    depth_scans,
    in_scans,
    late_rows,
    layer_scans,
    line_name,
    retention_lines,
    retention_measure,
    side_by_side,
)
from pipeline.report.plot import REFERENCE, STYLES, legend_below, plain, styles, to_png, to_svg
from pipeline.report.tables import method
from pipeline.report.text import p_equals
from pipeline.taps import MIDDLE, Tap

#: Indexes side by side in the picture of their use.
ABREAST = 5


class Drawing(NamedTuple):
    """A figure of the report.

    Attributes:
        name: The file name without its extension.
        title: The heading.
        caption: The description.
        panels: Functions that draw its parts, each small enough for a phone.
        whole: Draws it as one image.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Callable[[], Figure]]
    whole: Callable[[], Figure]

    def svgs(self) -> list[str]:
        """Returns the parts as `<svg>` elements."""
        return [to_svg(draw(), f"{self.name}-{i}") for i, draw in enumerate(self.panels)]

    def png(self) -> bytes:
        """Returns the whole figure as PNG."""
        return to_png(self.whole())


def drawings(evaluation: Evaluation) -> Iterator[Drawing]:
    """Yields every figure for which the evaluation has data."""
    if rows := side_by_side(evaluation):
        budget = common_budget(evaluation)
        yield Drawing(
            "index_utilisation",
            "Which positions are matched, and how alike they are",
            "Above: the strength with which each position of an item is matched by tokens of "
            "queries that it is relevant to. Below: the mean cosine between positions"
            + (f". Full tokens, and each method at {budget}." if budget else "."),
            [partial(_alone, row, _lowest(rows)) for row in rows],
            lambda: _abreast(rows),
        )
    if retention_lines(evaluation):
        yield _single(
            "quality_retention",
            "Quality kept against the share of vectors kept",
            f"{retention_measure(evaluation)} as a share of that of the full tokens, at the share "
            "of vectors that is really stored. Seeds: their mean, with a band of one standard "
            "deviation.",
            lambda: _retention(evaluation),
        )
    if scans := [s for s in layer_scans(evaluation) if any(r.retention for r in s.rows.values())]:
        budgets = list(dict.fromkeys(scan.budget for scan in scans))
        draws = [
            partial(_layers, evaluation, [scan for scan in scans if scan.budget == budget])
            for budget in budgets
        ]
        yield Drawing(
            "osr_by_layer",
            "Score retention by layer",
            "OSR of methods that read one layer, from first to last. The band across is random at "
            "the same budget, mean and standard deviation over its seeds; shaded is the window of "
            f"the middle layers ({MIDDLE} of the layers scanned) that SAP reads.",
            draws,
            lambda: _layers(evaluation, scans),
        )
    if rerank_scans := depth_scans(evaluation):
        yield _single(
            "reranking_by_depth",
            "Quality and latency by the rerank depth",
            f"{evaluation.headline} with so many of the first stage's best put into order (EDJE, "
            "figure 5), and the median milliseconds of a query that comes alone, both stages "
            "together. The lines across are the first stages.",
            lambda: _rerank_depths(evaluation, rerank_scans),
        )
    found = [correlation for correlation in correlations(evaluation) if len(correlation.rows) > 1]
    if found:
        yield Drawing(
            "diagnostics_quality",
            "Do the diagnostics foretell quality?",
            "Each point is a compressed row under the late score. Above each plot stands Pearson's "
            f"r with {evaluation.headline}.",
            [partial(_scatters, evaluation, [correlation]) for correlation in found],
            lambda: _scatters(evaluation, found),
        )


def _single(name: str, title: str, caption: str, draw: Callable[[], Figure]) -> Drawing:
    return Drawing(name, title, caption, [draw], draw)


def _lowest(rows: Sequence[Result]) -> float:
    """Where the colours of all similarity maps begin: at 0, or below if any similarity is."""
    diagnoses = [row.diagnosis for row in rows if row.diagnosis]
    return min(0.0, *(float(np.min(diagnosis.similarity)) for diagnosis in diagnoses))


def _alone(row: Result, lowest: float) -> Figure:
    figure = Figure(figsize=(3.2, 4.4), layout="constrained")
    _draw_use(figure, row, lowest)
    return figure


def _abreast(rows: Sequence[Result]) -> Figure:
    columns = min(len(rows), ABREAST)
    lines = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(3.2 * columns, 4.4 * lines), layout="constrained")
    parts = figure.subfigures(lines, columns, squeeze=False).flat
    for part, row in zip(parts, rows, strict=False):  # the last line need not be full
        _draw_use(part, row, _lowest(rows))
    return figure


def _draw_use(figure: FigureBase, row: Result, lowest: float) -> None:
    """A row's matching strength by position, above the similarity between positions."""
    bars, heat = figure.subplots(2, 1, height_ratios=(1, 1.5))
    diagnosis = row.diagnosis
    assert diagnosis is not None
    strengths = np.array(diagnosis.strengths)
    width = diagnosis.num_positions / max(1, len(strengths))
    bars.bar(np.arange(len(strengths)) * width, strengths, width, align="edge", color="#0072B2")
    bars.set_xlim(0, max(1, diagnosis.num_positions))
    bars.set_title(row.representation, fontsize=10)
    bars.set_ylabel("strength", fontsize=8)
    end = diagnosis.num_positions
    image = heat.imshow(
        np.array(diagnosis.similarity), vmin=lowest, vmax=1, cmap="viridis", extent=(0, end, end, 0)
    )
    heat.set_xlabel("position", fontsize=8)
    bar = figure.colorbar(image, ax=heat, shrink=0.8)
    bar.outline.set_edgecolor(REFERENCE)
    for panel in (bars, heat, bar.ax):
        plain(panel)
        panel.grid(False)
        panel.tick_params(labelsize=7)
    for axis in (bars.xaxis, heat.xaxis, heat.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))


def _retention(evaluation: Evaluation) -> Figure:
    figure = Figure(figsize=(5.6, 4.6), layout="constrained")
    panel = figure.subplots()
    lines, looks = retention_lines(evaluation), styles(evaluation)
    for name, points in lines.items():
        share, quality, spread = np.array(points).T
        panel.plot(share, quality, **looks[name], markeredgecolor="white", label=name)
        if spread.any():
            low, high = quality - spread, quality + spread
            panel.fill_between(share, low, high, color=looks[name]["color"], alpha=0.2, linewidth=0)
    panel.axhline(1, color=REFERENCE, linewidth=1, dashes=(6, 3), zorder=0)
    panel.set_xlabel("share of the vectors that is stored")
    panel.set_ylabel(f"{retention_measure(evaluation)}, share of the full tokens'")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    plain(panel)
    legend_below(figure, [panel])
    return figure


def _rerank_depths(evaluation: Evaluation, scans: Sequence[DepthScan]) -> Figure:
    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    quality, latency = figure.subplots(1, 2)
    for scan, style in zip(scans, STYLES, strict=False):
        depths, rows = list(scan.rows), list(scan.rows.values())
        drawn = {**style, "markeredgecolor": "white", "label": scan.name}
        for panel, values, first in (
            (quality, [evaluation.quality(row) for row in rows], evaluation.quality(scan.first)),
            (latency, [row.median_ms for row in rows], scan.first.median_ms),
        ):
            panel.plot(depths, values, **drawn)
            panel.axhline(
                first, color=style["color"], linewidth=1, dashes=(6, 3), label=scan.first.name
            )
    for panel, name in ((quality, evaluation.headline), (latency, "ms a query")):
        panel.set_xscale("log", base=2)
        every = sorted({depth for scan in scans for depth in scan.rows})
        panel.set_xticks(every, [str(depth) for depth in every])
        panel.minorticks_off()
        panel.set_xlabel("rerank depth")
        panel.set_ylabel(name)
        plain(panel)
    latency.set_ylim(bottom=0)
    legend_below(figure, [quality, latency])
    return figure


def _layers(evaluation: Evaluation, scans: Sequence[Scan]) -> Figure:
    budgets = list(dict.fromkeys(scan.budget for scan in scans))
    figure = Figure(figsize=(0.8 + 4.6 * len(budgets), 4.4), layout="constrained")
    panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    looks = styles(evaluation)
    for panel, budget in zip(panels, budgets, strict=True):
        own = [scan for scan in scans if scan.budget == budget]
        scanned = [layer for scan in own for layer in scan.rows]
        if min(scanned) >= 0:  # counted from the end they do not tell the depth
            window = Tap("column_sums", layers=MIDDLE).layer_indices(1 + max(scanned))
            panel.axvspan(window[0] - 0.5, window[-1] + 0.5, color="#0072B2", alpha=0.1)
        for scan in own:
            points = [
                (n, r.retention.mean, r.spread(OSR) or 0.0)
                for n, r in scan.rows.items()
                if r.retention
            ]
            if points:
                look = {**looks[scan.name], "markeredgecolor": "white", "label": scan.name}
                layers, means, spreads = zip(*points, strict=True)
                panel.errorbar(layers, means, spreads if any(spreads) else None, capsize=3, **look)
        for row in late_rows(evaluation):
            if row.is_random and row.budget == budget and row.retention:
                _band(panel, row)
        panel.set_title(str(budget), fontsize=11)
        panel.set_xlabel("layer")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        plain(panel)
    panels[0].set_ylabel(OSR)
    legend_below(figure, panels)
    return figure


def _band(panel: Axes, row: Result) -> None:
    assert row.retention is not None
    mean, spread = row.retention.mean, row.spread(OSR) or 0.0
    panel.axhline(mean, color=REFERENCE, linewidth=1.2, dashes=(4, 2), label=method(row))
    panel.axhspan(mean - spread, mean + spread, color=REFERENCE, alpha=0.2, linewidth=0)


def _scatters(evaluation: Evaluation, found: Sequence[Correlation]) -> Figure:
    figure = Figure(figsize=(0.6 + 4.4 * len(found), 4.6), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    looks, scanned = styles(evaluation), in_scans(evaluation)
    for panel, correlation in zip(panels, found, strict=True):
        for x, y, row in zip(correlation.x, correlation.y, correlation.rows, strict=True):
            if row.name in scanned:  # many rows of one method: one look
                name = "scans over layers"
                look: dict[str, Any] = {"color": REFERENCE, "marker": "."}
            else:
                name = line_name(evaluation, row)
                look = {**looks[name], "markersize": 8}
            look |= {"linestyle": "none", "markeredgecolor": "white", "label": name}
            panel.plot([x], [y], **look)
        if correlation.r is not None:
            slope, start = np.polyfit(correlation.x, correlation.y, 1)
            ends = np.array([correlation.x.min(), correlation.x.max()])
            panel.plot(ends, start + slope * ends, color=REFERENCE, linewidth=1, dashes=(4, 2))
            said = f"r = {correlation.r:.3f}, {p_equals(correlation.p)}, n = {len(correlation.x)}"
            panel.set_title(said, fontsize=10)
        panel.set_xlabel(correlation.of)
        plain(panel)
    panels[0].set_ylabel(evaluation.headline)
    legend_below(figure, panels)
    return figure
