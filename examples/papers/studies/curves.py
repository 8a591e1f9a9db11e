"""Plot of learning curves, with one panel per metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from pipeline.eval.report.plot import STYLES, apply_style, legend_below, to_png

#: Steps (T,) of the evaluations, and the values (S, T) of a metric by run.
Curve = tuple[np.ndarray, np.ndarray]


def curves_png(rows: Mapping[str, Mapping[str, Curve]], metrics: Sequence[str]) -> bytes:
    """Draws the mean of each row over its runs, and a band of one standard deviation, as a PNG."""
    figure = Figure(figsize=(3.6 * len(metrics), 3.4), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        for number, (name, curves) in enumerate(rows.items()):
            if metric not in curves:
                continue
            steps_T, values_ST = curves[metric]
            style = STYLES[number % len(STYLES)]
            mean_T = values_ST.mean(axis=0)
            panel.plot(steps_T, mean_T, **style, markersize=4, label=name)
            if len(values_ST) > 1:
                deviation_T = values_ST.std(axis=0, ddof=1)
                low_T, high_T = mean_T - deviation_T, mean_T + deviation_T
                panel.fill_between(steps_T, low_T, high_T, color=style["color"], alpha=0.15)
        panel.set_xlabel("step")
        panel.set_title(metric, fontsize=10)
        apply_style(panel)
    legend_below(figure, panels)
    return to_png(figure)
