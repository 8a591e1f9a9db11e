"""Figures of the diagnostics, as in the papers.

Figures without data are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.eval.report.plot import (
    REFERENCE,
    STYLES,
    apply_style,
    legend_below,
    styles,
    to_file,
    to_svg,
)
from pipeline.eval.report.tables import method
from pipeline.eval.report.utilisation import Profile, lowest_similarity, utilisation_figure
from pipeline.eval.results import OSR, Evaluation, Result
from pipeline.eval.views import (
    CandidatesScan,
    Correlation,
    DepthScan,
    Scan,
    candidates_scans,
    common_budget,
    comparable_rows,
    correlations,
    depth_scans,
    layer_scans,
    line_name,
    maxsim_rows,
    retention_lines,
    retention_measure,
    scanned_rows,
)
from pipeline.runtime.text import p_equals
from pipeline.taps import MIDDLE, Tap


class ReportFigure(NamedTuple):
    """Figure of the report.

    Attributes:
        name: File name without extension.
        panels: Functions that draw the panels, each small enough for a phone screen.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Callable[[], Figure]]
    whole: Callable[[], Figure]

    def svgs(self) -> list[str]:
        """Returns the panels as `<svg>` elements."""
        return [to_svg(draw(), f"{self.name}-{i}") for i, draw in enumerate(self.panels)]

    def file(self, format: str) -> bytes:
        """Returns the whole figure as the content of a file, see `to_file`."""
        return to_file(self.whole(), format)


def figures(evaluation: Evaluation) -> Iterator[ReportFigure]:
    """Yields every figure for which the evaluation has data."""
    if profiles := [_profile(row) for row in comparable_rows(evaluation)]:
        lowest = lowest_similarity(profiles)
        budget = common_budget(evaluation)
        yield ReportFigure(
            "index_utilisation",
            "Matching strength and similarity by position",
            "Top: matching strength between each position of an item and the tokens of its "
            "relevant queries. Bottom: mean cosine between positions."
            + (f" Shown are the uncompressed index and each method at {budget}." if budget else ""),
            [partial(utilisation_figure, [profile], lowest) for profile in profiles],
            lambda: utilisation_figure(profiles, lowest),
        )
    if retention_lines(evaluation):
        yield _single(
            "quality_retention",
            "Quality retention against the fraction of stored vectors",
            f"{retention_measure(evaluation)} relative to the uncompressed index, against the "
            "measured fraction of stored vectors. Methods with several seeds are shown as their "
            "mean and a band of one standard deviation.",
            lambda: _retention_figure(evaluation),
        )
    if scans := [s for s in layer_scans(evaluation) if any(r.retention for r in s.rows.values())]:
        budgets = list(dict.fromkeys(scan.budget for scan in scans))
        draws = [
            partial(_layer_figure, evaluation, [scan for scan in scans if scan.budget == budget])
            for budget in budgets
        ]
        yield ReportFigure(
            "osr_by_layer",
            "Score retention by layer",
            "OSR of methods that read a single layer. The horizontal band is random pruning at the "
            "same budget, as mean and standard deviation over seeds. The shaded window is the "
            f"middle layers ({MIDDLE} of the scanned layers) that SAP uses.",
            draws,
            lambda: _layer_figure(evaluation, scans),
        )
    if rerank_scans := depth_scans(evaluation):
        yield _single(
            "reranking_by_depth",
            "Quality and latency by the rerank depth",
            f"{evaluation.headline} by the number of reranked first-stage results (EDJE, figure "
            "5), and the median latency of a single query over both stages. The horizontal lines "
            "are the first stages.",
            lambda: _depth_figure(evaluation, rerank_scans),
        )
    if scans_of_candidates := candidates_scans(evaluation):
        yield _single(
            "candidates_recall",
            "Recall of candidate generators",
            "Share of the exact results among those found, by the number of candidates that are "
            "scored, and the median latency of a single query. The horizontal lines are the exact "
            "search.",
            lambda: _candidates_figure(scans_of_candidates),
        )
    found = [correlation for correlation in correlations(evaluation) if len(correlation.rows) > 1]
    if found:
        yield ReportFigure(
            "diagnostics_quality",
            "Correlation of the diagnostics with quality",
            "Each point is a compressed row under the MaxSim score. The title of each plot is "
            f"Pearson's r with {evaluation.headline}.",
            [partial(_scatter_figure, evaluation, [correlation]) for correlation in found],
            lambda: _scatter_figure(evaluation, found),
        )


