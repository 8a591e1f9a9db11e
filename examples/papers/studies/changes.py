"""Plot of metrics before and after training, with one panel per metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from pipeline.eval.report.plot import COLORS, REFERENCE, apply_style, legend_below, to_png

#: Mean before training, mean after training, and standard deviation over runs after training.
Change = tuple[float, float, float]


def changes_png(rows: Mapping[str, Mapping[str, Change]], metrics: Sequence[str]) -> bytes:
    """Draws one panel per metric, in which each row is a line from before to after, as a PNG."""
    figure = Figure(figsize=(3.2 * len(metrics), 1.2 + 0.32 * len(rows)), layout="constrained")
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    heights = np.arange(len(rows))[::-1]
    for panel, metric in zip(panels, metrics, strict=True):
        apply_style(panel)
        before, after, deviations = zip(*(row[metric] for row in rows.values()), strict=True)
        panel.hlines(heights, before, after, color=REFERENCE, alpha=0.4)
        panel.plot(before, heights, "o", mfc="none", color=COLORS[0], label="before")
        panel.errorbar(
            after, heights, xerr=deviations, fmt="o", color=COLORS[1], label="after training"
        )
        panel.set_xlabel(metric)
        panel.set_yticks(heights, list(rows))
    legend_below(figure, panels)
    return to_png(figure)
