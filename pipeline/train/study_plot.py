"""The plot of a study: every measure of all runs, before and after training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from pipeline.report.plot import COLORS, REFERENCE, legend_below, plain, to_png
from pipeline.train.study import PLOTTED, Row, spread


def study_png(rows: Sequence[Row]) -> bytes:
    """Draws one panel per measure and one line per row: from before training to after it."""
    measures = [name for name in PLOTTED if name in rows[0].after]
    figure = Figure(figsize=(3.2 * len(measures), 1.2 + 0.32 * len(rows)), layout="constrained")
    panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    places = np.arange(len(rows))[::-1]
    for panel, measure in zip(panels, measures, strict=True):
        plain(panel)
        before = [row.before[measure].mean() for row in rows]
        after = [row.after[measure].mean() for row in rows]
        spreads = [spread(row.after[measure]) for row in rows]
        panel.hlines(places, before, after, color=REFERENCE, alpha=0.4)
        panel.plot(before, places, "o", mfc="none", color=COLORS[0], label="before")
        panel.errorbar(
            after, places, xerr=spreads, fmt="o", color=COLORS[1], label="after training"
        )
        panel.set_xlabel(measure)
        panel.set_yticks(places, [row.name for row in rows])
    legend_below(figure, panels)
    return to_png(figure)