def _single(name: str, title: str, caption: str, draw: Callable[[], Figure]) -> ReportFigure:
    return ReportFigure(name, title, caption, [draw], draw)


def _profile(row: Result) -> Profile:
    diagnosis = row.diagnosis
    assert diagnosis is not None
    similarity = np.array(diagnosis.similarity)
    return Profile(row.representation, diagnosis.num_positions, diagnosis.strengths, similarity)


def _retention_figure(evaluation: Evaluation) -> Figure:
    figure = Figure(figsize=(5.6, 4.6), layout="constrained")
    panel = figure.subplots()
    lines, line_styles = retention_lines(evaluation), styles(evaluation)
    for name, points in lines.items():
        share, quality, spread = np.array(points).T
        panel.plot(share, quality, **line_styles[name], markeredgecolor="white", label=name)
        if spread.any():
            low, high = quality - spread, quality + spread
            panel.fill_between(
                share, low, high, color=line_styles[name]["color"], alpha=0.2, linewidth=0
            )
    panel.axhline(1, color=REFERENCE, linewidth=1, dashes=(6, 3), zorder=0)
    panel.set_xlabel("stored vectors relative to uncompressed")
    panel.set_ylabel(f"{retention_measure(evaluation)} relative to uncompressed")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    apply_style(panel)
    legend_below(figure, [panel])
    return figure


def _depth_figure(evaluation: Evaluation, scans: Sequence[DepthScan]) -> Figure:
    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    quality, latency = figure.subplots(1, 2)
    for scan, style in zip(scans, STYLES, strict=False):
        depths, rows = list(scan.rows), list(scan.rows.values())
        line = {**style, "markeredgecolor": "white", "label": scan.name}
        before = scan.first_stage
        for panel, values, first in (
            (quality, [evaluation.quality(row) for row in rows], evaluation.quality(before)),
            (latency, [row.median_ms for row in rows], before.median_ms),
        ):
            panel.plot(depths, values, **line)
            panel.axhline(
                first, color=style["color"], linewidth=1, dashes=(6, 3), label=before.name
            )
    for panel, name in ((quality, evaluation.headline), (latency, "ms per query")):
        panel.set_xscale("log", base=2)
        ticks = sorted({depth for scan in scans for depth in scan.rows})
        panel.set_xticks(ticks, [str(depth) for depth in ticks])
        panel.minorticks_off()
        panel.set_xlabel("rerank depth")
        panel.set_ylabel(name)
        apply_style(panel)
    latency.set_ylim(bottom=0)
    legend_below(figure, [quality, latency])
    return figure


def _candidates_figure(scans: Sequence[CandidatesScan]) -> Figure:
    exact_rows = list({scan.exact.name: scan.exact for scan in scans}.values())
    generators = list(dict.fromkeys(scan.generator for scan in scans))
    num_columns = min(len(exact_rows), 4)
    num_bands = math.ceil(len(exact_rows) / num_columns)
    figure = Figure(figsize=(1 + 3.2 * num_columns, 4.6 * num_bands), layout="constrained")
    panels = figure.subplots(2 * num_bands, num_columns, squeeze=False, sharex=True)
    dashes = {"recall@10": (0, ()), "recall@100": (0, (2, 2))}
    for panel in panels.flat:  # the last band may be incomplete
        panel.set_visible(False)
    for number, exact in enumerate(exact_rows):
        band, column = divmod(number, num_columns)
        recall, latency = panels[2 * band : 2 * band + 2, column]
        for scan in (scan for scan in scans if scan.exact is exact):
            numbers, rows = list(scan.rows), list(scan.rows.values())
            style = STYLES[generators.index(scan.generator) % len(STYLES)]
            line = {**style, "markeredgecolor": "white"}
            for depth in (name for name in dashes if name in rows[0].candidates):
                label = f"{scan.generator}, {depth}"
                values = [row.candidates[depth] for row in rows]
                recall.plot(numbers, values, **{**line, "linestyle": dashes[depth], "label": label})
            latency.plot(numbers, [row.median_ms for row in rows], **line)
        latency.axhline(exact.median_ms, color=REFERENCE, linewidth=1, dashes=(6, 3))
        recall.set_title(exact.name, fontsize=10)
        recall.set_ylim(top=1.02)
        latency.set_ylim(bottom=0)
        for panel, name in ((recall, "recall of the exact results"), (latency, "ms per query")):
            panel.set_visible(True)
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter("{x:g}")
            if not column:
                panel.set_ylabel(name)
            apply_style(panel)
        latency.set_xlabel("candidates")
    legend_below(figure, [panels[0, 0]])
    return figure


def _layer_figure(evaluation: Evaluation, scans: Sequence[Scan]) -> Figure:
    budgets = list(dict.fromkeys(scan.budget for scan in scans))
    figure = Figure(figsize=(0.8 + 4.6 * len(budgets), 4.4), layout="constrained")
    panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    line_styles = styles(evaluation)
    for panel, budget in zip(panels, budgets, strict=True):
        budget_scans = [scan for scan in scans if scan.budget == budget]
        scanned = [layer for scan in budget_scans for layer in scan.rows]
        if min(scanned) >= 0:  # negative layers do not imply the number of layers
            window = Tap("column_sums", layers=MIDDLE).layer_indices(1 + max(scanned))
            panel.axvspan(window[0] - 0.5, window[-1] + 0.5, color="#0072B2", alpha=0.1)
        for scan in budget_scans:
            points = [
                (n, r.retention.mean, r.spread(OSR) or 0.0)
                for n, r in scan.rows.items()
                if r.retention
            ]
            if points:
                style = {**line_styles[scan.name], "markeredgecolor": "white", "label": scan.name}
                layers, means, spreads = zip(*points, strict=True)
                panel.errorbar(layers, means, spreads if any(spreads) else None, capsize=3, **style)
        for row in maxsim_rows(evaluation):
            if row.is_random and row.budget == budget and row.retention:
                _band(panel, row)
        panel.set_title(str(budget), fontsize=11)
        panel.set_xlabel("layer")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        apply_style(panel)
    panels[0].set_ylabel(OSR)
    legend_below(figure, panels)
    return figure


def _band(panel: Axes, row: Result) -> None:
    assert row.retention is not None
    mean, spread = row.retention.mean, row.spread(OSR) or 0.0
    panel.axhline(mean, color=REFERENCE, linewidth=1.2, dashes=(4, 2), label=method(row))
    panel.axhspan(mean - spread, mean + spread, color=REFERENCE, alpha=0.2, linewidth=0)


def _scatter_figure(evaluation: Evaluation, found: Sequence[Correlation]) -> Figure:
    figure = Figure(figsize=(0.6 + 4.4 * len(found), 4.6), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    line_styles, scanned = styles(evaluation), scanned_rows(evaluation)
    for panel, correlation in zip(panels, found, strict=True):
        for x, y, row in zip(correlation.x, correlation.y, correlation.rows, strict=True):
            if row.name in scanned:  # one style for the many rows of a scan
                name = "layer scans"
                style: dict[str, Any] = {"color": REFERENCE, "marker": "."}
            else:
                name = line_name(evaluation, row)
                style = {**line_styles[name], "markersize": 8}
            style |= {"linestyle": "none", "markeredgecolor": "white", "label": name}
            panel.plot([x], [y], **style)
        if correlation.r is not None:
            slope, start = np.polyfit(correlation.x, correlation.y, 1)
            ends = np.array([correlation.x.min(), correlation.x.max()])
            panel.plot(ends, start + slope * ends, color=REFERENCE, linewidth=1, dashes=(4, 2))
            title = f"r = {correlation.r:.3f}, {p_equals(correlation.p)}, n = {len(correlation.x)}"
            panel.set_title(title, fontsize=10)
        panel.set_xlabel(correlation.quantity)
        apply_style(panel)
    panels[0].set_ylabel(evaluation.headline)
    legend_below(figure, panels)
    return figure
